# SPDX-License-Identifier: Apache-2.0
"""The verdict of a whole run, the same on the terminal, in every report and in verdict.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import (
    GOOD,
    INTERRUPTED,
    NOTHING_CHECKED,
    Outcome,
    TextLine,
    Verdict,
    outcome,
)

#: The check of what fails a run but belongs to no other check.
WHOLE_RUN = "whole-run"
#: The check of a suite that measures, and did not because the run is parallel.
UNMEASURED = "unmeasured-suite"

#: The most failing results in ``verdict.json``, and the most characters of each text.
_MOST_FAILING, _LONGEST = 100, 2000

#: The most deselected checks that the last line names.
_NAMED = 3

#: The most figures in ``verdict.json``.
MOST_FIGURES = 1000
#: The version of ``verdict.json``: another number means that a field was removed or has another meaning.
VERDICT_FORMAT = 1

#: All verdicts of a run. REFUSED: it did not start.
RUN_VERDICTS = ("PASS", "FAIL", str(Verdict.INCONCLUSIVE), INTERRUPTED, NOTHING_CHECKED, "REFUSED")

#: Verdicts of checks that say nothing of what was to be validated.
_UNCHECKED = {Verdict.NOT_APPLICABLE, Verdict.MISSING}
#: Verdicts of checks that could not be decided. A run in which nothing passed, and one of these, did not pass.
_UNDECIDED = {Verdict.INCONCLUSIVE, Verdict.UNKNOWN, Verdict.NO_EXPECTATION}


@dataclass(frozen=True)
class Conclusion:
    """The verdict of a run.

    :param outcome: the worst outcome of its results; FAIL if the run was interrupted.
    :param failed: whether a result fails the run.
    :param interrupted: how far the run came and what ended it early; empty: it was completed.
    :param beside: why the run fails although it was completed and no result fails; empty: it does not.
    :param nothing: whether no check came to a verdict. With ``--nixl-gate`` such a run fails for what is MISSING.
    :param unmeasured: why suites measured nothing, if nothing else fails the run; empty: they measured.
    :param undecided: whether no check passed, and one could not be decided. With ``--nixl-gate`` such a run fails.
    :param retry: whether the gate fails it for nothing but rows that are INCONCLUSIVE: the run may pass another time.
    """

    outcome: Outcome
    failed: bool
    interrupted: str = ""
    beside: str = ""
    nothing: bool = False
    undecided: bool = False
    unmeasured: str = ""
    retry: bool = False

    @classmethod
    def of(cls, results: Sequence[Result], *, gate: bool, interrupted: str = "", code: int | None = None) -> Conclusion:
        """Return the verdict of a run with these results.

        :param gate: whether ``--nixl-gate`` is given.
        :param code: pytest's exit code; None: not known.
        """
        outcomes = [outcome(result.verdict, gate=gate) for result in results]
        worst = next((candidate for candidate in (Outcome.FAIL, Outcome.WARN) if candidate in outcomes), Outcome.PASS)
        failing = [result for result, candidate in zip(results, outcomes, strict=True) if candidate is Outcome.FAIL]
        if failing and all(result.check == UNMEASURED for result in failing) and not gate and not interrupted:
            reasons = "; ".join(result.reason for result in failing)
            return cls(Outcome.FAIL, failed=False, nothing=True, unmeasured=reasons)
        checked = {result.verdict for result in results} - _UNCHECKED
        # With the gate, what was to be checked is MISSING. Older records, of rows alone, do not have that either.
        nothing = not checked and not gate if results else not code
        if nothing and not interrupted:
            return cls(Outcome.FAIL if code or worst is Outcome.FAIL else Outcome.WARN, failed=False, nothing=True)
        suffix = _beside(code) if code and worst is not Outcome.FAIL and not interrupted else ""
        return cls(
            Outcome.FAIL if interrupted or suffix else worst,
            worst is Outcome.FAIL,
            interrupted,
            suffix,
            undecided=bool(checked & _UNDECIDED) and not checked & GOOD,
            retry=bool(failing) and all(_may_pass_later(result) for result in failing),
        )

    @property
    def verdict(self) -> str:
        """One of :data:`RUN_VERDICTS` but REFUSED. A run that failed and was interrupted is FAIL."""
        if self.nothing:
            return NOTHING_CHECKED
        if self.failed or self.beside:
            return "FAIL"
        if self.interrupted:
            return INTERRUPTED
        return str(Verdict.INCONCLUSIVE) if self.undecided else "PASS"

    def __str__(self) -> str:
        if self.interrupted:
            return f"FAIL, {self.interrupted}" if self.failed else self.interrupted
        if self.unmeasured:
            return f"{self.verdict}, because {self.unmeasured}"
        if self.beside:
            return f"FAIL, because {self.beside}"
        if self.retry:
            return f"{Verdict.INCONCLUSIVE}, retry while the machine is quiet"
        return "PASS, with warnings" if self.verdict == "PASS" and self.outcome is Outcome.WARN else self.verdict


def _may_pass_later(result: Result) -> bool:
    """Whether a row was measured, or compared, without a decision: other processes may be why."""
    return result.verdict is Verdict.INCONCLUSIVE and result.row is not None


def _passed_without_a_floor(result: Result) -> bool:
    """Whether a row of whole blocks passed by its transport or latency alone, however slow it is."""
    row = result.row
    whole = isinstance(row, RowKey) and not (row.kv or row.pattern)
    return whole and result.verdict is Verdict.PASS and result.summary is not None and not result.summary.floor


def _beside(code: int) -> str:
    """Say what fails a run that pytest ended with an exit code other than 0, if no check fails it."""
    return "no test was collected" if code == 5 else "a test failed that is not a NIXL check"


def counted(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of results with each verdict that occurs, in the order of the verdicts."""
    counts = Counter(result.verdict for result in results)
    return {str(verdict): counts[verdict] for verdict in Verdict if counts[verdict]}


