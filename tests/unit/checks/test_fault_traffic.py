# SPDX-License-Identifier: Apache-2.0
"""Transfers that a fault disturbs: what NIXL raises, at whatever call and time, is an outcome and no error of ours.

The agent is a double, because a real one raises an error at once only over RDMA, and not at every call.
"""

from __future__ import annotations

import io
import mmap
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.checks.faults.scene import EarlyEndError, FaultOutcome, FaultScene, judge_faults
from pytest_nixl.checks.faults.worker import traffic as fault_traffic
from pytest_nixl.checks.faults.worker.traffic import (
    ENDED_EARLY,
    FINISH,
    FLOWS,
    interrupt,
    keep_transferring,
    unmap,
)
from pytest_nixl.core.errors import LateError
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.worker_errors import NixlError
from suites.faults.test_workers import come_back

GONE = type("nixlRemoteDisconnectError", (Exception,), {"__module__": "nixl_cu12._bindings"})
TRAFFIC: dict[str, Any] = {
    "op": "WRITE",
    "local": [[4096, 64], [8192, 64]],
    "remote": [[4096, 64], [8192, 64]],
    "peer": "target",
}


class Agent:
    """An agent whose transfers are done at the first question, until one call begins to raise.

    :param at: that call.
    :param after: how many of its calls succeed.
    :param error: what it raises then; None: transfers are in flight for ever from then on.
    """

    def __init__(self, at: str = "", after: int = 0, error: type[Exception] | None = GONE) -> None:
        self._at, self._calls_left, self._error, self._stuck = at, after, error, False
        self.calls: Counter[str] = Counter()

    def _answer_call(self, call: str, answer: object) -> Any:
        self.calls[call] += 1
        if call == self._at:
            self._calls_left -= 1
        if self._calls_left < 0:
            if self._error is None:
                return "PROC"
            if call == self._at:
                raise self._error("NIXL_ERR_REMOTE_DISCONNECT")
        return answer

    def get_xfer_descs(self, regions: object, memory: str) -> object:
        return regions

    def get_reg_descs(self, regions: object, memory: str) -> object:
        return regions

    def initialize_xfer(self, *_: object) -> object:
        return self._answer_call("initialize_xfer", object())

    def transfer(self, _: object) -> Any:
        return self._answer_call("transfer", "PROC")

    def check_xfer_state(self, _: object) -> Any:
        return self._answer_call("check_xfer_state", "DONE")

    def remove_remote_agent(self, _: str) -> None:
        self._answer_call("remove_remote_agent", None)

    def release_xfer_handle(self, _: object) -> None:
        self._answer_call("release_xfer_handle", None)


@pytest.fixture(autouse=True)
def usual_signal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    usual = signal.getsignal(FINISH)
    monkeypatch.setattr(fault_traffic, "_REST_SECONDS", 0.01)
    yield
    signal.signal(FINISH, usual)


def keep(agent: Agent, quiet: float = 60, limit: float = 60, timeout: float = 60) -> dict[str, Any]:
    return keep_transferring(agent, quiet=quiet, limit=limit, timeout=timeout, **TRAFFIC)


