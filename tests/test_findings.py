# SPDX-License-Identifier: Apache-2.0
"""Findings: what each state of a known defect comes to, and what a profile may say of it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from inner import run_pytest

from pytest_nixl.gate.findings import FINDINGS, Acceptance, judge_finding
from pytest_nixl.gate.profiles import load_profile, parse_profile
from pytest_nixl.gate.verdicts import Verdict

ID = "NIXL-ETCD-HTTPS-PLAINTEXT"
TODAY = date(2026, 11, 20)


def _accepted(expires: date) -> Acceptance:
    return Acceptance(ID, "our etcd is on loopback", expires)


@pytest.mark.parametrize(
    ("occurs", "affects", "acceptance", "verdict", "words"),
    [
        (False, False, None, Verdict.PASS, "seen"),
        (True, False, None, Verdict.WARN, "is read and then spoken in plaintext: seen"),
        (True, True, None, Verdict.FAIL, "is read and then spoken in plaintext: seen"),
        (True, True, _accepted(TODAY), Verdict.WARN, "accepted finding, until 2026-11-20 (our etcd is on loopback): "),
        (True, False, _accepted(date(2026, 11, 19)), Verdict.FAIL, "its acceptance expired on 2026-11-19 (our etcd is"),
        (False, True, _accepted(date(2026, 11, 19)), Verdict.FAIL, "accepted by the profile and no longer occurs: "),
        (False, False, _accepted(TODAY), Verdict.FAIL, "accepted by the profile and no longer occurs: seen"),
    ],
)  # fmt: skip
def test_a_finding_is_judged(
    occurs: bool, affects: bool, acceptance: Acceptance | None, verdict: Verdict, words: str
) -> None:
    judgement = judge_finding(
        FINDINGS[ID], occurs=occurs, reason="seen", affects=affects, acceptance=acceptance, today=TODAY
    )
    assert judgement.verdict is verdict
    assert words in judgement.reason
    assert judgement.finding == ID
    if verdict is Verdict.FAIL and acceptance is not None:
        assert f"the [[accept]] of {ID}" in judgement.remedy


PROFILE = '[profile]\nname = "x"\n'


def test_a_profile_accepts_findings() -> None:
    text = PROFILE + f'[[accept]]\nid = "{ID}"\nreason = "on loopback"\nexpires = 2030-01-31\n'
    profile = parse_profile(text.encode(), "x.toml")
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
        (f'id = "{ID}"\nreason = " "\nexpires = 2030-01-31', "accept #1, reason: empty: expected a text that says why"),
        (f'id = "{ID}"\nreason = "r"', "accept #1, expires: missing: expected a day without quotes, such as"),
        (f'id = "{ID}"\nreason = "r"\nexpires = "soon"', "accept #1, expires: a text, not a day: expected a day"),
        (f'id = "{ID}"\nreason = "r"\nexpires = 2030-01-31T00:00:00', "accept #1, expires: a date or time, not a day:"),
        (f'id = "{ID}"\nreason = "r"\nexpires = 2030-02-31', "is not TOML ("),
        (f'id = "{ID}"\nreason = "r"\nuntil = 2030-01-31', "accept #1, until: unknown key: expected id, reason"),
        (
            f'id = "{ID}"\nreason = "r"\nexpires = 2030-01-31\n'
            f'[[accept]]\nid = "{ID}"\nreason = "r"\nexpires = 2031-01-31',
            f"accept #2, id: {ID} is accepted twice: expected one [[accept]] for each finding",
        ),
    ],
)  # fmt: skip
def test_what_a_profile_may_not_say_of_findings_is_refused(lines: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_profile(f"{PROFILE}[[accept]]\n{lines}\n".encode(), "x.toml")
    assert str(caught.value).startswith("profile x.toml")
    assert sentence in str(caught.value)


def test_no_bundled_profile_accepts_what_would_expire_in_a_users_hands() -> None:
    assert load_profile("loopback").accepted == ()


TEST = """
import pytest
from suites.conftest import *

@pytest.mark.nixl_check("https-is-plaintext")
def test_it(finding):
    finding("NIXL-ETCD-HTTPS-PLAINTEXT", {occurs}, "seen on the wire", affects={affects})
"""


@pytest.mark.parametrize(
    ("occurs", "affects", "expires", "code", "line"),
    [
        (True, False, None, 0, f"WARN {ID}: https:// in NIXL_ETCD_ENDPOINTS is read and then spoken in plaintext: "),
        (True, True, None, 1, f"FAIL {ID}: https:// in NIXL_ETCD_ENDPOINTS is read and then spoken in plaintext: "),
        (True, True, "2999-12-31", 0, f"WARN {ID}: accepted finding, until 2999-12-31 (on loopback): https://"),
        (True, True, "2020-01-31", 1, f"FAIL {ID}: its acceptance expired on 2020-01-31 (on loopback): https://"),
        (False, False, "2999-12-31", 1, f"FAIL {ID}: it is accepted by the profile and no longer occurs: seen on"),
    ],
)  # fmt: skip
def test_a_finding_has_a_line_of_its_own_in_the_summary(
    pytester: pytest.Pytester, tmp_path: Path, occurs: bool, affects: bool, expires: str | None, code: int, line: str
) -> None:
    profile = tmp_path / "mine.toml"
    accept = f'[[accept]]\nid = "{ID}"\nreason = "on loopback"\nexpires = {expires}\n' if expires else ""
    profile.write_text(PROFILE + accept)
    pytester.makepyfile(TEST.format(occurs=occurs, affects=affects))
    done = run_pytest(pytester, f"--nixl-profile={profile}", "--junit-xml=junit.xml")
    done.stdout.fnmatch_lines([f"{line.replace('[', '[[]')}*"])
    assert done.ret == code
    assert f'name="nixl_finding" value="{ID}"' in (pytester.path / "junit.xml").read_text()