def known_limits(results: Sequence[Result]) -> list[str]:
    """Return the ids of the findings that were seen as known limits, without those that affect this deployment."""
    met = {result.finding for result in results if result.finding and result.verdict is not Verdict.PASS}
    return [id for id in dict.fromkeys(result.finding for result in results if result.known_limit) if id not in met]


def known_limits_line(results: Sequence[Result], version: str) -> str:
    """Return one line with the number of known limits that do not affect this deployment; empty: there are none.

    :param version: the version of NIXL; empty: not known.
    """
    count = len(known_limits(results))
    if not count:
        return ""
    nixl = f"NIXL {version}" if version else "NIXL"
    met = any(result.finding and result.verdict is not Verdict.PASS for result in results)
    limits = f"{count} {'more ' if met else ''}known limit{'' if count == 1 else 's'} of {nixl}"
    return f"{limits}, seen only under conditions that the checks made: `pytest-nixl explain --findings`"


def summary_line(
    results: Sequence[Result],
    *,
    gate: bool,
    interrupted: str = "",
    left_out: Sequence[str] = (),
    deselected: Sequence[str] = (),
    code: int | None = None,
) -> TextLine:
    """Return the last line of the terminal report: the run's verdict, then the number of checks with each verdict.

    :param code: pytest's exit code; None: not known.
    :param left_out: the names of the suites that were not selected.
    :param deselected: the ids of the checks that were deselected, such as by ``-k``.
    """
    listing = ", ".join(f"{count} {verdict}" for verdict, count in counted(results).items())
    measured = sum(result.summary is not None for result in results)
    rows = f"{measured} row{'' if measured == 1 else 's'} measured"
    if gate and (bare := sum(_passed_without_a_floor(result) for result in results)):
        rows += f", {bare} of them passed without a floor"
    unselected = f"; suites not selected: {', '.join(left_out)}" if left_out else ""
    if deselected:
        more = f" and {len(deselected) - _NAMED} more" if len(deselected) > _NAMED else ""
        unselected += f"; checks deselected: {', '.join(deselected[:_NAMED])}{more}"
    verdict = Conclusion.of(results, gate=gate, interrupted=interrupted, code=code)
    text = f"NIXL {'gate' if gate else 'verdict'}: {verdict} ({listing or 'no check ran'}; {rows}{unselected})"
    return TextLine(text, verdict.outcome)


