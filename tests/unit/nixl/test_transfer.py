# SPDX-License-Identifier: Apache-2.0
"""The transfer loop's rules: what ends a window, how long windows are, and when a wait ends.

The agents are doubles, because only they can give each poll a known answer.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from pytest_nixl.nixl.worker import transfer
from pytest_nixl.nixl.worker.memory import DramBuffer
from pytest_nixl.nixl.worker.transfer import (
    COUNTED,
    FEWEST_WINDOWS,
    WINDOWS,
    RowEnd,
    StepTimeoutError,
    Transfers,
    Watch,
    measure,
    move_each,
    serve,
    stamps_for,
)


class PolledAgent:
    """An agent whose polls find these notifications, one list for each poll, and then none.

    :param states: the answers to posts and to looks at transfers, in order; then DONE.
    """

    def __init__(self, polls: Sequence[Sequence[bytes]] = (), states: Sequence[str] = ()) -> None:
        self._polls = iter(polls)
        self._states = iter(states)
        #: What was posted and sent, in order.
        self.log: list[Any] = []

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        messages = list(next(self._polls, []))
        self.log.append("poll")
        return {"peer": messages} if messages else {}

    def send_notif(self, name: str, message: bytes) -> None:
        self.log.append((name, message))

    def make_connection(self, name: str) -> None:
        self.log.append(name)

    def transfer(self, handle: Any, tag: bytes) -> str:
        self.log.append((handle, tag))
        return next(self._states, "DONE")

    def check_xfer_state(self, handle: Any) -> str:
        return next(self._states, "DONE")

    @property
    def sent(self) -> list[Any]:
        return [entry for entry in self.log if entry != "poll"]


def initiator(agent: PolledAgent, depth: int = 1, handles: int = 1, **options: Any) -> Transfers:
    plain = [f"plain {number}" for number in range(handles)]
    tagged = {number: f"tagged {number}" for number in range(handles)}
    arguments: dict[str, Any] = {
        "acknowledged": True,
        "notify_each": False,
        "deadline": time.monotonic() + 60,
        **options,
    }
    return Transfers(agent, "target", plain, tagged, depth=depth, **arguments)


def served(*polls: Sequence[bytes]) -> list[Any]:
    """Return what a target sends that finds these notifications, one list for each poll."""
    agent = PolledAgent(polls)
    ends = iter(())
    windows = serve(agent, deadline=time.monotonic() + 60, cancelled=lambda: next(ends, True), idle=False)
    assert windows == len(agent.sent)
    return agent.sent


def arrived(window: int) -> tuple[str, bytes]:
    return ("peer", b"pytest-nixl:arrived:%d" % window)


def test_a_window_is_acknowledged_when_the_last_of_its_notifications_has_arrived() -> None:
    of_two = b"pytest-nixl:window:7:2"
    assert served([of_two]) == []
    assert served([of_two], [of_two]) == [arrived(7)]
    # A window of the same number, as the next run of the initiator has, begins to count anew.
    assert served([of_two, of_two, of_two]) == [arrived(7)]
    assert served([of_two] * 4) == [arrived(7), arrived(7)]
    assert served([of_two, b"pytest-nixl:window:8:2"]) == []


def test_announced_notifications_are_counted_once() -> None:
    two, more = b"pytest-nixl:expect:1:2", b"pytest-nixl:expect:2:2"
    assert served([two, COUNTED]) == []
    assert served([two], [COUNTED], [COUNTED]) == [arrived(1)]
    assert served([COUNTED, COUNTED], [two]) == [arrived(1)], "they may arrive before they are announced"
    assert served([two, COUNTED, COUNTED], [more]) == [arrived(1)], "those of one window do not count for the next"
    assert served([two, COUNTED, COUNTED, COUNTED], [more, COUNTED]) == [arrived(1), arrived(2)]
    assert served([b"", b"of somebody else"]) == []
    assert served([b"", b"of somebody else", b"pytest-nixl:window:7:1"]) == [arrived(7)]
    assert served([b"pytest-nixl:expect:1:1"]) == []


def test_a_target_that_waits_too_long_says_so() -> None:
    looks = iter([False, False])
    deadline = time.monotonic() + 60
    assert serve(PolledAgent(), deadline=deadline, cancelled=lambda: next(looks, True), idle=False) == 0
    with pytest.raises(StepTimeoutError, match="while the target waited for the initiator's transfers"):
        serve(PolledAgent(), deadline=time.monotonic() - 1, cancelled=lambda: False, idle=False)


@pytest.mark.parametrize(("depth", "handles"), [(1, 1), (1, 3), (2, 2), (2, 3)])
@pytest.mark.parametrize(("notify_each", "tagged"), [(False, 1), (True, 4)])
def test_a_window_ends_with_its_own_acknowledgement(depth: int, handles: int, notify_each: bool, tagged: int) -> None:
    agent = PolledAgent([[], [b"pytest-nixl:arrived:2"], [b"pytest-nixl:arrived:1"]], ["PROC", "DONE"])
    stamps = stamps_for(4)
    seconds = initiator(agent, depth, handles, notify_each=notify_each).run_window(4, stamps)
    assert agent.log[-3:] == ["poll"] * 3, "the acknowledgement of another window does not end it"
    posted = agent.sent
    assert [tag for _, tag in posted] == [b""] * (4 - tagged) + [b"pytest-nixl:window:1:%d" % tagged] * tagged
    assert [handle.split()[0] for handle, _ in posted] == ["plain"] * (4 - tagged) + ["tagged"] * tagged
    used = [int(handle.split()[1]) for handle, _ in posted]
    assert set(used) == set(range(handles)), "every handle is used"
    assert depth > 1 or used == [number % handles for number in range(4)], "and in turn"
    assert min(stamps) > 0
    assert sum(stamps) <= depth * seconds * 1e9


class ClockedAgent(PolledAgent):
    """An agent each of whose calls takes its own time, in nanoseconds, by a clock that only these calls move."""

    now = 1000

    def spend(self, nanoseconds: int) -> None:
        self.now += nanoseconds

    def transfer(self, handle: Any, tag: bytes) -> str:
        self.spend(30)
        return super().transfer(handle, tag)

    def check_xfer_state(self, handle: Any) -> str:
        self.spend(5)
        return super().check_xfer_state(handle)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.spend(10**3)
        return super().get_new_notifs()

    def send_notif(self, name: str, message: bytes) -> None:
        self.spend(10**6)
        super().send_notif(name, message)


@pytest.mark.parametrize(
    ("depth", "handles", "stamps"), [(1, 1, [30, 35, 30]), (1, 2, [30, 35, 30]), (2, 2, [40, 30, 105])]
)
def test_a_latency_ends_with_its_transfer_and_a_window_when_its_bytes_are_stored(
    monkeypatch: pytest.MonkeyPatch, depth: int, handles: int, stamps: list[int]
) -> None:
    in_turn, in_flight = ["DONE", "PROC", "DONE"], ["PROC", "PROC", "PROC", "DONE", "DONE"]
    agent = ClockedAgent([[b"pytest-nixl:arrived:1"]], in_turn if depth == 1 else in_flight)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: agent.now)
    watch = StoreWatch(arrived=lambda: agent.spend(10**5))
    sender = initiator(agent, depth, handles, announced=True, sync=lambda: agent.spend(10**4), watch=watch)
    latencies = stamps_for(3)
    posted = 95 if depth == 1 else 105
    assert sender.run_window(3, latencies) == pytest.approx((posted + 10**3 + 10**4 + 10**5) / 1e9, rel=1e-9)
    assert list(latencies) == stamps
    assert sender.pace == pytest.approx((posted + 111_000) / 3e9, rel=1e-9)


def test_a_window_that_needs_no_acknowledgement_ends_with_its_transfers() -> None:
    agent, synced = PolledAgent(), list[int]()
    sender = initiator(agent, acknowledged=False, sync=lambda: synced.append(len(agent.log)))
    sender.run_window(3, stamps_for(3))
    assert agent.log == [("plain 0", b"")] * 3
    assert synced == [3]


def test_a_greeting_ends_with_the_answer_of_the_target() -> None:
    agent = PolledAgent([[], [b"pytest-nixl:arrived:0"]])
    initiator(agent).greet()
    assert agent.log == ["target", ("target", b"pytest-nixl:window:0:1"), "poll", "poll"]


@pytest.mark.parametrize(("notify_each", "count"), [(False, 1), (True, 4)])
def test_a_window_is_announced_to_a_target_that_only_counts(notify_each: bool, count: int) -> None:
    agent = PolledAgent([[b"pytest-nixl:arrived:1"]])
    initiator(agent, notify_each=notify_each, announced=True).run_window(4, stamps_for(4))
    assert agent.log[0] == ("target", b"pytest-nixl:expect:1:%d" % count)


@pytest.mark.parametrize(("depth", "handles"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("states", [["ERR"], ["PROC", "ERR"], ["PROC", "PROC", "ERR"]])
def test_a_transfer_that_fails_ends_the_window(depth: int, handles: int, states: list[str]) -> None:
    with pytest.raises(RuntimeError, match="a transfer ended in state ERR"):
        initiator(PolledAgent(states=states), depth, handles).run_window(4, stamps_for(4))


def test_the_acknowledgements_of_several_windows_are_read_together() -> None:
    agent = PolledAgent([[b"pytest-nixl:arrived:3", b"of somebody else", b"pytest-nixl:arrived:12"]])
    sender = initiator(agent)
    assert sender.acknowledged() == {3, 12}
    assert sender.acknowledged() == set()
    assert [sender.next_notification(), sender.next_notification(), sender.window_number] == [
        b"pytest-nixl:window:1:1", b"pytest-nixl:window:2:1", 2,
    ]  # fmt: skip


def test_a_wait_for_the_target_ends_with_the_acknowledgement_of_the_current_window() -> None:
    agent = PolledAgent([[], [b"pytest-nixl:arrived:1"], [b"pytest-nixl:arrived:2"]])
    sender = initiator(agent)
    for _ in range(2):
        sender.next_notification()
    sender.wait_for_the_target()
    assert agent.log == ["poll"] * 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that ``time.monotonic()`` returns, in the only item."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_wait_ends_at_its_deadline_and_not_before(clock: list[float]) -> None:
    class SlowAgent(PolledAgent):
        def check_xfer_state(self, handle: Any) -> str:
            clock[0] += 0.001
            return "PROC"

    sender = initiator(SlowAgent(), deadline=103.0)
    with pytest.raises(StepTimeoutError, match="the deadline passed while waiting for a transfer to complete"):
        sender.finish("handle", "PROC")
    assert 103.0 < clock[0] < 103.0 + 0.001 * 2 * transfer._POLLS_BETWEEN_LOOKS


class StoreWatch(Watch):
    """Notes when it was asked why no transfer ends.

    :param arrived: called when a window has ended.
    :param answering: called before each answer.
    """

    def __init__(self, arrived: Callable[[], object] = lambda: None, answering: Callable[[], object] = lambda: None):
        self.asked: list[float] = []
        self._arrived, self._answering = arrived, answering

    def arrived(self) -> None:
        self._arrived()

    def stalled(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._answering()


def test_a_watch_is_asked_while_no_transfer_ends(clock: list[float]) -> None:
    class StalledAgent(PolledAgent):
        def check_xfer_state(self, handle: Any) -> str:
            clock[0] += 0.001
            return "PROC" if clock[0] < 112.5 else "DONE"

    def answer() -> None:
        clock[0] += 1.0

    watch = StoreWatch(answering=answer)
    initiator(StalledAgent(), deadline=200.0, watch=watch).finish("handle", "PROC")
    # The first look and all others are 512 polls apart; the time of the answer does not count for the next one.
    assert watch.asked == [pytest.approx(10 * 0.512), pytest.approx(20 * 0.512 + 1.0)]


def test_a_watch_counts_from_the_last_transfer_that_ended(clock: list[float]) -> None:
    class TrickleAgent(PolledAgent):
        polls = 0

        def check_xfer_state(self, handle: Any) -> str:
            clock[0] += 0.001
            self.polls += 1
            return "PROC" if self.polls % 4000 else "DONE"

        def transfer(self, handle: Any, tag: bytes) -> str:
            return "PROC"

    watch = StoreWatch()
    sender = initiator(TrickleAgent(), 2, 2, acknowledged=False, deadline=200.0, watch=watch)
    sender.run_window(6, stamps_for(6))
    assert watch.asked == [], "each transfer ended within five seconds of the one before"


class TimedInitiator(Transfers):
    """An initiator whose windows last as long as it is told.

    :param rates: the seconds of each transfer, for each window in turn; the last one for all further windows.
    """

    def __init__(self, rates: Sequence[float], depth: int = 1, transfers: int = 1) -> None:
        super().__init__(
            None, "target", [None] * transfers, {},
            depth=depth, acknowledged=True, notify_each=False, deadline=0.0,
        )  # fmt: skip
        self._rates = self._in_turn_of(rates)
        self.sizes: list[int] = []

    @staticmethod
    def _in_turn_of(rates: Sequence[float]) -> Iterator[float]:
        yield from rates
        while True:
            yield rates[-1]

    def run_window(self, transfers: int, stamps: array[int]) -> float:
        self.sizes.append(transfers)
        seconds = next(self._rates)
        stamps[:] = array("q", [int(seconds * 1e9)] * transfers)
        return transfers * seconds


def timed(sender: TimedInitiator, **options: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "iterations": 1,
        "warmup": 0,
        "warmup_seconds": 1.0,
        "duration": 0.0,
        "around": nullcontext(),
    }
    return measure(sender, **{**usual, **options})


def test_the_fastest_burst_gives_the_size_of_a_window() -> None:
    # The second burst was interrupted: by its rate windows would be a tenth as long as they should be.
    sender = TimedInitiator([0.0001, 0.001, 0.0001])
    timing = timed(sender)
    assert sender.sizes[0] == 5
    assert set(timing["transfers"]) == {72}
    assert len(timing["windows"]) == WINDOWS
    assert timing["windows"][0] == pytest.approx(0.0072)
    # So is the warm-up, if it was slow.
    assert set(timed(TimedInitiator([0.001, 0.0001]), warmup=10)["transfers"]) == {72}
    assert set(timed(TimedInitiator([0.0001, 0.001, 0.0001]), warmup=10)["transfers"]) == {72}


def test_transfers_are_settled_for_the_least_time() -> None:
    sender = TimedInitiator([0.01])
    timed(sender, warmup_seconds=1.0, warmup=10)
    assert sender.sizes[:2] == [10, 90]
    sender = TimedInitiator([0.01])
    timed(sender, warmup_seconds=0.0, warmup=1000)
    assert sender.sizes[:2] == [1000, 1], "once more even if the warm-up was long enough"
    sender = TimedInitiator([0.01])
    timed(sender, warmup_seconds=0.1, warmup=9)
    assert sender.sizes[:2] == [9, 5], "not in bursts of one"


def test_windows_go_on_until_the_duration_has_passed() -> None:
    timing = timed(TimedInitiator([0.001]), duration=1.0, iterations=200)
    assert set(timing["transfers"]) == {20}
    assert len(timing["windows"]) == 50
    assert timing["latencies"] == [pytest.approx(0.001)] * 1000
    assert len(timed(TimedInitiator([0.001]), iterations=201)["windows"]) == WINDOWS
    slow_at_first = TimedInitiator([0.001, 0.001, 0.01, 0.001])
    assert len(timed(slow_at_first, duration=0.999, iterations=200)["windows"]) == 41


@pytest.mark.parametrize(
    ("seconds", "options", "warm_up", "windows"),
    [
        (0.0001, {}, [10, 90], [100] * WINDOWS),
        (0.001, {}, [10, 5], [100] * WINDOWS),
        (0.01, {}, [10, 2], [20] * WINDOWS),
        (0.1, {}, [10, 1], [2] * WINDOWS),
        (0.3, {}, [1, 1], [1] * 6),
        (0.9, {}, [1, 1], [1] * FEWEST_WINDOWS),
        (3.0, {}, [1], [1]),
        (0.1, {"depth": 4, "transfers": 4}, [10, 1], [4] * 5),
        (0.1, {"depth": 2, "transfers": 41}, [10, 1], [5] * WINDOWS),
    ],
    ids=["quick", "just quick enough", "fewer transfers", "hardly any", "fewer windows", "the fewest", "one transfer",
         "in flight", "footprint"],
)  # fmt: skip
def test_a_row_of_a_slow_link_ends_in_time(
    seconds: float, options: dict[str, int], warm_up: list[int], windows: list[int]
) -> None:
    sender = TimedInitiator([seconds], **options)
    sender.pace = seconds
    timing = timed(sender, iterations=1000, warmup=10, warmup_seconds=0.01, longest=2.0)
    assert sender.sizes == warm_up + windows
    assert timing["transfers"] == windows


@pytest.mark.parametrize(
    ("factors", "rate", "windows"),
    [
        ((1.019, 1, 2, 1.01), 490.0, 4),
        ((2, 1.019, 2.03, 2.04), 0.0, 4),
        ((1, 1, 1.021, 1.03), 0.0, WINDOWS),
        ((1, 1, 1, 1.02), 981.0, WINDOWS),
        ((1, 1, 1, 1), None, WINDOWS),
    ],
    ids=["the fastest agree", "the slowest agree", "windows differ", "one is not fast enough", "all are needed"],
)
def test_a_clear_row_ends_after_four_windows(factors: Sequence[float], rate: float | None, windows: int) -> None:
    warming = [0.001, 0.001]
    sender = TimedInitiator([*warming, *(0.001 * factor for factor in factors), 0.001])
    assert len(timed(sender, decisive_rate=rate)["windows"]) == windows


@pytest.mark.parametrize(
    ("options", "size"),
    [({"iterations": 201}, 21), ({"depth": 32}, 32), ({"transfers": 301}, 31), ({}, 8)],
    ids=["iterations", "depth", "footprint", "duration of a window"],
)
def test_a_window_is_large_enough_for_each_reason(options: dict[str, int], size: int) -> None:
    iterations = options.pop("iterations", 1)
    timing = timed(TimedInitiator([0.001], **options), iterations=iterations)
    assert set(timing["transfers"]) == {size}


def test_the_order_statistics_are_in_the_middle_of_their_share() -> None:
    statistics = transfer._order_statistics(array("q", range(4000, 0, -1)))
    assert statistics == list(range(3, 4001, 4))
    assert transfer._order_statistics(array("q", [3, 1, 2])) == [1, 2, 3]


WRONG = {"wrong_bytes": 1, "total_bytes": 8, "offset": 3, "expected": 4, "found": 5}


def test_the_end_that_receives_compares_its_bytes_and_overwrites_all_of_them() -> None:
    buffer = DramBuffer(4096)
    end = RowEnd(buffer, size=1024, seed=7, receives=True, new_patterns=False)
    buffer.fill(7, 0, 4096)
    assert end.turn() is None
    wrong = end.turn()  # nothing has arrived since
    assert wrong is not None
    assert (wrong["wrong_bytes"], wrong["total_bytes"]) == (1024, 1024)
    assert buffer.compare(7, 0, 4096) == {**wrong, "total_bytes": 4096}, "no more than its size is overwritten"
    # The source of windows that have the same bytes is left as it is.
    assert RowEnd(buffer, size=1024, seed=7, receives=False, new_patterns=False).turn() is None
    assert buffer.compare(7, 0, 1024) == wrong


def test_each_window_has_the_pattern_of_the_next_seed() -> None:
    source, destination = DramBuffer(1024), DramBuffer(1024)
    how: dict[str, Any] = {"size": 1024, "seed": 7, "new_patterns": True}
    sends, receives = RowEnd(source, receives=False, **how), RowEnd(destination, receives=True, **how)
    source.fill(7, 0, 1024)
    for seed in (8, 9):
        destination.write(0, source.read(0, 1024))
        assert (receives.turn(), sends.turn()) == (None, None)
        assert source.compare(seed, 0, 1024) is None
        stale = destination.compare(seed, 0, 1024)
        assert stale is not None, "the bytes of the last window are not those of the next"
        assert stale["wrong_bytes"] == 1024, "not even by chance"


class ScriptedEnd(RowEnd):
    """An end whose turns have known answers, in order, then None."""

    def __init__(self, *answers: dict[str, int] | None) -> None:
        self._answers = list(answers)
        self.turns = 0

    def turn(self) -> dict[str, int] | None:
        self.turns += 1
        return self._answers.pop(0) if self._answers else None


def test_a_target_takes_its_turn_when_it_is_asked_and_answers_after_it() -> None:
    agent, stops = PolledAgent([[b"pytest-nixl:turn:1"], [b"pytest-nixl:turn:2"]]), iter(())
    serve(agent, deadline=time.monotonic() + 60, cancelled=lambda: next(stops, True), idle=False,
          end=ScriptedEnd(None, WRONG))  # fmt: skip
    answers = [message for _, message in agent.sent]
    assert answers[0] == b"pytest-nixl:turned:1:null"
    sender = initiator(PolledAgent([[answers[0]], [], [answers[0], answers[1], b"of somebody else"]]))
    assert sender.turn(ScriptedEnd()) is None
    assert sender.turn(ScriptedEnd()) == WRONG, "the answer to another turn does not end the wait"


def test_a_turn_tells_the_corruption_of_either_end() -> None:
    agent = PolledAgent([[b"pytest-nixl:turned:1:null"]])
    end = ScriptedEnd(WRONG)
    assert initiator(agent).turn(end) == WRONG
    assert agent.log == [("target", b"pytest-nixl:turn:1"), "poll"], "the target is asked before this end begins"


def test_a_turn_that_is_not_answered_ends_at_its_deadline() -> None:
    with pytest.raises(StepTimeoutError, match="while waiting for the target to compare its bytes"):
        initiator(PolledAgent(), deadline=time.monotonic() - 1).turn(ScriptedEnd())


class TurnedInitiator(TimedInitiator):
    """An initiator whose target answers each turn with None."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__(rates)
        #: The number of windows before each turn.
        self.turned: list[int] = []

    def turn(self, end: RowEnd) -> dict[str, int] | None:
        self.turned.append(len(self.sizes))
        return end.turn()


