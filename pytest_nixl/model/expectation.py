# SPDX-License-Identifier: Apache-2.0
"""What a profile says of the rows that it applies to, and the bandwidth that none of them can exceed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_nixl.model.machine import Machine
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.transports import cards, is_network

if TYPE_CHECKING:
    from pytest_nixl.model.row_key import RowKey
    from pytest_nixl.model.samples import Samples


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
        return None if value is None else Ceiling(value, _reached(machine))
    value = machine.ceiling(len(nics))
    return None if value is None else Ceiling(value, _used(machine, nics))


def _over_network(samples: Samples, expectation: Expectation | None) -> bool:
    transports = samples.transports or (expectation and expectation.transports) or ()
    return bool(transports) and all(is_network(transport) for transport in transports)


def _reached(machine: Machine) -> str:
    if machine.nics == 1:
        return f"the line rate of the machine's {machine.describe(1)}"
    return f"the line rate of the {machine.describe(machine.reach or 1)} that one GPU reaches"


def _used(machine: Machine, nics: tuple[str, ...]) -> str:
    if len(nics) > machine.nics:
        return f"the line rate of all {machine.describe(machine.nics)} that the profile knows"
    return f"the line rate of the {machine.describe(len(nics))} that carried it ({', '.join(nics)})"
