# SPDX-License-Identifier: Apache-2.0
"""The verdicts, and what each does to a test: the one table that every suite and command follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pytest_nixl.model.verdicts import GOOD, Outcome, Verdict, outcome


class Verdict(str, Enum):
    """What a check or a row came to."""

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
    """What a verdict makes of the test that reached it."""

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
    """Return what ``verdict`` does to its test.

    :param gate: whether ``--nixl-gate`` is given: what is undecided then fails.
    :param required: whether the profile requires this check: with the gate it may then not be NOT-APPLICABLE.
    """
    if verdict in _ALWAYS_FAIL:
        return Outcome.FAIL
    if verdict in _UNDECIDED:
        return Outcome.FAIL if gate else Outcome.WARN
    if verdict is Verdict.NOT_APPLICABLE:
        return Outcome.FAIL if gate and required else Outcome.SKIP
    return Outcome.WARN if verdict is Verdict.WARN else Outcome.PASS


#: What needs no word of explanation.
GOOD = frozenset((Verdict.PASS, Verdict.UNCHANGED, Verdict.IMPROVED))


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reason in one sentence and what to do about it; ``finding``: the id of that it is about."""

    verdict: Verdict
    reason: str
    remedy: str = ""
    finding: str = ""
    #: Whether a known limit of NIXL was seen that this deployment does not meet: a PASS with a note.
    known_limit: bool = False

    def __str__(self) -> str:
        text = f"{self.verdict} {self.finding}: {self.reason}" if self.finding else f"{self.verdict}: {self.reason}"
        return f"{text}\nremedy: {self.remedy}" if self.remedy else text


#: The word of a run that was ended early, in every report.
INTERRUPTED = "INTERRUPTED"


@dataclass(frozen=True)
class TextLine:
    """A line, and whether it is good, doubtful or bad; None: neither."""

    text: str
    outcome: Outcome | None = None
