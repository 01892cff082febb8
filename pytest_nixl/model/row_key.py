# SPDX-License-Identifier: Apache-2.0
"""The key of a row: what was requested, and nothing that was observed."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.core import units
from pytest_nixl.model.memory import DevicePair, MemoryPair


@dataclass(frozen=True)
class RowKey:
    """The identity of a row: only what was requested, never what was observed.

    :param block: block size in bytes.
    :param batch: blocks in one transfer.
    :param depth: transfers in flight.
    :param pair: the ranks of initiator and target.
    :param devices: the GPUs that were requested by number; None: none were, or the row has no GPU memory.
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
