# SPDX-License-Identifier: Apache-2.0
"""What a profile expects of rows and of a machine's hardware and software, and the ceiling of a row."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_nixl.core import units
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.transports import cards, is_network

if TYPE_CHECKING:
    from pytest_nixl.model.row_key import RowKey
    from pytest_nixl.model.samples import Samples

#: The software whose version a profile may want: the key in ``[versions]``, and its name in messages.
SOFTWARE = {
    "nixl": "NIXL",
    "ucx": "UCX",
    "libfabric": "libfabric",
    "etcd_cpp_api": "etcd-cpp-apiv3",
    "cuda": "the CUDA runtime",
    "torch": "torch",
    "gdrcopy": "GDRCopy",
    "efa_installer": "the EFA installer",
}
VERSION_FORM = 'a version or its first numbers ("1.5"), or bounds (">=1.18, <2")'
_OPERATORS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_VERSION_BOUND = re.compile(r"(>=|<=|>|<|)\s*(\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class Machine:
    """The hardware of one end of a link, from the profile.

    :param nics: the number of network cards that a rank can use; in a pod, the cards that the pod was given; 0: not
        given.
    :param nic_rate: line rate of each card in bytes per second, one way; 0: not given.
    :param gpus: the number of GPUs; None: not given.
    :param gpu: the GPU model; empty: not given. A machine of which only the model is given has at least one GPU.
    :param nics_per_gpu: the number of cards that one GPU reaches; None: not given.
    :param nic_kind: the transport of the cards, such as ``efa`` or ``rc``; empty: not given.
    :param scaling: the least ratio of the bandwidth of all GPUs together to the sum of each alone; None: not given.
    :param source: where each figure is from.
    """

    nics: int
    nic_rate: float
    gpus: int | None
    gpu: str
    nic_kind: str
    source: str
    nics_per_gpu: int | None = None
    scaling: float | None = None

    def ceiling(self, devices: int | None) -> float | None:
        """Return the bytes per second that some network cards carry together, one way; None: not known.

        :param devices: the number of cards; None: it is not known which cards moved the bytes. Then the answer is for
            the cards that one GPU reaches, or for the only card, but never for all cards of the host.
        """
        count = min(devices, self.nics) if devices and self.nics else self.reach
        return None if count is None else count * self.nic_rate

    @property
    def reach(self) -> int | None:
        """The number of network cards that one GPU can use; 1 if there is only one card; None: not known."""
        return self.nics_per_gpu or (1 if self.nics == 1 else None)

    def most(self, memories: Sequence[MemoryPair] | None) -> int:
        """Return how many network cards a row can use: those that a GPU reaches if every pair has VRAM, else all.

        :param memories: the row's memory types; None: any.
        """
        gpu = bool(memories) and all(pair.on_gpu for pair in memories or ())
        return (self.reach or self.nics) if gpu else self.nics

    @property
    def has_gpus(self) -> bool:
        """Whether the machine has a GPU."""
        return bool(self.gpus or (self.gpu and self.gpus is None))

    def is_model(self, name: str) -> bool:
        """Return whether a GPU of this name is of the machine's model: ``H200`` is not a part of ``GH200``."""
        return re.search(rf"(?<![a-z0-9]){re.escape(self.gpu)}(?![a-z0-9])", name, re.IGNORECASE) is not None

    def describe(self, count: int) -> str:
        """Return ``count`` network cards as text: ``4 NICs of 100 Gb/s``."""
        return f"{count} {'NIC' if count == 1 else 'NICs'} of {units.gigabits(self.nic_rate)} Gb/s"


@dataclass(frozen=True)
class ImageRequirements:
    """What a profile wants of an image.

    :param plugins: the NIXL plugins that must load, such as ``UCX``; empty: those of the requested backends, which
        other checks judge.
    :param etcd_uri_patch: whether etcd's client library must have the patch that skips the validation of addresses;
        None: either will do.
    :param versions: the accepted versions, by the keys of :data:`SOFTWARE`.
    """

    plugins: tuple[str, ...] = ()
    etcd_uri_patch: bool | None = None
    versions: Mapping[str, VersionRange] = field(default_factory=dict)


NO_IMAGE_REQUIREMENTS = ImageRequirements()


@dataclass(frozen=True)
class VersionRange:
    """Accepted versions.

    :param text: the text from which it was read.
    :param bounds: each an operator and numbers; an empty operator accepts all versions that begin with the numbers.
    """

    text: str
    bounds: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> VersionRange:
        """Read a range.

        :raises ValueError: the text is none.
        """
        bounds = []
        for part in text.split(","):
            match = _VERSION_BOUND.fullmatch(part.strip())
            if match is None:
                raise ValueError(f"{part.strip()!r} is neither a version nor a bound: expected {VERSION_FORM}")
            bounds.append((match[1], tuple(map(int, match[2].split(".")))))
        return cls(text.strip(), tuple(bounds))

    def accepts(self, version: str) -> bool:
        """Return whether a version is accepted. Only its numbers count: ``2.9.0+cu128`` is ``2.9.0``.

        :raises ValueError: the version does not begin with a number.
        """
        match = re.match(r"v?(\d+(?:\.\d+)*)", version)
        if match is None:
            raise ValueError(f"{version!r} does not begin with a number")
        numbers = tuple(map(int, match[1].split(".")))
        return all(_version_holds(symbol, numbers, bound) for symbol, bound in self.bounds)