def test_both_ends_take_turns_between_the_timed_windows() -> None:
    sender, end = TurnedInitiator([0.001]), ScriptedEnd()
    assert timed(sender, end=end)["corruption"] is None
    settling = len(sender.sizes) - WINDOWS
    assert sender.turned == [settling + window for window in range(1, WINDOWS)], (
        "not before the first, nor after the last"
    )
    assert end.turns == WINDOWS - 1
    end = ScriptedEnd(None, WRONG, {**WRONG, "offset": 5})
    assert timed(sender, end=end)["corruption"] == WRONG, "the first one"


@pytest.mark.parametrize(("seconds", "turns"), [(0.0001, 99), (0.01, 9)])
def test_turns_take_a_twentieth_of_a_long_row(monkeypatch: pytest.MonkeyPatch, seconds: float, turns: int) -> None:
    sender = TurnedInitiator([0.001])
    monkeypatch.setattr(time, "perf_counter", lambda: seconds * len(sender.turned))
    windows = timed(sender, end=ScriptedEnd(), duration=0.8)["windows"]
    assert len(windows) == 100
    assert abs(len(sender.turned) - turns) <= 2


def test_corrupt_transfers_are_counted_and_the_first_is_known() -> None:
    sender, end = TurnedInitiator([0.001]), ScriptedEnd(None, WRONG, None, {**WRONG, "offset": 5})
    assert move_each(sender, end, 5) == {"corrupt": 2, "first": {"transfer": 2, **WRONG}}
    assert sender.sizes == [1] * 5
    assert sender.turned == [1, 2, 3, 4, 5], "each is compared before the next is posted"
    assert move_each(TurnedInitiator([0.001]), ScriptedEnd(), 5) == {"corrupt": 0, "first": None}
