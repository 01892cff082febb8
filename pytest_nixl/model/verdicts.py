# SPDX-License-Identifier: Apache-2.0
"""The verdicts, and the outcome of a test with each verdict. Every suite and command uses this table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """The verdict of a check or a row."""

    PASS = "PASS"
    FAIL = "FAIL"
    CORRUPT = "CORRUPT"
    WRONG_TRANSPORT = "WRONG-TRANSPORT"
    IMPLAUSIBLE = "IMPLAUSIBLE"
    ERROR = "ERROR"
    MISSING = "MISSING"
    REGRESSED = "REGRESSED"
    UNCHANGED = "UNCHANGED"
    IMPROVED = "IMPROVED"
    INCONCLUSIVE = "INCONCLUSIVE"
    NO_EXPECTATION = "NO-EXPECTATION"
    UNKNOWN = "UNKNOWN"
    WARN = "WARN"
    NOT_APPLICABLE = "NOT-APPLICABLE"

    def __str__(self) -> str:
        return self.value


class Outcome(str, Enum):
    """The outcome of a test, by its verdict."""

    PASS = "pass"
    WARN = "pass with a warning"
    FAIL = "fail"
    SKIP = "skip"


#: The outcome of a test with each verdict, without and with ``--nixl-gate``. The most severe verdict is first.
_OUTCOMES: dict[Verdict, tuple[Outcome, Outcome]] = {
    Verdict.CORRUPT: (Outcome.FAIL, Outcome.FAIL),
    Verdict.FAIL: (Outcome.FAIL, Outcome.FAIL),
    Verdict.WRONG_TRANSPORT: (Outcome.FAIL, Outcome.FAIL),
    Verdict.IMPLAUSIBLE: (Outcome.FAIL, Outcome.FAIL),
    Verdict.REGRESSED: (Outcome.FAIL, Outcome.FAIL),
    # It may follow from another fault.
    Verdict.ERROR: (Outcome.FAIL, Outcome.FAIL),
    Verdict.MISSING: (Outcome.FAIL, Outcome.FAIL),
    Verdict.UNKNOWN: (Outcome.WARN, Outcome.FAIL),
    Verdict.INCONCLUSIVE: (Outcome.WARN, Outcome.FAIL),
    Verdict.NO_EXPECTATION: (Outcome.WARN, Outcome.FAIL),
    Verdict.WARN: (Outcome.WARN, Outcome.WARN),
    Verdict.PASS: (Outcome.PASS, Outcome.PASS),
    Verdict.IMPROVED: (Outcome.PASS, Outcome.PASS),
    Verdict.UNCHANGED: (Outcome.PASS, Outcome.PASS),
    Verdict.NOT_APPLICABLE: (Outcome.SKIP, Outcome.SKIP),
}
#: The verdicts, the most severe first. NOT-APPLICABLE is last: it decides only if nothing else has a verdict.
SEVERITY = tuple(_OUTCOMES)


def outcome(verdict: Verdict, *, gate: bool, required: bool = False) -> Outcome:
    """Return the outcome of a test with this verdict.

    :param gate: whether ``--nixl-gate`` is given; undecided verdicts then fail.
    :param required: whether the profile requires this check; with the gate, NOT-APPLICABLE then fails.
    """
    if verdict is Verdict.NOT_APPLICABLE and gate and required:
        return Outcome.FAIL
    return _OUTCOMES[verdict][gate]


#: Verdicts that need no explanation in a report.
GOOD = frozenset((Verdict.PASS, Verdict.UNCHANGED, Verdict.IMPROVED))
#: A row with one of these verdicts has no bandwidth to compare.
NO_BANDWIDTH = (Verdict.CORRUPT, Verdict.WRONG_TRANSPORT, Verdict.IMPLAUSIBLE, Verdict.ERROR)


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reason.

    :param reason: one sentence.
    :param remedy: what to do about it; empty: nothing.
    :param finding: the id of the finding that was seen; empty: none.
    """

    verdict: Verdict
    reason: str
    remedy: str = ""
    finding: str = ""
    #: Whether a known limit of NIXL was seen that does not affect this deployment: a PASS with a note.
    known_limit: bool = False

    def __str__(self) -> str:
        text = f"{self.verdict} {self.finding}: {self.reason}" if self.finding else f"{self.verdict}: {self.reason}"
        return f"{text}\nremedy: {self.remedy}" if self.remedy else text


def most_severe(judgements: Iterable[Judgement]) -> Judgement:
    """Return the judgement with the most severe verdict; of several, the first."""
    return min(judgements, key=lambda judgement: SEVERITY.index(judgement.verdict))


@dataclass(frozen=True)
class TextLine:
    """A line of text, and the outcome that decides its colour; None: no colour."""

    text: str
    outcome: Outcome | None = None


#: The word of a run that was ended early, in every report.
INTERRUPTED = "INTERRUPTED"
#: The word of a run in which no check came to a verdict: each was skipped, or did not run at all.
NOTHING_CHECKED = "NOTHING CHECKED"
