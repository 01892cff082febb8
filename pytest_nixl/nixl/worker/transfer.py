# SPDX-License-Identifier: Apache-2.0
"""The transfer loop: the initiator's timed windows, and the target's acknowledgement that the bytes have arrived.

A window is ``n`` transfers, of which ``depth`` are in flight. A window of WRITE ends when the target's acknowledgement
arrives. For that, the initiator's last transfer (or each transfer, if DONE does not mean that the bytes have arrived)
carries a notification, which NIXL delivers after the data. The target answers when it has all notifications. A WRITE to
storage ends with a sync of the file. A window of READ ends with its last DONE, because the bytes have then arrived at
the initiator.

After a handle was posted once with a notification, every later post of it sends that notification again, even if the
later one is empty. Each transfer in flight therefore has two handles, one plain and one notifying.

LIBFABRIC before NIXL 1.0 sends only the notification with which a handle was created. For these releases each notifying
handle is created with :data:`COUNTED`, and before a window the initiator tells the target how many to wait for.

Between windows, each end of a row may take its turn: the end that receives compares its bytes and overwrites them, and
the end that sends may write the next pattern. The initiator asks the target for its turn by a notification, which the
target answers after it, with the corruption if there is any.

Both sides poll and yield the processor between polls, without a progress thread. On few cores the results vary far
less than with a spinning thread.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from pytest_nixl.core.lazy_module import lazy_module

if TYPE_CHECKING:
    import numpy as np
else:  # pytest imports this module too, and has no need for numpy
    np = lazy_module("numpy")

WINDOWS = 10
#: A row at a decisive rate ends after this many windows if so many of them agree: the slowest of these takes at most
#: this share longer than the fastest. In 96 rows of 4 KiB to 64 MiB over cma 75 ended so; their medians were at most
#: 4 % (in the mean 0.4 %) from those of ten windows, and from row to row they differed no more.
DECISIVE_WINDOWS, DECISIVE_AGREEING, DECISIVE_SPREAD = 4, 3, 0.02
#: The least duration of a window in seconds, so that its one acknowledgement hardly counts.
WINDOW_SECONDS = 0.007
#: Windows are planned that much longer, so that ten of them rarely last less than ten times the least.
_MARGIN = 1.02
#: If ten windows would take longer than a row may take, there are fewer, but at least this many; if one transfer alone
#: takes longer, there is one.
FEWEST_WINDOWS = 3
#: The largest number of order statistics of latencies in a result.
LATENCIES = 1000
#: After the first windows, the most time that turns between windows take, as a share of the timed windows.
_TURNS_SHARE = 0.05

_BUSY_SECONDS = 0.0002
# With two microseconds, the target's polling would cost a third of the bandwidth of 64 KiB blocks over cma.
_NAP_SECONDS = 0.00002
#: The seconds of a nap while nothing is measured.
IDLE_NAP_SECONDS = 0.001
_POLLS_BETWEEN_LOOKS = 512
#: If no transfer ends in this time, a watch is asked, and again after the same time, in seconds.
STALLED_SECONDS = 5.0
_NAPS_BETWEEN_LOOKS = 8


#: The notification of every transfer that notifies, if NIXL can send only the one given at a handle's creation.
COUNTED = b"pytest-nixl:counted"
_NOTIFICATION = re.compile(rb"pytest-nixl:window:([0-9]+):([0-9]+)")
_ANNOUNCEMENT = re.compile(rb"pytest-nixl:expect:([0-9]+):([0-9]+)")
_ARRIVED = re.compile(rb"pytest-nixl:arrived:([0-9]+)")
_TURN = re.compile(rb"pytest-nixl:turn:([0-9]+)")
_TURNED = re.compile(rb"pytest-nixl:turned:([0-9]+):(.*)", re.DOTALL)


class StepTimeoutError(Exception):
    """A wait in the worker passed its deadline."""


class Watch(Protocol):
    """An object that can tell why no transfer ends, such as the client of a server."""

    def arrived(self) -> None:
        """Note that a window has ended."""

    def stalled(self, seconds: float) -> None:
        """Raise an error if it knows why no transfer has ended for this time, in seconds."""


class PatternMemory(Protocol):
    """A buffer that can be filled with the pattern of a seed, and compared with it."""

    def fill(self, seed: int, offset: int, size: int, *, inverted: bool = False) -> None:
        """Write the pattern, or its complement, in which every byte is wrong."""

    def compare(self, seed: int, offset: int, size: int) -> dict[str, int] | None:
        """Return None if every byte has the pattern, else the corruption."""


class RowEnd:
    """One end of a row, which takes a turn between windows.

    Before the first window the source has the pattern of ``seed``.

    :param buffer: the memory that the transfers read or write.
    :param size: the number of bytes, from the beginning of the buffer, that are compared or written in a turn.
    :param seed: the seed of the pattern.
    :param receives: whether the transfers write this buffer.
    :param new_patterns: whether each window has a pattern of its own, that of the next seed.
    """

    def __init__(self, buffer: PatternMemory, *, size: int, seed: int, receives: bool, new_patterns: bool) -> None:
        self._buffer = buffer
        self._size = size
        self._seed = seed
        self._receives = receives
        self._new_patterns = new_patterns

    def turn(self) -> dict[str, int] | None:
        """Compare the bytes of the last window and overwrite them with wrong ones, or write the next pattern.

        :returns: the corruption; None: every byte is right, or this end is the source.
        """
        corruption = self._buffer.compare(self._seed, 0, self._size) if self._receives else None
        self._seed += self._new_patterns
        if self._receives or self._new_patterns:
            self._buffer.fill(self._seed, 0, self._size, inverted=self._receives)
        return corruption


def stamps_for(count: int) -> array[int]:
    """Return an array for the latencies of so many transfers, in nanoseconds."""
    return array("q", bytes(8 * count))


def _notification(window: int, needed: int) -> bytes:
    return b"pytest-nixl:window:%d:%d" % (window, needed)


def _announcement(window: int, needed: int) -> bytes:
    return b"pytest-nixl:expect:%d:%d" % (window, needed)


def _acknowledgement(window: int) -> bytes:
    return b"pytest-nixl:arrived:%d" % window


class Transfers:
    """Prepared transfers to one target, which are posted and timed.

    :param agent: the raw agent.
    :param target: the name of the target's agent.
    :param plain: prepared transfers, which are posted in turn.
    :param notifying: the same transfers with a notification, by their place in ``plain``.
    :param depth: the number of transfers in flight; None: all of ``plain``.
    :param acknowledged: whether a window ends with the target's acknowledgement (WRITE to another agent).
    :param notify_each: whether every transfer carries a notification, not only the last one of a window.
    :param deadline: the value of ``time.monotonic()`` at which every wait ends; it is set anew for each command.
    :param announced: whether notifying transfers carry :data:`COUNTED`, with which their handles were created.
    :param sync: called at the end of a window (WRITE to storage); None for nothing.
    :param watch: asked if no transfer ends for :data:`STALLED_SECONDS`; None: nothing is.
    """

    def __init__(
        self,
        agent: Any,
        target: str,
        plain: Sequence[Any],
        notifying: Mapping[int, Any],
        *,
        depth: int | None = None,
        acknowledged: bool,
        notify_each: bool,
        deadline: float = 0.0,
        announced: bool = False,
        sync: Callable[[], None] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._agent = agent
        self._target = target
        self._plain = plain
        self._notifying = notifying
        self._depth = len(plain) if depth is None else depth
        self._free = deque(range(len(plain)))  # in turn, so that every handle is used equally
        self._acknowledged = acknowledged
        self._notify_each = notify_each
        self._announced = announced
        self._sync = sync
        self._watch = watch
        #: The times of the first look since a transfer ended, and of the watch's last answer; 0: none.
        self._since = self._asked = 0.0
        #: The value of ``time.monotonic()`` at which every wait ends.
        self.deadline = deadline
        #: The number of the current window, which the target acknowledges.
        self.window_number = 0
        self._turns = 0
        #: The seconds of a transfer in the latest window; 0: there was none.
        self.pace = 0.0

    @property
    def depth(self) -> int:
        """The number of transfers in flight."""
        return self._depth

    @property
    def count(self) -> int:
        """How many are prepared: the depth, or more if they walk a footprint."""
        return len(self._plain)

    def run_window(self, count: int, stamps: array[int]) -> float:
        """Run transfers, and return the seconds until the bytes of the last one have arrived.

        :param count: their number.
        :param stamps: receives the latency of each transfer in nanoseconds.
        :raises StepTimeoutError: the deadline has passed.
        :raises RuntimeError: a transfer failed.
        """
        self.window_number += 1
        self._since = 0.0
        notification = _notification(self.window_number, count if self._notify_each else 1)
        # The first post that carries the notification: none does, only the last one, or all.
        first_notifying = count if not self._acknowledged else 0 if self._notify_each else count - 1
        run = self._in_flight if self._depth > 1 else self._one_by_one if len(self._plain) == 1 else self._in_turn
        if self._announced and self._acknowledged:
            self._agent.send_notif(self._target, _announcement(self.window_number, count - first_notifying))
        start = time.perf_counter_ns()
        run(count, first_notifying, notification, start, stamps)
        if self._acknowledged:
            self._wait_for(_acknowledgement(self.window_number))
        if self._sync is not None:
            self._sync()
        if self._watch is not None:
            self._watch.arrived()
        seconds = (time.perf_counter_ns() - start) / 1e9
        self.pace = seconds / count
        return seconds

    def release(self) -> None:
        """Release every transfer."""
        for handle in (*self._plain, *self._notifying.values()):
            self._agent.release_xfer_handle(handle)

    def greet(self) -> None:
        """Connect to a target, and exchange a notification in each direction."""
        self._agent.make_connection(self._target)
        self._agent.send_notif(self._target, _notification(0, 1))
        self._wait_for(_acknowledgement(0))

    def _one_by_one(
        self, count: int, first_notifying: int, notification: bytes, start: int, stamps: array[int]
    ) -> None:
        transfer, clock = self._agent.transfer, time.perf_counter_ns
        [plain] = self._plain
        before = start
        for handle, message, part in (
            (plain, b"", range(first_notifying)),
            (self._notifying[0], notification, range(first_notifying, count)),
        ):
            for number in part:
                state = transfer(handle, message)
                if state != "DONE":
                    self.finish(handle, state)
                now = clock()
                stamps[number] = now - before
                before = now

    def _in_turn(self, count: int, first_notifying: int, notification: bytes, start: int, stamps: array[int]) -> None:
        transfer, clock, free = self._agent.transfer, time.perf_counter_ns, self._free
        before = start
        for number in range(count):
            place = free[0]
            free.rotate(-1)
            if number < first_notifying:
                handle, message = self._plain[place], b""
            else:
                handle, message = self._notifying[place], notification
            state = transfer(handle, message)
            if state != "DONE":
                self.finish(handle, state)
            now = clock()
            stamps[number] = now - before
            before = now

    def _in_flight(self, count: int, first_notifying: int, notification: bytes, start: int, stamps: array[int]) -> None:
        transfer, check, clock = self._agent.transfer, self._agent.check_xfer_state, time.perf_counter_ns
        posted = done = polls = 0
        begun: dict[int, tuple[int, Any]] = {}
        free, depth = self._free, self._depth
        while done < count:
            while len(begun) < depth and posted < count:
                slot = free.popleft()
                if posted < first_notifying:
                    handle, message = self._plain[slot], b""
                else:
                    handle, message = self._notifying[slot], notification
                begun[slot] = clock(), handle
                state = transfer(handle, message)
                posted += 1
                if state == "DONE":
                    stamps[done] = clock() - begun.pop(slot)[0]
                    done += 1
                    free.append(slot)
                elif state != "PROC":
                    raise RuntimeError(f"a transfer ended in state {state}")
            moved = False
            for slot in list(begun):
                state = check(begun[slot][1])
                if state == "DONE":
                    stamps[done] = clock() - begun.pop(slot)[0]
                    done += 1
                    free.append(slot)
                    moved = True
                elif state != "PROC":
                    raise RuntimeError(f"a transfer ended in state {state}")
            if moved:
                self._since = 0.0
            elif begun:
                polls += 1
                self._pause(polls, "a transfer to complete")

    def turn(self, end: RowEnd) -> dict[str, int] | None:
        """Let both ends of the row take their turns at the same time.

        :param end: the initiator's end.
        :returns: the corruption of the bytes that one of them received, or None.
        :raises StepTimeoutError: the deadline has passed.
        """
        self._turns += 1
        self._agent.send_notif(self._target, b"pytest-nixl:turn:%d" % self._turns)
        position = end.turn()
        return self._wait_for_turn() or position

    def _wait_for_turn(self) -> dict[str, int] | None:
        """Wait for the target's end of the row, and return the corruption of the bytes that it received."""
        polls = 0
        while True:
            for messages in self._agent.get_new_notifs().values():
                for answer in filter(None, map(_TURNED.fullmatch, messages)):
                    if int(answer[1]) == self._turns:
                        corruption: dict[str, int] | None = json.loads(answer[2])
                        return corruption
            polls += 1
            self._pause(polls, "the target to compare its bytes")

    def next_notification(self) -> bytes:
        """Return the notification of the next window, which has one transfer."""
        self.window_number += 1
        return _notification(self.window_number, 1)

    def acknowledged(self) -> set[int]:
        """Return the numbers of the windows whose acknowledgements have arrived since the last call."""
        messages = (message for new_notif in self._agent.get_new_notifs().values() for message in new_notif)
        return {int(match[1]) for message in messages if (match := _ARRIVED.fullmatch(message))}

    def wait_for_the_target(self) -> None:
        """Wait until the target has acknowledged the current window. :raises StepTimeoutError: the deadline passed."""
        self._wait_for(_acknowledgement(self.window_number))

    def finish(self, handle: Any, state: str) -> None:
        """Poll a posted transfer until it is complete.

        :param state: the state that the post returned.
        :raises StepTimeoutError: the deadline has passed.
        :raises RuntimeError: the transfer failed.
        """
        polls = 0
        self._since = 0.0
        while state == "PROC":
            polls += 1
            self._pause(polls, "a transfer to complete")
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended in state {state}")

    def _wait_for(self, message: bytes) -> None:
        polls = 0
        while True:
            for messages in self._agent.get_new_notifs().values():
                if message in messages:
                    return
            polls += 1
            self._pause(polls, "the target's acknowledgement that the bytes have arrived")

    def _pause(self, polls: int, awaited: str) -> None:
        os.sched_yield()
        if polls % _POLLS_BETWEEN_LOOKS == 0:
            now = time.monotonic()
            if now > self.deadline:
                raise StepTimeoutError(f"the deadline passed while waiting for {awaited}")
            if self._watch is not None:
                self._ask(self._watch, now)

    def _ask(self, watch: Watch, now: float) -> None:
        """Ask the watch why no transfer has ended, if it is time to."""
        if not self._since:
            self._since = self._asked = now
        elif now - self._asked > STALLED_SECONDS:
            watch.stalled(now - self._since)
            self._asked = time.monotonic()


