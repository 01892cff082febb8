# SPDX-License-Identifier: Apache-2.0
"""Findings: the verdict for each state of a known defect, and what a profile may accept."""

from __future__ import annotations

from datetime import date

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl.judge.profiles import parse_profile
from pytest_nixl.model.conclusion import known_limits, known_limits_line
from pytest_nixl.model.findings import FINDINGS, Acceptance, judge_finding
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict

ID = "NIXL-ETCD-HTTPS-PLAINTEXT"
TODAY = date(2026, 11, 20)


def _accepted(expires: date) -> Acceptance:
    return Acceptance(ID, "our etcd is on loopback", expires)


@pytest.mark.parametrize(
    ("occurs", "affects", "acceptance", "verdict", "message"),
    [
        (False, False, None, Verdict.PASS, "seen"),
        (True, False, None, Verdict.PASS, FINDINGS[ID].title + ": seen"),
        (True, False, _accepted(TODAY), Verdict.PASS, FINDINGS[ID].title + ": seen"),
        (True, True, None, Verdict.FAIL, FINDINGS[ID].title + ": seen"),
        (True, True, _accepted(TODAY), Verdict.WARN, "accepted finding, until 2026-11-20 (our etcd is on loopback): "),
        (True, False, _accepted(date(2026, 11, 19)), Verdict.FAIL, "expired on 2026-11-19 (our etcd is on loopback)"),
        (False, True, _accepted(date(2026, 11, 19)), Verdict.FAIL, "no longer occurs: seen"),
        (False, False, _accepted(TODAY), Verdict.FAIL, "no longer occurs: seen"),
    ],
)
def test_a_finding_is_judged(
    occurs: bool, affects: bool, acceptance: Acceptance | None, verdict: Verdict, message: str
) -> None:
    judgement = judge_finding(
        FINDINGS[ID], occurs=occurs, reason="seen", affects=affects, acceptance=acceptance, today=TODAY
    )
    assert judgement.verdict is verdict
    assert message in judgement.reason
    assert judgement.finding == ID
    assert judgement.known_limit is (occurs and not affects and verdict is Verdict.PASS)
    if verdict is Verdict.FAIL and acceptance is not None:
        assert f"the [[accept]] of {ID}" in judgement.remedy


PROFILE = '[profile]\nname = "x"\n'
ACCEPT = f'id = "{ID}"\nreason = "on loopback"\nexpires = 2030-01-31'


def test_a_profile_accepts_findings() -> None:
    profile = parse_profile(f"{PROFILE}[[accept]]\n{ACCEPT}".encode(), "x.toml")
    assert profile.acceptance(ID) == Acceptance(ID, "on loopback", date(2030, 1, 31))
    assert profile.acceptance("NIXL-ETCD-SILENT-FAILURE") is None


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            'id = "NIXL-ETCD-HTTPS"\nreason = "r"\nexpires = 2030-01-31',
            f"accept #1, id: there is no finding 'NIXL-ETCD-HTTPS' (did you mean {ID}?): expected {ID}, NIXL-",
        ),
        ('reason = "r"\nexpires = 2030-01-31', "accept #1, id: missing: expected the id of a finding"),
        (f'id = "{ID}"\nexpires = 2030-01-31', "accept #1, reason: missing: expected a text that says why"),
        (f'id = "{ID}"\nreason = "r"', "accept #1, expires: missing: expected a day without quotes, such as"),
        (f'id = "{ID}"\nreason = "r"\nexpires = "soon"', "accept #1, expires: a text, not a day: expected a day"),
        (f'id = "{ID}"\nreason = "r"\nexpires = 2030-01-31T00:00:00', "accept #1, expires: a date or time, not a day:"),
        (f'id = "{ID}"\nreason = "r"\nexpires = 2030-02-31', "is not TOML ("),
        (f'id = "{ID}"\nreason = "r"\nuntil = 2030-01-31', "accept #1, until: unknown key: expected id, reason"),
        (f"{ACCEPT}\n[[accept]]\n{ACCEPT}", f"accept #2, id: {ID} is accepted twice: expected one [[accept]] for each"),
    ],
)
def test_an_invalid_acceptance_is_refused(lines: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_profile(f"{PROFILE}[[accept]]\n{lines}\n".encode(), "x.toml")
    assert str(caught.value).startswith("profile x.toml")
    assert sentence in str(caught.value)


TEST = """
import pytest
from suites.conftest import *

@pytest.mark.nixl_check("https-is-plaintext")
def test_it(finding):
    finding("NIXL-ETCD-HTTPS-PLAINTEXT", True, "seen on the wire", affects=True)
"""


def test_a_finding_has_a_separate_line_in_the_summary(pytester: pytest.Pytester) -> None:
    accepted = f'[[accept]]\nid = "{ID}"\nreason = "on loopback"\nexpires = 2999-12-31\n'
    (pytester.path / "mine.toml").write_text(PROFILE + accepted)
    pytester.makepyfile(TEST)
    done = run_pytest(pytester, "--nixl-profile=./mine.toml", "--junit-xml=junit.xml", in_process=True)
    done.stdout.fnmatch_lines([f"WARN {ID}: accepted finding, until 2999-12-31 (on loopback): *: seen on the wire"])
    assert done.ret == 0
    assert f'name="nixl_finding" value="{ID}"' in (pytester.path / "junit.xml").read_text()


def _limit(id: str, verdict: Verdict = Verdict.PASS) -> Result:
    return Result("x", id, verdict, finding=id, known_limit=bool(id) and verdict is Verdict.PASS)


def test_a_finding_that_affects_the_deployment_does_not_count_as_known_limit() -> None:
    results = [_limit("A"), _limit("A"), _limit("B"), _limit("A", Verdict.FAIL)]
    assert known_limits(results) == ["B"]
    command = "seen only under conditions that the checks made: `pytest-nixl explain --findings`"
    assert known_limits_line(results, "1.5.1") == f"1 more known limit of NIXL 1.5.1, {command}"
    once = [_limit("A"), _limit("A"), _limit("", Verdict.FAIL)]
    assert known_limits_line(once, "") == f"1 known limit of NIXL, {command}"
    assert known_limits_line(once[2:], "1.5.1") == ""
