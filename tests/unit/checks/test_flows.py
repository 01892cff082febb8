# SPDX-License-Identifier: Apache-2.0
"""The transfers of one flow, and what of them counts in a window. The agent and the clock are doubles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.checks.pattern.worker import commands, flows
from pytest_nixl.checks.pattern.worker.flows import FlowEndpoint, Gate, OutgoingFlow, StepPart, notification
from pytest_nixl.nixl.worker.transfer import StepTimeoutError


class _Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _PostingAgent:
    """An agent whose transfers end in ``state`` when they are looked at."""

    def __init__(self, state: str = "DONE") -> None:
        self.state = state
        self.posted: list[tuple[str, bytes]] = []

    def transfer(self, handle: str, tag: bytes) -> str:
        self.posted.append((handle, tag))
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        return self.state


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    fake_clock = _Clock()
    monkeypatch.setattr(flows, "time", fake_clock)
    return fake_clock


def windowed(clock: _Clock, arrivals: list[tuple[float, int]], *, posted: int, slots: int = 1) -> OutgoingFlow:
    """Return a flow after a window of one second, after whose start transfers arrived at these times.

    :param posted: how often each of its ``slots`` handles is posted.
    """
    agent = _PostingAgent()
    flow = OutgoingFlow(3, ["handle"] * slots, notification(3))
    flow.begin(100.0, 101.0)
    for _ in range(posted):
        flow.advance(agent, posting=True)
    flow.advance(agent, posting=False)
    for now, count in arrivals:
        clock.now = 100.0 + now
        flow.delivered(count)
    return flow


def test_each_transfer_carries_the_notification_of_its_flow() -> None:
    agent = _PostingAgent()
    flow = OutgoingFlow(3, ["one", "two"], notification(3))
    flow.begin(0.0, 1.0)
    assert flow.advance(agent, posting=True)
    assert agent.posted == [("one", b"pytest-nixl:flow:3"), ("two", b"pytest-nixl:flow:3")]
    assert not flow.over
    flow.advance(agent, posting=False)
    assert not flow.over, "it is over when the target has said so, not when it is DONE"
    flow.delivered(2)
    assert flow.over


def test_a_transfer_without_a_notification_has_arrived_when_it_is_done() -> None:
    agent = _PostingAgent()
    flow = OutgoingFlow(0, ["one"], b"")
    flow.begin(0.0, 1.0)
    flow.advance(agent, posting=True)
    flow.advance(agent, posting=False)
    assert flow.over


def test_a_transfer_that_fails_is_an_error() -> None:
    agent = _PostingAgent("ERR")
    flow = OutgoingFlow(0, ["one"], b"")
    flow.begin(0.0, 1.0)
    flow.advance(agent, posting=True)
    with pytest.raises(RuntimeError, match="a transfer ended in state ERR"):
        flow.advance(agent, posting=True)


def test_what_arrives_after_the_end_of_a_window_counts_for_the_time_before_it(clock: _Clock) -> None:
    # 10 transfers in each second, of which the last begins in the window and ends behind it.
    flow = windowed(clock, [(0.1 * number + 0.05, number) for number in range(1, 11)], posted=10)
    count, seconds = flow.result()
    assert count == 9
    assert count / seconds == pytest.approx(9.5)


def test_a_flow_that_stands_still_is_not_fast(clock: _Clock) -> None:
    flow = windowed(clock, [(0.1, 10), (1.1, 11)], posted=11)
    count, seconds = flow.result()
    assert count / seconds == pytest.approx(10.9)


def test_a_window_with_too_few_transfers_counts_all_of_them(clock: _Clock) -> None:
    count, seconds = windowed(clock, [(0.9, 1), (1.8, 2), (2.7, 3)], posted=3).result()
    assert (count, round(seconds, 9)) == (3, 2.7)
    count, seconds = windowed(clock, [(0.2, 2), (0.9, 3), (1.8, 4)], posted=2, slots=2).result()
    assert (count, round(seconds, 9)) == (4, 1.8)


def test_a_window_with_two_transfers_for_each_in_flight_counts_those_before_its_end(clock: _Clock) -> None:
    count, seconds = windowed(clock, [(0.2, 1), (0.9, 2), (1.8, 3)], posted=3).result()
    assert count == 2
    assert count / seconds == pytest.approx(2 + 1 / 9)


def test_a_count_that_was_never_posted_is_not_believed(clock: _Clock) -> None:
    flow = windowed(clock, [(0.5, 7)], posted=2)
    assert not flow.over
    clock.now = 100.6
    flow.delivered(2)
    assert flow.over


class TalkingAgent(_PostingAgent):
    """An agent whose polls find these notifications, one mapping for each poll, and then none."""

    def __init__(self, *polls: dict[str, list[bytes]]) -> None:
        super().__init__()
        self._polls = iter(polls)
        self.sent: list[tuple[str, bytes]] = []
        self.released: list[str] = []

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return next(self._polls, {})

    def send_notif(self, name: str, message: bytes) -> None:
        self.sent.append((name, message))

    def release_xfer_handle(self, handle: str) -> None:
        self.released.append(handle)


def test_a_target_tells_each_sender_how_many_transfers_of_its_flow_have_arrived() -> None:
    flow = notification(3)
    agent = TalkingAgent({"a": [flow, flow], "b": [flow]}, {"a": [b"of somebody else"]}, {"a": [flow, notification(4)]})
    endpoint = FlowEndpoint(agent, [], lambda: False)
    assert [endpoint._poll() for _ in range(4)] == [True, True, True, False]
    assert agent.sent == [
        ("a", b"pytest-nixl:flow-arrived:3:2"), ("b", b"pytest-nixl:flow-arrived:3:1"),
        ("a", b"pytest-nixl:flow-arrived:3:3"), ("a", b"pytest-nixl:flow-arrived:4:1"),
    ]  # fmt: skip


def test_a_coordinator_lets_the_others_go_when_all_are_ready() -> None:
    ready = b"pytest-nixl:ready:1:0:0"
    agent = TalkingAgent({"a": [ready, ready]}, {"b": [b"pytest-nixl:ready:1:1:0"]}, {"b": [ready]})
    endpoint = FlowEndpoint(agent, [], lambda: True)
    endpoint.run(1, Gate("", ["a", "b"]), [], [], 60)
    assert agent.sent == [("a", b"pytest-nixl:go:1:0:0"), ("b", b"pytest-nixl:go:1:0:0")]
    assert list(agent._polls) == [], "not before the second is ready for the same step"


def test_a_rank_waits_for_the_coordinator_of_each_gate() -> None:
    agent = TalkingAgent(
        {"c": [b"pytest-nixl:go:1:0:0"]}, {}, {"c": [b"pytest-nixl:go:2:1:0", b"pytest-nixl:go:1:1:0"]}
    )
    endpoint = FlowEndpoint(agent, [], lambda: False)
    endpoint.run(1, Gate("c", []), [None], [], 60)
    assert agent.sent == [("c", b"pytest-nixl:ready:1:0:0"), ("c", b"pytest-nixl:ready:1:1:0")]
    assert endpoint.measured == [None]
    assert list(agent._polls) == []


def test_a_step_measures_each_window_of_its_flows() -> None:
    agent = TalkingAgent({"c": [b"pytest-nixl:go:5:0:0"]})
    flow = OutgoingFlow(3, ["one", "two"], b"")
    endpoint = FlowEndpoint(agent, [flow], lambda: False)
    agent._polls = iter([{"c": [b"pytest-nixl:go:5:0:0"]}, {}, {"g": [b"pytest-nixl:go:5:0:1"]}])
    group = Gate("g", [])
    with pytest.raises(StepTimeoutError, match="it was ended while waiting for the coordinator"):
        endpoint._cancelled = lambda: len(agent.sent) == 3
        endpoint.run(5, Gate("c", []), [StepPart(group, [3], [0.0, 0.0], 1)], [], 60)
    assert agent.sent == [
        ("c", b"pytest-nixl:ready:5:0:0"), ("g", b"pytest-nixl:ready:5:0:1"), ("c", b"pytest-nixl:ready:5:1:0"),
    ]  # fmt: skip
    [measured] = endpoint.measured
    assert measured is not None
    assert [count for count, _ in measured.windows[3]] == [2, 2]
    assert all(seconds > 0 for _, seconds in measured.windows[3])
    endpoint.close()
    endpoint.close()
    assert agent.released == ["one", "two"]


def test_a_window_begins_after_the_wait_at_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticking(TalkingAgent):
        """An agent each of whose polls takes a second."""

        now = 0.0

        def get_new_notifs(self) -> dict[str, list[bytes]]:
            self.now += 1
            return super().get_new_notifs()

    agent = Ticking({"c": [b"pytest-nixl:go:5:0:0"]}, *[{}] * 40, {"g": [b"pytest-nixl:go:5:0:1"]})
    clock = SimpleNamespace(perf_counter=lambda: agent.now, monotonic=lambda: agent.now, sleep=lambda _: None)
    monkeypatch.setattr(flows, "time", clock)
    endpoint = FlowEndpoint(agent, [OutgoingFlow(3, ["one"], b"")], lambda: len(agent.sent) == 3)
    with pytest.raises(StepTimeoutError, match="it was ended"):
        endpoint.run(5, Gate("c", []), [StepPart(Gate("g", []), [3], [0.0, 10.0], 1)], [], 1e9)
    [measured] = endpoint.measured
    assert measured is not None
    assert [count for count, _ in measured.windows[3]] == [1, 10]


def test_a_flow_of_this_rank_is_told_what_has_arrived_of_it() -> None:
    flow = OutgoingFlow(3, ["one"], notification(3))
    agent = TalkingAgent({"t": [b"pytest-nixl:flow-arrived:9:1", b"pytest-nixl:flow-arrived:3:1"]})
    flow.advance(agent, posting=True)
    flow.advance(agent, posting=False)
    FlowEndpoint(agent, [flow], lambda: False)._poll()
    assert flow.over


def test_the_coordinator_of_all_polls_until_it_is_ended() -> None:
    agent = TalkingAgent({"a": [notification(3)]}, {"a": [notification(3)]})
    ended = iter([False, False, True])
    FlowEndpoint(agent, [], lambda: next(ended)).run(1, Gate("", []), [], [], 60)
    assert [message for _, message in agent.sent] == [b"pytest-nixl:flow-arrived:3:1", b"pytest-nixl:flow-arrived:3:2"]


def test_a_window_ends_its_duration_after_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = FlowEndpoint(TalkingAgent(), [OutgoingFlow(3, ["one"], b"")], lambda: False)
    lasted: list[float] = []
    monkeypatch.setattr(endpoint, "_window", lambda _, start, end: lasted.append(end - start))
    endpoint._step(b"1:0", StepPart(Gate("", []), [3], [0.25, 0.5], 1), [])
    assert lasted == pytest.approx([0.25, 0.5])


def test_a_rank_that_only_receives_polls_until_the_end_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, ticks = TalkingAgent({"a": [notification(3)]}, {}, {"a": [notification(3)]}), iter([0.0, 1.0, 2.0, 3.0])
    clock = SimpleNamespace(perf_counter=lambda: next(ticks), monotonic=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(flows, "time", clock)
    FlowEndpoint(agent, [], lambda: False)._window([], 0.0, 3.0)
    assert [message for _, message in agent.sent] == [b"pytest-nixl:flow-arrived:3:1", b"pytest-nixl:flow-arrived:3:2"]
    assert list(ticks) == []


def test_a_rank_naps_when_nothing_has_moved_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, naps, now = FlowEndpoint(TalkingAgent(), [], lambda: False), list[float](), 100.0
    monkeypatch.setattr(flows, "time", SimpleNamespace(monotonic=lambda: now, sleep=naps.append))
    endpoint._rest(True, 1.0)
    assert naps == []
    now += 2 * flows._BUSY_SECONDS
    endpoint._rest(False, 1.0)
    assert naps == [1.0]


class PreparingAgent(TalkingAgent):
    """An agent that keeps how its transfers are prepared."""

    def __init__(self, *polls: dict[str, list[bytes]]) -> None:
        super().__init__(*polls)
        self.creations: list[Any] = []

    def get_xfer_descs(self, listed: list[Any], memory: str) -> Any:
        return listed, memory

    def initialize_xfer(self, *arguments: Any, backends: list[str]) -> str:
        self.creations.append((*arguments, backends))
        return f"handle {len(self.creations)}"


@pytest.mark.parametrize(("op", "tag"), [("WRITE", notification(3)), ("READ", b"")])
def test_the_commands_of_a_rank_prepare_run_report_and_release_its_flows(op: str, tag: bytes) -> None:
    agent = PreparingAgent({"b": [b"pytest-nixl:flow-arrived:3:2"]} if tag else {})
    objects: Any = SimpleNamespace(get=lambda key: key, keep=lambda endpoint, _: endpoint, cancelled=lambda: True)
    slots = [[[1, 64, 0], [2, 64, 7]], [[65, 64, 0], [66, 64, 7]]]
    prepared_flows: Any = [{"number": 3, "partner": "b", "slots": slots}]
    endpoint: Any = commands.flows_prepare(objects, cast(Any, agent), op, "UCX", ("DRAM", "VRAM"), prepared_flows)
    assert agent.creations == [
        (op, ([tuple(local)], "DRAM"), ([tuple(remote)], "VRAM"), "b", tag, ["UCX"]) for local, remote in slots
    ]
    gate: Any = {"coordinator": "", "members": []}
    step: Any = {"group": gate, "flows": [3], "durations": [0.0], "busy": 1}
    commands.flows_run(objects, endpoint, 1, gate, [None, step], [], 60)
    rested, measured = commands.flows_report(objects, endpoint)
    assert rested is None
    assert measured is not None
    [[number, counts, seconds]] = measured["windows"]
    assert (number, counts, seconds[0] > 0, measured["contention"] >= 0) == (3, [2], True, True)
    commands.flows_release(objects, endpoint)
    assert agent.released == ["handle 1", "handle 2"]


@pytest.mark.parametrize(("gate", "peer"), [(Gate("c", []), "the coordinator to let"), (Gate("", ["a"]), "the other")])
def test_a_gate_that_stays_shut_ends_at_its_deadline(gate: Gate, peer: str) -> None:
    endpoint = FlowEndpoint(TalkingAgent(), [], lambda: False)
    with pytest.raises(StepTimeoutError, match=f"the deadline passed while waiting for {peer}"):
        endpoint.run(1, gate, [], [], 0.05)


def test_a_rank_waits_twice_as_long_for_the_steps_of_others_as_its_own_step_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = FlowEndpoint(TalkingAgent(), [], lambda: True)
    remaining: list[float] = []
    monkeypatch.setattr(flows, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(endpoint, "_gate", lambda *_: remaining.append(endpoint._deadline - 100.0))
    monkeypatch.setattr(endpoint, "_step", lambda *_: remaining.append(endpoint._deadline - 100.0))
    endpoint.run(1, Gate("", []), [StepPart(Gate("", []), [], [], 1)], [], 7.0)
    assert remaining == [14.0, 7.0, 14.0]