def _version_holds(symbol: str, numbers: tuple[int, ...], bound: tuple[int, ...]) -> bool:
    width = max(len(numbers), len(bound))
    padded = numbers + (0,) * (width - len(numbers))
    if not symbol:
        return padded[: len(bound)] == bound
    return _OPERATORS[symbol](padded, bound + (0,) * (width - len(bound)))


@dataclass(frozen=True)
class Expectation:
    """An ``[[expect]]`` table of a profile: which rows it applies to, and what it expects of them.

    The fields from ``backend`` to ``pages`` select the rows; None selects any. The other fields are expectations; None
    expects nothing.

    :param source: where each figure is from.
    :param blocks: the first and the last block size in bytes.
    :param notify: which transfers of a row carry a notification: ``each`` or ``last``. Those of nixlbench all do.
    :param pages: the pages of a row's buffers in host memory: ``huge`` or ``base``. Those of nixlbench are ``base``.
    :param floor: bytes per second; ``ceiling`` too.
    :param p50: upper bound of the latency in seconds; ``p99`` too.
    :param transports: the accepted transports, without devices.
    :param raw: the least share of the bandwidth of a raw tool over the same transport.
    """

    source: str
    backend: tuple[str, ...] | None = None
    op: tuple[str, ...] | None = None
    memory: tuple[MemoryPair, ...] | None = None
    batch: tuple[int, ...] | None = None
    depth: tuple[int, ...] | None = None
    blocks: tuple[int, int] | None = None
    notify: tuple[str, ...] | None = None
    pages: tuple[str, ...] | None = None
    floor: float | None = None
    ceiling: float | None = None
    p50: float | None = None
    p99: float | None = None
    transports: tuple[str, ...] | None = None
    raw: float | None = None

    def applies(self, key: RowKey) -> bool:
        """Whether this expectation applies to the row ``key``."""
        return (
            (self.backend is None or key.backend in self.backend)
            and (self.op is None or key.op in self.op)
            and (self.memory is None or key.memory in self.memory)
            and (self.batch is None or key.batch in self.batch)
            and (self.depth is None or key.depth in self.depth)
            and (self.notify is None or key.notify in self.notify)
            and (self.pages is None or not key.pages or key.pages in self.pages)
            and (self.blocks is None or self.blocks[0] <= key.block <= self.blocks[1])
        )


@dataclass(frozen=True)
class ReferenceRun:
    """A published figure, which is shown but never used for a verdict. A field that the document does not give is None.

    :param source: the document, with a quotation.
    :param plausible: False: the figure cannot be true, for example because it is above the line rate.
    :param blocks: the first and the last block size in bytes.
    :param bandwidth: bytes per second.
    :param p50: seconds; ``p99`` too.
    :param latency: seconds, if the document does not say which percentile.
    """

    source: str
    note: str = ""
    plausible: bool = True
    backend: str | None = None
    op: str | None = None
    memory: MemoryPair | None = None
    blocks: tuple[int, int] | None = None
    bandwidth: float | None = None
    p50: float | None = None
    p99: float | None = None
    latency: float | None = None


@dataclass(frozen=True)
class Ceiling:
    """The bandwidth that a row cannot exceed.

    :param value: bytes per second.
    :param why: the reason, such as ``the line rate of ...``; empty: the profile gives the ceiling itself.
    """

    value: float
    why: str = ""


def row_ceiling(samples: Samples, expectation: Expectation | None, machine: Machine | None) -> Ceiling | None:
    """Return the ceiling of a row: the profile's, else the line rate of the network cards; None: there is none.

    The line rate is used only if every transport of the row uses a network card. If the row's transports are not known,
    every transport that the profile accepts must use one.
    """
    if expectation is not None and expectation.ceiling is not None:
        return Ceiling(expectation.ceiling)
    if machine is None or not _over_network(samples, expectation):
        return None
    nics = cards(samples.transports)
    if samples.counted is not None and (carriers := samples.counted.carriers(samples.transports)):
        nics = tuple(item.device for item in carriers if item.device != "lo")
        if not nics:
            return None  # the bytes went over the loopback device, to another process of this host
    if nics is None:
        # A row between host memories may use every card, not only the cards that one GPU reaches.
        if machine.nics > 1 and not samples.key.memory.on_gpu:
            return None
        value = machine.ceiling(None)
        return None if value is None else Ceiling(value, _why_reached(machine))
    value = machine.ceiling(len(nics))
    return None if value is None else Ceiling(value, _why_used(machine, nics))


def _over_network(samples: Samples, expectation: Expectation | None) -> bool:
    transports = samples.transports or (expectation and expectation.transports) or ()
    return bool(transports) and all(is_network(transport) for transport in transports)


def _why_reached(machine: Machine) -> str:
    if machine.nics == 1:
        return f"the line rate of the machine's {machine.describe(1)}"
    return f"the line rate of the {machine.describe(machine.reach or 1)} that one GPU reaches"


def _why_used(machine: Machine, nics: tuple[str, ...]) -> str:
    if len(nics) > machine.nics:
        return f"the line rate of all {machine.describe(machine.nics)} that the profile knows"
    return f"the line rate of the {machine.describe(len(nics))} that carried it ({', '.join(nics)})"
