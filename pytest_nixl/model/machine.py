# SPDX-License-Identifier: Apache-2.0
"""A machine's network cards, and which of them a transport names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_nixl.core import units

if TYPE_CHECKING:
    from pytest_nixl.model.memory import MemoryPair

RDMA = frozenset({"rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "dc", "dc_mlx5", "dc_x",
                  "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "verbs", "cxi", "opx", "psm2", "psm3"})  # fmt: skip
#: The suffix of an EFA transport that moved its bytes by send and receive messages instead of RDMA.
EMULATED = "-emulated"
EFA = frozenset({"efa", "srd", f"efa{EMULATED}", f"srd{EMULATED}"})

#: Transports that use a network card, as UCX and libfabric name them.
NETWORK = RDMA | EFA | {"tcp", "sockets"}


@dataclass(frozen=True)
class Machine:
    """The hardware of one end of a link, from the profile.

    :param nics: the number of network cards that a rank can use; in a pod, the cards that the pod was given.
    :param nic_rate: line rate of each card in bytes per second, one way.
    :param gpus: the number of GPUs; None: not given.
    :param gpu: the GPU model; empty: not given.
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
        count = min(devices, self.nics) if devices else self.reach
        return None if count is None else count * self.nic_rate

    @property
    def reach(self) -> int | None:
        """The number of network cards that one GPU can use; 1 if there is only one card; None: not known."""
        return self.nics_per_gpu or (1 if self.nics == 1 else None)

    def most(self, memories: Sequence[MemoryPair] | None) -> int:
        """Return how many network cards a row can use: those that a GPU reaches if every pair has VRAM, else all.

        :param memories: the row's memory types; None: any.
        """
        gpu = bool(memories) and all("VRAM" in (pair.initiator, pair.target) for pair in memories or ())
        return (self.reach or self.nics) if gpu else self.nics

    def describe(self, count: int) -> str:
        """Return ``count`` network cards as text: ``4 NICs of 100 Gb/s``."""
        return f"{count} {'NIC' if count == 1 else 'NICs'} of {units.gigabits(self.nic_rate)} Gb/s"


def is_network(transport: str) -> bool:
    """Whether a transport, given as ``name`` or ``name/device``, uses a network card."""
    name, _, device = transport.partition("/")
    return re.split(r"[;:]", name)[0] in NETWORK and device != "lo"


def card(transport: str) -> str:
    """Return the network card of a ``name/device`` transport, without the suffixes of UCX (``:1``) and libfabric
    (``-rdm``, ``-dgrm``).
    """
    return re.sub(r"(:1|-rdm|-dgrm)$", "", transport.partition("/")[2])


def devices(transports: Sequence[str]) -> tuple[str, ...] | None:
    """Return the network cards of ``name/device`` transports, each once; None: a transport names no device."""
    names = [card(transport) for transport in transports]
    return tuple(dict.fromkeys(names)) if names and all(names) else None
