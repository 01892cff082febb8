# SPDX-License-Identifier: Apache-2.0
"""Misuse of the real NIXL is judged by what NIXL does: with a call that has no defect, the same check passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers.watching_agent import nixlInvalidParamError, watching_agents

from pytest_nixl.checks.faults.misuse import (
    KINDS,
    MisuseEnding,
    MisuseOutcome,
    judge_misuses,
    misuse,
    misuse_reason,
)
from pytest_nixl.checks.faults.worker import misuse as worker_misuse
from pytest_nixl.checks.faults.worker.misuse import MISUSES, STALLS, carry_out
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.worker.peer_scene import PEER, SIZE, PeerScene
from pytest_nixl.nixl.worker.transfer import StepTimeoutError
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerDiedError, WorkerError


@pytest.fixture
def agent(nixl_settings: Settings) -> Iterator[NixlAgent]:
    """An agent in a worker of its own."""
    with Agents(LocalHost(supervisor()), nixl_settings) as agents:
        yield agents.start(progress_thread=None)


def outcome(id: str, ending: MisuseEnding, error: str = "", wrong: int | None = 0) -> MisuseOutcome:
    """Return an outcome of UCX."""
    return MisuseOutcome(KINDS[id], "UCX", "1.5.1", ending, error, wrong)


def test_the_worker_can_carry_out_every_misuse_and_no_other() -> None:
    assert set(MISUSES) == set(KINDS)


PASSES = "NIXL 1.5.1 with UCX moves correct bytes after each: "
CRASH = outcome("empty-transfer", MisuseEnding.CRASHED, "was ended by SIGSEGV", None)
CRASHED, ACCEPTED = (
    "a transfer has 0 bytes: crashed (was ended by SIGSEGV)",
    "a region of 0 bytes is registered: accepted",
)
NEXT = "with UCX of NIXL 1.5.1, {}, and the next transfer has {} wrong bytes"
AFTER = "; after that, NIXL refuses a transfer to the peer (nixlBackendError)"


@pytest.mark.parametrize(
    ("tried", "fault", "reason"),
    [
        (CRASH, CRASHED, f"with UCX of NIXL 1.5.1, {CRASHED}"),
        (
            outcome("unknown-agent", MisuseEnding.ACCEPTED),
            "a transfer is prepared to an unknown agent: accepted, but only an error is right",
            NEXT.format("a transfer is prepared to an unknown agent: accepted", 0),
        ),
        (outcome("empty-region", MisuseEnding.ACCEPTED, "", 7), f"{ACCEPTED}; 7 bytes of the next transfer are wrong",
         NEXT.format(ACCEPTED, 7)),
        (replace(outcome("empty-region", MisuseEnding.ACCEPTED), after="PROC"),
         f"{ACCEPTED}; after that, a transfer to the peer stays PROC",
         f"with UCX of NIXL 1.5.1, {ACCEPTED}; after that, a transfer to the peer stays PROC"),
        (replace(outcome("empty-region", MisuseEnding.ACCEPTED), after="nixlBackendError"), f"{ACCEPTED}{AFTER}",
         f"with UCX of NIXL 1.5.1, {ACCEPTED}{AFTER}"),
        (outcome("empty-region", MisuseEnding.ACCEPTED), "", NEXT.format(ACCEPTED, 0)),
        (outcome("empty-region", MisuseEnding.REFUSED, "nixlBackendError"), "",
         NEXT.format("a region of 0 bytes is registered: refused (nixlBackendError)", 0)),
    ],
)  # fmt: skip
def test_one_bad_outcome_fails_among_good_ones(tried: MisuseOutcome, fault: str, reason: str) -> None:
    assert (tried.fault, misuse_reason(tried)) == (fault, reason)
    good = [outcome("released-twice", MisuseEnding.REFUSED, "x"), outcome("empty-transfer", MisuseEnding.ACCEPTED)]
    judgement = judge_misuses([good[0], tried, good[1], CRASH])
    assert judgement == Judgement(
        Verdict.FAIL,
        f"NIXL 1.5.1 with UCX: {'; '.join(filter(None, [fault, CRASHED]))}",
        "report it with this output at https://github.com/ai-dynamo/nixl/issues, and remove from your program: "
        f"{', '.join([*[tried.kind.label] * bool(fault), CRASH.kind.label])}",
    )
    if not fault:
        refused, accepted = "refused: released-twice", "accepted: {}empty-transfer"
        parts = (
            f"{refused}, empty-region; {accepted.format('')}"
            if tried.error
            else f"{refused}; {accepted.format('empty-region, ')}"
        )
        assert judge_misuses([good[0], tried, good[1]]) == Judgement(Verdict.PASS, PASSES + parts)
        assert judge_misuses(good[1:]).reason == f"{PASSES}accepted: empty-transfer"


def test_calls_on_bytes_or_agents_that_are_not_there_fail_if_they_are_accepted() -> None:
    assert {id for id in KINDS if outcome(id, MisuseEnding.ACCEPTED).fault} == {
        "beyond-own-region", "beyond-peers-region", "different-lengths", "unknown-agent",
        "notification-to-unknown-agent", "index-out-of-range", "cut-metadata",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ({"raised": "nixlBackendError", "after": "", "wrong_bytes": 0},
         outcome("released-twice", MisuseEnding.REFUSED, "nixlBackendError")),
        ({"raised": "", "after": "PROC", "wrong_bytes": 3},
         replace(outcome("released-twice", MisuseEnding.ACCEPTED, "", 3), after="PROC")),
        (WorkerDiedError("rank 0 (pid 7) was ended by SIGBUS during run"),
         outcome("released-twice", MisuseEnding.CRASHED, "was ended by SIGBUS", None)),
        *[({"raised": "", "after": "", "wrong_bytes": wrong}, "wrong_bytes") for wrong in (-1, 0.5, None)],
    ],
)  # fmt: skip
def test_the_answer_of_the_worker_is_the_outcome_or_an_error_if_it_has_another_form(
    answer: Any, result: MisuseOutcome | str
) -> None:
    """The worker is a double. Two transfers that are never done end before it misses its own deadline."""
    worker = MagicMock(timeout=6.0, versions={"nixl": "1.5.1"})
    worker.name = "rank 0"
    worker.request.return_value.result.side_effect = [answer]
    agent: Any = SimpleNamespace(ref=1, worker=worker)
    if isinstance(result, str):
        with pytest.raises(WorkerError, match=f"^rank 0 sent a wrong answer to released-twice: .*{result}"):
            misuse(agent, KINDS["released-twice"], "UCX")
    else:
        assert misuse(agent, KINDS["released-twice"], "UCX") == result
    worker.request.assert_called_once_with(
        "run",
        agent=1,
        function="pytest_nixl.checks.faults.worker.misuse:carry_out",
        arguments={"misuse": "released-twice", "backend": "UCX", "seconds": 2.0},
    )


@pytest.mark.parametrize("id", ["duplicate-descriptor", "released-handle"])
def test_a_crash_of_the_real_nixl_is_an_outcome(agent: NixlAgent, id: str) -> None:
    outcome = misuse(agent, KINDS[id], "UCX")
    assert (outcome.ending, outcome.error, outcome.wrong_bytes) == (MisuseEnding.CRASHED, "was ended by SIGSEGV", None)
    assert outcome.fault == f"{KINDS[id].label}: crashed (was ended by SIGSEGV)"


def test_cut_metadata_of_the_real_nixl_spoils_its_agent(agent: NixlAgent) -> None:
    outcome = misuse(agent, KINDS["cut-metadata"], "UCX")
    assert (outcome.ending, outcome.error) == (MisuseEnding.REFUSED, "nixlNotFoundError")
    after = "; after that, NIXL refuses a transfer to the peer (nixlInvalidParamError)"
    assert outcome.fault == f"{KINDS['cut-metadata'].label}: refused (nixlNotFoundError){after}"
    assert misuse_reason(outcome).endswith(f"refused (nixlNotFoundError){after}")


@pytest.mark.parametrize(
    ("id", "faults", "registered", "done"),
    [
        ("registered-twice", ["registered twice"], [], 0),
        ("deregistered-twice", ["not registered"], [], 0),
        ("empty-region", ["an empty region"], [], 0),
        ("overlapping-regions", ["overlapping regions"], [], 1),
        (
            "beyond-own-region",
            ["own memory is not registered", "posted after its memory was deregistered"],
            [SIZE // 2],
            1,
        ),
        ("beyond-peers-region", ["the peer's memory is not registered"], [2 * SIZE], 1),
        ("different-lengths", ["different lengths"], [SIZE], 1),
        ("empty-transfer", ["an empty transfer"], [SIZE], 1),
        ("overlapping-transfer", ["overlapping descriptors"], [SIZE], 1),
        ("unknown-agent", ["unknown agent"], [SIZE], 0),
        ("notification-to-unknown-agent", ["unknown agent"], [], 0),
        ("index-out-of-range", ["descriptor 1 of 1"], [SIZE], 0),
        ("posted-twice", ["posted in flight"], [64 << 20], 1),
        ("released-twice", ["released twice"], [SIZE], 1),
        ("handles-kept", ["10,000 handles"], [SIZE], 1),
        ("duplicate-descriptor", ["named twice"], [], 0),
        ("released-handle", ["posted after it was released"], [SIZE], 2),
        ("released-in-flight", ["released in flight"] * 5, [64 << 20, SIZE], 5),
        ("deregistered-source", ["posted after its memory was deregistered"], [], 1),
        ("cut-metadata", ["cut metadata"], [], 0),
    ],
)
def test_each_misuse_makes_its_wrong_call_and_no_other(
    id: str, faults: list[str], registered: list[int], done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = watching_agents(monkeypatch)
    agent, scene = agents["agent"], PeerScene(agents["agent"], "UCX", 60.0)
    steps = MISUSES[id](scene)
    next(steps)
    assert agent.faults == [], "the preparation is right"
    assert agent.removed == (["nobody"] if id == "unknown-agent" else [])
    assert list(steps) == []
    assert (agent.faults, [*map(len, agent.regions)], agent.done) == (faults, registered, done)
    assert agents[PEER].faults == []


def spoiled(data: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in data[:3]) + data[3:]


@pytest.mark.parametrize(("id", "backend"), [(id, "UCX") for id in MISUSES] + [STALLS])
def test_the_answer_to_a_misuse_says_what_nixl_raised_and_how_many_bytes_of_the_next_transfer_are_wrong(
    id: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refuses, wrong in ((True, 0), (False, 3)):
        agents = watching_agents(monkeypatch)
        agents["agent"].refuses = refuses
        agents["agent"].arrive = spoiled if wrong else bytes
        answer = carry_out(agents["agent"], id, backend, 60.0)
        raised = "nixlInvalidParamError" if refuses else ""
        assert answer == {"raised": raised, "after": "", "wrong_bytes": wrong}
        assert agents[PEER].options == {"progress_thread": backend == "LIBFABRIC"}


def test_a_failed_preparation_is_an_error_and_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = watching_agents(monkeypatch)["agent"]
    agent.refuses, agent.regions = True, [range(1 << 62)]
    with pytest.raises(nixlInvalidParamError, match="overlapping regions"):
        carry_out(agent, "released-twice", "UCX", 60.0)


@pytest.mark.parametrize(("id", "backend"), [STALLS, ("released-in-flight", "UCX"), ("released-twice", "LIBFABRIC")])
def test_a_deadline_that_passes_is_an_outcome_of_the_known_stall_only(
    id: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late() -> int:
        raise StepTimeoutError("not finished")

    monkeypatch.setattr(worker_misuse, "PeerScene", lambda *_: SimpleNamespace(wrong_bytes=late))
    monkeypatch.setitem(MISUSES, id, lambda _: iter([None]))
    if (id, backend) == STALLS:
        assert carry_out(None, id, backend, 1.0) == {"raised": "", "after": "PROC", "wrong_bytes": 0}
    else:
        with pytest.raises(StepTimeoutError):
            carry_out(None, id, backend, 1.0)
