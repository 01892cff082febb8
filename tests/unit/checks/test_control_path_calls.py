# SPDX-License-Identifier: Apache-2.0
"""What the control path's timings contain: which calls of an agent, how many, of which regions.

The agent and the clock are doubles, because only they give each call a known duration.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.checks.control_path import worker as control_path
from pytest_nixl.checks.control_path.worker import FETCH_AGAIN_SECONDS, PAGE
from pytest_nixl.nixl.worker import nixl_api

#: The seconds of each call.
SECONDS = {
    "register_memory": 2.0, "deregister_memory": 3.0, "get_agent_metadata": 5.0, "add_remote_agent": 7.0,
    "make_connection": 11.0, "transfer": 13.0, "check_xfer_state": 17.0, "send_notif": 0.25,
}  # fmt: skip


class ClockedAgent:
    """An agent whose calls last as long as :data:`SECONDS` says, and which keeps their arguments.

    :param answers: by the name of a call, its answers in turn; then None.
    """

    name = "clocked"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Sequence[Any]) -> None:
        self._answers = {name: iter(results) for name, results in answers.items()}
        self.now = 100.0
        self.calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(control_path, "_clock", lambda: self.now)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(control_path, "time", clock)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            self.now += SECONDS.get(name, 0.0)
            return next(self._answers.get(name, iter(())), None)

        return call

    def named(self, name: str) -> list[Any]:
        return [call[1:] for call in self.calls if call[0] == name]


def _sizes(regions: Sequence[tuple[int, int, int, str]], size: int) -> int:
    """Check that these regions of one size lie one behind another, and return their number."""
    assert [(address, *region_tail) for address, *region_tail in regions] == [
        (regions[0][0] + number * size, size, 0, "") for number in range(len(regions))
    ]
    return len(regions)


def test_a_registration_and_its_end_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class WritingAgent(ClockedAgent):
        def register_memory(self, regions: Any, memory: str) -> str:
            self.calls.append(("register_memory", regions, memory))
            ctypes.memset(regions[0][0], 7, len(regions) * regions[0][1])  # the whole memory is there
            self.now += 2.0
            return f"registered {len(self.calls)}"

    agent = WritingAgent(monkeypatch)
    assert control_path.register(agent, count=3, size=100, repeats=2) == [(2.0, 3.0)] * 2
    assert [name for name, *_ in agent.calls] == ["register_memory", "deregister_memory"] * 2
    for regions, memory in agent.named("register_memory"):
        assert _sizes(regions, 100) == 3
        assert memory == "DRAM"
    assert agent.named("deregister_memory") == [("registered 1",), ("registered 3",)]


def test_regions_accumulate_and_all_of_them_end(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch, register_memory=["a", "b", "c", "d"])
    timings = control_path.accumulate(agent, count=3, repeats=2, rounds=2)
    assert timings == {
        "registration": [[[2.0, 2.0]] * 2, [[0.0, 0.0]] * 2],
        "deregistration": [[[3.0, 3.0]] * 2, [[0.0, 0.0]] * 2],
    }
    assert [name for name, *_ in agent.calls] == (["register_memory"] * 2 + ["deregister_memory"] * 2) * 2
    first, second, *_ = (regions for regions, _ in agent.named("register_memory"))
    assert _sizes([*first, *second], PAGE) == 6, "the second call has the regions behind those of the first"
    assert [name for (name,) in agent.named("deregister_memory")] == ["a", "b", "c", "d"]


def test_each_reference_is_timed_beside_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch)
    monkeypatch.setattr(control_path, "_reference", lambda: agent.now)
    timings = control_path.accumulate(agent, count=1, repeats=2, rounds=1)
    assert timings["registration"][1] == [[100.0, 102.0]]
    assert timings["deregistration"][1] == [[104.0, 107.0]]


def test_regions_that_are_kept_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_path, "_kept_alive", [])
    agent = ClockedAgent(monkeypatch)
    control_path.keep_registered(agent, count=2)
    [(regions, memory)] = agent.named("register_memory")
    assert (_sizes(regions, PAGE), memory) == (2, "DRAM")
    assert len(control_path._kept_alive) == 1
    ctypes.memset(regions[0][0], 7, 2 * PAGE)


def test_no_export_has_the_addresses_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over RDMA an agent that knows a region refuses another registration of it: tests/machines/test_rdma_faults.py."""
    agent = ClockedAgent(monkeypatch)
    for _ in range(3):
        control_path.export(agent, count=2, repeats=1)
    addresses = {address for regions, _ in agent.named("register_memory") for address, *_ in regions}
    assert len(addresses) == 6


@pytest.mark.parametrize("count", [0, 2])
def test_exports_are_timed_while_the_regions_are_registered(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    agent = ClockedAgent(monkeypatch, register_memory=["regions"], get_agent_metadata=[b"one", b"two"])
    timings = control_path.export(agent, count=count, repeats=2)
    assert timings == {"seconds": [5.0, 5.0], "metadata": b"two"}
    names = [name for name, *_ in agent.calls]
    assert names == ["register_memory", "get_agent_metadata", "get_agent_metadata", "deregister_memory"]
    [(regions, memory)] = agent.named("register_memory")
    assert (len(regions), memory) == (count, "DRAM")
    assert agent.named("deregister_memory") == [("regions",)]


def test_metadata_is_forgotten_between_two_loads_and_not_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch, add_remote_agent=[b"peer", "peer", b"peer"])
    assert control_path.load(agent, metadata=b"m", repeats=3) == [7.0] * 3
    assert [name for name, *_ in agent.calls] == [
        "add_remote_agent", "remove_remote_agent", "add_remote_agent", "remove_remote_agent", "add_remote_agent",
    ]  # fmt: skip
    assert agent.named("remove_remote_agent") == [("peer",), ("peer",)]
    assert agent.named("add_remote_agent") == [(b"m",)] * 3


