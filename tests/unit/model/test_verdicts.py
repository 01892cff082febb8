# SPDX-License-Identifier: Apache-2.0
"""Every line of the table of verdicts."""

from __future__ import annotations

import pytest

from pytest_nixl.model.verdicts import SEVERITY, Judgement, Outcome, Verdict, most_severe, outcome

PASS, WARN, FAIL, SKIP = Outcome.PASS, Outcome.WARN, Outcome.FAIL, Outcome.SKIP

# Verdict: its outcome without the gate, with the gate, and with the gate for a required check.
TABLE = {
    "PASS": (PASS, PASS, PASS),
    "FAIL": (FAIL, FAIL, FAIL),
    "CORRUPT": (FAIL, FAIL, FAIL),
    "WRONG-TRANSPORT": (FAIL, FAIL, FAIL),
    "IMPLAUSIBLE": (FAIL, FAIL, FAIL),
    "ERROR": (FAIL, FAIL, FAIL),
    "MISSING": (FAIL, FAIL, FAIL),
    "REGRESSED": (FAIL, FAIL, FAIL),
    "UNCHANGED": (PASS, PASS, PASS),
    "IMPROVED": (PASS, PASS, PASS),
    "INCONCLUSIVE": (WARN, FAIL, FAIL),
    "NO-EXPECTATION": (WARN, FAIL, FAIL),
    "UNKNOWN": (WARN, FAIL, FAIL),
    "WARN": (WARN, WARN, WARN),
    "NOT-APPLICABLE": (SKIP, SKIP, FAIL),
}


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_its_outcome(verdict: Verdict) -> None:
    open_, gated, gated_required = TABLE[str(verdict)]
    for required in (False, True):
        assert outcome(verdict, gate=False, required=required) is open_
    assert outcome(verdict, gate=True) is outcome(verdict, gate=True, required=False) is gated
    assert outcome(verdict, gate=True, required=True) is gated_required


@pytest.mark.parametrize("gate", [False, True])
def test_verdicts_are_ordered_by_their_outcomes_and_wrong_bytes_are_first(gate: bool) -> None:
    outcomes = [outcome(verdict, gate=gate) for verdict in SEVERITY]
    assert outcomes == sorted(outcomes, key=[FAIL, WARN, PASS, SKIP].index)
    first, second = Judgement(Verdict.WARN, "first"), Judgement(Verdict.WARN, "second")
    assert most_severe([Judgement(Verdict.PASS, ""), first, second]) is first
    assert SEVERITY[0] is Verdict.CORRUPT


def test_a_judgement_prints_its_reason_and_its_remedy() -> None:
    judgement = Judgement(Verdict.WRONG_TRANSPORT, "went over tcp/lo", "check UCX_TLS")
    assert str(judgement) == "WRONG-TRANSPORT: went over tcp/lo\nremedy: check UCX_TLS"
    assert str(Judgement(Verdict.PASS, "fast")) == "PASS: fast"
