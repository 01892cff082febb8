# SPDX-License-Identifier: Apache-2.0
"""What ``pytest-nixl explain`` prints of each kind of entry, and in which order it finds them."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pytest_nixl import cli
from pytest_nixl.cli import explain
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.settings import OPTIONS
from pytest_nixl.session.selection import SuiteCheck, suite_checks

CHECKS = (
    SuiteCheck("a-link", "suites/metadata/test_a.py::test_link", "standard", ("F-ONE",), "The link\n  is up.\n\nMore."),
    SuiteCheck("slow", "suites/faults/test_b.py::test_it[a b]", "extended", (), "It is slow."),
)
TEXTS = {
    "error-texts": """
[speaker.UCX]
sign = "ucx"
error = "(pid)?ucx error "
error_parts = ["ucx error"]
[[error]]
text = "link is down"
also = ["no link"]
by = "UCX"
means = "a linkage is broken, see `pytest suites/metadata` and mypytest suites/x, pytest suites/"
do = "[repair](checks.md) it"
[[error]]
text = "change of plan"
by = "UCX"
weight = "harmless"
means = "nothing"
[[class]]
text = "any error"
by = "UCX"
source = ".*"
means = "something"
do = "look"
""",
    "checks": """
[[fault]]
fault = "the cable is out"
sign = "a link is down, and the line linked to it"
remedy = "plug it in"
checks = ["a-link", "slow"]
[[fault]]
fault = "a PCI slot"
sign = "one"
remedy = "two"
checks = ["slow"]
[[fault]]
fault = "PCI"
sign = "three"
remedy = "four"
checks = ["slow"]
""",
}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few entries be all that are known."""
    monkeypatch.setattr(explain, "text_file", TEXTS.__getitem__)
    monkeypatch.setattr(explain, "suite_checks", lambda: CHECKS)
    monkeypatch.setattr(explain, "FINDINGS", {})
    monkeypatch.setattr(explain, "OPTIONS", [option for option in OPTIONS if option.field in ("gate", "rank")])


LINK = """\
error link is down
    by:     UCX
    means:  a linkage is broken, see `pytest suites/metadata` and mypytest suites/x, pytest suites/
    do:     repair (docs/reference/checks.md) it
"""
CHECK = """\
check a-link
    suite:  metadata (level standard)
    proves: The link is up.
    run it: pytest suites/metadata/test_a.py::test_link
"""
SLOW = """\
check slow
    suite:  faults (level extended)
    proves: It is slow.
    run it: pytest 'suites/faults/test_b.py::test_it[a b]' --nixl-level=extended
"""
FAULT = """\
fault the cable is out
    sign:   a link is down, and the line linked to it
    remedy: plug it in
    check:  a-link, slow
"""
GATE = "option --nixl-gate\n    fail on everything that is not proven to be good\n"


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("query", "printed"),
    [
        ("A-LINK", [CHECK, FAULT]),
        ("nixl-gate", [GATE]),
        ("--nixl-gate", [GATE]),
        # Whole words in a name, their beginnings, whole words and beginnings in the lines, and then parts.
        ("link", [LINK, CHECK, FAULT]),
        ("cab ou", [FAULT]),
        ("plug", [FAULT]),
        ("plu i", [FAULT]),
        ("inkage", [LINK]),
        ("ink", [LINK, CHECK, FAULT]),
        ("linkage broken", [LINK]),
        ("Extended", [SLOW]),
        (
            "pci",
            [
                "fault PCI\n    sign:   three\n    remedy: four\n    check:  slow\n",
                "fault a PCI slot\n    sign:   one\n    remedy: two\n    check:  slow\n",
            ],
        ),
        ("hang", ["error change of plan\n    by:     UCX\n    means:  nothing\n"]),
    ],
)
def test_an_entry_is_found_by_its_names_before_its_lines(
    query: str, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "--all", "--", *query.split()]) == 0
    assert capsys.readouterr().out == "".join(printed)


@pytest.mark.usefixtures("made_up")
def test_an_installed_package_names_its_suites_by_modules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "suites_folder", lambda: Path(explain.__file__).parents[1] / "suites")
    assert cli.main(["explain", "--all", "link"]) == 0
    printed = [LINK, CHECK, FAULT]
    for old, new in (
        ("pytest suites/metadata/test_a.py::", "pytest --pyargs pytest_nixl.suites.metadata.test_a::"),
        ("`pytest suites/metadata`", "`pytest --pyargs pytest_nixl.suites.metadata`"),
    ):
        printed = [text.replace(old, new) for text in printed]
    assert capsys.readouterr().out == "".join(printed)


def test_all_checks_and_findings_are_listed_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*arguments: str) -> Any:
        assert cli.main(["explain", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    assert listed("--findings") == [{"kind": "finding", **asdict(finding)} for finding in FINDINGS.values()]
    checks = {check.id: check for check in suite_checks()}
    assert [entry["id"] for entry in listed("--checks")] == list(checks)
    for entry in listed("--checks"):
        check = checks[entry["id"]]
        command = entry.pop("command")
        assert command.startswith("pytest ")
        assert command.endswith(" --nixl-level=extended") is (check.level == "extended")
        assert entry == {
            "kind": "check", "id": check.id, "suite": check.suite, "test": check.test, "level": check.level,
            "findings": list(check.findings), "proves": check.proves,
        }  # fmt: skip


def test_a_finding_is_printed_with_its_script_if_it_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    for name, script in (("NIXL-ETCD-STALE-KEY", False), ("NIXL-CUT-METADATA", True)):
        finding = FINDINGS[name]
        lines = [f"finding {name}", f"    what:    {finding.title}", f"    seen in: {finding.seen}",
                 f"    met if:  {finding.met_by}", f"    remedy:  {finding.remedy}"]  # fmt: skip
        lines += [f"    script:  `pytest-nixl explain {name} --reproduce`"] * script
        assert cli.main(["explain", "--findings", name]) == 0
        assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.usefixtures("made_up")
def test_lines_of_a_log_are_printed_with_their_meaning_and_without_an_echo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, other = tmp_path / "a.log", tmp_path / "b.log"
    log.write_text("change of plan\nucx: no link\nlink is down\nthe secret is hunter2\n")
    other.write_text("ucx error odd\n")
    _, _, explained = LINK.partition("\n")
    harmless = "change of plan (nothing)"
    for arguments in ([str(log)], ["-"], []):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
        assert cli.main(["explain", *arguments]) == 0
        assert capsys.readouterr().out == f"line 2, 2 times: no link\n{explained}also seen, harmless: {harmless}\n"
    assert cli.main(["explain", str(log), str(other)]) == 0
    any_error = f"{other}: line 1: any error\n    by:     UCX\n    means:  something\n    do:     look\n"
    assert capsys.readouterr().out == (
        f"{log}: line 2, 2 times: no link\n{explained}{any_error}also seen, harmless: {harmless}\n"
    )
    assert cli.main(["explain", "--json", str(other), str(log)]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["kind"], entry["line"], entry["count"], entry["text"]) for entry in entries] == [
        ("error", 1, 1, "any error"), ("error", 2, 2, "link is down"), ("error", 1, 1, "change of plan")
    ]  # fmt: skip
    assert cli.main(["explain", "no", "link"]) == 0
    assert capsys.readouterr().out == f"error no link\n{explained}"
