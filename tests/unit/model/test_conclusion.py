# SPDX-License-Identifier: Apache-2.0
"""The figures in ``verdict.json``: each with its bounds and its verdict, in a form that other ranks accept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_nixl.cluster.messages import REQUESTS
from pytest_nixl.core.strict import check
from pytest_nixl.model.conclusion import (
    MOST_FIGURES,
    UNMEASURED,
    Conclusion,
    failed_beside,
    interrupted_before,
    next_step,
    summary_line,
    verdict_fields,
    without_results,
)
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Outcome, Verdict, outcome

CREATION = Figure("agent-creation", 0.04, "s", {"backend": "UCX"})
SIZE = Figure("metadata-size", 11_700.0, "B", {"backend": "UCX", "count": "256"}, at_most=100.0)
RATE = Figure("notification-rate", 12_000.0, "1/s", {"backend": "UCX"}, at_most=1e6, at_least=5000.0)


def of(verdict: Verdict, *figures: Figure) -> Result:
    """Return the result of a check that measured figures."""
    return Result("a-check", "t.py::test", verdict, "why", measured=figures)


def test_every_figure_has_its_bounds_and_its_verdict() -> None:
    figures = verdict_fields([of(Verdict.FAIL, CREATION, SIZE), of(Verdict.PASS, RATE)], gate=True)["figures"]
    assert figures == [
        {"check": "a-check", "name": "agent-creation", "labels": {"backend": "UCX"}, "value": 0.04, "unit": "s",
         "at_most": None, "at_least": None, "verdict": "PASS"},
        {"check": "a-check", "name": "metadata-size", "labels": {"backend": "UCX", "count": "256"}, "value": 11_700.0,
         "unit": "B", "at_most": 100.0, "at_least": None, "verdict": "FAIL"},
        {"check": "a-check", "name": "notification-rate", "labels": {"backend": "UCX"}, "value": 12_000.0,
         "unit": "1/s", "at_most": 1e6, "at_least": 5000.0, "verdict": "PASS"},
    ]  # fmt: skip


def test_a_figure_is_within_its_bounds_up_to_and_with_them() -> None:
    for value, within in ((4999.0, False), (5000.0, True), (1e6, True), (1e6 + 1, False)):
        assert Figure(RATE.name, value, RATE.unit, RATE.labels, (), RATE.at_most, RATE.at_least).within is within


def test_other_ranks_accept_the_figures_and_their_number_is_limited() -> None:
    long = Result("x", "x", Verdict.FAIL, "w" * 4096, "m" * 4096)
    many = [of(Verdict.PASS, *[RATE] * (MOST_FIGURES + 1)), of(Verdict.PASS, Figure("x", float("nan"), "s")), long]
    document = json.loads(json.dumps(verdict_fields(many, gate=False)))
    assert len(document["figures"]) == MOST_FIGURES == 1000
    assert [len(document["failing"][0][name]) for name in ("reason", "remedy")] == [2000, 2000]
    check(REQUESTS["end"][0], {"code": 0, "verdict": "", "refusal": "", "verdict_fields": document})
    check(REQUESTS["end"][0], {"code": 4, "verdict": "", "refusal": "no", "verdict_fields": without_results("REFUSED")})


@pytest.mark.parametrize(
    ("verdicts", "interrupted", "advice"),
    [
        ([Verdict.PASS], "", "accept"),
        ([Verdict.PASS, Verdict.WARN], "", "accept"),
        ([Verdict.PASS, Verdict.INCONCLUSIVE], "", "retry"),
        ([Verdict.PASS], "INTERRUPTED after 1 of 2 checks", "retry"),
        ([Verdict.INCONCLUSIVE, Verdict.NO_EXPECTATION], "", "review"),
        ([Verdict.NO_EXPECTATION, Verdict.REGRESSED], "", "reject"),
        ([Verdict.INCONCLUSIVE, Verdict.UNKNOWN], "", "reject"),
        ([Verdict.FAIL], "INTERRUPTED after 1 of 2 checks", "reject"),
        ([Verdict.INCONCLUSIVE] * 101, "", "retry"),
        ([Verdict.INCONCLUSIVE] * 100 + [Verdict.CORRUPT], "", "reject"),
        ([Verdict.INCONCLUSIVE] * 100 + [Verdict.UNKNOWN], "", "reject"),
    ],
)
def test_a_pipeline_is_told_what_to_do_next(verdicts: list[Verdict], interrupted: str, advice: str) -> None:
    results = [Result("x", "x", verdict, "why") for verdict in verdicts]
    assert next_step(verdict_fields(results, gate=True, interrupted=interrupted)) == advice


@pytest.mark.parametrize("gate", [False, True])
def test_each_result_fails_warns_or_does_neither(gate: bool) -> None:
    found = verdict_fields([Result(str(verdict), "x", verdict) for verdict in Verdict], gate=gate)
    outcomes = {str(verdict): outcome(verdict, gate=gate) for verdict in Verdict}
    assert [failure["check"] for failure in found["failing"]] == [
        name for name, worst in outcomes.items() if worst is Outcome.FAIL
    ]
    assert found["warnings"] == list(outcomes.values()).count(Outcome.WARN)


BESIDE = "a test failed that is not a NIXL check (exit code 1)"


@pytest.mark.parametrize(
    ("verdict", "beside", "reason", "lost", "step"),
    [
        (Verdict.PASS, "FAIL", BESIDE, "INTERRUPTED", "reject"),
        (Verdict.INCONCLUSIVE, "FAIL", BESIDE, "INTERRUPTED", "reject"),
        (Verdict.FAIL, "FAIL", "why", "FAIL", "reject"),
        (Verdict.NOT_APPLICABLE, "NOTHING CHECKED", None, "INTERRUPTED", "correct"),
    ],
)
def test_what_fails_a_run_after_its_checks_changes_its_verdict(
    verdict: Verdict, beside: str, reason: str | None, lost: str, step: str
) -> None:
    before = verdict_fields([Result("x", "x", verdict, "why")], gate=False)
    failed = failed_beside(before, 1)
    assert (failed["verdict"], next_step(failed)) == (beside, step)
    assert [failure["reason"] for failure in failed["failing"]] == ([reason] if reason else [])
    late = interrupted_before(before, "rank 1 is gone")
    assert (late["verdict"], late["interrupted"]) == (lost, "INTERRUPTED: rank 1 is gone")
    assert interrupted_before(late, "rank 2 is gone")["interrupted"] == late["interrupted"]


def row(verdict: Verdict, floor: float, *variant: tuple[str, str]) -> Result:
    """Return the result of a measured row."""
    key = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1 << 20, variant=variant)
    return Result("bandwidth", "t.py::test", verdict, row=key, summary=RowSummary(1e9, 1e-6, 1e-6, 10, floor, 0.0, ()))


NOTHING = [Result(UNMEASURED, "", Verdict.MISSING, f"the suite {name} measured nothing") for name in "ab"]
FAILED = Result(
    "slow", "t", Verdict.FAIL, "why", "Mend it.", row=RowKey("UCX", "READ", MemoryPair("DRAM", "DRAM"), 4096)
)


def test_the_verdict_for_programs_has_each_field() -> None:
    limit = Result("limit", "l", Verdict.PASS, finding="NIXL-X", known_limit=True)
    none = row(Verdict.NO_EXPECTATION, 0.0)
    fields = {
        "verdict": "FAIL", "gate": False, "warnings": 1, "interrupted": "INTERRUPTED", "rows": 1,
        "checks": {"PASS": 1, "FAIL": 1, "NO-EXPECTATION": 1}, "known_limits": ["NIXL-X"], "failing_left_out": 0,
        "figures": [],
        "failing": [{"check": "slow", "row": "UCX/READ/DRAM:DRAM/4KiB/batch1/depth1/0-1", "verdict": "FAIL",
                     "reason": "why", "remedy": "Mend it."}],
    }  # fmt: skip
    assert verdict_fields([none, limit, FAILED], gate=False, interrupted="INTERRUPTED") == fields
    refused = {**fields, "verdict": "REFUSED", "warnings": 0, "rows": 0, "checks": {}, "known_limits": [],
               "failing": [], "interrupted": "by Ctrl-C"}  # fmt: skip
    assert without_results("REFUSED", "by Ctrl-C") == refused
    passed = verdict_fields([limit], gate=False)
    failure = {"check": "", "row": "", "verdict": "FAIL", "remedy": "", "reason": "no test was collected (exit code 5)"}
    assert failed_beside(passed, 5) == {**passed, "verdict": "FAIL", "failing": [failure]}
    empty = verdict_fields([], gate=False)
    assert (empty["verdict"], next_step(empty)) == ("NOTHING CHECKED", "correct")
    assert failed_beside(empty, 5) == {**empty, "verdict": "FAIL", "failing": [failure]}
    assert failed_beside(refused, 5) == refused


@pytest.mark.parametrize(
    ("results", "options", "text"),
    [
        ([of(Verdict.PASS)], {"code": 1},
         "NIXL verdict: FAIL, because a test failed that is not a NIXL check (1 PASS; 0 rows measured)"),
        ([of(Verdict.PASS), of(Verdict.WARN)], {"code": 5},
         "NIXL verdict: FAIL, because no test was collected (1 PASS, 1 WARN; 0 rows measured)"),
        ([of(Verdict.PASS), FAILED], {"code": 1}, "NIXL verdict: FAIL (1 PASS, 1 FAIL; 0 rows measured)"),
        ([of(Verdict.PASS), of(Verdict.WARN)], {"code": 0},
         "NIXL verdict: PASS, with warnings (1 PASS, 1 WARN; 0 rows measured)"),
        (NOTHING, {}, "NIXL verdict: NOTHING CHECKED, because the suite a measured nothing; the suite b measured "
         "nothing (2 MISSING; 0 rows measured)"),
        (NOTHING, {"gate": True}, "NIXL gate: FAIL (2 MISSING; 0 rows measured)"),
        ([row(Verdict.PASS, 1e8)], {"gate": True, "left_out": ["faults", "pattern"]},
         "NIXL gate: PASS (1 PASS; 1 row measured; suites not selected: faults, pattern)"),
        ([row(Verdict.PASS, 1e8), row(Verdict.PASS, 0.0), row(Verdict.PASS, 0.0)], {"gate": True},
         "NIXL gate: PASS (3 PASS; 3 rows measured, 2 of them passed without a floor)"),
        # Only rows of whole blocks that passed in the gate are counted without a floor.
        ([row(Verdict.PASS, 0.0)], {}, "NIXL verdict: PASS (1 PASS; 1 row measured)"),
        ([row(Verdict.FAIL, 0.0), row(Verdict.PASS, 1e8)], {"gate": True},
         "NIXL gate: FAIL (1 PASS, 1 FAIL; 2 rows measured)"),
        *(([row(Verdict.PASS, 0.0, (name, "x"))], {"gate": True}, "NIXL gate: PASS (1 PASS; 1 row measured)")
          for name in ("kv", "pattern")),
        ([FAILED], {"interrupted": "INTERRUPTED after 1 of 2 checks: Ctrl-C", "deselected": ["a", "b", "c"]},
         "NIXL verdict: FAIL, INTERRUPTED after 1 of 2 checks: Ctrl-C (1 FAIL; 0 rows measured; checks deselected: "
         "a, b, c)"),
        ([of(Verdict.PASS)], {"interrupted": "INTERRUPTED after 1 of 2 checks: Ctrl-C", "deselected": "abcde"},
         "NIXL verdict: INTERRUPTED after 1 of 2 checks: Ctrl-C (1 PASS; 0 rows measured; checks deselected: a, b, c "
         "and 2 more)"),
        ([row(Verdict.INCONCLUSIVE, 1e8)], {"gate": True},
         "NIXL gate: INCONCLUSIVE, retry while the machine is quiet (1 INCONCLUSIVE; 1 row measured)"),
        ([row(Verdict.INCONCLUSIVE, 1e8), of(Verdict.INCONCLUSIVE)], {"gate": True},
         "NIXL gate: FAIL (2 INCONCLUSIVE; 1 row measured)"),
        ([of(Verdict.UNKNOWN), of(Verdict.WARN)], {},
         "NIXL verdict: INCONCLUSIVE (1 UNKNOWN, 1 WARN; 0 rows measured)"),
        ([of(Verdict.UNKNOWN), of(Verdict.IMPROVED)], {},
         "NIXL verdict: PASS, with warnings (1 IMPROVED, 1 UNKNOWN; 0 rows measured)"),
        ([of(Verdict.NOT_APPLICABLE)], {"code": 1},
         "NIXL verdict: NOTHING CHECKED (1 NOT-APPLICABLE; 0 rows measured)"),
        *(([], {"gate": gate}, f"NIXL {word}: NOTHING CHECKED (no check ran; 0 rows measured)")
          for gate, word in ((False, "verdict"), (True, "gate"))),
        ([], {"code": 5}, "NIXL verdict: FAIL, because no test was collected (no check ran; 0 rows measured)"),
        ([], {"interrupted": "INTERRUPTED before a check"},
         "NIXL verdict: INTERRUPTED before a check (no check ran; 0 rows measured)"),
        ([Result(UNMEASURED, "", Verdict.MISSING, "the suite a measured nothing"), FAILED], {},
         "NIXL verdict: FAIL (1 FAIL, 1 MISSING; 0 rows measured)"),
    ],
)  # fmt: skip
def test_the_last_line_of_a_run(results: list[Result], options: dict[str, Any], text: str) -> None:
    assert summary_line(results, **{"gate": False, **options}).text == text


@pytest.mark.parametrize(
    ("verdicts", "options", "worst"),
    [
        ("PASS", {}, "PASS"), ("PASS UNKNOWN", {}, "WARN"), ("PASS UNKNOWN", {"gate": True}, "FAIL"),
        ("WARN FAIL PASS", {}, "FAIL"), ("PASS", {"interrupted": "x"}, "FAIL"), ("PASS", {"code": 1}, "FAIL"),
        ("NOT-APPLICABLE", {}, "WARN"), ("NOT-APPLICABLE", {"code": 1}, "FAIL"), ("MISSING", {}, "FAIL"),
    ],
)  # fmt: skip
def test_the_outcome_of_a_run_is_its_worst(verdicts: str, options: dict[str, Any], worst: str) -> None:
    results = [of(Verdict(verdict)) for verdict in verdicts.split()]
    assert Conclusion.of(results, **{"gate": False, **options}).outcome.name == worst
