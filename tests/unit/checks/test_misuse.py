# SPDX-License-Identifier: Apache-2.0
"""Misuse of the real NIXL is judged by what NIXL does: with a call that has no defect, the same check passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.checks.faults.misuse import (
    DEFECTIVE,
    KINDS,
    SURVIVED,
    MisuseEnding,
    MisuseOutcome,
    judge_misuses,
    misuse,
    misuse_reason,
)
from pytest_nixl.checks.faults.worker.misuse import MISUSES
from pytest_nixl.model.findings import FINDINGS, judge_finding
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.worker.peer_scene import SIZE
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerError

#: The functions that replace the defective calls, by their misuse.
WITHOUT_DEFECT = {
    "duplicate-descriptor": "refuse_duplicates",
    "released-handle": "refuse_released_handles",
    "deregistered-source": "refuse_deregistered_source",
    "cut-metadata": "refuse_cut_metadata",
}


@pytest.fixture
def agent(nixl_settings: Settings) -> Iterator[NixlAgent]:
    """An agent in a worker of its own."""
    with Agents(LocalHost(supervisor()), nixl_settings) as agents:
        yield agents.start(progress_thread=None)


def outcome(id: str, ending: MisuseEnding, said: str = "", wrong: int | None = 0) -> MisuseOutcome:
    """Return an outcome of UCX."""
    return MisuseOutcome(KINDS[id], "UCX", "1.5.1", ending, said, wrong)


def test_the_worker_can_carry_out_every_misuse_and_no_other() -> None:
    assert set(MISUSES) == set(KINDS)
    # UCX does not have the defect of the one that is left: tests/libfabric has it.
    assert {*WITHOUT_DEFECT, "released-in-flight"} == {kind.id for kind in DEFECTIVE}


def test_refused_and_accepted_misuses_pass() -> None:
    judgement = judge_misuses(
        [
            outcome("unknown-agent", MisuseEnding.REFUSED, "nixlNotFoundError"),
            outcome("empty-transfer", MisuseEnding.ACCEPTED),
        ]
    )
    assert judgement.verdict is Verdict.PASS
    assert judgement.reason == (
        "NIXL 1.5.1 with UCX moves correct bytes after each: refused: unknown-agent; accepted: empty-transfer"
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (outcome("empty-transfer", MisuseEnding.CRASHED, "was ended by SIGSEGV", None),
         "a transfer has 0 bytes: crashed (was ended by SIGSEGV)"),
        (outcome("unknown-agent", MisuseEnding.ACCEPTED),
         "a transfer is prepared to an unknown agent: accepted, but only an error is right"),
        (outcome("empty-region", MisuseEnding.ACCEPTED, "", 7),
         "a region of 0 bytes is registered: accepted; 7 bytes of the next transfer are wrong"),
        (replace(outcome("empty-region", MisuseEnding.ACCEPTED), after="PROC"),
         "a region of 0 bytes is registered: accepted; after that, a transfer to the peer stays PROC"),
    ],
)  # fmt: skip
def test_one_bad_outcome_fails_among_good_ones(found: MisuseOutcome, words: str) -> None:
    judgement = judge_misuses([outcome("released-twice", MisuseEnding.ACCEPTED), found])
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == f"NIXL 1.5.1 with UCX: {words}"
    assert found.kind.what in judgement.remedy


def test_calls_on_bytes_or_agents_that_are_not_there_fail_if_they_are_accepted() -> None:
    assert {id for id in KINDS if outcome(id, MisuseEnding.ACCEPTED).fault} == {
        "beyond-own-region", "beyond-peers-region", "different-lengths", "unknown-agent",
        "notification-to-unknown-agent", "index-out-of-range", "cut-metadata",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [-1, 0.5, None])
def test_an_answer_of_another_form_is_an_error_and_no_outcome(wrong: object) -> None:
    """The worker is a double. Two transfers that are never done end before it misses its own deadline."""
    asked: list[Any] = []
    answer = {"raised": "", "after": "", "wrong_bytes": wrong}

    def request(command: str, **given: Any) -> Any:
        asked.append(given["arguments"])
        return SimpleNamespace(result=lambda: answer)

    agent: Any = SimpleNamespace(
        ref=1, worker=SimpleNamespace(name="rank 0", timeout=6.0, versions={}, request=request)
    )
    with pytest.raises(WorkerError, match=r"rank 0 sent a wrong answer to released-twice: .*wrong_bytes"):
        misuse(agent, KINDS["released-twice"], "UCX")
    assert [(each["misuse"], each["backend"], each["seconds"] < 6.0 / 2) for each in asked] == [
        ("released-twice", "UCX", True)
    ]


@pytest.mark.parametrize("id", WITHOUT_DEFECT)
def test_a_nixl_without_the_defect_passes_the_same_check(agent: NixlAgent, id: str) -> None:
    agent.run(f"helpers.misuse_functions:{WITHOUT_DEFECT[id]}")
    found = misuse(agent, KINDS[id], "UCX")
    assert (found.ending, found.said, found.wrong_bytes) == (MisuseEnding.REFUSED, "nixlInvalidParamError", 0)
    judgement = judge_finding(
        FINDINGS[KINDS[id].finding], occurs=bool(found.fault), reason=misuse_reason(found), affects=False,
        acceptance=None, today=date(2026, 11, 22),
    )  # fmt: skip
    assert (judgement.verdict, judgement.known_limit) == (Verdict.PASS, False)
    assert f"with UCX of NIXL {found.nixl}, {KINDS[id].what}: refused (nixlInvalidParamError), and the next" in (
        judgement.reason
    )


@pytest.mark.parametrize("id", ["duplicate-descriptor", "released-handle"])
def test_a_crash_of_the_real_nixl_is_an_outcome(agent: NixlAgent, id: str) -> None:
    found = misuse(agent, KINDS[id], "UCX")
    assert (found.ending, found.said, found.wrong_bytes) == (MisuseEnding.CRASHED, "was ended by SIGSEGV", None)
    assert found.fault == f"{KINDS[id].what}: crashed (was ended by SIGSEGV)"


@pytest.mark.parametrize("id", ["posted-twice", "beyond-peers-region", "released-in-flight"])
def test_a_misuse_of_larger_buffers_does_no_harm_to_the_real_nixl(agent: NixlAgent, id: str) -> None:
    found = misuse(agent, KINDS[id], "UCX")
    assert found.ending in (MisuseEnding.REFUSED, MisuseEnding.ACCEPTED)
    assert (found.fault, found.wrong_bytes) == ("", 0)


def test_cut_metadata_of_the_real_nixl_spoils_its_agent(agent: NixlAgent) -> None:
    found = misuse(agent, KINDS["cut-metadata"], "UCX")
    assert (found.ending, found.said) == (MisuseEnding.REFUSED, "nixlNotFoundError")
    after = "; after that, NIXL refuses a transfer to the peer (nixlInvalidParamError)"
    assert found.fault == f"{KINDS['cut-metadata'].what}: refused (nixlNotFoundError){after}"
    assert misuse_reason(found).endswith(f"refused (nixlNotFoundError){after}")


def test_a_new_crash_is_caught(agent: NixlAgent) -> None:
    agent.run("helpers.misuse_functions:crash", method="send_notif")
    found = misuse(agent, KINDS["notification-to-unknown-agent"], "UCX")
    assert found.fault == "a notification is sent to an unknown agent: crashed (was ended by SIGSEGV)"


def test_a_transfer_that_must_be_refused_is_caught_if_it_is_accepted(agent: NixlAgent) -> None:
    agent.run("helpers.misuse_functions:accept_every_transfer")
    found = misuse(agent, KINDS["different-lengths"], "UCX")
    assert "accepted, but only an error is right" in found.fault
    assert found.wrong_bytes == SIZE - 1024, "of what did not arrive, no byte is right by chance"


def test_wrong_bytes_after_a_misuse_are_caught(agent: NixlAgent) -> None:
    agent.run("helpers.misuse_functions:spoil")
    assert misuse(agent, KINDS["released-twice"], "UCX").fault.endswith("; 1 bytes of the next transfer are wrong")


def test_a_failed_preparation_is_an_error_and_no_outcome(agent: NixlAgent) -> None:
    agent.run("helpers.misuse_functions:refuse", method="add_remote_agent")
    with pytest.raises(NixlError, match="nixlInvalidParamError"):
        misuse(agent, KINDS["released-twice"], "UCX")


def test_every_kind_has_a_different_id() -> None:
    assert len(KINDS) == len(SURVIVED) + len(DEFECTIVE)
