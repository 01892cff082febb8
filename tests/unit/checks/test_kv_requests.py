# SPDX-License-Identifier: Apache-2.0
"""A request for KV blocks is over when its target has said that the blocks have arrived, and not before.

The agent is a double, because only it can hold an acknowledgement back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pytest_nixl.checks.kv_cache.blocks import BlockDraw, KvLayout, KvMethod
from pytest_nixl.checks.kv_cache.worker.requests import CacheSide, KvRequests
from pytest_nixl.nixl.worker.files import FileBuffer
from pytest_nixl.nixl.worker.transfer import StepTimeoutError, Transfers

LAYOUT = KvLayout(tensors=2, blocks=8, block_bytes=64, ranges=2)
DRAW = BlockDraw(np.array([1, 3], dtype=np.int32), np.array([0, 2], dtype=np.int32))


class HeldAgent:
    """An agent whose polls find the acknowledgements of these windows, one list for each poll, and then none.

    :param states: the answers to posts and to looks at transfers, in order; then DONE.
    """

    def __init__(self, polls: Sequence[Sequence[int]], states: Sequence[str] = ()) -> None:
        self._polls, self._states = iter(polls), iter(states)
        #: What happened, in order: the names of functions, with the token or the handle.
        self.log: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []

    def prep_xfer_dlist(self, name: str, rows: Any, memory: str, plugins: list[str]) -> str:
        self.calls.append((name, rows.tolist(), memory, plugins))
        return f"prepared {len(self.calls)}"

    def make_prepped_xfer(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        self.log.append(("make", arguments[5]))
        number = arguments[5].decode().split(":")[2:3]
        return " ".join(["handle", *number])

    def get_xfer_descs(self, rows: Any, memory: str) -> Any:
        return rows.tolist(), memory

    def initialize_xfer(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        self.log.append(("make", arguments[4]))
        return "handle 1"

    def transfer(self, handle: str) -> str:
        self.log.append(("post", handle))
        return next(self._states, "DONE")

    def check_xfer_state(self, handle: str) -> str:
        return next(self._states, "DONE")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.log.append("poll")
        return {"peer": [b"pytest-nixl:arrived:%d" % window for window in next(self._polls, ())]}

    def release_xfer_handle(self, handle: str) -> None:
        self.log.append(("release", handle))

    def release_dlist_handle(self, handle: str) -> None:
        self.log.append(("release", handle))


def requests(agent: HeldAgent, method: KvMethod = KvMethod.PREPPED, *, merge: bool = True) -> KvRequests:
    initiator = Transfers(
        agent, "target", [], {}, depth=1, acknowledged=True, notify_each=False, deadline=time.monotonic() + 60
    )
    sides = CacheSide(4096, "DRAM", 0), CacheSide(65536, "VRAM", 3)
    return KvRequests(agent, initiator, "target", "WRITE", "UCX", LAYOUT, sides, method, merge=merge)


def test_a_request_is_released_after_the_target_has_acknowledged_it() -> None:
    agent = HeldAgent([[], [7], [1]])
    steps = requests(agent).request(DRAW, 60)
    assert agent.log == [
        ("make", b"pytest-nixl:window:1:1"), ("post", "handle 1"), "poll", "poll", "poll", ("release", "handle 1"),
    ]  # fmt: skip
    assert len(steps) == 5
    assert min(steps) >= 0


#: The seconds that each call of a TimedAgent takes.
SECONDS = {
    "prep_xfer_dlist": 32,
    "make_prepped_xfer": 1,
    "transfer": 2,
    "check_xfer_state": 4,
    "get_new_notifs": 8,
    "release_xfer_handle": 16,
}


class TimedAgent(HeldAgent):
    """An agent each of whose calls takes its own time, on a clock of its own."""

    now = 100.0

    def __getattribute__(self, name: str) -> Any:
        if name in SECONDS:
            self.now += SECONDS[name]
        return super().__getattribute__(name)


@pytest.mark.parametrize(("in_flight", "steps"), [(1, [1, 2, 4, 8, 16]), (2, [1, 2, 8 + 4, 0, 16])])
def test_the_steps_of_a_request_are_its_times_without_gaps(
    in_flight: int, steps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make, post, complete, be told, and release. Of several requests, all that are over are told first."""
    agent = TimedAgent([[1]], ["PROC", "DONE"])
    monkeypatch.setattr("pytest_nixl.checks.kv_cache.worker.requests.time.perf_counter", lambda: agent.now)
    kv_requests = requests(agent)
    [entry] = kv_requests.run([DRAW], 60, in_flight=in_flight)
    monkeypatch.undo()
    assert kv_requests.prepare_seconds == 64
    assert entry == {"intended": 0, "start": 0, "steps": steps, "range": 0}


