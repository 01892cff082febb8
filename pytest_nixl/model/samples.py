# SPDX-License-Identifier: Apache-2.0
"""The samples that one or more launches measured for a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median

from pytest_nixl.model.device_counters import CarrierBytes, LossyDevice, sum_losses
from pytest_nixl.model.row_key import RowKey


@dataclass(frozen=True)
class Corruption:
    """Bytes that differ from what was sent.

    :param phase: when they were compared, in words.
    :param offset: the place of the first wrong byte in the buffer.
    :param expected: the value of the first wrong byte as it should be; ``found`` is its real value.
    """

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
    """What one or more launches measured for one row.

    :param windows: seconds of wall time of each window, which ends with the last proof of delivery.
    :param transfers: the number of transfers in each window; a transfer moves ``block * batch`` bytes.
    :param latencies: seconds of single transfers, from post to completion.
    :param transports: the transports as the backend reports them (``cma/memory``, ``tcp/eth0``); empty: unknown.
    :param corruption: the first comparison that failed, whose text says what is wrong, such as a :class:`Corruption`;
        None: every compared byte was right.
    :param windows_of_launches: the number of windows of each launch, in order; empty: all windows are of one launch.
    :param counted: what the initiator's devices counted meanwhile; None: they were not read.
    :param lossy: the devices of both hosts whose counters of lost or repeated packets grew meanwhile.
    :param contention: of each launch, the cores it needed on the initiator's host that other processes used;
        empty: not known.
    :param obstacle: what keeps one process of this host from copying from another; empty: nothing known.
    :param protocol: UCX's word for how it moved the bytes, such as ``software emulation``; empty: unknown.
    :param hosts: the host of the initiator and that of the target; empty: not known.
    :param ucx_tls: if the row is between two ranks: each with UCX_TLS set (``rank 1 on node-b``), and its value.
    :param gpu_waits: of each launch, the longest time in seconds that a kernel over 8 bytes took on a GPU of the row,
        just before or after the timed transfers; empty: the row has no GPU, or it was not tried.
    """

    key: RowKey
    windows: tuple[float, ...]
    transfers: tuple[int, ...]
    latencies: tuple[float, ...]
    transports: tuple[str, ...] = ()
    corruption: object = None
    windows_of_launches: tuple[int, ...] = ()
    counted: CarrierBytes | None = None
    contention: tuple[float, ...] = ()
    obstacle: str = ""
    protocol: str = ""
    hosts: tuple[str, ...] = ()
    ucx_tls: tuple[tuple[str, str], ...] = ()
    gpu_waits: tuple[float, ...] = ()
    lossy: tuple[LossyDevice, ...] = ()

    def with_launch(self, other: Samples) -> Samples:
        """Return these samples together with those of another launch of the same row."""
        return replace(
            self,
            windows=self.windows + other.windows,
            transfers=self.transfers + other.transfers,
            latencies=self.latencies + other.latencies,
            transports=tuple(dict.fromkeys(self.transports + other.transports)),
            corruption=self.corruption or other.corruption,
            contention=self.contention + other.contention,
            lossy=sum_losses(self.lossy, other.lossy),
            windows_of_launches=(*(self.windows_of_launches or (len(self.windows),)), len(other.windows)),
            gpu_waits=self.gpu_waits + other.gpu_waits,
            counted=self.counted + other.counted if self.counted is not None and other.counted is not None else None,
        )

    @property
    def transfer_bytes(self) -> int:
        """Bytes that one transfer moves."""
        return self.key.block * self.key.batch

    @property
    def rates(self) -> tuple[float, ...]:
        """The bandwidth of each window in bytes per second."""
        return tuple(n * self.transfer_bytes / s for n, s in zip(self.transfers, self.windows, strict=True))

    @property
    def values(self) -> tuple[float, ...]:
        """The bandwidth of each launch in bytes per second: the median over its windows."""
        windows = iter(self.rates)
        return tuple(median(islice(windows, count)) for count in self.windows_of_launches or (len(self.windows),))

    @property
    def disturbed(self) -> bool:
        """Whether the contention during any launch was too high for that launch to fail the row."""
        return self.gpu_is_busy or any(cores > DISTURBED_CORES for cores in self.contention)

    @property
    def gpu_is_busy(self) -> bool:
        """Whether other processes used a GPU of the row during any launch."""
        return max(self.gpu_waits, default=0.0) > BUSY_GPU

    @property
    def bandwidth(self) -> float:
        """The bandwidth of the row in bytes per second: the median over the launches."""
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
    """Return a percentile by the nearest-rank method: the least value that ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


#: Seconds of a kernel over 8 bytes above which other processes use its GPU. Seen on an H100: 0.015 to 0.031 ms if the
#: GPU is idle, also while all cores are busy; 0.33 to 0.40 ms while another process multiplies matrices of 512x512, and
#: 2.5 ms while it multiplies matrices of 8192x8192.
BUSY_GPU = 0.1e-3

#: Cores of a launch that other processes may use. If they used more, the launch can support PASS but not FAIL.
DISTURBED_CORES = 0.3
