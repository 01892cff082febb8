# SPDX-License-Identifier: Apache-2.0
"""The transfers of one flow, and what of them counts in a window. The agent and the clock are doubles."""

from __future__ import annotations

import pytest

from pytest_nixl.nixl.worker import flows
from pytest_nixl.nixl.worker.flows import OutgoingFlow, notification


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
    made = _Clock()
    monkeypatch.setattr(flows, "time", made)
    return made


def windowed(clock: _Clock, arrivals: list[tuple[float, int]], *, posted: int) -> OutgoingFlow:
    """Return a flow of one handle after a window of one second, in which transfers arrived at these times."""
    agent = _PostingAgent()
    flow = OutgoingFlow(3, ["handle"], notification(3))
    flow.begin(0.0, 1.0)
    for _ in range(posted):
        flow.advance(agent, posting=True)
    flow.advance(agent, posting=False)
    for now, count in arrivals:
        clock.now = now
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
    flow = windowed(clock, [(0.9, 1), (1.8, 2), (2.7, 3)], posted=3)
    assert flow.result() == (3, 2.7)


def test_a_count_that_was_never_posted_is_not_believed(clock: _Clock) -> None:
    flow = windowed(clock, [(0.5, 7)], posted=2)
    assert not flow.over
    clock.now = 0.6
    flow.delivered(2)
    assert flow.over
