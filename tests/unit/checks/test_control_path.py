# SPDX-License-Identifier: Apache-2.0
"""What the control path's figures contain: which calls of an agent, how many, of which regions; and their words.

The agents and the clock are doubles, because only they give each call a known duration.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.control_path import check, worker
from pytest_nixl.checks.control_path.check import (
    ControlPath,
    describe_oversize,
    find_all,
    judge_path_growth,
    refusal_of,
    regions_of,
    register_regions,
    sizes_that_fit,
)
from pytest_nixl.checks.control_path.worker import FETCH_AGAIN_SECONDS, PAGE
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.kv_cache import KvPlan, kv_model
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.worker import nixl_api

#: The seconds of each call, and those from one look at the clock to the next.
SECONDS = {
    "register_memory": 2.0, "deregister_memory": 3.0, "get_agent_metadata": 5.0, "add_remote_agent": 7.0,
    "make_connection": 11.0, "transfer": 13.0, "check_xfer_state": 17.0, "send_notif": 0.25,
    "get_new_notifs": 0.25, "remove_remote_agent": 19.0,
}  # fmt: skip
TICK = 1 / 1024


class ClockedAgent:
    """An agent whose calls last as long as :data:`SECONDS` says, and which keeps their arguments.

    :param answers: by the name of a call, its answers in turn; then None.
    """

    name = "clocked"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Sequence[Any]) -> None:
        self._answers = {name: iter(results) for name, results in answers.items()}
        self.now = 100.0
        self.calls: list[tuple[Any, ...]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.wait, perf_counter=lambda: self.wait(TICK))
        monkeypatch.setattr(worker, "time", clock)

    def wait(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            self.now += SECONDS.get(name, 0.0)
            return next(self._answers.get(name, iter(())), None)

        return call

    def named(self, name: str) -> list[Any]:
        return [call[1:] for call in self.calls if call[0] == name]


def sizes(regions: Sequence[tuple[int, int, int, str]], size: int) -> int:
    """Check that these regions of one size lie one behind another in memory that is there; return their number."""
    assert [(address, *region_tail) for address, *region_tail in regions] == [
        (regions[0][0] + number * size, size, 0, "") for number in range(len(regions))
    ]
    return len(regions)


def test_a_registration_and_its_end_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class WritingAgent(ClockedAgent):
        def register_memory(self, regions: Any, memory: str) -> str:
            ctypes.memset(regions[0][0], 7, len(regions) * regions[0][1])  # the whole memory is there
            self.calls.append(("register_memory", regions, memory))
            self.now += 2.0
            return f"registered {len(self.calls)}"

    agent = WritingAgent(monkeypatch)
    assert worker.register(agent, count=3, size=100, repeats=2) == [(2.0 + TICK, 3.0 + TICK)] * 2
    assert [name for name, *_ in agent.calls] == ["register_memory", "deregister_memory"] * 2
    assert [(sizes(regions, 100), memory) for regions, memory in agent.named("register_memory")] == [(3, "DRAM")] * 2
    assert agent.named("deregister_memory") == [("registered 1",), ("registered 3",)]


def test_regions_accumulate_and_all_of_them_end(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch, register_memory=["a", "b", "c", "d"])
    timings = worker.accumulate(agent, count=3, repeats=2, rounds=2)
    assert timings == {
        "registration": [[[2.0 + TICK] * 2] * 2, [[TICK] * 2] * 2],
        "deregistration": [[[3.0 + TICK] * 2] * 2, [[TICK] * 2] * 2],
    }
    assert [name for name, *_ in agent.calls] == (["register_memory"] * 2 + ["deregister_memory"] * 2) * 2
    registered = agent.named("register_memory")
    assert {memory for _, memory in registered} == {"DRAM"}
    for first, second in (registered[:2], registered[2:]):
        assert sizes([*first[0], *second[0]], PAGE) == 6, "the second call has the regions behind those of the first"
    assert [name for (name,) in agent.named("deregister_memory")] == ["a", "b", "c", "d"]


def test_regions_that_are_kept_stay_and_no_export_has_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over RDMA an agent that knows a region refuses another registration of it: tests/machines/test_rdma_faults.py."""
    agent = ClockedAgent(monkeypatch)
    worker.keep_registered(agent, count=2)
    for _ in range(3):
        worker.export(agent, count=2, repeats=1)
    registered = agent.named("register_memory")
    assert [(sizes(regions, PAGE), memory) for regions, memory in registered] == [(2, "DRAM")] * 4
    assert len({address for regions, _ in registered for address, *_ in regions}) == 8
    for regions, _ in registered:
        ctypes.memset(regions[0][0], 7, 2 * PAGE)
    assert len(agent.named("deregister_memory")) == 3


