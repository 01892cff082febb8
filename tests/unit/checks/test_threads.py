# SPDX-License-Identifier: Apache-2.0
"""Concurrent use of the real NIXL is byte-exact, and each fault of it is seen."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.watching_agent import WatchingAgent, watching_agents

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
from pytest_nixl.checks.faults.worker.threads import (
    _ALL,
    _at_once,
    _Collector,
    collect,
    create_at_once,
    notify,
    transfer_at_once,
)
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.worker.peer_scene import PEER
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerDiedError, WorkerError

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
def test_agents_that_are_created_at_once_move_bytes(agent: NixlAgent) -> None:
    (outcome,) = create_in_threads([agent], "UCX")
    assert (outcome.faults, outcome.moved) == ([], AGENTS)


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


def test_threads_share_an_agent_of_the_mode_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = watching_agents(monkeypatch)
    counts = transfer_at_once(agents["agent"], "LIBFABRIC", "rw", 3, 4, 60.0)
    assert counts == {"moved": 12, "wrong_bytes": 0, "lost": 0, "doubled": 0, "errors": []}
    assert list(agents) == ["agent", "agent-rw", PEER]
    shared, peer = agents["agent-rw"], agents[PEER]
    assert (shared.options, shared.log[0]) == ({"progress_thread": True, "sync_mode": "rw"}, "create_backend LIBFABRIC")
    assert (shared.faults, peer.faults, agents["agent"].log) == ([], [], [])
    assert (shared.done, shared.regions, len(shared.handles)) == (12, [], 0)


def test_agents_created_at_once_move_bytes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = watching_agents(monkeypatch)
    counts = create_at_once(agents["agent"], "UCX", 3, 60.0)
    assert counts == {"moved": 3, "wrong_bytes": 0, "lost": 0, "doubled": 0, "errors": []}
    assert {*agents} == {"agent", PEER, *(f"agent-at-once-{number}" for number in range(3))}
    for number in range(3):
        created = agents[f"agent-at-once-{number}"]
        assert (created.options, created.log[0]) == (
            {"progress_thread": False, "sync_mode": "auto"}, "create_backend UCX",
        )  # fmt: skip
        assert (created.faults, created.done, agents[PEER].faults) == ([], 1, [])


def test_an_agent_that_cannot_be_created_beside_others_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = watching_agents(monkeypatch)
    create = WatchingAgent.create_backend

    def refuse_one(agent: WatchingAgent, plugin: str) -> None:
        if agent.name == "agent-at-once-1":
            raise RuntimeError("refused by the test")
        create(agent, plugin)

    monkeypatch.setattr(WatchingAgent, "create_backend", refuse_one)
    counts = create_at_once(agents["agent"], "UCX", 3, 60.0)
    assert (counts["moved"], counts["errors"]) == (2, ["RuntimeError: refused by the test"])


def spoiled(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize(
    ("faults", "counts"),
    [
        ({"arrive": spoiled}, {"moved": 4, "wrong_bytes": 4, "lost": 0, "doubled": 0, "errors": []}),
        (
            {"deliver": lambda messages: messages * 2},
            {"moved": 4, "wrong_bytes": 0, "lost": 0, "doubled": 4, "errors": []},
        ),
        (
            {"deliver": lambda messages: []},
            {"moved": 0, "wrong_bytes": 0, "lost": 0, "doubled": 0, "errors": ["late"] * 2},
        ),
    ],
)
def test_a_fault_of_shared_agents_is_counted(
    faults: dict[str, Any], counts: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, change in faults.items():
        monkeypatch.setattr(WatchingAgent, name, staticmethod(change))
    agents = watching_agents(monkeypatch)
    answer = transfer_at_once(agents["agent"], "UCX", "strict", 2, 2, 60.0 if counts["moved"] else 0.3)
    late = ("TimeoutError", "a thread did not end before its deadline")
    assert {**answer, "errors": ["late" if error in late else error for error in answer["errors"]]} == counts
    if faults.get("arrive"):
        assert create_at_once(agents["agent"], "UCX", 3, 60.0) == {**counts, "moved": 3, "wrong_bytes": 3}


ANSWER = {"moved": 7, "wrong_bytes": 1, "lost": 2, "doubled": 3, "errors": ["x"]}
USE = ConcurrentUse("", "UCX", "1.5.1", 0, moved=7, wrong_bytes=1, lost=2, doubled=3, errors=("x",))


def worker_of(name: str, *answers: object) -> MagicMock:
    """Return an agent that knows its name, and whose worker gives these answers."""
    agent = MagicMock(ref=f"ref of {name}")
    agent.name, agent.worker.name, agent.worker.timeout, agent.worker.versions = name, name, 5.0, {"nixl": "1.5.1"}
    agent.worker.request.return_value.result.side_effect = list(answers)
    agent.get_agent_metadata.return_value = f"metadata of {name}"
    return agent


def request(function: str, name: str, **arguments: object) -> Any:
    return call(
        "run", seconds=15.0, agent=f"ref of {name}",
        function=f"pytest_nixl.checks.faults.worker.threads:{function}", arguments={**arguments, "seconds": 10.0},
    )  # fmt: skip


def test_each_use_asks_the_workers_and_keeps_their_answers() -> None:
    healthy, other = (
        worker_of("one", ANSWER, ANSWER),
        worker_of("other", WorkerDiedError("x (pid 7) was ended by SIGABRT")),
    )
    assert transfer_in_threads(healthy, "UCX", "rw") == replace(
        USE, label="4 threads on one agent with the synchronization mode rw", expected=200
    )
    label = "8 agents created at once in each of 2 processes"
    assert create_in_threads([healthy, other], "UCX") == [
        replace(USE, label=label, expected=8),
        ConcurrentUse(label, "UCX", "1.5.1", 8, ended="was ended by SIGABRT"),
    ]
    created = request("create_at_once", "one", backend="UCX", count=8)
    assert healthy.worker.request.call_args_list == [
        request("transfer_at_once", "one", backend="UCX", sync_mode="rw", threads=4, per_thread=50), created,
    ]  # fmt: skip
    assert other.worker.request.call_args_list == [request("create_at_once", "other", backend="UCX", count=8)]
    with pytest.raises(WorkerError, match=r"^one sent a wrong answer about 4 threads on one agent .*: .*moved"):
        transfer_in_threads(worker_of("one", {**ANSWER, "moved": -1}), "UCX", "rw")


@pytest.mark.parametrize("moved", [500, 499])
def test_senders_and_receiver_know_each_other_and_are_awaited_if_all_arrived(
    moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"moved": moved, "wrong_bytes": 0, "lost": 0, "doubled": 0, "errors": []}
    receiver, senders = worker_of("receiver", answer), [worker_of("a"), worker_of("b")]
    awaited = MagicMock()
    monkeypatch.setattr("pytest_nixl.checks.faults.threads.results", awaited)
    assert notify_at_once(receiver, senders, "UCX") == ConcurrentUse(
        "notifications from 2 processes at once", "UCX", "1.5.1", 500, moved=moved
    )
    receiver.worker.request.assert_called_once_with(
        *request("collect", "receiver", senders=["a", "b"], count=250).args,
        **request("collect", "receiver", senders=["a", "b"], count=250).kwargs,
    )
    for sender in senders:
        assert sender.mock_calls[0] == call.add_remote_agent("metadata of receiver")
        sender.polled.assert_called_once_with()
        assert sender.worker.request.call_args_list == [request("notify", sender.name, peer="receiver", count=250)]
    assert receiver.polled.call_count == 2
    assert receiver.add_remote_agent.mock_calls == [call("metadata of a"), call("metadata of b")]
    assert awaited.call_count == (moved == 500)


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