def test_agents_that_are_not_found_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch, check_remote_metadata=[False, True, False, True])
    assert control_path.find(agent, names=["a", "b"], timeout=1) == []
    assert agent.named("fetch_remote_metadata") == [("a",), ("b",)]
    assert agent.now == pytest.approx(100.001)
    agent = ClockedAgent(monkeypatch, check_remote_metadata=[True])
    assert control_path.find(agent, names=["a", "b", "c"], timeout=1) == ["b", "c"]
    assert agent.now == pytest.approx(101.0, abs=0.001)


def test_what_was_published_too_late_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL gives a fetch up after five seconds, and a busy host may publish later."""
    agent = ClockedAgent(monkeypatch)
    fetches = agent.named

    def is_known(name: str) -> bool:
        return fetches("fetch_remote_metadata").count((name,)) > {"a": 1, "b": 0, "c": 2, "d": 9}[name]

    monkeypatch.setattr(agent, "check_remote_metadata", is_known, raising=False)
    assert control_path.find(agent, names=["a", "b", "c"], timeout=60) == []
    assert fetches("fetch_remote_metadata") == [("a",), ("b",), ("c",), ("a",), ("c",), ("c",)]
    assert 100 + 2 * FETCH_AGAIN_SECONDS <= agent.now < 100.1 + 2 * FETCH_AGAIN_SECONDS
    assert control_path.find(agent, names=["d", "b"], timeout=7) == ["d"]


def test_each_transfer_is_timed_until_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ClockedAgent(monkeypatch, transfer=["DONE", "PROC"], check_xfer_state=["PROC", "DONE"],
                         get_xfer_descs=["from", "to"], initialize_xfer=["handle"])  # fmt: skip
    timings = control_path.connect_and_write(
        agent, target="peer", local=[1, 2, 0], remote=[3, 2, 0], repeats=2, timeout=60
    )
    assert timings == {"connect": 11.0, "transfers": [13.0, 13.0 + 2 * 17.0]}
    assert agent.named("get_xfer_descs") == [([(1, 2, 0)], "DRAM"), ([(3, 2, 0)], "DRAM")]
    assert agent.named("initialize_xfer") == [("WRITE", "from", "to", "peer", b"")]
    assert agent.calls[-2:] == [("release_xfer_handle", "handle"), ("send_notif", "peer", b"one of many")]


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        (["ERR"], RuntimeError, "transfer 2 to peer ended with ERR"),
        (["PROC"] * 9, TimeoutError, "transfer 2 to peer was not complete in time"),
    ],
)
def test_a_transfer_that_is_not_complete_is_named(
    monkeypatch: pytest.MonkeyPatch, states: list[str], error: type[Exception], message: str
) -> None:
    agent = ClockedAgent(monkeypatch, transfer=["DONE", "PROC"], check_xfer_state=states)
    with pytest.raises(error, match=message):
        control_path.connect_and_write(agent, target="peer", local=[1], remote=[2], repeats=2, timeout=60)
    assert len(agent.named("check_xfer_state")) == (1 if error is RuntimeError else 3)


def test_single_notifications_and_then_a_burst_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    of_burst = b"one of many"
    agent = ClockedAgent(
        monkeypatch, get_new_notifs=[{"p": [b"question"]}, {}, {"p": [of_burst, b"question"]}, {"p": [of_burst]}]
    )
    control_path.answer(agent, peer="p", burst=2, timeout=60)
    assert agent.named("send_notif") == [("p", b"answer"), ("p", b"answer"), ("p", b"all")]


def test_round_trips_end_after_their_time_or_number_and_are_ten_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"p": [b"answer"]}] * 100
    for single, seconds, count in ((3, 60.0, 3), (50, 0.0, 10), (50, 4.0, 16), (50, 60.0, 50)):
        agent = ClockedAgent(monkeypatch, get_new_notifs=answers)
        timings = control_path.notify(agent, peer="p", single=single, seconds=seconds, burst=4, timeout=60)
        assert timings == {"round_trips": [0.25] * count, "burst": 1.0}
        assert agent.named("send_notif") == [("p", b"question")] * count + [("p", b"one of many")] * 4


def test_a_peer_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentAgent(ClockedAgent):
        def get_new_notifs(self) -> dict[str, list[bytes]]:
            self.now += 1.0
            return {}

    for call in (
        lambda agent: control_path.answer(agent, peer="p", burst=1, timeout=5),
        lambda agent: control_path.notify(agent, peer="p", single=1, seconds=0, burst=1, timeout=5),
    ):
        agent = SilentAgent(monkeypatch)
        with pytest.raises(TimeoutError, match="no notification arrived from p in time"):
            call(agent)
        assert 105 < agent.now < 107


def test_each_agent_that_is_created_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, created = ClockedAgent(monkeypatch), list[tuple[str, bool]]()

    def make(name: str, *, progress_thread: bool) -> Any:
        created.append((name, progress_thread))
        agent.now += 4.0
        return SimpleNamespace(create_backend=lambda plugin: created.append((plugin, True)))

    monkeypatch.setattr(nixl_api, "make_agent", make)
    assert control_path.create_agents(agent, backend="UCX", count=2, progress_thread=False) == [4.0, 4.0]
    assert created == [("clocked-0", False), ("UCX", True), ("clocked-1", False), ("UCX", True)]
