# SPDX-License-Identifier: Apache-2.0
"""Transfers that a fault disturbs: what NIXL raises, at whatever call and time, is an outcome and no error of ours.

The agent is a double, because a real one raises an error at once only over RDMA, and not at every call.
"""

from __future__ import annotations

import io
import mmap
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.checks.faults.worker import commands
from pytest_nixl.checks.faults.worker import traffic as fault_traffic
from pytest_nixl.checks.faults.worker.traffic import (
    ENDED_EARLY,
    FINISH,
    FLOWS,
    interrupt,
    keep_transferring,
    unmap,
)
from pytest_nixl.core.wire import Ref

GONE = type("nixlRemoteDisconnectError", (Exception,), {"__module__": "nixl_cu12._bindings"})
TRAFFIC: dict[str, Any] = {
    "op": "READ",
    "local": [[4096, 64], [8192, 128]],
    "remote": [[1 << 20, 64], [1 << 21, 128]],
    "peer": "target",
}
#: The seconds that each call of the agent takes, and each nap between two rounds of calls.
CALL, NAP = 0.25, 1.0


class Agent:
    """An agent whose transfers are done at the first question, until one call begins to raise, on a clock of its own.

    :param at: that call.
    :param after: how many of its calls succeed.
    :param error: what it raises then; None: transfers are in flight for ever from then on.
    :param others: what a transfer is whose call does not raise from then on.
    :param finish: the number of calls after which the process gets the signal to finish.
    """

    def __init__(
        self, at: str = "", after: int = 0, error: type[Exception] | None = GONE, others: str = "", finish: int = 0
    ) -> None:
        self._at, self._after, self._error, self._others, self._finish = at, after, error, others, finish
        self.now = 100.0
        #: The calls in order.
        self.log: list[tuple[Any, ...]] = []
        self._count = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += NAP

    def _answer_call(self, call: str, *arguments: object, answer: object = None) -> Any:
        self.log.append((call, *arguments))
        self.now += CALL
        self._count += call == self._at
        if self._finish and len(self.log) == self._finish:
            signal.raise_signal(FINISH)
        if self._count > self._after:
            if self._error is None:
                return "PROC"
            if call == self._at and (not self._others or self._count == self._after + 1):
                raise self._error("NIXL_ERR_REMOTE_DISCONNECT")
            return self._others or answer
        return answer

    def get_xfer_descs(self, regions: object, memory: str) -> object:
        return memory, regions

    def get_reg_descs(self, regions: object, memory: str) -> object:
        return memory, regions

    def initialize_xfer(self, *arguments: object) -> object:
        return self._answer_call("initialize_xfer", *arguments, answer=f"handle {len(self.log)}")

    def transfer(self, handle: str) -> Any:
        return self._answer_call("transfer", handle, answer="PROC")

    def check_xfer_state(self, handle: str) -> Any:
        return self._answer_call("check_xfer_state", handle, answer="DONE")

    def remove_remote_agent(self, peer: str) -> None:
        self._answer_call("remove_remote_agent", peer)

    def add_remote_agent(self, metadata: bytes) -> None:
        self._answer_call("add_remote_agent", metadata)

    def release_xfer_handle(self, handle: str) -> None:
        self._answer_call("release_xfer_handle", handle)

    def deregister_memory(self, regions: object) -> None:
        self._answer_call("deregister_memory", regions)


@pytest.fixture(autouse=True)
def usual_signal() -> Iterator[None]:
    usual = signal.getsignal(FINISH)
    yield
    signal.signal(FINISH, usual)


def keep(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, quiet: float = 60, limit: float = 60, timeout: float = 60
) -> dict[str, Any]:
    monkeypatch.setattr(fault_traffic, "time", agent)
    return keep_transferring(agent, quiet=quiet, limit=limit, timeout=timeout, **TRAFFIC)


