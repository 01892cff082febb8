# SPDX-License-Identifier: Apache-2.0
"""All checks of the doctor: run them in order, put effects after their cause, and show the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from importlib import import_module
from typing import Any

from pytest_nixl.checks.doctor.check import REGISTERED, Check, CheckResult, Requirements, unknown
from pytest_nixl.core import extensions
from pytest_nixl.core.extensions import Extension, ExtensionError, Registry
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement, Outcome, TextLine, Verdict, outcome

#: The modules with checks, in the order in which their checks run.
_MODULES = (
    "libraries",
    "image",
    "resources",
    "rdma",
    "network",
    "gpu",
    "gpu_health",
    "etcd",
    "variables",
    "engine",
    "transfers",
)

#: The checks that try something. They fail because of a variable that another check may name.
_ATTEMPTS = ("backend-loads", "telemetry-in-process", "transfers-arrive")
#: How the reason of a check begins that knows another check to be the cause.
_FOLLOWS = re.compile(r"follows from (?P<cause>[\w-]+): ")


def checks() -> Mapping[str, Check]:
    """Return all checks by id, in the order in which they run: ours, then those that other distributions add.

    :raises ExtensionError: if one of those cannot be loaded, or has an id that is taken.
    """
    return dict(Registry(extensions.DOCTOR_CHECKS, own_checks(), _accept))


def other_checks() -> list[str]:
    """Return the ids of the checks that other distributions add; none if two of them have the same id.

    Nothing is loaded. :func:`checks` reports such ids.
    """
    try:
        return list(extensions.DOCTOR_CHECKS.extensions(own_checks()))
    except ExtensionError:
        return []


def own_checks() -> Mapping[str, Check]:
    """Return the checks of pytest-nixl itself by id, in the order in which they run."""
    for module in _MODULES:
        import_module(f"{__package__}.{module}")
    place = {f"{__package__}.{module}": number for number, module in enumerate(_MODULES)}
    return dict(sorted(REGISTERED.items(), key=lambda item: place[item[1].judge.__module__]))


def _accept(extension: Extension, loaded: Any) -> Check:
    if not isinstance(loaded, Check):
        raise extension.fault("is not a pytest_nixl.Check")
    if loaded.id != extension.name:
        raise extension.fault(f"has another id in its code, {loaded.id!r}")

    @wraps(loaded.judge)  # its module says that it is of another package
    def judge_guarded(facts: Facts, expected: Requirements) -> Judgement:
        try:
            judgement = extension.call(lambda: loaded.judge(facts, expected))
        except ExtensionError as error:
            return unknown(error.reason, error.remedy)
        if not isinstance(judgement, Judgement):
            error = extension.fault(f"returned {type(judgement).__name__} instead of a Judgement")
            return unknown(error.reason, error.remedy)
        return judgement

    return replace(loaded, judge=judge_guarded)


def judge_by_id(id: str, facts: Facts, expected: Requirements) -> Judgement:
    """Run one check.

    :raises KeyError: no check has this id.
    """
    return checks()[id].judge(facts, expected)


def examine(facts: Facts, expected: Requirements, *, gate: bool) -> tuple[CheckResult, ...]:
    """Run all checks that apply: with ``expected.image`` only those of an image.

    :param gate: whether the gate is on: undecided verdicts then fail, and so does NOT-APPLICABLE of a required check.
    """
    answers = []
    for check in checks().values():
        if check.image or not expected.image:
            judgement = check.judge(facts, expected)
            required = check.id in expected.profile.required
            answers.append(
                CheckResult(check, judgement, outcome(judgement.verdict, gate=gate, required=required), required)
            )
    return by_cause(answers, facts)


def any_failed(answers: Sequence[CheckResult]) -> bool:
    """Return whether any result fails."""
    return any(answer.outcome is Outcome.FAIL for answer in answers)


def result_lines(results: Sequence[CheckResult], *, every: bool = False, note: str = "") -> Iterator[TextLine]:
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
    for result, *same_results in alike.values():
        missed = result.outcome is Outcome.FAIL and result.judgement.verdict is Verdict.NOT_APPLICABLE
        reason = f"{result.judgement.reason}; the profile requires it" if missed else result.judgement.reason
        head = f"{result.judgement.verdict.value:<{width}}  {result.check.id:<{names}}  {reason}"
        yield TextLine(head, result.outcome)
        if result.judgement.remedy and result.outcome is not Outcome.PASS:
            yield TextLine(f"{'':<{width}}  {'':<{names}}  remedy: {result.judgement.remedy}")
        if same_results:
            same = ", ".join(other.check.id for other in same_results)
            yield TextLine(f"{'':<{width}}  {'':<{names}}  the same: {same}", result.outcome)
    if not every:
        yield TextLine(_by_topic(results))
    if note:
        yield TextLine(note)
    counts = Counter(result.judgement.verdict.value for result in results)
    bad = any_failed(results)
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


def plain_results(facts: Facts, expected: Requirements, answers: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the results as a dictionary of JSON values."""
    return {
        "verdict": "FAIL" if any_failed(answers) else "PASS",
        "host": facts.host.name.value,
        "profile": expected.profile.name,
        "backends": list(expected.backends),
        "image": expected.image,
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


def by_cause(answers: Sequence[CheckResult], facts: Facts) -> tuple[CheckResult, ...]:
    """Return the results so that the check which knows the cause precedes the attempts that fail because of it.

    The attempts say which check they follow from.

    :param answers: the results in the order of the catalogue.
    :param facts: the facts with the transfers that were tried.
    """
    attempts = [answer for answer in answers if answer.check.id in _ATTEMPTS and _went_wrong(answer)]
    faults = [proof for proof in facts.transfers if proof.fault]
    backends = {proof.backend for proof in faults}
    of_backends = [answer for answer in attempts if backends & set(re.findall(r"\w+", _subject(answer)))]
    cause = _cause(answers, attempts, of_backends, [name for proof in faults for name in proof.variables])
    if cause is None:
        return tuple(answers)
    effects = [
        answer for answer in attempts if answer is not cause and (_follows(answer, cause) or answer in of_backends)
    ]
    if not effects:
        return tuple(answers)
    later = [answer for answer in answers if answer is not cause]
    place = later.index(effects[0])
    return tuple(
        _following(answer, cause) if answer in effects else answer for answer in [*later[:place], cause, *later[place:]]
    )


def _cause(
    answers: Sequence[CheckResult],
    attempts: Sequence[CheckResult],
    of_backends: Sequence[CheckResult],
    variables: Sequence[str],
) -> CheckResult | None:
    """Return the failed check that knows the cause; None if none does.

    :param of_backends: the attempts with a backend whose transfers failed.
    :param variables: the variables without which bytes arrive.
    """
    named = {match["cause"] for answer in attempts if (match := _FOLLOWS.match(answer.judgement.reason))}
    failures = [answer for answer in answers if answer.judgement.verdict is Verdict.FAIL]
    untried = [answer for answer in failures if answer not in attempts]
    tried = ["transfers-arrive"] if variables else ["backend-loads", "transfers-arrive"]
    candidates = [
        *(answer for answer in untried if answer.check.id in named),
        *(answer for answer in untried if any(_names(answer, name) for name in variables)),
        *(answer for id in tried for answer in failures if answer.check.id == id and answer in of_backends),
    ]
    return next(iter(candidates), None)


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
