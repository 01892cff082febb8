# SPDX-License-Identifier: Apache-2.0
"""The verdicts, and the outcome of a test with each verdict. Every suite and command uses this table."""

from __future__ import annotations

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


_ALWAYS_FAIL = {
    Verdict.FAIL,
    Verdict.CORRUPT,
    Verdict.WRONG_TRANSPORT,
    Verdict.IMPLAUSIBLE,
    Verdict.ERROR,
    Verdict.MISSING,
    Verdict.REGRESSED,
}
_UNDECIDED = {Verdict.INCONCLUSIVE, Verdict.NO_EXPECTATION, Verdict.UNKNOWN}


def outcome(verdict: Verdict, *, gate: bool, required: bool = False) -> Outcome:
    """Return the outcome of a test with this verdict.

    :param gate: whether ``--nixl-gate`` is given; undecided verdicts then fail.
    :param required: whether the profile requires this check; with the gate, NOT-APPLICABLE then fails.
    """
    if verdict in _ALWAYS_FAIL:
        return Outcome.FAIL
    if verdict in _UNDECIDED:
        return Outcome.FAIL if gate else Outcome.WARN
    if verdict is Verdict.NOT_APPLICABLE:
        return Outcome.FAIL if gate and required else Outcome.SKIP
    return Outcome.WARN if verdict is Verdict.WARN else Outcome.PASS


#: Verdicts that need no explanation in a report.
GOOD = frozenset((Verdict.PASS, Verdict.UNCHANGED, Verdict.IMPROVED))


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


@dataclass(frozen=True)
class TextLine:
    """A line of text, and the outcome that decides its colour; None: no colour."""

    text: str
    outcome: Outcome | None = None


#: The word of a run that was ended early, in every report.
INTERRUPTED = "INTERRUPTED"
#: The word of a run in which no check came to a verdict: each was skipped, or did not run at all.
NOTHING_CHECKED = "NOTHING CHECKED"
