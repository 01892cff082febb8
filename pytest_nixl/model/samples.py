# SPDX-License-Identifier: Apache-2.0
"""One bandwidth measurement: what was asked for, and what was observed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median

from pytest_nixl.model.carrier_bytes import CarrierBytes
from pytest_nixl.model.row_key import RowKey


@dataclass(frozen=True)
class Corruption:
    """Bytes that are not what was sent: how many, and the first of them."""

    phase: str
    wrong_bytes: int
    total_bytes: int
    offset: int
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"{self.wrong_bytes} of {self.total_bytes} bytes are wrong {self.phase}, the first at offset "
            f"{self.offset}: expected 0x{self.expected:02x}, found 0x{self.found:02x}"
        )


@dataclass(frozen=True)
class Samples:
    """What one launch, or several, measured for one row.

    :param windows: seconds of wall time of each window, which ends with the last proof of delivery.
    :param transfers: transfers made in each window; a transfer moves ``block * batch`` bytes.
    :param latencies: seconds of single transfers, from post to completion.
    :param transports: what carried the bytes as the backend reports it (``cma/memory``, ``tcp/eth0``); empty: unknown.
    :param corruption: the first comparison that failed; None: every byte compared was right.
    :param launches: how many of the windows are of each launch, in order; empty: all are of one.
    :param counted: what the initiator's devices counted meanwhile; None: they were not read.
    :param others: cores that others of the initiator's host took of those that each launch needed; empty: not known.
    :param obstacle: what forbids that one process of this host copies from another; empty: nothing that is known.
    """

    key: RowKey
    windows: tuple[float, ...]
    transfers: tuple[int, ...]
    latencies: tuple[float, ...]
    transports: tuple[str, ...] = ()
    corruption: Corruption | None = None
    launches: tuple[int, ...] = ()
    counted: CarrierBytes | None = None
    others: tuple[float, ...] = ()
    obstacle: str = ""

    def with_launch(self, other: Samples) -> Samples:
        """Return these samples and those of one more launch of the same row."""
        return replace(
            self,
            windows=self.windows + other.windows,
            transfers=self.transfers + other.transfers,
            latencies=self.latencies + other.latencies,
            transports=tuple(dict.fromkeys(self.transports + other.transports)),
            corruption=self.corruption or other.corruption,
            others=self.others + other.others,
            launches=(*(self.launches or (len(self.windows),)), len(other.windows)),
            counted=self.counted + other.counted if self.counted is not None and other.counted is not None else None,
        )

    @property
    def transfer_bytes(self) -> int:
        """Bytes that one transfer moves."""
        return self.key.block * self.key.batch

    @property
    def rates(self) -> tuple[float, ...]:
        """Delivered bandwidth of each window in bytes per second."""
        return tuple(n * self.transfer_bytes / s for n, s in zip(self.transfers, self.windows, strict=True))

    @property
    def values(self) -> tuple[float, ...]:
        """Delivered bandwidth of each launch in bytes per second: the median over its windows."""
        windows = iter(self.rates)
        return tuple(median(islice(windows, count)) for count in self.launches or (len(self.windows),))

    @property
    def disturbed(self) -> bool:
        """Whether others took so much beside any launch that it may not fail the row."""
        return any(cores > DISTURBED_CORES for cores in self.others)

    @property
    def bandwidth(self) -> float:
        """Delivered bandwidth in bytes per second: the median over the launches."""
        return median(self.values)

    @property
    def p50(self) -> float:
        """Median latency of one transfer in seconds."""
        return percentile(self.latencies, 50)

    @property
    def p99(self) -> float:
        """99th percentile of the latency of one transfer in seconds."""
        return percentile(self.latencies, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of ``values`` do not exceed (the nearest-rank method)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


#: Cores that others may take of those that a launch needs; beside more of them it may support PASS, not FAIL.
DISTURBED_CORES = 0.3
