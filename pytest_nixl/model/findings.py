# SPDX-License-Identifier: Apache-2.0
"""Findings: known defects of NIXL by id, their acceptance by a profile, and the verdict of a check for one.

Scripts beside the documentation reproduce findings with NIXL alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from pathlib import Path

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.texts import Entries
from pytest_nixl.model.verdicts import Judgement, Verdict


@dataclass(frozen=True)
class Finding:
    """A known defect of NIXL or its tools.

    :param title: what the defect does.
    :param remedy: what an operator can do about it.
    :param met_by: the deployments that it affects.
    :param seen: the releases in which it was seen.
    """

    id: str
    title: str
    remedy: str
    met_by: str
    seen: str = "NIXL 0.9.0 to 1.5.1: every release that was tried"


@dataclass(frozen=True)
class Acceptance:
    """A finding that a profile accepts.

    :param reason: why it is accepted.
    :param expires: the last day on which it is accepted.
    """

    id: str
    reason: str
    expires: date


#: Every known finding by its id.
FINDINGS = Entries("findings", Finding)


def known_finding(text: str) -> str:
    """Return ``text`` if it is the id of a known finding. :raises ValueError: if it is not."""
    if text not in FINDINGS:
        near = get_close_matches(text.upper(), FINDINGS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"there is no finding {text!r}{hint}: expected {', '.join(FINDINGS)}")
    return text


def judge_finding(
    finding: Finding, *, occurs: bool, reason: str, affects: bool, acceptance: Acceptance | None, today: date
) -> Judgement:
    """Return the verdict of a check that looked for a finding.

    :param occurs: whether the defect was seen.
    :param reason: what was seen, as one sentence.
    :param affects: whether the defect affects this deployment. If it was only seen on processes that the check itself
        set up, it is a known limit: the check passes, and reports show it as a known limit.
    :param acceptance: the profile's acceptance of the finding; None: the profile does not accept it.
    :param today: the day by which an acceptance may have expired.
    """
    if not occurs:
        if acceptance is None:
            return Judgement(Verdict.PASS, reason, finding=finding.id)
        gone = f"the profile accepts this finding, but it no longer occurs: {reason}"
        return Judgement(Verdict.FAIL, gone, f"remove the [[accept]] of {finding.id} from the profile", finding.id)
    description = f"{finding.title}: {reason}"
    if acceptance is None and affects:
        return Judgement(Verdict.FAIL, description, finding.remedy, finding.id)
    if acceptance is None or (not affects and today <= acceptance.expires):
        return Judgement(Verdict.PASS, description, finding.remedy, finding.id, known_limit=True)
    if today > acceptance.expires:
        description = (
            f"the profile's acceptance of it expired on {acceptance.expires} ({acceptance.reason}): {description}"
        )
        remedy = f"{finding.remedy}; or give the [[accept]] of {finding.id} a later date in the profile, or remove it"
        return Judgement(Verdict.FAIL, description, remedy, finding.id)
    description = f"accepted finding, until {acceptance.expires} ({acceptance.reason}): {description}"
    return Judgement(Verdict.WARN, description, finding.remedy, finding.id)


class FindingError(NixlPluginError):
    """A known defect was observed.

    :param finding: id of the finding.
    :param reason: the observation that shows it.
    :param detail: evidence, such as the last lines of a log.
    :param remedy: what to do about this cause; empty for the finding's own remedy.
    """

    def __init__(self, finding: str, reason: str, detail: str = "", remedy: str = "") -> None:
        entry = FINDINGS[finding]
        super().__init__(f"{entry.title}: {reason}", remedy or entry.remedy, detail)
        self.finding = finding
        self.seen = reason


def reproduction(finding: str) -> str | None:
    """Return the script that reproduces a finding; None if there is none."""
    package = Path(__file__).parents[1]
    # The wheel has the scripts in the package, a clone in docs/reproductions.
    folders = (package / "docs" / "reproductions", package.parent / "docs" / "reproductions")
    scripts = (folder / f"{finding.lower().replace('-', '_')}.py" for folder in folders)
    return next((script.read_text(encoding="utf-8") for script in scripts if script.is_file()), None)