@pytest.mark.parametrize("call", ["initialize_xfer", "transfer", "check_xfer_state"])
def test_an_error_at_the_first_call_is_an_answer_and_ends_the_wait(
    call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = keep(Agent(call))
    assert (answer["said"], answer["completed"]) == ("nixlRemoteDisconnectError", 0)
    assert capsys.readouterr().out == f"{ENDED_EARLY}\n"


@pytest.mark.parametrize("call", ["transfer", "check_xfer_state"])
def test_an_error_after_transfers_were_completed_is_the_answer(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = keep(Agent(call, after=20))
    assert answer["said"] == "nixlRemoteDisconnectError"
    assert answer["completed"] >= 19
    assert capsys.readouterr().out == f"{FLOWS}\n"


@pytest.mark.parametrize(("call", "line"), [("", FLOWS), ("transfer", ENDED_EARLY)])
def test_what_the_scene_waits_for_is_written_at_once(monkeypatch: pytest.MonkeyPatch, call: str, line: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    keep(Agent(call), limit=0.01)
    assert written.getvalue().decode() == f"{line}\n"


def test_nothing_is_posted_after_an_error() -> None:
    agent = Agent("transfer")
    keep(agent)
    assert agent.calls["transfer"] == 1


def test_an_error_that_is_not_of_nixl_is_raised() -> None:
    with pytest.raises(ValueError, match="DISCONNECT"):
        keep(Agent("initialize_xfer", error=ValueError))


def test_transfers_that_never_end_are_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    answer = keep(Agent("check_xfer_state", after=20, error=None), quiet=0.02)
    assert (answer["said"], answer["unended"]) == ("PROC", 0)
    assert answer["longest"] > 0.02
    assert capsys.readouterr().out == f"{FLOWS}\n"


def test_the_first_transfers_may_take_longer_than_those_after_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """A slow machine is not taken for a silent NIXL before the fault is made."""
    answer = keep(Agent("transfer", error=None), quiet=0, limit=0, timeout=0.02)
    assert (answer["said"], answer["longest"] > 0.02) == ("PROC", True)
    assert capsys.readouterr().out == f"{ENDED_EARLY}\n"


def test_the_loop_ends_after_its_limit() -> None:
    answer = keep(Agent(), limit=0.01)
    assert (answer["said"], answer["unended"]) == ("DONE", 0)
    assert answer["completed"] >= 4


@pytest.mark.parametrize(("call", "act"), [("initialize_xfer", "was not called"), ("transfer", "returned")])
def test_an_interrupted_transfer_that_nixl_refuses_is_counted(call: str, act: str) -> None:
    answer = interrupt(Agent(call), "remove_remote_agent", [], quiet=60, **TRAFFIC)
    assert (answer["act"], answer["in_flight"]) == (act, 0)
    assert answer["states"] == {"nixlRemoteDisconnectError": 1 if call == "initialize_xfer" else 2}


@pytest.mark.parametrize("call", ["remove_remote_agent", "check_xfer_state"])
def test_an_error_of_the_interruption_and_of_the_transfers_after_it_is_an_answer(call: str) -> None:
    answer = interrupt(Agent(call), "remove_remote_agent", [], quiet=60, **TRAFFIC)
    assert answer["in_flight"] == 2
    refused = call == "remove_remote_agent"
    assert answer["act"] == ("nixlRemoteDisconnectError" if refused else "returned")
    assert answer["states"] == {"DONE" if refused else "nixlRemoteDisconnectError": 2}


def test_transfers_that_are_in_flight_after_the_interruption_are_counted() -> None:
    answer = interrupt(Agent("transfer", error=None), "remove_remote_agent", [], quiet=0.01, **TRAFFIC)
    assert answer["states"] == {"PROC": 2}
    assert interrupt(Agent(), "release_xfer_handle", [], quiet=60, **TRAFFIC)["states"] == {}


def scene(ending: str, output: str) -> FaultScene:
    """Return a scene whose initiator has already ended its transfers."""
    answer = {"said": ending, "completed": 0, "longest": 0.0, "unended": 0}
    answered = SimpleNamespace(result=lambda: answer)
    worker = SimpleNamespace(output=lambda: output, alive=True, timeout=240.0, request=lambda *_, **__: answered)
    fault_scene = FaultScene.__new__(FaultScene)
    buffer: Any = SimpleNamespace(address=0)
    agent: Any = SimpleNamespace(name="initiator", ref=None, worker=worker)
    fault_scene.initiator = fault_scene.target = agent
    fault_scene.source = fault_scene.destination = buffer
    fault_scene.op = "WRITE"
    return fault_scene


def test_an_error_before_the_fault_ends_the_wait_at_once_and_fails() -> None:
    with (
        pytest.raises(EarlyEndError) as caught,
        scene("nixlRemoteDisconnectError", ENDED_EARLY).traffic(quiet=1, limit=1),
    ):
        pytest.fail("no fault is to be made")
    outcome = FaultOutcome("target-killed", "UCX", "WRITE", "1.5.1", caught.value.answer, 0.5, early=True)
    judgement = judge_faults([outcome])
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == (
        "target-killed (WRITE, UCX of NIXL 1.5.1): nixlRemoteDisconnectError after 0.50 s; "
        "the transfers ended before the fault was made, although the target runs"
    )


def test_transfers_that_do_not_begin_are_late_and_no_failure() -> None:
    with (
        pytest.raises(LateError, match="waited 240 s for initiator to complete transfers"),
        scene("PROC", ENDED_EARLY).traffic(quiet=1, limit=1),
    ):
        pytest.fail("no fault is to be made")


CALLS = ("remove_remote_agent", "add_remote_agent", "write")


def written(at: str, times: int, kind: str = "nixlRemoteDisconnectError") -> Any:
    """Write to a target that came back, while one of the calls raises some times."""
    remaining = [times]

    def call(name: str) -> None:
        if name == at and remaining[0]:
            remaining[0] -= 1
            raise NixlError(f"{kind} raised", "", "", kind)

    initiator: Any = SimpleNamespace(
        worker=SimpleNamespace(name="initiator"),
        remove_remote_agent=lambda _: call("remove_remote_agent"),
        add_remote_agent=lambda _: call("add_remote_agent"),
    )
    again: Any = SimpleNamespace(
        name="target",
        worker=SimpleNamespace(name="target"),
        polled=nullcontext,
        get_agent_metadata=lambda: b"",
    )
    return come_back(initiator, again, lambda: call("write"))


@pytest.mark.parametrize("call", CALLS)
def test_the_death_of_the_former_target_may_be_told_late(call: str) -> None:
    judgement = written(call, 1)
    assert judgement.verdict is Verdict.PASS
    assert "before that NIXL raised nixlRemoteDisconnectError once" in judgement.reason


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("times", "kind"), [(2, "nixlRemoteDisconnectError"), (1, "nixlBackendError")])
def test_a_target_that_cannot_be_written_to_fails(call: str, times: int, kind: str) -> None:
    judgement = written(call, times, kind)
    assert judgement.verdict is Verdict.FAIL
    assert f"initiator gets {kind} from NIXL when it writes to target" in judgement.reason


def test_a_target_that_is_written_to_at_once_passes_without_a_note() -> None:
    assert written("", 0).reason.endswith("of the one that was killed")


@pytest.mark.parametrize(("call", "limit", "seconds"), [("", 0.01, 7.0), ("check_xfer_state", 60, 0.01)])
def test_transfers_in_flight_are_waited_for_longer_if_nothing_failed(
    monkeypatch: pytest.MonkeyPatch, call: str, limit: float, seconds: float
) -> None:
    waited: list[float] = []

    def wait(agent: object, handles: object, seconds: float) -> int:
        waited.append(seconds)
        return 2

    monkeypatch.setattr(fault_traffic, "_wait", wait)
    assert keep(Agent(call, after=20), quiet=7.0, limit=limit)["unended"] == 2
    assert waited == [seconds]


@pytest.mark.parametrize("failed", [0, -1])
def test_only_whole_pages_are_given_back(monkeypatch: pytest.MonkeyPatch, failed: int) -> None:
    """The kernel is a double, because the process would lose its memory."""
    ranges: list[tuple[int, int]] = []

    def munmap(start: int, size: int) -> int:
        ranges.append((start, size))
        return failed

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace(munmap=munmap))
    page = mmap.PAGESIZE
    with pytest.raises(OSError, match="munmap failed") if failed else nullcontext():
        unmap(10 * page - 1, 3 * page)
    assert ranges == [(10 * page, 2 * page)]
