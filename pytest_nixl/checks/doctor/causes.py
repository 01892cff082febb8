# SPDX-License-Identifier: Apache-2.0
"""Order the results of checks by cause: the one that knows the cause comes before those that only see its effects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from pytest_nixl.checks.doctor.check import CheckResult
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Verdict

#: The checks that try something. They fail because of a variable that another check may name.
_ATTEMPTS = ("backend-loads", "telemetry-in-process", "transfers-arrive")
#: How the reason of a check begins that knows another check to be the cause.
_FOLLOWS = re.compile(r"follows from (?P<cause>[\w-]+): ")


def by_cause(answers: Sequence[CheckResult], facts: Facts) -> tuple[CheckResult, ...]:
    """Return the results so that the check which knows the cause precedes the attempts that fail because of it.

    The attempts say which check they follow from.

    :param answers: the results in the order of the catalogue.
    :param facts: the facts with the transfers that were tried.
    """
    attempts = [answer for answer in answers if answer.check.id in _ATTEMPTS and _went_wrong(answer)]
    faults = [proof for proof in facts.transfers if proof.fault]
    cause = _cause(answers, attempts, [name for proof in faults for name in proof.variables])
    if cause is None:
        return tuple(answers)
    backends = {proof.backend for proof in faults}
    effects = [
        answer for answer in attempts
        if answer is not cause and (_follows(answer, cause) or backends & set(re.findall(r"\w+", _subject(answer))))
    ]  # fmt: skip
    if not effects:
        return tuple(answers)
    rest = [answer for answer in answers if answer is not cause]
    place = rest.index(effects[0])
    return tuple(
        _following(answer, cause) if answer in effects else answer for answer in [*rest[:place], cause, *rest[place:]]
    )


def _cause(
    answers: Sequence[CheckResult], attempts: Sequence[CheckResult], variables: Sequence[str]
) -> CheckResult | None:
    """Return the failed check that knows the cause; None if none does.

    :param variables: the variables without which bytes arrive.
    """
    named = {match["cause"] for answer in attempts if (match := _FOLLOWS.match(answer.judgement.reason))}
    failed = [answer for answer in answers if answer.judgement.verdict is Verdict.FAIL]
    others = [answer for answer in failed if answer not in attempts]
    known = [
        *(answer for answer in others if answer.check.id in named),
        *(answer for answer in others if any(_names(answer, name) for name in variables)),
        *(answer for answer in failed if answer.check.id == ("transfers-arrive" if variables else "backend-loads")),
    ]
    return next(iter(known), None)


def _went_wrong(answer: CheckResult) -> bool:
    return answer.judgement.verdict in (Verdict.FAIL, Verdict.UNKNOWN)


def _names(answer: CheckResult, variable: str) -> bool:
    text = f"{answer.judgement.reason} {answer.judgement.remedy}"
    return re.search(rf"(?<!\w){re.escape(variable)}(?!\w)", text) is not None


def _follows(answer: CheckResult, cause: CheckResult) -> bool:
    match = _FOLLOWS.match(answer.judgement.reason)
    return match is not None and match["cause"] == cause.check.id


def _subject(answer: CheckResult) -> str:
    """Return the beginning of an attempt's reason, which names the backend; that of the telemetry is UCX."""
    return "UCX" if answer.check.id == "telemetry-in-process" else answer.judgement.reason.partition(":")[0]


def _following(answer: CheckResult, cause: CheckResult) -> CheckResult:
    if _follows(answer, cause):
        return answer
    reason = f"follows from {cause.check.id}: {answer.judgement.reason}"
    remedy = f"follow the remedy of {cause.check.id}"
    return replace(answer, judgement=replace(answer.judgement, reason=reason, remedy=remedy))
