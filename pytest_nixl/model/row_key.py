# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.core import units
from pytest_nixl.model.memory import DevicePair, MemoryPair


@dataclass(frozen=True)
class RowKey:
    """What was requested of a row; nothing observed is ever part of it. ``pair`` is initiator rank and target rank.

    ``devices`` are GPUs that were asked for by number; None: none were, or there is no GPU memory in the row.
    """

    backend: str
    op: str
    memory: MemoryPair
    block: int
    batch: int = 1
    depth: int = 1
    pair: tuple[int, int] = (0, 1)
    devices: DevicePair | None = None

    def __str__(self) -> str:
        pair = f"{self.pair[0]}-{self.pair[1]}"
        size = units.format_size(self.block)
        memory = self.devices.of(self.memory) if self.devices else self.memory
        return f"{self.backend}/{self.op}/{memory}/{size}/batch{self.batch}/depth{self.depth}/{pair}"