def test_of_several_requests_each_is_released_after_its_own_acknowledgement() -> None:
    agent = HeldAgent([[], [2], [], [3], [1]], ["PROC", "DONE", "PROC"])
    times = requests(agent).run([DRAW] * 3, 60, in_flight=2)
    assert [entry for entry in agent.log if entry != "poll"] == [
        ("make", b"pytest-nixl:window:1:1"), ("post", "handle 1"),
        ("make", b"pytest-nixl:window:2:1"), ("post", "handle 2"),
        ("release", "handle 2"),
        ("make", b"pytest-nixl:window:3:1"), ("post", "handle 3"),
        ("release", "handle 3"), ("release", "handle 1"),
    ]  # fmt: skip
    assert agent.log.index(("release", "handle 2")) > 4
    assert [entry["range"] for entry in times] == [0, 1, 1], "the third takes the range that is free again"
    assert [len(entry["steps"]) for entry in times] == [5, 5, 5]
    assert all(entry["intended"] == entry["start"] > 0 for entry in times)
    # The blocks of the second range are those of the first, four blocks further in each tensor.
    first, second = (call for call in agent.calls if call[0] == "WRITE" and call[5].endswith((b":1:1", b":2:1")))
    assert (second[2] - first[2]).tolist() == [4] * 4
    assert (second[4] - first[4]).tolist() == [4] * 4


def test_requests_at_a_rate_start_when_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def passes(seconds: float = 1e-6) -> float:
        now[0] += seconds
        return now[0]

    kv_requests = requests(HeldAgent([[number] for number in range(1, 4)]))
    monkeypatch.setattr("pytest_nixl.checks.kv_cache.worker.requests.time.perf_counter", passes)
    monkeypatch.setattr("pytest_nixl.checks.kv_cache.worker.requests.time.sleep", passes)
    times = kv_requests.run([DRAW] * 3, 60, in_flight=2, interval=0.02)
    monkeypatch.undo()
    assert [entry["intended"] for entry in times] == [0.0, 0.02, 0.04]
    assert all(0 <= entry["start"] - entry["intended"] < 1e-4 for entry in times), "a sleep does not make them late"


@pytest.mark.parametrize("states", [["ERR"], ["PROC", "ERR"]])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_transfer_that_fails_is_an_error(states: list[str], in_flight: int) -> None:
    with pytest.raises(RuntimeError, match="a transfer ended in state ERR"):
        requests(HeldAgent([], states)).run([DRAW], 60, in_flight=in_flight)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_request_may_be_acknowledged_after_many_polls(in_flight: int) -> None:
    assert len(requests(HeldAgent([*[[]] * 2000, [1]])).run([DRAW], 60, in_flight=in_flight)) == 1


@pytest.mark.parametrize(("in_flight", "text"), [(1, "the target's acknowledgement"), (2, "one of several requests")])
def test_a_request_that_nobody_acknowledges_ends_at_its_deadline(in_flight: int, text: str) -> None:
    with pytest.raises(StepTimeoutError, match=text):
        requests(HeldAgent([])).run([DRAW], 0.05, in_flight=in_flight)


