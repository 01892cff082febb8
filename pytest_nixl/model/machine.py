# SPDX-License-Identifier: Apache-2.0
"""A machine's network cards, and the bandwidth that no row over them can exceed."""

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
#: What follows the name of a transport of EFA that moved its bytes without RDMA, in messages of send and receive.
EMULATED = "-emulated"
EFA = frozenset({"efa", "srd", f"efa{EMULATED}", f"srd{EMULATED}"})

#: Transports that leave the host by a network card, as UCX and libfabric name them.
NETWORK = RDMA | EFA | {"tcp", "sockets"}


@dataclass(frozen=True)
class Machine:
    """What a profile says of the hardware of one end.

    :param nics: network cards that a rank there can have: of a pod, those that it was given.
    :param nic_rate: line rate of each in bytes per second, one way.
    :param gpus: how many GPUs; None: not said, as is an empty text below.
    :param nics_per_gpu: of ``nics``, those that one GPU reaches; None: not said.
    :param nic_kind: what they speak, such as ``efa`` or ``rc``.
    :param scaling: of what its GPUs move one by one, the share that all must move together; None: not said.
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
        """Return the bytes per second that ``devices`` network cards carry together, one way.

        None as ``devices``: it is not known which moved the bytes. Then it is of those that one GPU reaches, or of the
        only one there is; never of the whole host, so that the answer may be None: not known.
        """
        count = min(devices, self.nics) if devices else self.reach
        return None if count is None else count * self.nic_rate

    @property
    def reach(self) -> int | None:
        """How many network cards one GPU can use, or anyone where there is but one; None: not known."""
        return self.nics_per_gpu or (1 if self.nics == 1 else None)

    def most(self, memories: Sequence[MemoryPair] | None) -> int:
        """Return how many cards a row between these memories can use: all, or those that a GPU reaches at each row."""
        gpu = bool(memories) and all("VRAM" in (pair.initiator, pair.target) for pair in memories or ())
        return (self.reach or self.nics) if gpu else self.nics

    def describe(self, count: int) -> str:
        """Name ``count`` of its network cards: ``4 NICs of 100 Gb/s``."""
        return f"{count} {'NIC' if count == 1 else 'NICs'} of {units.gigabits(self.nic_rate)} Gb/s"


def is_network(transport: str) -> bool:
    """Whether a transport, as ``name`` or ``name/device``, is one that leaves the host by a network card."""
    name, _, device = transport.partition("/")
    return re.split(r"[;:]", name)[0] in NETWORK and device != "lo"


def card(transport: str) -> str:
    """Return the network card that a transport names, without what UCX and libfabric add (``mlx5_0:1``, ``…-rdm``)."""
    return re.sub(r"(:1|-rdm|-dgrm)$", "", transport.partition("/")[2])


def devices(transports: Sequence[str]) -> tuple[str, ...] | None:
    """Return the network cards that ``name/device`` transports tell of, each once; None: one tells of none."""
    names = [card(transport) for transport in transports]
    return tuple(dict.fromkeys(names)) if names and all(names) else None
