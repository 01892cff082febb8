# SPDX-License-Identifier: Apache-2.0
"""The hardware of a machine, as a profile gives it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_nixl.core import units

if TYPE_CHECKING:
    from pytest_nixl.model.memory import MemoryPair


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
