# SPDX-License-Identifier: Apache-2.0
"""The requests for KV blocks that an engine makes of NIXL, each step timed: make, post, transfer, notify, release.

An engine prepares the descriptors of the whole cache once on both sides. For each request it makes a transfer of the
blocks' numbers, posts it with a notification that carries the request's id, and releases it when it is complete.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_nixl.checks.kv_cache.blocks import BlockDraw, KvLayout, KvMethod, Numbers
from pytest_nixl.nixl.worker.files import FileBuffer
from pytest_nixl.nixl.worker.objects import ObjectBuffer
from pytest_nixl.nixl.worker.transfer import StepTimeoutError, Transfers

#: Until so many seconds before the next request starts, the initiator sleeps if none is in flight.
_NEAR = 0.001
#: The clock is read once in this number of polls.
_POLLS_BETWEEN_LOOKS = 256


@dataclass(frozen=True)
class CacheSide:
    """One side's cache for NIXL: its address in the process that has it, its memory type and its device."""

    address: int
    memory: str
    device: int

    def rows(self, layout: KvLayout, numbers: Numbers | None = None) -> npt.NDArray[np.uint64]:
        """Return descriptors as rows of address, length and device: those of these numbers, or of the whole cache."""
        chosen = np.arange(layout.tensors * layout.blocks) if numbers is None else numbers
        rows = np.empty((len(chosen), 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(self.address) + chosen.astype(np.uint64) * np.uint64(layout.block_bytes)
        rows[:, 1] = layout.block_bytes
        rows[:, 2] = self.device
        if self.memory == "OBJ":  # each block is an object, which NIXL names by a number from 1
            rows[:, 0], rows[:, 2] = 0, chosen + 1
        return rows

    def strided(self, layout: KvLayout) -> npt.NDArray[np.uint64]:
        """Return the whole cache as rows of address, length, device, stride and count: one for each tensor."""
        strides = np.empty((layout.tensors, 5), dtype=np.uint64)
        starts = np.arange(layout.tensors, dtype=np.uint64) * np.uint64(layout.tensor_bytes)
        strides[:, 0] = np.uint64(self.address) + starts
        strides[:, 1:] = layout.block_bytes, self.device, layout.block_bytes, layout.blocks
        return strides


@dataclass
class _Flight:
    """A request that was posted and is not over.

    :param number: its place among the requests.
    :param range: the range of the caches that it uses.
    :param window: the number that the target acknowledges.
    :param stamps: when each of its steps began and ended, from ``make`` on.
    """

    number: int
    range: int
    handle: Any
    window: int
    deadline: float
    stamps: list[float] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether its transfer is over."""
        return len(self.stamps) > 3


class KvRequests:
    """Make requests between two caches, one after another or several at a time.

    :param agent: the raw agent of the initiator.
    :param transfers: none is prepared: it polls the agent, and knows the target's acknowledgements.
    :param target: the name of the target's agent.
    :param op: ``WRITE`` or ``READ``.
    :param plugin: the backend's plugin.
    :param sides: the initiator's cache and the target's.
    :param merge: whether NIXL may merge descriptors of neighbouring blocks.
    :param file: the target's cache if it is a file or objects, to which no notification can be sent; None: an agent
        has it.
    """

    def __init__(
        self,
        agent: Any,
        transfers: Transfers,
        target: str,
        op: str,
        plugin: str,
        layout: KvLayout,
        sides: tuple[CacheSide, CacheSide],
        method: KvMethod,
        *,
        merge: bool,
        file: FileBuffer | ObjectBuffer | None = None,
    ) -> None:
        self._agent, self._transfers, self._file = agent, transfers, file
        self._target, self._op, self._plugins = target, op, [plugin]
        self.layout, self._sides, self._merge = layout, sides, merge
        self._prepared: tuple[Any, Any] | None = None
        #: Seconds to prepare the descriptors of both whole caches; 0: this method prepares none.
        self.prepare_seconds = 0.0
        if method is not KvMethod.INITIALIZED:
            start = time.perf_counter()
            local, remote = (
                side.strided(layout) if method is KvMethod.STRIDED else side.rows(layout) for side in sides
            )
            self._prepared = (
                agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, sides[0].memory, self._plugins),
                agent.prep_xfer_dlist(target, remote, sides[1].memory, self._plugins),
            )
            self.prepare_seconds = time.perf_counter() - start

    def run(
        self, draws: Sequence[BlockDraw], timeout: float, *, in_flight: int = 1, interval: float = 0.0
    ) -> list[dict[str, Any]]:
        """Make requests, and return for each when it should have started and did, its steps, and its range.

        :param draws: the blocks of each request, in the first range of the caches.
        :param timeout: the time that each request may take from its start, in seconds.
        :param in_flight: the number of requests in flight, each of which has a range of the caches.
        :param interval: seconds between the intended starts of two requests; 0: each starts when one is over.
        :raises StepTimeoutError: the deadline of a request has passed.
        :raises RuntimeError: a transfer failed.
        """
        begin = time.perf_counter()
        requests: list[dict[str, Any]] = []
        if in_flight == 1 and not interval:
            for draw in draws:
                start = time.perf_counter() - begin
                requests.append({"intended": start, "start": start, "steps": self.request(draw, timeout), "range": 0})
            return requests
        requests = [{} for _ in draws]
        waiting = list(reversed(range(len(draws))))
        free, flights, polls = list(range(in_flight)), list[_Flight](), 0
        acknowledged: set[int] = set()
        while waiting or flights:
            while waiting and free:
                early = begin + waiting[-1] * interval - time.perf_counter()
                if early > 0:
                    if not flights and early > _NEAR:
                        time.sleep(early - _NEAR)
                    break
                flights.append(self._start(waiting.pop(), draws, free.pop(0), timeout))
            acknowledged |= self._transfers.acknowledged() if flights else set()
            for flight in list(flights):
                if not self._over(flight, acknowledged):
                    continue
                flights.remove(flight)
                free.append(flight.range)
                stamps = flight.stamps
                requests[flight.number] = {
                    "intended": flight.number * interval if interval else stamps[0] - begin,
                    "start": stamps[0] - begin,
                    "steps": [after - before for before, after in itertools.pairwise(stamps)],
                    "range": flight.range,
                }
            polls += 1
            os.sched_yield()
            if polls % _POLLS_BETWEEN_LOOKS == 0 and any(time.monotonic() > flight.deadline for flight in flights):
                raise StepTimeoutError("the deadline of one of several requests passed before it was over")
        return requests

    def _start(self, number: int, draws: Sequence[BlockDraw], part: int, timeout: float) -> _Flight:
        draw = draws[number].moved(part * self.layout.range_blocks)
        clock, notification = time.perf_counter, self._transfers.next_notification()
        deadline = time.monotonic() + timeout
        stamps = [clock()]
        handle = self._make(draw, notification)
        stamps.append(clock())
        state = self._agent.transfer(handle)
        stamps.append(clock())
        if state == "DONE":
            stamps.append(clock())
        elif state != "PROC":
            raise RuntimeError(f"a transfer ended in state {state}")
        return _Flight(number, part, handle, self._transfers.window_number, deadline, stamps)

    def _over(self, flight: _Flight, acknowledged: set[int]) -> bool:
        """Whether a request is over; it is then released."""
        clock = time.perf_counter
        if not flight.complete:
            state = self._agent.check_xfer_state(flight.handle)
            if state not in ("DONE", "PROC"):
                raise RuntimeError(f"a transfer ended in state {state}")
            if state == "DONE":
                flight.stamps.append(clock())
        if not flight.complete or flight.window not in acknowledged:
            return False
        flight.stamps.append(clock())
        self._agent.release_xfer_handle(flight.handle)
        flight.stamps.append(clock())
        return True

    def request(self, draw: BlockDraw, timeout: float) -> list[float]:
        """Make one request, and return the seconds of each of its steps: make, post, transfer, notify, release.

        :param draw: the blocks to move.
        :param timeout: the time that the request may take, in seconds.
        :raises StepTimeoutError: the deadline has passed.
        :raises RuntimeError: the transfer failed.
        """
        clock, transfers = time.perf_counter, self._transfers
        transfers.deadline = time.monotonic() + timeout
        notification = transfers.next_notification() if self._file is None else b""
        start = clock()
        handle = self._make(draw, notification)
        made_at = clock()
        state = self._agent.transfer(handle)
        posted = clock()
        if state != "DONE":
            transfers.finish(handle, state)
        complete = clock()
        if self._file is None:
            transfers.wait_for_the_target()
        elif self._op == "WRITE":
            self._file.sync()
        notified_at = clock()
        self._agent.release_xfer_handle(handle)
        return [made_at - start, posted - made_at, complete - posted, notified_at - complete, clock() - notified_at]

    def close(self) -> None:
        """Release the prepared descriptors."""
        for handle in self._prepared or ():
            self._agent.release_dlist_handle(handle)
        self._prepared = None

    def _make(self, draw: BlockDraw, notification: bytes) -> Any:
        layout = self.layout
        local, remote = layout.descriptors(draw.local), layout.descriptors(draw.remote)
        if self._prepared is not None:
            local_side, remote_side = self._prepared
            return self._agent.make_prepped_xfer(
                self._op, local_side, local, remote_side, remote, notification, self._plugins, not self._merge
            )
        descriptors = [
            self._agent.get_xfer_descs(side.rows(layout, numbers), side.memory)
            for side, numbers in zip(self._sides, (local, remote), strict=True)
        ]
        return self._agent.initialize_xfer(self._op, *descriptors, self._target, notification, self._plugins)
