# SPDX-License-Identifier: Apache-2.0
"""What a run of a user's own checks writes: on the terminal, in its reports, in its store and for GitHub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import junit_suite
from helpers.pytester_run import run_pytest

from pytest_nixl.report.outputs import write_refusal
from pytest_nixl.store.store import Store

#: Checks of a user with each outcome, rows that start no worker, and a test that is no check.
CHECKS = """
import pathlib
import pytest
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.session.run import RUN

@pytest.mark.nixl_check("passes")
def test_passes():
    pass

@pytest.mark.nixl_check("nixl-loads")
def test_fails():
    raise NixlPluginError("it is wrong", "Mend it.")

@pytest.mark.nixl_check("skips")
def test_skips():
    pytest.skip("no GPU")

KEYS = [RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), block) for block in (4096, 65536)]

@pytest.fixture
def nixl_rows(): pass

@pytest.mark.nixl_check("rows")
@pytest.mark.parametrize("program_row", KEYS, ids=str)
def test_row(program_row, nixl_rows, request, benchmark):
    record = request.config.stash[RUN].record
    values = (program_row.block * 1e5,)
    record.add_row(request.node.nodeid, RowSummary.of_launches(values, ("cma/memory",), {"p50": 1e-6, "p99": 2e-6}))
    benchmark.fullname = str(program_row)
    benchmark.extra_info.update({"key": str(program_row), "launches": values, "transports": ["cma/memory"]})
    benchmark.pedantic(lambda: None, rounds=1)
    record.benchmarks.append(benchmark.stats)
    record.note("a note")
    record.note_detail("a detail")

@pytest.mark.nixl_check("spoils")
def test_spoils():
    pathlib.Path("r.html").mkdir()
    pathlib.Path("store").touch()

def test_also_mine():
    assert "planted" == "fault"

def test_mine():
    assert "planted" == "fault"