@pytest.mark.parametrize("count", [0, 2])
def test_exports_are_timed_while_the_regions_are_registered(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    agent = ClockedAgent(monkeypatch, register_memory=["regions"], get_agent_metadata=[b"one", b"two"])
    timings = worker.export(agent, count=count, repeats=2)
    assert timings == {"seconds": [5.0 + TICK] * 2, "metadata": b"two"}
    assert [(name, *arguments[-1:]) for name, *arguments in agent.calls] == [
        ("register_memory", "DRAM"), ("get_agent_metadata",), ("get_agent_metadata",), ("deregister_memory", "regions"),
    ]  # fmt: skip
    assert len(agent.calls[0][1]) == count


def test_metadata_is_forgotten_between_two_loads_and_not_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch, add_remote_agent=[b"peer", "peer", b"peer"])
    assert worker.load(agent, metadata=b"m", repeats=3) == [7.0 + TICK] * 3
    add, remove = ("add_remote_agent", b"m"), ("remove_remote_agent", "peer")
    assert agent.calls == [add, remove, add, remove, add]


def test_agents_that_are_not_found_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch, check_remote_metadata=[False, True, False, True])
    assert worker.find(agent, names=["a", "b"], timeout=1) == []
    assert agent.named("fetch_remote_metadata") == [("a",), ("b",)]
    assert agent.named("check_remote_metadata") == [("a",), ("a",), ("b",), ("b",)]
    assert agent.now == pytest.approx(100.001)
    agent = ClockedAgent(monkeypatch, check_remote_metadata=[True])
    assert worker.find(agent, names=["a", "b", "c"], timeout=1) == ["b", "c"]
    assert agent.now == pytest.approx(101.0, abs=0.001)