def verdict_fields(results: Sequence[Result], *, gate: bool, interrupted: str = "") -> dict[str, Any]:
    """Return the part of ``verdict.json`` that is the same for every rank, as JSON values.

    :param gate: whether ``--nixl-gate`` is given.
    :param interrupted: how far the run came and what ended it early; empty: it was completed.
    """
    verdict = Conclusion.of(results, gate=gate, interrupted=interrupted)
    failing = [result for result in results if outcome(result.verdict, gate=gate) is Outcome.FAIL]
    return {
        "verdict": verdict.verdict,
        "gate": gate,
        "warnings": sum(outcome(result.verdict, gate=gate) is Outcome.WARN for result in results),
        "interrupted": interrupted,
        "checks": counted(results),
        "rows": sum(result.summary is not None for result in results),
        "failing": [
            {
                "check": result.check,
                "row": str(result.row or ""),
                "verdict": str(result.verdict),
                "reason": result.reason[:_LONGEST],
                "remedy": result.remedy[:_LONGEST],
            }
            for result in failing[:_MOST_FAILING]
        ],
        "known_limits": known_limits(results),
        "failing_left_out": max(0, len(failing) - _MOST_FAILING),
        "figures": verdict_figures(results),
    }


#: What each word of :func:`next_step` asks of a reader.
NEXT_STEPS = {
    "accept": "nothing to do",
    "retry": "start it again while the machine is quiet: what it measured decides nothing, or it did not end",
    "review": "a row has no floor, or there is no baseline: keep this run if it is good, and judge the next one by it",
    "reject": "do what the first remedy says, then repeat its command",
    "correct": "correct the command or the machine: nothing was validated",
}


def next_step(report: Mapping[str, Any]) -> str:
    """Return what a pipeline does next: a key of :data:`NEXT_STEPS`.

    :param report: the values of ``verdict.json``.
    """
    if report["verdict"] in ("REFUSED", NOTHING_CHECKED):
        return "correct"  # the command, or the machine: nothing is known of what was to be validated
    failing = {failure["verdict"] for failure in report["failing"]}
    if report["failing_left_out"]:
        failing |= {
            failure for failure in report["checks"] if outcome(Verdict(failure), gate=report["gate"]) is Outcome.FAIL
        }
    if failing - {Verdict.INCONCLUSIVE, Verdict.NO_EXPECTATION}:
        return "reject"
    if Verdict.NO_EXPECTATION in failing:
        return "review"
    return "accept" if report["verdict"] == "PASS" else "retry"


def verdict_figures(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the named figures of ``verdict.json``, each with its bounds and whether it is within them.

    ``at_most`` and ``at_least`` are in the figure's unit; None: the profile has no such bound.
    """
    return [
        {
            "check": result.check,
            "name": figure.name,
            "labels": dict(figure.labels),
            "value": figure.value,
            "unit": figure.unit,
            "at_most": figure.at_most,
            "at_least": figure.at_least,
            "verdict": str(Verdict.PASS if figure.within else Verdict.FAIL),
        }
        for result in results
        for figure in result.measured
        if math.isfinite(figure.value)
    ][:MOST_FIGURES]


def interrupted_before(told_before: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the ``verdict.json`` values of a run that lost a rank after its verdict was sent to the ranks.

    :param told_before: the values that were sent.
    :param reason: what happened to the rank.
    """
    verdict = "FAIL" if told_before.get("verdict") == "FAIL" else INTERRUPTED
    return {
        **told_before,
        "verdict": verdict,
        "interrupted": told_before.get("interrupted") or f"{INTERRUPTED}: {reason}",
    }


def failed_beside(told_before: Mapping[str, Any], code: int) -> dict[str, Any]:
    """Return the ``verdict.json`` values of a run that pytest ended with an exit code other than 0: it is FAIL.

    :param told_before: the values by the checks alone.
    :param code: the exit code.
    """
    without_checks = told_before.get("verdict") == NOTHING_CHECKED and not told_before.get("checks")
    if told_before.get("verdict") not in ("PASS", Verdict.INCONCLUSIVE) and not without_checks:
        return dict(told_before)
    failure = {"check": "", "row": "", "verdict": "FAIL", "reason": f"{_beside(code)} (exit code {code})", "remedy": ""}
    return {**told_before, "verdict": "FAIL", "failing": [failure]}


def without_results(verdict: str, interrupted: str = "") -> dict[str, Any]:
    """Return the ``verdict.json`` values of a run without results: it was refused, or rank 0 was lost.

    :param verdict: one of :data:`RUN_VERDICTS`.
    """
    return {**verdict_fields((), gate=False), "verdict": verdict, "interrupted": interrupted}
