# SPDX-License-Identifier: Apache-2.0
"""Run all checks of the doctor, and print their verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_nixl.checks.doctor.catalogue import checks
from pytest_nixl.checks.doctor.causes import by_cause
from pytest_nixl.checks.doctor.check import CheckResult, Requirements
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement, Outcome, TextLine, Verdict, outcome


def examine(facts: Facts, wanted: Requirements, *, gate: bool) -> tuple[CheckResult, ...]:
    """Run all checks that apply: with ``wanted.image`` only those of an image.

    :param gate: whether the gate is on: undecided verdicts then fail, and so does NOT-APPLICABLE of a required check.
    """
    answers = []
    for check in checks().values():
        if check.image or not wanted.image:
            judgement = check.judge(facts, wanted)
            required = check.id in wanted.profile.required
            answers.append(
                CheckResult(check, judgement, outcome(judgement.verdict, gate=gate, required=required), required)
            )
    return by_cause(answers, facts)


def failed(answers: Sequence[CheckResult]) -> bool:
    """Return whether any result fails."""
    return any(answer.outcome is Outcome.FAIL for answer in answers)


def lines(answers: Sequence[CheckResult]) -> Iterator[TextLine]:
    """Yield one line per result, its remedy below it unless it passed, and a summary line at the end.

    Results of one cause, such as a NIXL that cannot be loaded, are one line, with the other checks below it.
    """
    width = max(len(answer.judgement.verdict.value) for answer in answers)
    names = max(len(answer.check.id) for answer in answers)
    alike: dict[tuple[Judgement, Outcome], list[CheckResult]] = {}
    for answer in answers:
        alike.setdefault((answer.judgement, answer.outcome), []).append(answer)
    for answer, *others in alike.values():
        missed = answer.outcome is Outcome.FAIL and answer.judgement.verdict is Verdict.NOT_APPLICABLE
        reason = f"{answer.judgement.reason}; the profile requires it" if missed else answer.judgement.reason
        head = f"{answer.judgement.verdict.value:<{width}}  {answer.check.id:<{names}}  {reason}"
        yield TextLine(head, answer.outcome)
        if answer.judgement.remedy and answer.outcome is not Outcome.PASS:
            yield TextLine(f"{'':<{width}}  {'':<{names}}  remedy: {answer.judgement.remedy}")
        if others:
            told = ", ".join(other.check.id for other in others)
            yield TextLine(f"{'':<{width}}  {'':<{names}}  the same: {told}", answer.outcome)
    counts = Counter(answer.judgement.verdict.value for answer in answers)
    bad = failed(answers)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    yield TextLine(f"NIXL doctor: {'FAIL' if bad else 'PASS'} ({told})", Outcome.FAIL if bad else Outcome.PASS)


def plain(facts: Facts, wanted: Requirements, answers: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the results as a dictionary of JSON values."""
    return {
        "verdict": "FAIL" if failed(answers) else "PASS",
        "host": facts.host.name.value,
        "profile": wanted.profile.name,
        "backends": list(wanted.backends),
        "image": wanted.image,
        "checks": [
            {
                "id": answer.check.id,
                "question": answer.check.question,
                "verdict": answer.judgement.verdict.value,
                "reason": answer.judgement.reason,
                "remedy": answer.judgement.remedy,
                "required": answer.required,
            }
            for answer in answers
        ],
    }