"""
WRONG = [
    "",
    "ERROR nixl-loads: it is wrong",
    "    remedy: Mend it.",
    "    about: pytest-nixl explain nixl-loads",
    "    repeat: pytest test_checks.py::test_fails --nixl-image=a:1",
]
ROWS = [
    "backend  op     memory     block  batch  depth  GB/s  Gb/s  p50 us  p99 us  floor  transport   verdict",
    "UCX      WRITE  DRAM:DRAM   4KiB      1      1  0.41  3.28       1       2      -  cma/memory  PASS",
    "UCX      WRITE  DRAM:DRAM  64KiB      1      1  6.55  52.4       1       2      -  cma/memory  PASS",
]
SKIPPED = "NOT-APPLICABLE skips: no GPU"


def sections(result: pytest.RunResult) -> dict[str, list[str]]:
    """Return the lines of each section of the terminal by its title."""
    titles: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in result.outlines:
        if title := re.fullmatch(r"=+ (.*?) =+", line):
            lines = titles.setdefault(title[1], [])
        else:
            lines.append(line)
    return titles


@pytest.fixture
def folder(pytester: pytest.Pytester) -> Path:
    pytester.makepyfile(test_checks=CHECKS)
    return pytester.path


def run(pytester: pytest.Pytester, *options: str, **env: str) -> pytest.RunResult:
    return run_pytest(pytester, "--nixl-image=a:1", *options, env={"COLUMNS": "110", **env}, in_process=True)


@pytest.mark.usefixtures("folder")
def test_a_run_that_fails_begins_with_what_is_wrong_and_ends_with_its_verdict(pytester: pytest.Pytester) -> None:
    shown = sections(run(pytester, "-k", "passes or fails or skips or row"))
    assert shown["NIXL: what is wrong, and what to do"] == WRONG
    assert shown["NIXL"] == [
        *ROWS, SKIPPED, "NIXL verdict: FAIL (3 PASS, 1 ERROR, 1 NOT-APPLICABLE; 2 rows measured)", "a note", "a detail",
    ]  # fmt: skip
    assert list(shown).index("NIXL: what is wrong, and what to do") < list(shown).index("NIXL")


def test_the_outputs_of_a_run_are_written_and_named(pytester: pytest.Pytester, folder: Path) -> None:
    options = ("--nixl-report=r.html,r.json", "--junit-xml=r.xml", "--nixl-store=store")
    tests, env = ("-k", "not spoils"), {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "s.md"}
    shown = sections(run(pytester, *options, *tests, **env))["NIXL"]
    [stored], skipped = Store(folder / "store").runs()
    stored_name = f"store/{Path(stored.source).name}"
    assert shown[5:] == [
        "a note", "a detail", f"stored: {stored_name}", "wrote r.html", "wrote r.json",
        "next: reject: open r.html; do what the first remedy says, then repeat its command",
        "::error title=NIXL ERROR nixl-loads::it is wrong%0AMend it.",
    ]  # fmt: skip
    assert skipped == []
    assert [(result.name, str(result.verdict)) for result in stored.results] == [
        ("passes", "PASS"), ("nixl-loads", "ERROR"), ("skips", "NOT-APPLICABLE"),
        *((f"rows[UCX/WRITE/DRAM:DRAM/{size}/batch1/depth1/0-1]", "PASS") for size in ("4KiB", "64KiB")),
    ]  # fmt: skip
    assert [row.bandwidth for row in stored.rows.values()] == [4096e5, 65536e5]
    assert stored.notes == ("a note", "a detail")
    summary = (folder / "s.md").read_text().splitlines()
    assert (summary[0], summary[4]) == (
        "## NIXL verdict: FAIL", "Next: **reject**: do what the first remedy says, then repeat its command."
    )  # fmt: skip
    verdict = json.loads((folder / "r.json").read_text())
    failed = [f"test_checks.py::{name}" for name in ("test_also_mine", "test_mine")]
    assert (verdict["verdict"], verdict["exit_code"], verdict["failed_tests"]) == ("FAIL", 1, failed)
    cases = {str(case.attrib["name"]): len(case.findall("failure")) for case in junit_suite(folder / "r.xml")
             if case.tag == "testcase"}  # fmt: skip
    assert [name for name, failures in cases.items() if failures] == ["test_fails", "test_also_mine", "test_mine"]
    of_checks = (folder / "r.xml").read_text().count('<property name="nixl_image" value="a:1"')
    assert of_checks == len(cases) - len(failed)


LOST = (
    ": this run's verdict is not affected, but its record is lost. Free space there or make the directory writable and "
    "run again; --benchmark-json FILE writes a record elsewhere."
)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (("-k", "row", "--nixl-store=store", "--nixl-report=r.html"),
         ["stored: {stored}", "wrote r.html", "next: accept: nothing to do; figures: r.html; compare a later run: "
          "--nixl-baseline={stored}"]),
        (("-k", "row", "--nixl-report=r.json"),
         ["wrote r.json", "next: accept: nothing to do; to compare a later run: --nixl-store=DIR, then "
          "--nixl-baseline=FILE"]),
        (("-k", "passes or mine", "--nixl-report=r.json"),
         ["wrote r.json", "next: reject: do what the first remedy says, then repeat its command"]),
        (("-k", "passes", "--nixl-store=store"), ["nothing was stored in store: no row was recorded"]),
        (("-k", "row or spoils", "--nixl-report=r.html,r.json", "--nixl-store=store"),
         [f"store cannot be written (File exists){LOST}", f"r.html cannot be written (Is a directory){LOST}",
          "wrote r.json", "next: accept: nothing to do; to compare a later run: --nixl-store=DIR, then "
          "--nixl-baseline=FILE", "the reports have no history: store cannot be read (Not a directory)"]),
    ],
)  # fmt: skip
def test_the_notes_of_a_run_name_what_was_written_and_the_next_step(
    pytester: pytest.Pytester, folder: Path, options: tuple[str, ...], lines: list[str]
) -> None:
    shown = sections(run(pytester, *options)).get("NIXL", [])
    stored = [f"store/{path.name}" for path in sorted(folder.glob("store/*.json"))]
    notes = [line for line in shown if line and not line.startswith(("NIXL", "backend", "UCX", "a "))]
    assert notes == [line.format(stored=stored[0] if stored else "") for line in lines]


@pytest.mark.usefixtures("folder")
def test_a_word_of_a_row_is_its_verdict_and_its_bandwidth(pytester: pytest.Pytester) -> None:
    lines = run(pytester, "-v", "-k", "row or passes").outlines
    assert [re.sub(r" +\[ *\d+%\]$", "", line.partition("::")[2]) for line in lines if line.endswith("%]")] == [
        "test_passes PASSED",
        "test_row[UCX/WRITE/DRAM:DRAM/4KiB/batch1/depth1/0-1] PASS 0.41 GB/s",
        "test_row[UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1] PASS 6.55 GB/s",
    ]


def test_a_refused_run_replaces_the_reports_of_an_earlier_one(pytester: pytest.Pytester, folder: Path) -> None:
    outputs = ("--nixl-report=r.json", "--junit-xml=sub/r.xml")
    result = run(pytester, *outputs, "--nixl-depth=0", GITHUB_ACTIONS="true")
    reason = "--nixl-depth: '0' is not a positive integer: expected a positive integer, or a list of them"
    assert result.errlines == ["wrote r.json", f"::error title=NIXL REFUSED::{reason}", f"ERROR: {reason}", ""]
    verdict = json.loads((folder / "r.json").read_text())
    assert [verdict[name] for name in ("verdict", "exit_code", "next", "text")] == ["REFUSED", 4, "correct", reason]
    assert (folder / "sub/r.xml").read_text() == (
        "<?xml version='1.0' encoding='utf-8'?>\n"
        '<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="0" tests="1" time="0">'
        f'<testcase classname="nixl_run" name="refused" time="0"><failure message="REFUSED: {reason}">REFUSED: {reason}'
        "</failure></testcase></testsuite></testsuites>"
    )


def test_a_rank_that_the_group_numbered_writes_only_its_own_file_if_it_is_refused(tmp_path: Path) -> None:
    names = {"xmlpath": str(tmp_path / "r.xml")}
    config = SimpleNamespace(
        stash=pytest.Stash(), pluginmanager=SimpleNamespace(get_plugins=list), getoption=lambda name, _: names[name]
    )
    run = SimpleNamespace(
        hide=lambda text: text.replace("hunter2", "***"), usable=False, rank_session=SimpleNamespace(rank=2)
    )
    for reason in ("the password hunter2 is wrong", "a later reason"):
        write_refusal(cast(Any, config), cast(Any, run), reason)
    assert [path.name for path in tmp_path.iterdir()] == ["r.rank2.xml"]
    [failure] = [case.find("failure") for case in junit_suite(tmp_path / "r.rank2.xml").findall("testcase")]
    assert failure is not None
    assert failure.attrib["message"] == "REFUSED: the password *** is wrong"
