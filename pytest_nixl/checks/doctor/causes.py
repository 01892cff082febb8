# SPDX-License-Identifier: Apache-2.0
"""Order the results of checks by cause: the one that knows the cause comes before those that only see its effects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement, Verdict

if TYPE_CHECKING:
    from pytest_nixl.checks.doctor.examine import CheckResult

#: The checks that try something. They fail because of a variable that another check names.
_EFFECTS = ("backend-loads", "telemetry-in-process", "transfers-arrive")


def by_cause(answers: Sequence[CheckResult], facts: Facts) -> tuple[CheckResult, ...]:
    """Return the results so that a failed check about a variable precedes the attempts that fail because of it.

    The others say which check they follow from, and what to do is said once.

    :param answers: the results in the order of the catalogue.
    :param facts: the facts with the transfers that were tried.
    """
    blamed = [name for proof in facts.transfers for name in proof.variables]
    effects = [answer for answer in answers if answer.check.id in _EFFECTS and _fails(answer)]
    cause = _cause(answers, blamed) if effects else None
    if cause is None:
        return tuple(answers)
    backends = {proof.backend for proof in facts.transfers if proof.culprits}
    ordered: list[CheckResult] = []
    for answer in answers:
        if answer is cause:
            continue
        follows = answer in effects and (answer.check.id != "backend-loads" or _is_about(answer, backends))
        if follows and cause not in ordered:
            ordered.append(cause)
        ordered.append(_following(answer, cause) if follows else answer)
    return tuple(ordered if cause in ordered else answers)


def _cause(answers: Sequence[CheckResult], blamed: Sequence[str]) -> CheckResult | None:
    """Return the failed check that knows the cause: one about a blamed variable, else the transfers that named it."""
    failures = [answer for answer in answers if _fails(answer)]
    for answer in failures:
        if answer.check.id not in _EFFECTS and any(_names(answer.judgement.reason, name) for name in blamed):
            return answer
    return next((answer for answer in failures if blamed and answer.check.id == "transfers-arrive"), None)


def _names(reason: str, variable: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(variable)}(?!\w)", reason) is not None


def _fails(answer: CheckResult) -> bool:
    return answer.judgement.verdict is Verdict.FAIL


def _is_about(answer: CheckResult, backends: set[str]) -> bool:
    return answer.judgement.reason.partition(" ")[0] in backends


def _following(answer: CheckResult, cause: CheckResult) -> CheckResult:
    judgement = answer.judgement
    reason = f"follows from {cause.check.id}: {judgement.reason}"
    return replace(
        answer, judgement=Judgement(judgement.verdict, reason, f"follow the remedy of {cause.check.id}")
    )
