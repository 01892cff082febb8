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


def lines(results: Sequence[CheckResult], *, every: bool = False, note: str = "") -> Iterator[TextLine]:
    """Yield what is not good, each with its remedy below it, then one line of counts by topic, and the verdict last.

    Results of one cause, such as a NIXL that cannot be loaded, are one line, with the other checks below it.

    :param every: whether to yield a line for each result, not only for what is not good.
    :param note: what else to know before the verdict; empty: nothing.
    """
    shown = [result for result in results if every or not _is_good(result)]
    width = max((len(result.judgement.verdict.value) for result in shown), default=0)
    names = max((len(result.check.id) for result in shown), default=0)
    alike: dict[tuple[Judgement, Outcome], list[CheckResult]] = {}
    for result in shown:
        alike.setdefault((result.judgement, result.outcome), []).append(result)
    for result, *others in alike.values():
        missed = result.outcome is Outcome.FAIL and result.judgement.verdict is Verdict.NOT_APPLICABLE
        reason = f"{result.judgement.reason}; the profile requires it" if missed else result.judgement.reason
        head = f"{result.judgement.verdict.value:<{width}}  {result.check.id:<{names}}  {reason}"
        yield TextLine(head, result.outcome)
        if result.judgement.remedy and result.outcome is not Outcome.PASS:
            yield TextLine(f"{'':<{width}}  {'':<{names}}  remedy: {result.judgement.remedy}")
        if others:
            same = ", ".join(other.check.id for other in others)
            yield TextLine(f"{'':<{width}}  {'':<{names}}  the same: {same}", result.outcome)
    if not every:
        yield TextLine(_by_topic(results))
    if note:
        yield TextLine(note)
    counts = Counter(result.judgement.verdict.value for result in results)
    bad = failed(results)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    yield TextLine(f"NIXL doctor: {'FAIL' if bad else 'PASS'} ({counted})", Outcome.FAIL if bad else Outcome.PASS)


def _is_good(result: CheckResult) -> bool:
    """Return whether a result asks nothing of the reader."""
    calm = (Verdict.PASS, Verdict.NOT_APPLICABLE)
    return result.judgement.verdict in calm and result.outcome is not Outcome.FAIL


def _by_topic(results: Sequence[CheckResult]) -> str:
    """Return how many checks of each topic passed, and how many did not apply."""
    passed = Counter(result.check.topic for result in results if result.judgement.verdict is Verdict.PASS)
    idle = sum(result.judgement.verdict is Verdict.NOT_APPLICABLE for result in results)
    counted = ", ".join(f"{topic} {count}" for topic, count in passed.items()) or "none"
    return f"passed: {counted}; not applicable here: {idle}; -v lists each check with its reason"


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