#: The calls that make both transfers.
MADE = [
    ("initialize_xfer", "READ", ("DRAM", [(4096, 64, 0)]), ("DRAM", [(1 << 20, 64, 0)]), "target"),
    ("initialize_xfer", "READ", ("DRAM", [(8192, 128, 0)]), ("DRAM", [(1 << 21, 128, 0)]), "target"),
]
NEVER: dict[str, Any] = {"error": None}


@pytest.mark.parametrize(
    ("agent", "limits", "ending", "completed", "longest", "unended", "line", "seconds"),
    [
        # An error at the first call ends the wait.
        ({"at": "initialize_xfer"}, {}, GONE.__name__, 0, 0.0, 0, ENDED_EARLY, 0.25),
        ({"at": "transfer"}, {}, GONE.__name__, 0, 0.25, 0, ENDED_EARLY, 1.75),
        ({"at": "check_xfer_state"}, {}, GONE.__name__, 0, 1.75, 0, ENDED_EARLY, 4.5),
        # One after transfers were completed: those in flight are waited for, but no longer than five seconds.
        ({"at": "transfer", "after": 20}, {}, GONE.__name__, 20, 2.75, 0, FLOWS, 31.75),
        ({"at": "check_xfer_state", "after": 20}, {}, GONE.__name__, 20, 2.75, 0, FLOWS, 34.5),
        ({"at": "check_xfer_state", "after": 20, "others": "PROC"}, {}, GONE.__name__, 20, 2.75, 1, FLOWS, 39.75),
        ({"at": "check_xfer_state", "after": 21, "others": "PROC"}, {}, GONE.__name__, 21, 2.75, 0, FLOWS, 33.5),
        # Transfers that are silent after the first ones, and before them, when a slow machine gets its own time.
        ({"at": "check_xfer_state", "after": 20, **NEVER}, {"quiet": 9}, "PROC", 20, 10.5, 0, FLOWS, 41.0),
        ({"at": "transfer", **NEVER}, {"quiet": 0, "limit": 0, "timeout": 9}, "PROC", 0, 9.5, 0, ENDED_EARLY, 11.0),
        # The limit counts from the first completed transfers; after it those in flight have the time to be quiet.
        ({}, {"limit": 20}, "DONE", 18, 2.75, 0, FLOWS, 27.5),
        ({}, {"timeout": 3}, "DONE", 2, 1.75, 0, ENDED_EARLY, 6.5),
        ({"at": "transfer", "after": 21, **NEVER}, {"limit": 60, "quiet": 9}, "PROC", 20, 10.5, 0, FLOWS, 41.0),
        ({"at": "transfer", "after": 17, **NEVER}, {"limit": 20, "quiet": 9}, "DONE", 16, 2.75, 2, FLOWS, 38.5),
        # The signal.
        ({"finish": 20}, {}, "DONE", 8, 2.75, 0, FLOWS, 15.5),
    ],
)
def test_transfers_are_repeated_until_an_error_a_silence_or_the_end(
    agent: Mapping[str, Any],
    limits: Mapping[str, float],
    ending: str,
    completed: int,
    longest: float,
    unended: int,
    line: str,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the scene waits for is written at once."""
    written, double = io.BytesIO(), Agent(**agent)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    answer = keep(double, monkeypatch, **limits)
    assert answer == {"said": ending, "completed": completed, "longest": longest, "unended": unended}
    assert written.getvalue().decode() == f"{line}\n"
    assert double.now - 100 == seconds
    assert double.log[: min(2, len(double.log))] == MADE[: min(2, len(double.log))]


def test_an_error_that_is_not_of_nixl_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("initialize_xfer", "transfer", "check_xfer_state"):
        with pytest.raises(ValueError, match="DISCONNECT"):
            keep(Agent(call, error=ValueError), monkeypatch)


HANDLES = ("handle 0", "handle 1")
RELEASED = [("release_xfer_handle", handle) for handle in HANDLES]
REMOVED, ADDED = ("remove_remote_agent", "target"), ("add_remote_agent", b"metadata")
DEREGISTERED = ("deregister_memory", ("DRAM", [(4096, 512, 0, "")]))


@pytest.mark.parametrize(
    ("action", "agent", "act", "in_flight", "states", "seconds", "calls"),
    [
        ("remove_remote_agent", {}, "returned", 2, {"DONE": 2}, 0.25, [REMOVED]),
        ("release_xfer_handle", {}, "returned", 2, {}, 0.5, RELEASED),
        ("deregister_memory", {}, "returned", 2, {"DONE": 2}, 0.25, [DEREGISTERED]),
        ("replace", {}, "returned", 2, {"DONE": 2}, 0.5, [REMOVED, ADDED]),
        # NIXL refuses to make the transfers, to post them, or the call; or the transfers end in an error, or never.
        ("remove_remote_agent", {"at": "initialize_xfer"}, "was not called", 0, {GONE.__name__: 1}, 0.0, []),
        ("remove_remote_agent", {"at": "transfer"}, "returned", 0, {GONE.__name__: 2}, 0.25, [REMOVED]),
        ("replace", {"at": "transfer", "after": 1}, "returned", 1, {GONE.__name__: 1, "DONE": 1}, 0.5,
         [REMOVED, ADDED]),
        ("remove_remote_agent", {"at": "remove_remote_agent"}, GONE.__name__, 2, {"DONE": 2}, 0.25, [REMOVED]),
        ("replace", {"at": "add_remote_agent"}, GONE.__name__, 2, {"DONE": 2}, 0.5, [REMOVED, ADDED]),
        ("release_xfer_handle", {"at": "release_xfer_handle"}, GONE.__name__, 2, {}, 0.25, RELEASED[:1]),
        ("deregister_memory", {"at": "check_xfer_state"}, "returned", 2, {GONE.__name__: 2}, 0.25, [DEREGISTERED]),
        ("remove_remote_agent", {"at": "check_xfer_state", "others": "PROC"}, "returned", 2,
         {GONE.__name__: 1, "PROC": 1}, 0.25, [REMOVED]),
        ("remove_remote_agent", {"at": "transfer", **NEVER}, "returned", 2, {"PROC": 2}, 0.25, [REMOVED]),
    ],
)  # fmt: skip
def test_what_followed_an_interruption_is_an_answer(
    action: str,
    agent: Mapping[str, Any],
    act: str,
    in_flight: int,
    states: dict[str, int],
    seconds: float,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = Agent(**agent)
    monkeypatch.setattr(fault_traffic, "time", double)
    answer = interrupt(double, action, [(4096, 512, 0)], quiet=9, metadata=b"metadata", **TRAFFIC)
    assert answer == {"act": act, "seconds": seconds, "in_flight": in_flight, "states": states}
    after = [call for call in double.log if call[0] not in ("initialize_xfer", "transfer", "check_xfer_state")]
    assert after == calls
    posted = [("transfer", handle) for handle in HANDLES] if act != "was not called" else []
    assert double.log[2:4] == posted
    assert double.now - 100 < 13, "it waits no longer than it may be quiet"


@pytest.mark.parametrize(
    ("address", "size", "failed", "start", "length"),
    [(-1, 3, 0, 0, 2), (0, 2, 0, 0, 2), (1, 3, 0, 1, 2), (-1, 3, -1, 0, 2)],
)
def test_only_whole_pages_are_given_back(
    address: int, size: int, failed: int, start: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is a double, because the process would lose its memory."""
    ranges: list[tuple[int, int]] = []

    def munmap(first: int, count: int) -> int:
        ranges.append((first, count))
        return failed

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace(munmap=munmap))
    page = mmap.PAGESIZE
    memory = SimpleNamespace(address=10 * page + address, size=size * page)
    objects: Any = SimpleNamespace(get=lambda ref: memory)
    calls: list[Callable[[], None]] = [
        lambda: unmap(memory.address, memory.size),
        lambda: commands.unmap(objects, Ref(1, "buffer")),
    ]
    for call in calls:
        with pytest.raises(OSError, match="munmap failed") if failed else nullcontext():
            call()
    assert ranges == [((10 + start) * page, length * page)] * 2
