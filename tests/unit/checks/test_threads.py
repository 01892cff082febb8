# SPDX-License-Identifier: Apache-2.0
"""Concurrent use of the real NIXL is byte-exact, and each fault of it is seen."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from pytest_nixl.checks.faults.threads import (
    AGENTS,
    LOCKED,
    NOTIFICATIONS,
    THREADS,
    TRANSFERS,
    ConcurrentUse,
    create_in_threads,
    has_modes,
    judge_concurrent_use,
    notify_at_once,
    transfer_in_threads,
)
from pytest_nixl.checks.faults.worker.threads import _ALL, _at_once, _Collector, collect, notify
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

GOOD = ConcurrentUse("threads on one agent", "UCX", "1.5.1", 400, moved=400)


@pytest.fixture
def agents(nixl_settings: Settings) -> Iterator[Agents]:
    """Agents with UCX in workers of their own."""
    with Agents(LocalHost(supervisor()), replace(nixl_settings, backend=("UCX",), timeout=120)) as started:
        yield started


@pytest.fixture
def agent(agents: Agents) -> NixlAgent:
    """An agent without a progress thread."""
    return agents.start(progress_thread=None)


def test_a_good_outcome_passes_in_words() -> None:
    judgement = judge_concurrent_use([GOOD, GOOD])
    assert judgement.verdict is Verdict.PASS
    assert judgement.reason == (
        "threads on one agent (UCX of NIXL 1.5.1): all 800 are there once, and every byte is correct"
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(GOOD, ended="was ended by SIGSEGV"), "the process was ended by SIGSEGV"),
        (replace(GOOD, moved=399), "1 missing"),
        (replace(GOOD, wrong_bytes=3, lost=1), "3 bytes are wrong, 1 notifications are lost"),
        (replace(GOOD, doubled=2), "2 notifications arrived twice"),
        (replace(GOOD, errors=("nixlBackendError", "nixlBackendError")), "nixlBackendError"),
    ],
)
def test_each_fault_fails_among_good_outcomes(bad: ConcurrentUse, reason: str) -> None:
    judgement = judge_concurrent_use([GOOD, bad])
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == f"threads on one agent (UCX of NIXL 1.5.1): {reason}"


@pytest.mark.long
@pytest.mark.parametrize("mode", LOCKED)
def test_threads_on_one_agent_move_every_byte(agent: NixlAgent, mode: str) -> None:
    assert has_modes(agent)
    outcome = transfer_in_threads(agent, "UCX", mode)
    assert (outcome.faults, outcome.moved) == ([], THREADS * TRANSFERS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "reasons"),
    [
        ("crash_in_threads", ["the process was ended by SIGSEGV"]),
        ("double", ["1 notifications arrived twice"]),
        ("spoil", [f"{THREADS * TRANSFERS} bytes are wrong"]),
    ],
)
def test_a_fault_of_threads_is_seen(agent: NixlAgent, function: str, reasons: list[str]) -> None:
    agent.run(f"helpers.thread_functions:{function}")
    assert transfer_in_threads(agent, "UCX", "strict").faults == reasons


@pytest.mark.long
def test_agents_that_are_created_at_once_move_bytes(agent: NixlAgent) -> None:
    (outcome,) = create_in_threads([agent], "UCX")
    assert (outcome.faults, outcome.moved) == ([], AGENTS)


@pytest.mark.long
def test_an_agent_that_cannot_be_created_beside_others_is_missing(agent: NixlAgent) -> None:
    agent.run("helpers.thread_functions:refuse_second_agent")
    (outcome,) = create_in_threads([agent], "UCX")
    assert outcome.faults == ["1 missing", "RuntimeError: refused by the test"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "reasons"),
    [("", []), ("lose", ["1 missing", "1 notifications are lost"]), ("double", ["1 notifications arrived twice"])],
)
def test_notifications_of_many_peers_are_counted(agents: Agents, function: str, reasons: list[str]) -> None:
    receiver, *senders = agents.start_each([None] * 3, progress_thread=None)
    if function:
        receiver.run(f"helpers.thread_functions:{function}")
    if function == "lose":
        receiver.worker.timeout = 5  # it waits in vain for twice as long, and polls all the time
    outcome = notify_at_once(receiver, senders, "UCX")
    assert outcome.faults == reasons
    assert outcome.moved == 2 * NOTIFICATIONS - (function == "lose")


class nixlBackendError(Exception):  # noqa: N801 (as NIXL's own error is named)
    __module__ = "nixl_cu12._bindings"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x" * 300), f"ValueError: {'x' * 188}"),
        (TimeoutError("late"), "TimeoutError"),
        (nixlBackendError("NIXL_ERR_BACKEND"), "nixlBackendError"),
    ],
)
def test_errors_of_threads_are_named_and_those_of_nixl_without_their_text(error: Exception, expected: str) -> None:
    def act(number: int) -> None:
        if number:
            raise error

    assert _at_once(3, act, 60) == [expected, expected]


def test_threads_begin_together_and_late_ones_are_counted() -> None:
    together, held = threading.Barrier(3), threading.Event()

    def act(number: int) -> None:
        together.wait(60)  # ends only if all run at the same time
        if number < 2:
            held.wait(60)

    assert _at_once(3, act, 2) == ["a thread did not end before its deadline"] * 2
    held.set()


class ToldAgent:
    """An agent whose polls find these notifications by sender, and then none. Only a double gets them in a known order.

    :param polls: what each poll finds.
    """

    name = "one"

    def __init__(self, *polls: Mapping[str, list[bytes]]) -> None:
        self._polls = iter(polls)
        self.sent: list[tuple[str, bytes]] = []

    def get_new_notifs(self) -> Mapping[str, list[bytes]]:
        return next(self._polls, {})

    def send_notif(self, peer: str, message: bytes) -> None:
        self.sent.append((peer, message))


def test_notifications_of_several_senders_are_counted_until_some_polls_after_the_last() -> None:
    agent = ToldAgent({"a": [b"a/0", b"a/0", b"a/1"]}, {}, {"b": [b"b/0", b"a/1"]}, {"b": [b"b/1"]}, {"b": [b"b/1"]})
    counts = collect(agent, ["a", "b"], 2, 60)
    errors = ["1 notifications have the name of another sender"]
    assert counts == {"moved": 4, "wrong_bytes": 0, "lost": 0, "doubled": 3, "errors": errors}
    assert agent.sent == [("a", _ALL), ("b", _ALL)]


def test_a_collection_ends_at_its_deadline_with_what_is_lost_and_what_is_wrong() -> None:
    agent = ToldAgent({"a": [b"a/0", b"a/7"]})
    assert collect(agent, ["a"], 2, 0.02) == {"moved": 1, "wrong_bytes": 1, "lost": 1, "doubled": 0, "errors": []}
    assert agent.sent == [("a", _ALL)]


def test_a_sender_polls_until_all_its_notifications_are_there() -> None:
    agent = ToldAgent({}, {"peer": [b"x"]}, {"peer": [b"x", _ALL]})
    notify(agent, "peer", 2, 60)
    assert agent.sent == [("peer", b"one/0"), ("peer", b"one/1")]
    with pytest.raises(TimeoutError, match="peer did not answer"):
        notify(ToldAgent(), "peer", 1, 0.01)


def test_notifications_that_come_late_are_counted_too() -> None:
    with _Collector(ToldAgent({"a": [b"1"]}, *[{}] * 50, {"a": [b"1", b"2"]})) as collector:
        pass
    assert collector.counts == Counter({"1": 2, "2": 1})