def move_each(transfers: Transfers, end: RowEnd, count: int) -> dict[str, Any]:
    """Run transfers one at a time, each with a pattern of its own, which is compared before the next one is posted.

    :param end: the initiator's end of the row.
    :param count: the number of transfers.
    :returns: the number of corrupt transfers, and the number and the corruption of the first one, or None.
    :raises StepTimeoutError: the deadline has passed.
    """
    corrupt, first, stamps = 0, None, stamps_for(1)
    for number in range(1, count + 1):
        transfers.run_window(1, stamps)
        wrong = transfers.turn(end)
        if wrong is not None:
            corrupt += 1
            first = first or {"transfer": number, **wrong}
    return {"corrupt": corrupt, "first": first}


def measure(
    transfers: Transfers,
    *,
    iterations: int,
    warmup: int,
    warmup_seconds: float,
    duration: float,
    around: AbstractContextManager[object],
    end: RowEnd | None = None,
    decisive_rate: float | None = None,
    longest: float = math.inf,
) -> dict[str, Any]:
    """Warm up, time at least :data:`WINDOWS` windows, and return their seconds, transfers and latencies.

    The first :data:`DECISIVE_WINDOWS` windows suffice if they agree, and each has at least ``decisive_rate``. On a
    link so slow that all would take more than ``longest``, there are fewer transfers, and then fewer windows.

    :param iterations: the least number of transfers to time.
    :param warmup: the number of transfers before anything else.
    :param warmup_seconds: seconds of transfers before the first window, the warmup included.
    :param duration: the least time to measure, in seconds.
    :param around: a context manager that is entered before the first window and exited after the last.
    :param end: the initiator's end of the row, if bytes are compared and overwritten between the windows.
    :param decisive_rate: transfers per second at which a row needs no more windows; None: it always needs them.
    :param longest: the seconds that the windows together should take at most; so may the warmup.
    :raises StepTimeoutError: the deadline has passed.
    """
    if warmup * transfers.pace > longest:
        warmup = 1
    warmed = transfers.run_window(warmup, stamps_for(warmup)) if warmup else 0.0
    estimate = warmed / warmup if warmed > longest else _warm_up(transfers, warmup_seconds, warmup, warmed)
    # Every handle is used at least once, because the bytes of all are compared afterwards.
    least = max(iterations, transfers.count)
    fewest = max(transfers.depth, -(-transfers.count // WINDOWS))
    per_window = max(-(-least // WINDOWS), int(_MARGIN * WINDOW_SECONDS / estimate) + 1)
    per_window = max(fewest, int(min(per_window, longest / WINDOWS / estimate)))
    needed = WINDOWS
    if transfers.count == transfers.depth:
        fewest = 1 if estimate > longest else FEWEST_WINDOWS
        needed = int(max(fewest, min(WINDOWS, longest / per_window / estimate)))
    stamps = stamps_for(per_window)
    windows: list[float] = []
    latencies: array[int] = array("q")
    timed = spent = 0.0
    corruption = None
    with around:
        while (len(windows) < needed or timed < duration) and not _decisive(windows, per_window, decisive_rate):
            if end is not None and windows and (len(windows) < WINDOWS or spent < timed * _TURNS_SHARE):
                start = time.perf_counter()
                corruption = corruption or transfers.turn(end)
                spent += time.perf_counter() - start
            windows.append(transfers.run_window(per_window, stamps))
            timed += windows[-1]
            latencies.extend(stamps)
    return {
        "corruption": corruption,
        "windows": windows,
        "transfers": [per_window] * len(windows),
        "latencies": [stamp / 1e9 for stamp in _order_statistics(latencies)],
    }


def _decisive(windows: Sequence[float], count: int, rate: float | None) -> bool:
    """Whether more windows would tell nothing new.

    :param windows: the seconds of each.
    :param count: the transfers of each.
    :param rate: transfers per second, which each window must have; None: more windows always tell something.
    """
    if rate is None or len(windows) != DECISIVE_WINDOWS:
        return False
    ordered = sorted(windows)
    pairs = zip(ordered, ordered[DECISIVE_AGREEING - 1 :], strict=False)
    return count >= rate * ordered[-1] and any(slow <= (1 + DECISIVE_SPREAD) * fast for fast, slow in pairs)


def _warm_up(transfers: Transfers, least: float, done: int, seconds: float) -> float:
    """Run transfers until they have taken ``least`` seconds, and return the seconds per transfer.

    Other processes only make transfers slower, so the fastest of all bursts counts: windows would be too short if a
    burst that was interrupted gave their size.

    :param done: the number of transfers that were run before.
    :param seconds: how long these took.
    """
    estimate = max(seconds / done, 1e-7) if done else least
    while True:
        # At least once, because the first transfers of a size are slower than those that follow.
        fewest = min(5, int(least / estimate) + 1) if done else 5
        count = max(fewest, int((least - seconds) / estimate))
        taken = transfers.run_window(count, stamps_for(count))
        burst = max(taken / count, 1e-7)
        estimate = min(estimate, burst) if done else burst
        done += count
        seconds += taken
        if seconds >= least:
            return estimate


def _order_statistics(stamps: array[int]) -> list[int]:
    ordered = np.sort(np.frombuffer(stamps, dtype=np.int64))
    count = min(len(ordered), LATENCIES)
    return [int(ordered[int((i + 0.5) * len(ordered) / count)]) for i in range(count)]


def serve(agent: Any, *, deadline: float, cancelled: Callable[[], bool], idle: bool, end: RowEnd | None = None) -> int:
    """Be the target: acknowledge every window whose notifications have all arrived, until cancelled.

    :param agent: the raw agent.
    :param deadline: the value of ``time.monotonic()`` at which the loop ends.
    :param cancelled: called regularly; the loop ends when it returns True. Until then the loop makes progress, so that
        the last notifications are sent.
    :param idle: whether nothing is measured meanwhile, so that longer naps leave the processor to others.
    :return: the number of acknowledged windows.
    :raises StepTimeoutError: the deadline has passed.
    """
    arrived: dict[tuple[str, bytes], int] = {}
    expected: dict[str, tuple[int, int]] = {}
    windows = polls = 0
    busy_until = time.monotonic() + _BUSY_SECONDS
    while True:
        for sender, messages in agent.get_new_notifs().items():
            busy_until = time.monotonic() + _BUSY_SECONDS
            for message in messages:
                if announcement := _ANNOUNCEMENT.fullmatch(message):
                    expected[sender] = int(announcement[1]), int(announcement[2])
                    continue
                if message == COUNTED:
                    arrived[sender, COUNTED] = arrived.get((sender, COUNTED), 0) + 1
                    continue
                if end is not None and (turn_request := _TURN.fullmatch(message)):
                    answer = json.dumps(end.turn()).encode()
                    agent.send_notif(sender, b"pytest-nixl:turned:%d:%b" % (int(turn_request[1]), answer))
                    continue
                notification = _NOTIFICATION.fullmatch(message)
                if notification is None:  # LIBFABRIC of NIXL 0.7 sends an empty notification for transfers without one
                    continue
                count = arrived[sender, message] = arrived.get((sender, message), 0) + 1
                if count == int(notification[2]):
                    del arrived[sender, message]
                    windows += 1
                    agent.send_notif(sender, _acknowledgement(int(notification[1])))
            if sender in expected and arrived.get((sender, COUNTED), 0) >= expected[sender][1]:
                number, needed_here = expected.pop(sender)
                arrived[sender, COUNTED] -= needed_here
                windows += 1
                agent.send_notif(sender, _acknowledgement(number))
        polls += 1
        if time.monotonic() > busy_until:
            time.sleep(IDLE_NAP_SECONDS if idle else _NAP_SECONDS)
            if polls % _NAPS_BETWEEN_LOOKS == 0:
                if cancelled():
                    return windows
                if time.monotonic() > deadline:
                    raise StepTimeoutError("the deadline passed while the target waited for the initiator's transfers")
        else:
            os.sched_yield()
