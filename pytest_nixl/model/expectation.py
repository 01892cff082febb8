# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_nixl.model.memory import MemoryPair

if TYPE_CHECKING:
    from pytest_nixl.model.row_key import RowKey


@dataclass(frozen=True)
class Expectation:
    """What a profile says of the rows that it applies to; None where it says nothing.

    The fields from ``backend`` to ``blocks`` say which rows those are, and None there is any. ``blocks`` are bytes, the
    first and the last size; ``floor`` and ``ceiling`` are bytes per second; ``p50`` and ``p99`` are upper bounds in
    seconds; ``transports`` are accepted names, without the device; ``raw`` is the share that NIXL must reach
    of what a raw tool moves over the same path; ``source`` says where each figure is from.
    """

    source: str
    backend: tuple[str, ...] | None = None
    op: tuple[str, ...] | None = None
    memory: tuple[MemoryPair, ...] | None = None
    batch: tuple[int, ...] | None = None
    depth: tuple[int, ...] | None = None
    blocks: tuple[int, int] | None = None
    floor: float | None = None
    ceiling: float | None = None
    p50: float | None = None
    p99: float | None = None
    transports: tuple[str, ...] | None = None
    raw: float | None = None

    def applies(self, key: RowKey) -> bool:
        """Whether this is said of the row ``key``."""
        return (
            (self.backend is None or key.backend in self.backend)
            and (self.op is None or key.op in self.op)
            and (self.memory is None or key.memory in self.memory)
            and (self.batch is None or key.batch in self.batch)
            and (self.depth is None or key.depth in self.depth)
            and (self.blocks is None or self.blocks[0] <= key.block <= self.blocks[1])
        )


@dataclass(frozen=True)
class ReferenceRun:
    """A figure that somebody reported: shown, never judged by.

    Bandwidth is bytes per second; ``p50``, ``p99`` and ``latency`` (where the report does not say which) are seconds;
    ``blocks`` are bytes, the first and the last size. What the report does not say is None.

    :param source: the document, with its own words.
    :param plausible: False: nothing can be so; every figure above the line rate says so.
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
