# SPDX-License-Identifier: Apache-2.0
"""One rank's part in a traffic pattern: post its own flows, acknowledge those that reach it, and start with the others.

All of it is on the data path: the ranks take one step after another, start each together and learn that bytes have
arrived by notifications of NIXL, so that nothing waits for the process that drives the run.

In a step some groups of ranks measure their flows in one or more windows, each group for itself; other ranks rest. A
step begins at a gate of all ranks, and each further window at a gate of its group. At a gate each member tells the
coordinator, one of the ranks, that it is ready, and the coordinator then lets all of them go. In a window each rank
posts the transfers of its flows until the duration is over. It is ready when everything that it posted has arrived.

A WRITE counts when its target has said that the bytes have arrived: each of its transfers carries a notification, which
NIXL delivers after the data, and the target answers with the number that it has seen. A READ counts when it is DONE.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.cpu_contention import CpuContention
from pytest_nixl.nixl.worker.transfer import IDLE_NAP_SECONDS, StepTimeoutError

_CARRIED = re.compile(rb"pytest-nixl:flow:([0-9]{1,9})")
_ARRIVED = re.compile(rb"pytest-nixl:flow-arrived:([0-9]{1,9}):([0-9]{1,18})")
_READY = re.compile(rb"pytest-nixl:ready:([0-9]{1,18}:[0-9]{1,9}:[0-9]{1,9})")
_GO = re.compile(rb"pytest-nixl:go:([0-9]{1,18}:[0-9]{1,9}:[0-9]{1,9})")

#: Seconds without progress after which a rank naps between its polls, and the seconds of a nap beside transfers.
_BUSY_SECONDS, _NAP_SECONDS = 0.0002, 0.00002
#: The seconds of a nap between the polls of a rank that waits for all others: the slowest of them needs the processor.
_GATE_NAP_SECONDS = 0.003
_POLLS_BETWEEN_LOOKS = 64


def notification(number: int) -> bytes:
    """Return the notification of each transfer of a flow."""
    return b"pytest-nixl:flow:%d" % number


class OutgoingFlow:
    """The transfers of one flow that this rank posts.

    :param number: the number of the flow in the pattern.
    :param handles: the prepared transfers, all of which are in flight at the same time.
    :param notification: that of each; empty: a transfer has arrived when it is DONE.
    """

    def __init__(self, number: int, handles: Sequence[Any], notification: bytes) -> None:
        self.number = number
        self.handles = handles
        self._notification = notification
        self._free = list(range(len(handles)))
        self._in_flight: list[int] = []
        self._posted = self._delivered = 0
        self.begin(0.0, 0.0)

    @property
    def over(self) -> bool:
        """Whether everything that was posted has arrived."""
        return not self._in_flight and self._delivered == self._posted

    def begin(self, start: float, end: float) -> None:
        """Begin a window: ``start`` and ``end`` are values of ``time.perf_counter()``."""
        self._first, self._start, self._end, self._last = self._delivered, start, end, start
        #: The transfers that had arrived at the last look before the end of the window and at the first look after it,
        #: with the seconds of both.
        self._counted: tuple[int, float] = (0, 0.0)
        self._after: tuple[int, float] | None = None

    def delivered(self, count: int) -> None:
        """Note how many transfers have arrived since the flow was prepared."""
        if not self._delivered < count <= self._posted:
            return
        self._delivered, self._last = count, time.perf_counter()
        if self._last <= self._end:
            self._counted = (count - self._first, self._last - self._start)
        elif self._after is None:
            self._after = (count - self._first, self._last - self._start)

    def advance(self, agent: Any, *, posting: bool) -> bool:
        """Look at the transfers in flight, and post those that are free if ``posting``. Return whether any has moved.

        :raises RuntimeError: a transfer failed.
        """
        done = [slot for slot in self._in_flight if self._is_done(agent.check_xfer_state(self.handles[slot]))]
        for slot in done:
            self._complete(slot)
        posted = self._free if posting else []
        self._free = [] if posting else self._free
        for slot in posted:
            self._posted += 1
            self._in_flight.append(slot)
            if self._is_done(agent.transfer(self.handles[slot], self._notification)):
                self._complete(slot)
        return bool(done or posted)

    def result(self) -> tuple[int, float]:
        """Return transfers and the seconds that they took.

        They are the transfers that arrived before the end of the window, and their share of its duration: a flow that
        stands still at the end is as slow as it was. If they are too few to say anything, all transfers are returned.
        """
        count, before = self._counted
        if count < 2 * len(self.handles):
            return self._delivered - self._first, self._last - self._start
        if self._after is None:
            return count, before
        later, after = self._after
        duration = self._end - self._start
        arrived = count + (later - count) * (duration - before) / (after - before)
        return count, duration * count / arrived

    def _complete(self, slot: int) -> None:
        self._in_flight.remove(slot)
        self._free.append(slot)
        if not self._notification:
            self.delivered(self._delivered + 1)

    @staticmethod
    def _is_done(state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"a transfer ended in state {state}")
        return state == "DONE"


@dataclass(frozen=True)
class Gate:
    """The ranks that start together.

    :param coordinator: the agent that lets the others go; empty: this one.
    :param members: for the coordinator, the names of the other agents.
    """

    coordinator: str
    members: Sequence[str]


@dataclass(frozen=True)
class StepPart:
    """One rank's part in a step.

    :param group: the ranks that start each window but the first together.
    :param flows: the numbers of the flows to post.
    :param durations: the seconds of each window; 0: each prepared transfer is posted once.
    :param busy: how many processes of this host measure flows in this step.
    """

    group: Gate
    flows: Sequence[int]
    durations: Sequence[float]
    busy: int


@dataclass(frozen=True)
class MeasuredStep:
    """What a rank measured in a step.

    :param windows: of each of its flows the number, and transfers and seconds of each window.
    :param contention: the cores that these processes needed and other processes took.
    """

    windows: dict[int, list[tuple[int, float]]]
    contention: float


class FlowEndpoint:
    """The flows of one rank, and what the other ranks have told it.

    :param agent: the raw agent.
    :param flows: those whose transfers this rank posts.
    :param cancelled: returns whether pytest has asked to end the running command.
    """

    def __init__(self, agent: Any, flows: Sequence[OutgoingFlow], cancelled: Callable[[], bool]) -> None:
        self._agent, self._cancelled = agent, cancelled
        self._flows = {flow.number: flow for flow in flows}
        #: The number of transfers of each incoming flow that have arrived, by sender and flow.
        self._incoming: dict[tuple[str, int], int] = defaultdict(int)
        self._ready: dict[bytes, set[str]] = defaultdict(set)
        self._go: set[bytes] = set()
        self._deadline = self._busy_until = 0.0
        self._polls = 0
        #: What was measured in each step of the latest run; None for a step in which this rank rested.
        self.measured: list[MeasuredStep | None] = []

    def run(
        self, run: int, everyone: Gate, steps: Sequence[StepPart | None], own: Sequence[int], timeout: float
    ) -> None:
        """Take part in steps, and keep what was measured in :attr:`measured`.

        If this rank coordinates everyone, it polls at the end until it is cancelled.

        :param run: a number that no other run of these ranks has.
        :param everyone: all ranks, which start each step together.
        :param steps: this rank's part in each; None: it rests.
        :param own: the pids of the pattern's other processes on this host.
        :param timeout: the seconds that a step may take.
        :raises StepTimeoutError: a step takes longer, or pytest has asked to end.
        :raises RuntimeError: a transfer failed.
        """
        self.measured = []
        for number, step in enumerate(steps):
            self._deadline = time.monotonic() + 2 * timeout  # others may still be in the step before
            self._gate(b"%d:%d:0" % (run, number), everyone, _GATE_NAP_SECONDS)
            self._deadline = time.monotonic() + timeout
            self.measured.append(None if step is None else self._step(b"%d:%d" % (run, number), step, own))
        self._deadline = time.monotonic() + 2 * timeout
        self._gate(b"%d:%d:0" % (run, len(steps)), everyone, _GATE_NAP_SECONDS)
        if not everyone.coordinator:
            while not self._cancelled():  # its last messages leave it only while it polls
                self._rest(self._poll(), IDLE_NAP_SECONDS)

    def close(self) -> None:
        """Release every transfer."""
        for flow in self._flows.values():
            for handle in flow.handles:
                self._agent.release_xfer_handle(handle)
        self._flows.clear()

    def _step(self, token: bytes, step: StepPart, own: Sequence[int]) -> MeasuredStep:
        active = [self._flows[number] for number in step.flows]
        windows: dict[int, list[tuple[int, float]]] = {flow.number: [] for flow in active}
        contention = CpuContention(own, needed=step.busy)
        with contention:
            for number, duration in enumerate(step.durations):
                if number:
                    self._gate(token + b":%d" % number, step.group, _NAP_SECONDS)
                start = time.perf_counter()
                self._window(active, start, start + duration)
                for flow in active:
                    windows[flow.number].append(flow.result())
        return MeasuredStep(windows, contention.cores)

    def _window(self, active: Sequence[OutgoingFlow], start: float, end: float) -> None:
        for flow in active:
            flow.begin(start, end)
        posting = True
        while posting or not all(flow.over for flow in active):
            moved = [flow.advance(self._agent, posting=posting) for flow in active]
            # A rank that only receives stays until the end, too: it answers at once, and measures its contention.
            posting = time.perf_counter() < end
            self._wait(self._poll() or any(moved), "the transfers of a window to arrive")

    def _gate(self, token: bytes, gate: Gate, nap: float) -> None:
        """Wait until all ranks of a gate are there.

        :param token: the run, the step and the window that begins; the first window of a step has none of its own.
        :param nap: seconds between polls. A rank that rests leaves the processor to those that measure or start.
        """
        if gate.coordinator:
            self._agent.send_notif(gate.coordinator, b"pytest-nixl:ready:" + token)
            while token not in self._go:
                self._wait(self._poll(), "the coordinator to let this rank go", nap)
            self._go.discard(token)
            return
        while not self._ready[token].issuperset(gate.members):
            self._wait(self._poll(), "the other ranks to be ready", nap)
        del self._ready[token]
        for member in gate.members:
            self._agent.send_notif(member, b"pytest-nixl:go:" + token)

    def _poll(self) -> bool:
        """Read what has arrived, and acknowledge it. Return whether anything has."""
        notifications = self._agent.get_new_notifs()
        for sender, messages in notifications.items():
            senders: set[int] = set()
            for message in messages:
                if match := _CARRIED.fullmatch(message):
                    self._incoming[sender, int(match[1])] += 1
                    senders.add(int(match[1]))
                elif match := _ARRIVED.fullmatch(message):
                    if (flow := self._flows.get(int(match[1]))) is not None:
                        flow.delivered(int(match[2]))
                elif match := _READY.fullmatch(message):
                    self._ready[match[1]].add(sender)
                elif match := _GO.fullmatch(message):
                    self._go.add(match[1])
            for number in senders:
                text = b"pytest-nixl:flow-arrived:%d:%d" % (number, self._incoming[sender, number])
                self._agent.send_notif(sender, text)
        return any(notifications.values())

    def _wait(self, moved: bool, what: str, nap: float = _NAP_SECONDS) -> None:
        self._rest(moved, nap)
        if self._polls % _POLLS_BETWEEN_LOOKS:
            return
        if time.monotonic() > self._deadline:
            raise StepTimeoutError(f"the deadline passed while waiting for {what}")
        if self._cancelled():
            raise StepTimeoutError(f"it was ended while waiting for {what}")

    def _rest(self, moved: bool, nap: float) -> None:
        self._polls += 1
        now = time.monotonic()
        if moved:
            self._busy_until = now + _BUSY_SECONDS
        if now > self._busy_until:
            time.sleep(nap)
        else:
            os.sched_yield()