def test_prepared_descriptors_are_those_of_both_whole_caches() -> None:
    agent = HeldAgent([])
    kv_requests = requests(agent)
    local, remote = agent.calls
    assert local == ("NIXL_INIT_AGENT", [[4096 + 64 * number, 64, 0] for number in range(16)], "DRAM", ["UCX"])
    assert remote == ("target", [[65536 + 64 * number, 64, 3] for number in range(16)], "VRAM", ["UCX"])
    kv_requests.close()
    kv_requests.close()
    assert agent.log == [("release", "prepared 1"), ("release", "prepared 2")]


@pytest.mark.parametrize("merge", [True, False])
def test_a_request_names_the_blocks_of_each_tensor(merge: bool) -> None:
    agent = HeldAgent([[1]])
    requests(agent, merge=merge).request(DRAW, 60)
    op, local, mine, remote, theirs, token, plugins, skip = agent.calls[-1]
    assert (op, local, remote, token, plugins) == (
        "WRITE", "prepared 1", "prepared 2", b"pytest-nixl:window:1:1", ["UCX"],
    )  # fmt: skip
    assert (mine.tolist(), theirs.tolist()) == ([1, 3, 9, 11], [0, 2, 8, 10])
    assert skip is not merge
    agent = HeldAgent([[1]])
    kv_requests = requests(agent, KvMethod.INITIALIZED)
    assert kv_requests.prepare_seconds == 0.0
    kv_requests.request(DRAW, 60)
    assert agent.calls == [
        (
            "WRITE",
            ([[4096 + 64 * number, 64, 0] for number in (1, 3, 9, 11)], "DRAM"),
            ([[65536 + 64 * number, 64, 3] for number in (0, 2, 8, 10)], "VRAM"),
            "target", b"pytest-nixl:window:1:1", ["UCX"],
        )
    ]  # fmt: skip


def test_strided_descriptors_are_one_row_for_each_tensor() -> None:
    """The numbers of the blocks are those of separate descriptors."""
    agent = HeldAgent([[1]])
    requests(agent, KvMethod.STRIDED).request(DRAW, 60)
    assert agent.calls[:2] == [
        ("NIXL_INIT_AGENT", [[4096, 64, 0, 64, 8], [4096 + 512, 64, 0, 64, 8]], "DRAM", ["UCX"]),
        ("target", [[65536, 64, 3, 64, 8], [65536 + 512, 64, 3, 64, 8]], "VRAM", ["UCX"]),
    ]
    assert agent.calls[2][2].tolist() == [1, 3, 9, 11]


class File(FileBuffer):
    """A file that only counts its syncs."""

    def __init__(self) -> None:
        self.syncs = 0

    def sync(self) -> None:
        self.syncs += 1


@pytest.mark.parametrize(("op", "syncs"), [("WRITE", 1), ("READ", 0)])
def test_a_request_to_a_file_ends_with_its_sync_and_sends_no_notification(op: str, syncs: int) -> None:
    agent, file = HeldAgent([]), File()
    initiator = Transfers(agent, "target", [], {}, depth=1, acknowledged=True, notify_each=False, deadline=0.0)
    sides = CacheSide(4096, "DRAM", 0), CacheSide(0, "FILE", 9)
    kv_requests = KvRequests(
        agent, initiator, "self", op, "POSIX", LAYOUT, sides, KvMethod.PREPPED, merge=True, file=file
    )
    assert len(kv_requests.request(DRAW, 60)) == 5
    assert [step for step in agent.log if step != "poll"] == [("make", b""), ("post", "handle"), ("release", "handle")]
    assert "poll" not in agent.log
    assert file.syncs == syncs


def test_a_block_in_an_object_store_is_an_object_with_a_number_from_1() -> None:
    rows = CacheSide(0, "OBJ", 0).rows(LAYOUT, np.array([0, 9], dtype=np.int32))
    assert rows.tolist() == [[0, 64, 1], [0, 64, 10]]
