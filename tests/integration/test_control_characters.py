# SPDX-License-Identifier: Apache-2.0
"""Control characters and broken texts of hosts, images and errors control no terminal and end no report."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.pytester_run import run_pytest
from helpers.records import KEY, record, write

from pytest_nixl.cli import main
from pytest_nixl.report.files import write_report
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.record_reader import parse_recorded

#: ESC, BEL, a C1 control, a sign that turns the direction of text, and half a surrogate pair (of a byte above 127).
HOSTILE = "h\x1b[2Jo\x07s\x9bt\u202e\udcff"
ESCAPED = r"h\x1b[2Jo\x07s\x9bt\u202e\udcff"
SIGNS = set("\x1b\x07\x9b\u202e\udcff")
FAILS = """
import pytest
from pytest_nixl.core.errors import NixlPluginError

@pytest.mark.nixl_check("etcd-roundtrip")
def test_it(nixl_settings):
    raise NixlPluginError("the error says " + bytes({raw}).decode(errors="surrogateescape"), "ask " + chr(27))
"""
FILES = ("r.html", "r.csv", "r.json", "r.prom", "summary.md")


def signs(text: str) -> set[str]:
    return SIGNS & set(text)


def test_no_report_of_a_run_has_a_control_character(pytester: pytest.Pytester) -> None:
    raw = list(HOSTILE.encode(errors="surrogateescape"))
    pytester.makepyfile(FAILS.format(raw=raw))
    summary = pytester.path / FILES[-1]
    done = run_pytest(
        pytester, "-v", "--nixl-report=" + ",".join(FILES[:-1]), f"--nixl-image={HOSTILE}",
        env={"NIXL_NODE_NAME": HOSTILE, "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}, in_process=True,
    )  # fmt: skip
    output = "\n".join([*done.outlines, *done.errlines])
    assert f"the error says {ESCAPED}" in output
    assert signs(output) == set()
    for name in FILES:
        assert signs((pytester.path / name).read_text(encoding="utf-8")) == set(), name
    assert "h\\\\x1b" in summary.read_text()  # Markdown escapes the backslash
    assert ESCAPED in (pytester.path / "r.html").read_text()


def test_commands_escape_what_a_record_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record is a file of another host. Half a surrogate pair makes it unreadable, so it has the other signs."""
    hostile = HOSTILE[:-1]
    path = write(tmp_path / "a.json", record(f"registry/{hostile}", {KEY: [5.0, 5.1, 5.2, 5.3, 5.4]}))
    main(["compare", str(path), str(path)])
    output = capsys.readouterr().out
    assert ESCAPED[: -len(r"\udcff")] in output
    assert signs(output) == set()


def test_the_table_of_the_rows_of_a_hostile_host_and_image_has_no_control_character(tmp_path: Path) -> None:
    hostile = HOSTILE[:-1]
    data = record(f"registry/{hostile}", {KEY: [5.0]}, name=hostile)
    write_report(RunReport(parse_recorded(data, "x")), tmp_path / "r.csv")
    text = (tmp_path / "r.csv").read_text()
    assert text.count(ESCAPED[: -len(r"\udcff")]) == 2
    assert signs(text) == set()


@pytest.mark.parametrize(
    "option",
    [
        f"--nixl-baseline={HOSTILE[:-1]}",
        f"--nixl-etcd-cert={HOSTILE[:-1]}",
        "--nixl-baseline=password=Sw0rdfish1",
        f"--nixl-profile={'x' * 100_000}",
    ],
    ids=["baseline", "certificate", "secret", "long"],
)
def test_pytest_prints_a_refusal_short_and_without_control_characters_and_secrets(
    option: str, pytester: pytest.Pytester
) -> None:
    (pytester.path / HOSTILE[:-1]).touch()  # a certificate, whose key is missing
    pytester.makepyfile("def test_it(nixl_settings): pass")
    done = run_pytest(pytester, option, in_process=True)
    text = "\n".join([*done.outlines, *done.errlines])
    assert done.ret == 4
    assert f"ERROR: {option.partition('=')[0]}" in text
    assert signs(text) == set()
    assert "Sw0rdfish1" not in text
    assert len(text) < 3000


def test_a_refusal_escapes_the_words_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", HOSTILE]) == 2
    errors = capsys.readouterr().err
    assert "x1b" in errors
    assert signs(errors) == set()
