# SPDX-License-Identifier: Apache-2.0
"""What a profile says of the rows that it applies to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_nixl.model.memory import MemoryPair

if TYPE_CHECKING:
    from pytest_nixl.model.row_key import RowKey


@dataclass(frozen=True)
class Expectation:
    """An ``[[expect]]`` table of a profile: which rows it applies to, and what it expects of them.

    The fields from ``backend`` to ``notify`` select the rows; None selects any. The other fields are expectations; None
    expects nothing.

    :param source: where each figure is from.
    :param blocks: the first and the last block size in bytes.
    :param notify: which transfers of a row carry a notification: ``each`` or ``last``. Those of nixlbench all do.
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