def test_what_was_published_too_late_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL gives a fetch up after five seconds, and a busy host may publish later."""
    agent = ClockedAgent(monkeypatch)
    fetches = agent.named

    def is_known(name: str) -> bool:
        return fetches("fetch_remote_metadata").count((name,)) > {"a": 1, "b": 0, "c": 2, "d": 9}[name]

    monkeypatch.setattr(agent, "check_remote_metadata", is_known, raising=False)
    assert worker.find(agent, names=["a", "b", "c"], timeout=60) == []
    assert fetches("fetch_remote_metadata") == [("a",), ("b",), ("c",), ("a",), ("c",), ("c",)]
    assert 100 + 2 * FETCH_AGAIN_SECONDS <= agent.now < 100.1 + 2 * FETCH_AGAIN_SECONDS
    assert worker.find(agent, names=["d", "b"], timeout=7) == ["d"]


WRITE: Any = {"target": "peer", "local": [1, 2, 0], "remote": [3, 2, 0], "repeats": 2, "timeout": 61}


def test_each_transfer_is_timed_until_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch, transfer=["DONE", "PROC"], check_xfer_state=["PROC", "DONE"],
                         get_xfer_descs=["from", "to"], initialize_xfer=["handle"])  # fmt: skip
    timings = worker.connect_and_write(agent, **WRITE)
    assert timings == {"connect": 11.0 + TICK, "transfers": [13.0 + TICK, 13.0 + 2 * 17.0 + TICK]}
    transfer, state = ("transfer", "handle"), ("check_xfer_state", "handle")
    assert agent.calls == [
        ("make_connection", "peer"),
        ("get_xfer_descs", [(1, 2, 0)], "DRAM"), ("get_xfer_descs", [(3, 2, 0)], "DRAM"),
        ("initialize_xfer", "WRITE", "from", "to", "peer", b""), transfer, transfer, state, state,
        ("release_xfer_handle", "handle"), ("send_notif", "peer", b"one of many"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("states", "error", "message", "polls"),
    [
        (["ERR"], RuntimeError, "transfer 2 to peer ended with ERR", 1),
        (["PROC"] * 9, TimeoutError, "transfer 2 to peer was not complete in time", 3),
    ],
)
def test_a_transfer_that_is_not_complete_is_named(
    monkeypatch: pytest.MonkeyPatch, states: list[str], error: type[Exception], message: str, polls: int
) -> None:
    agent = ClockedAgent(monkeypatch, transfer=["DONE", "PROC"], check_xfer_state=states)
    with pytest.raises(error, match=f"^{message}$"):
        worker.connect_and_write(agent, **WRITE)
    assert len(agent.named("check_xfer_state")) == polls


def test_single_notifications_and_then_a_burst_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    of_burst = b"one of many"
    notifications = [{"p": [b"question"]}, {}, {"q": [of_burst], "p": [b"question"]}, {"p": [of_burst]}]
    agent = ClockedAgent(monkeypatch, get_new_notifs=notifications)
    worker.answer(agent, peer="p", burst=2, timeout=60)
    assert agent.named("send_notif") == [("p", b"answer"), ("p", b"answer"), ("p", b"all")]


def test_round_trips_end_after_their_time_or_number_and_are_ten_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"p": [b"answer"]}] * 100
    for single, seconds, count in ((3, 60.0, 3), (50, 0.0, 10), (50, 8.0, 16), (50, 60.0, 50)):
        agent = ClockedAgent(monkeypatch, get_new_notifs=answers)
        timings = worker.notify(agent, peer="p", single=single, seconds=seconds, burst=4, timeout=60)
        assert timings == {"round_trips": [0.5 + TICK] * count, "burst": 1.25 + TICK}
        assert agent.named("send_notif") == [("p", b"question")] * count + [("p", b"one of many")] * 4


def test_a_peer_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentAgent(ClockedAgent):
        def get_new_notifs(self) -> dict[str, list[bytes]]:
            self.now += 1.0
            return {}

    for call in (
        lambda agent: worker.answer(agent, peer="p", burst=1, timeout=5),
        lambda agent: worker.notify(agent, peer="p", single=1, seconds=0, burst=1, timeout=5),
        lambda agent: worker.notify(agent, peer="p", single=0, seconds=0, burst=1, timeout=5),
    ):
        agent = SilentAgent(monkeypatch)
        with pytest.raises(TimeoutError, match=r"^no notification arrived from p in time$"):
            call(agent)
        assert 105 < agent.now < 107


@pytest.mark.parametrize("backend", ["UCX", "of-a-plugin"])
def test_each_agent_that_is_created_is_timed(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    agent, created = ClockedAgent(monkeypatch), list[tuple[str, bool]]()

    def make(name: str, *, progress_thread: bool) -> Any:
        created.append((name, progress_thread))
        agent.now += 4.0
        return SimpleNamespace(create_backend=lambda plugin: created.append((plugin, agent.wait(8.0) > 0)))

    monkeypatch.setattr(nixl_api, "make_agent", make)
    assert worker.create_agents(agent, backend=backend, count=2, progress_thread=False) == [12.0 + TICK] * 2
    assert created == [("clocked-0", False), (backend, True), ("clocked-1", False), (backend, True)]


class PairOfAgents:
    """A control path with doubles of its agents, which keeps what they are asked for, in order.

    :param answers: what each function answers in a worker.
    """

    def __init__(self, backend: str, answers: Mapping[str, Any]) -> None:
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.answers = answers
        self.agents = [self._agent(name, place) for place, name in enumerate(("first", "other"))]
        self.path = ControlPath(backend, self.agents[0], self.agents[1], 5.0)

    def _agent(self, name: str, place: int) -> Any:
        def request(command: str, *, seconds: float, agent: str, function: str, arguments: dict[str, Any]) -> Any:
            assert (command, seconds, agent) == ("run", 10.0, f"ref of {name}")
            self.requests.append((name, function.partition("worker:")[2], arguments))
            answer = self.answers.get(function.partition(":")[2])
            return MagicMock(result=answer if callable(answer) else lambda: answer)

        agent = MagicMock(ref=f"ref of {name}", **{"get_agent_metadata.return_value": f"metadata of {name}".encode()})
        agent.name, agent.worker.request = name, request
        agent.allocate.side_effect = lambda size: SimpleNamespace(descriptor=lambda: (place, size, 0))
        agent.run = lambda function, **arguments: request("run", seconds=10.0, agent=agent.ref, function=function,
                                                          arguments=arguments).result()  # fmt: skip
        return agent


NOTIFIED = {"round_trips": [2.0, 8.0, 4.0], "burst": 4.0}
CONNECTED = {"connect": 1.0, "transfers": [9.0, 3.0, 5.0, 2.0]}
EXPORTED = {"seconds": [1.0, 5.0, 2.0], "metadata": b"four"}
TOLD = ("other", "answer", {"peer": "first", "timeout": 5.0})


def figure(name: str, value: float, rounds: tuple[float, ...] = (), **labels: object) -> Figure:
    return Figure.of(name, value, {"backend": "UCX", **labels}, rounds)


@pytest.mark.parametrize(
    ("measure", "answers", "figures", "requests"),
    [
        (lambda path: path.creation(), {"create_agents": [3.0, 1.0, 2.0]},
         [figure("agent-creation", 2.0, (3.0, 1.0, 2.0))],
         [("first", "create_agents", {"backend": "UCX", "count": 3, "progress_thread": False})]),
        (lambda path: path.registration(16, 4096), {"register": [(1.0, 9.0), (3.0, 4.0), (2.0, 5.0)]},
         [figure("registration", 2.0, (1.0, 3.0, 2.0), count=16, size="4KiB"),
          figure("deregistration", 5.0, (9.0, 4.0, 5.0), count=16, size="4KiB")],
         [("first", "register", {"count": 16, "size": 4096, "repeats": 10})]),
        (lambda path: path.metadata(16), {"export": EXPORTED, "load": [7.0, 8.0, 6.0]},
         [figure("metadata-export", 2.0, (1.0, 5.0, 2.0), count=16),
          figure("metadata-load", 7.0, (7.0, 8.0, 6.0), count=16), figure("metadata-size", 4, count=16)],
         [("first", "export", {"count": 16, "repeats": 10}),
          ("other", "load", {"metadata": b"four", "repeats": 10})]),
        (lambda path: path.connection(3), {"connect_and_write": CONNECTED},
         [figure("connect", 1.0, (1.0,)), figure("first-transfer", 9.0, (9.0,), size="64KiB"),
          figure("later-transfer", 3.0, (3.0, 5.0, 2.0), size="64KiB")],
         [(*TOLD[:2], {**TOLD[2], "burst": 1}),
          ("first", "connect_and_write", {"target": "other", "local": [0, 65536, 0], "remote": [1, 65536, 0],
                                          "repeats": 4, "timeout": 5.0})]),
        (lambda path: path.notifications(), {"notify": NOTIFIED},
         [figure("notification-latency", 2.0, (1.0, 4.0, 2.0)), figure("notification-rate", 250)],
         [(*TOLD[:2], {**TOLD[2], "burst": 1000}),
          ("first", "notify", {"peer": "other", "single": 200, "seconds": 0.5, "burst": 1000, "timeout": 5.0})]),
    ],
)  # fmt: skip
def test_each_figure_is_the_median_of_what_an_agent_is_asked_for(
    measure: Callable[[ControlPath], tuple[Figure, ...]], answers: Mapping[str, Any], figures: list[Figure],
    requests: list[tuple[str, str, dict[str, Any]]],
) -> None:  # fmt: skip
    pair = PairOfAgents("UCX", answers)
    assert measure(pair.path) == tuple(figures)
    assert pair.requests == requests
    meets = "answer" in (function for _, function, _ in requests)
    added = [agent.add_remote_agent.call_args_list for agent in pair.agents]
    assert [[call.args for call in calls] for calls in added] == (
        [[(b"metadata of other",)], [(b"metadata of first",)]] if meets else [[], []]
    )
    if "connect" in answers.get("connect_and_write", ()):
        registered = [agent.register.call_args.args[0].descriptor() for agent in pair.agents]
        assert registered == [(0, 65536, 0), (1, 65536, 0)]


def test_a_backend_that_shakes_hands_is_loaded_once_and_needs_a_progress_thread() -> None:
    pair = PairOfAgents("LIBFABRIC", {"create_agents": [1.0], "export": EXPORTED, "load": [1.0]})
    pair.path.creation()
    pair.path.metadata(1)
    assert pair.requests[0][2]["progress_thread"] is True
    assert pair.requests[2][2]["repeats"] == 1
    for agent in (0, 1):
        assert pair.path.healthy
        pair.agents[agent].worker.alive = False
        assert not pair.path.healthy
        pair.agents[agent].worker.alive = True


def rounds(slope: float) -> list[list[list[float]]]:
    return [[[1.0 + slope * number for number in range(64)]] * 5, [[1.0] * 64] * 5]


@pytest.mark.parametrize(
    ("slopes", "reasons"),
    [
        ([(0.0, 0.0)], [("registration", "does not"), ("deregistration", "does not")]),
        ([(1.0, 0.0), (0.0, 1.0)], [("registration", "does not"), ("deregistration", "does not")]),
        ([(0.0, 1.0), (1.0, 2.0)], [("deregistration", "becomes")]),
        ([(1.0, 1.0), (1.0, 1.0)], [("registration", "becomes")]),
    ],
)
def test_what_becomes_slower_is_measured_again_and_the_lesser_growth_counts(
    slopes: list[tuple[float, float]], reasons: list[tuple[str, str]]
) -> None:
    turns, names = iter(slopes), ("registration", "deregistration")
    pair = PairOfAgents("UCX", {"accumulate": lambda: dict(zip(names, map(rounds, next(turns)), strict=True))})
    judged = judge_path_growth(pair.path)
    assert pair.requests == [("first", "accumulate", {"count": 16, "repeats": 64, "rounds": 5})] * len(slopes)
    assert re.findall(r"(?:^|; )(\w+) (does not|becomes) ", judged.reason) == reasons
    fails = reasons[0][1] == "becomes"
    assert (judged.verdict, bool(judged.remedy)) == (Verdict.FAIL if fails else Verdict.PASS, fails)


def test_agents_are_found_and_regions_kept_in_the_worker_of_an_agent() -> None:
    pair = PairOfAgents("UCX", {"find": ["b"]})
    owners = [cast(NixlAgent, SimpleNamespace(name=name)) for name in ("a", "b")]
    assert find_all(pair.agents[0], owners, 7.0) == ["b"]
    assert register_regions(pair.agents[1], 9) == b"metadata of other"
    assert pair.requests == [("first", "find", {"names": ["a", "b"], "timeout": 7.0}),
                          ("other", "keep_registered", {"count": 9})]  # fmt: skip


def test_regions_are_those_of_an_engine_and_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert regions_of(KvPlan.of(kv_model("llama-3-8b"), tokens=64)) == 64
    assert regions_of(KvPlan.of(kv_model("deepseek-r1"), tokens=64)) == 61  # MLA has one tensor in each layer
    for free, fitting in ((400, (1, 100)), (399, (1,)), (None, (1, 100, 101))):
        memory = None if free is None else SimpleNamespace(size=free)
        monkeypatch.setattr(check, "available_memory", lambda root, memory=memory: memory)
        assert sizes_that_fit((1, 100, 101)) == fitting
    assert [size >> 20 for size in (*check.SIZES, *check.EXTENDED_SIZES)] == [1, 64, 256, 1024]


REFUSED = "E1122 nixl_etcd_metadata_backend.cpp:126] Failed to store metadata in etcd: etcdserver: request is too large"
LARGER = "E1 Received message Larger than max (2200000 vs. 2097152)"


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (f"Initialized\n  {REFUSED} \nlater", REFUSED),
        (f"{REFUSED}\n{LARGER}", LARGER),
        ("E1 failed to connect to all addresses", ""),
        ("", ""),
    ],
)
def test_only_a_refusal_for_the_size_is_one(output: str, line: str) -> None:
    assert refusal_of(output) == line


@pytest.mark.parametrize(
    ("arguments", "description"),
    [
        ((40_000, 1_760_407, b"x" * 331, REFUSED),
         "metadata of 40000 regions (1.76 MB) exceeds etcd's request limit of 1.5 MiB: etcd still has the 331 B of an "
         f"earlier publication; on stderr NIXL wrote: {REFUSED}"),
        ((9, 480, None, ""), "metadata of 9 regions (480 B) exceeds etcd's request limit: etcd still has nothing"),
        ((64, 3300, b"x" * 3300, ""), "metadata of 64 regions (3.3 KB) was published to etcd, which by default accepts "
         "requests of up to 1.5 MiB"),
    ],
)  # fmt: skip
def test_metadata_is_described_with_its_size_and_what_etcd_has(arguments: Any, description: str) -> None:
    assert describe_oversize(*arguments) == description
