# SPDX-License-Identifier: Apache-2.0
"""What was measured of requests for KV blocks: the seconds of each step, and a row of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from pytest_nixl.checks.kv_cache.blocks import BlockOrder, KvCorruption
from pytest_nixl.model.device_counters import CarrierBytes, LossyDevice, sum_losses
from pytest_nixl.model.samples import Samples, percentile

if TYPE_CHECKING:
    from pytest_nixl.model.row_key import RowKey

#: The steps of a request in their order. ``notify`` ends when the initiator knows that the target was notified.
STEPS = ("make", "post", "transfer", "notify", "release")


@dataclass(frozen=True)
class RequestTimes:
    """The times of one request in seconds, from the start of the first request.

    :param intended: when the request should have started: in an open loop by the rate, else when it did.
    :param steps: the seconds of each of its :data:`STEPS`.
    """

    intended: float
    start: float
    steps: tuple[float, ...]

    @property
    def notified(self) -> float:
        """When the initiator knew that the target was notified; the release comes after it."""
        return self.start + sum(self.steps[: STEPS.index("release")])

    @property
    def latency(self) -> float:
        """Seconds from the intended start until the initiator knew that the target was notified."""
        return self.notified - self.intended


@dataclass(frozen=True)
class KvSamples:
    """What one or more launches measured of one kind of request.

    :param order: how the blocks of each request lie in the cache.
    :param request_bytes: the bytes that one request moves.
    :param descriptors: the number of descriptors given to NIXL for one request, before NIXL merges any.
    :param prepares: for each launch the seconds to prepare the descriptors of both whole caches; 0: none are prepared.
    :param timed: for each launch the times of its requests.
    :param alone: whether each request started when the one before it was over.
    :param corruption: the first comparison that failed; None: every compared byte was right.
    :param transports: the transports as the backend reports them; empty: unknown.
    :param counted: what the initiator's devices counted during the timed requests.
    :param contention: of each launch, the CPU cores that the requests needed and other processes used.
    :param gpu_waits: of each launch, the longest seconds of a kernel over 8 bytes on a GPU of the row, just before or
        after the timed requests; empty: the row has no GPU.
    :param obstacle: what keeps one process of this host from copying from another; empty: nothing known.
    :param protocol: UCX's word for how it moved the bytes, such as ``software emulation``; empty: unknown.
    :param lossy: the devices of both hosts whose counters of lost or repeated packets grew during the timed requests.
    """

    order: BlockOrder
    request_bytes: int
    descriptors: int
    prepares: tuple[float, ...]
    timed: tuple[tuple[RequestTimes, ...], ...]
    alone: bool
    corruption: KvCorruption | None
    transports: tuple[str, ...]
    counted: CarrierBytes
    contention: tuple[float, ...]
    gpu_waits: tuple[float, ...] = ()
    obstacle: str = ""
    protocol: str = ""
    lossy: tuple[LossyDevice, ...] = ()

    def with_launch(self, other: KvSamples) -> KvSamples:
        """Return these samples together with those of another launch."""
        return replace(
            self,
            prepares=self.prepares + other.prepares,
            timed=self.timed + other.timed,
            corruption=self.corruption or other.corruption,
            transports=tuple(dict.fromkeys(self.transports + other.transports)),
            counted=self.counted + other.counted,
            contention=self.contention + other.contention,
            gpu_waits=self.gpu_waits + other.gpu_waits,
            lossy=sum_losses(self.lossy, other.lossy),
        )

    @property
    def prepare(self) -> float:
        """Seconds to prepare the descriptors of both whole caches, the median over launches; 0: none are prepared."""
        return median(self.prepares)

    @property
    def steps(self) -> tuple[tuple[float, ...], ...]:
        """For each request the seconds of each of its :data:`STEPS`."""
        return tuple(request.steps for launch in self.timed for request in launch)

    @property
    def requests(self) -> tuple[float, ...]:
        """Seconds of each request from its intended start until its notification was there."""
        return tuple(request.latency for launch in self.timed for request in launch)

    @property
    def bandwidth(self) -> float:
        """Bytes per second: of the median request, or of all requests in flight together."""
        return median(
            median(self.request_bytes * count / seconds for seconds, count in self._windows(launch))
            for launch in self.timed
        )

    @property
    def descriptors_per_second(self) -> float:
        """Descriptors per second, before NIXL merges any."""
        return self.descriptors * self.bandwidth / self.request_bytes

    def step(self, name: str, percent: float = 50) -> float:
        """Return a percentile of the seconds of one step, by nearest rank.

        :param name: one of :data:`STEPS`.
        """
        place = STEPS.index(name)
        return percentile([steps[place] for steps in self.steps], percent)

    def row(self, key: RowKey) -> Samples:
        """Return the samples of a row: a transfer is a request, and its latency is counted from its intended start."""
        windows = [self._windows(launch) for launch in self.timed]
        return Samples(
            key,
            tuple(seconds for launch in windows for seconds, _ in launch),
            tuple(count for launch in windows for _, count in launch),
            self.requests,
            self.transports,
            self.corruption,
            tuple(len(launch) for launch in windows),
            self.counted,
            self.contention,
            self.obstacle,
            self.protocol,
            gpu_waits=self.gpu_waits,
            lossy=self.lossy,
        )

    def _windows(self, launch: tuple[RequestTimes, ...]) -> list[tuple[float, int]]:
        """Return the seconds and the number of requests of each window of a launch.

        Each request is a window. If several are in flight, or if they start at a rate, all of them are one window,
        because requests that end together would make the windows between them look fast.
        """
        if self.alone:
            return [(request.latency, 1) for request in launch]
        return [(max(request.notified for request in launch) - min(request.start for request in launch), len(launch))]
