# SPDX-License-Identifier: Apache-2.0
"""While a row is measured a terminal shows one live line, and a log gets a line for a row that takes long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, environment
from helpers.pytester_run import PLUGIN
from helpers.terminal_screen import COLUMNS, open_terminal, run_on_terminal, screen

from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.report import row_progress
from pytest_nixl.report.row_progress import ProgressWriter, RowOfRun, takes_live_line

KEY = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 65536, 1, 1, (0, 1))
#: Two rows that start no worker, and a test of the same file that is no row.
ROWS = """
import pytest
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey

KEYS = [RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), block, 1, 1, (0, 1)) for block in (4096, 65536)]

@pytest.fixture
def nixl_rows(): pass

@pytest.mark.nixl_check("mine")
@pytest.mark.parametrize("program_row", KEYS, ids=str)
def test_row(program_row, nixl_rows, progress): progress()

def test_no_row(): pass
"""
#: Each row lasts until its first plain line is written, if there are plain lines, and that is at once.
CONFTEST = """
import threading
import pytest
from pytest_nixl.report import row_progress

row_progress.PLAIN_SECONDS = 0.0
written = threading.Event()
write = row_progress.ProgressWriter._write

def write_and_tell(self, text):
    write(self, text)
    written.set()

row_progress.ProgressWriter._write = write_and_tell

@pytest.fixture
def progress(pytestconfig):
    plugin = pytestconfig.pluginmanager.get_plugin(row_progress.NAME)
    if plugin._writer is None:
        return lambda: None
    written.clear() if not plugin._writer._live else None
    return lambda: written.wait(300)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "test_rows.py").write_text(ROWS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def on_terminal(rows: Path, *options: str, **changes: str) -> str:
    env = environment(PYTHONPATH=str(ROOT), **{"TERM": "xterm", **changes})
    for name in ("CI", "BUILD_NUMBER", "NO_COLOR"):
        if name not in changes:
            env.pop(name, None)
    words = [sys.executable, "-m", "pytest", *PLUGIN, "--benchmark-disable", *options]
    code, written = run_on_terminal(words, cwd=rows, env=env)
    assert code == 0, written
    return written


def test_words_of_a_row() -> None:
    first = RowOfRun(KEY, 1, 4, None)
    assert first.words(0.4, None) == f"row 1 of 4, 0 s: {KEY}"
    third = RowOfRun(KEY, 3, 4, 30.0)
    assert third.words(10.0, 12.34e9) == f"row 3 of 4, 10 s, 12.3 GB/s so far, about 50 s of rows left: {KEY}"
    assert third.words(45.0, None) == f"row 3 of 4, 45 s, about 30 s of rows left: {KEY}"
    assert "about 10 min of rows left" in RowOfRun(KEY, 1, 20, 30.0).words(0.0, None)


@pytest.mark.long
def test_a_terminal_shows_a_live_line_and_keeps_nothing_of_it(rows: Path) -> None:
    written = on_terminal(rows)
    live = re.findall(r"\x1bD\x1b\[A\x1b7\r+\n\x1b\[K(row.*?)\x1b8", written)
    assert [line.partition(",")[0] for line in live if ", 0 s" in line] == ["row 1 of 2", "row 2 of 2"]
    assert "about " not in live[0]
    assert all(len(line) < COLUMNS for line in live)
    assert "row 1 of 2, 0 s: UCX/WRITE/DRAM:DRAM/4KiB/" in live[0]
    shown = screen(written)
    assert any(re.match(r"test_rows\.py \.\.\. +\[100%\]$", line) for line in shown), shown
    assert not any("row 1 of 2" in line or "row 2 of 2" in line for line in shown)


@pytest.mark.long
def test_the_live_line_is_below_what_verbose_pytest_writes(rows: Path) -> None:
    written = on_terminal(rows, "-v")
    assert "row 2 of 2" in written
    shown = screen(written)
    assert len([line for line in shown if re.search(r"::test_\w+(\[.*\])? PASSED", line)]) == 3, shown
    assert not any("row 2 of 2" in line for line in shown)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (("-q",), {}),
        # test_variables_that_forbid_a_live_line has these two; CI shows that the variables of a run are asked.
        pytest.param((), {"NO_COLOR": "1"}, marks=pytest.mark.whole),
        pytest.param((), {"TERM": "dumb"}, marks=pytest.mark.whole),
        ((), {"CI": "true"}),
        (("--color=no",), {}),
        (("-s",), {}),
    ],
    ids=["-q", "NO_COLOR", "dumb", "CI", "--color=no", "-s"],
)
def test_no_live_line(rows: Path, options: tuple[str, ...], changes: dict[str, str]) -> None:
    written = on_terminal(rows, *options, **changes)
    assert "\x1b7" not in written
    assert "\x1bD" not in written
    assert ("row 1 of 2" in written) == ("-q" not in options)  # as plain lines


@pytest.mark.long
def test_a_pipe_gets_plain_lines(rows: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "--benchmark-disable", "--color=yes"], cwd=rows,
        env=environment(PYTHONPATH=str(ROOT), TERM="xterm"), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^row 1 of 2, \d+ s: UCX/WRITE/DRAM:DRAM/4KiB/batch1/depth1/0-1$", done.stdout, re.MULTILINE)
    assert re.search(r"^row 2 of 2, \d+ s, about \d+ s of rows left: UCX/WRITE", done.stdout, re.MULTILINE)
    assert "\x1b7" not in done.stdout


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = open_terminal()
    yield ours, os.dup(theirs)
    os.close(ours)
    os.close(theirs)


def read_until(descriptor: int, text: str) -> str:
    found = ""
    while text not in found:
        found += os.read(descriptor, 4096).decode()
    return found


def test_the_live_line_is_brought_up_to_date_and_removed(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_progress, "LIVE_SECONDS", 0.01)
    ours, theirs = terminal
    writer = ProgressWriter(theirs, live=True)
    texts = iter(["first", "second " + 100 * "x"])
    os.write(theirs, b"suite ...")
    writer.begin(lambda _: next(texts, "later"))
    written = read_until(ours, "later")
    assert screen(written)[:2] == ["suite ...", "later"]
    os.write(theirs, b".")
    writer.end()
    os.write(theirs, b"!\r\nnext")
    written += read_until(ours, "next")
    assert screen(written) == ["suite ....!", "next"]
    assert f"second {(COLUMNS - 1 - len('second ')) * 'x'}\x1b8" in written
    writer.close()


@pytest.mark.parametrize(
    ("live", "lines"),
    [
        # The time to the next plain line doubles.
        (False, [(9.0, 1.0, ""), (10.0, 10.0, "10 s"), (19.0, 1.0, ""), (20.0, 20.0, "20 s")]),
        (True, [(0.5, 0.5, ""), (1.25, 1.0, "1 s"), (2.0, 0.25, ""), (2.25, 1.0, "2 s")]),
    ],
)
def test_a_line_is_written_when_it_is_due(
    monkeypatch: pytest.MonkeyPatch, live: bool, lines: list[tuple[float, float, str]]
) -> None:
    writer, written, now = ProgressWriter(-1, live=live), list[str](), [100.0]
    monkeypatch.setattr(row_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(writer, "_write", written.append)
    monkeypatch.setattr(writer, "_thread", "another")  # the test looks in its place
    writer.begin("{:.0f} s".format)
    assert ("0 s" in "".join(written)) == live
    for seconds, left, words in lines:
        written.clear()
        now[0] = 100.0 + seconds
        assert writer._look() == pytest.approx(left)
        assert (words in "".join(written)) if words else written == []
    writer.end()
    written.clear()
    now[0] += 1000.0
    assert writer._look() == (row_progress.LIVE_SECONDS if live else row_progress.PLAIN_SECONDS)
    assert written == []


def test_a_short_row_gets_no_plain_line() -> None:
    reading, writing = os.pipe()
    writer = ProgressWriter(writing, live=False)
    writer.begin(lambda _: "words")
    writer.end()
    writer.close()
    assert os.read(reading, 100) == b""
    os.close(reading)


def test_a_terminal_that_is_gone_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = ProgressWriter(writing, live=True)
    writer.begin(lambda _: "words")
    writer.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "CI": "1"}, False),
        ({"TERM": "xterm", "BUILD_NUMBER": "7"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_variables_that_forbid_a_live_line(environ: dict[str, str], expected: bool) -> None:
    assert takes_live_line(environ) is expected


@pytest.mark.long
@pytest.mark.whole  # the words and the line are tested above, with rows that take no time
def test_real_rows_on_a_terminal_say_what_their_launches_reached() -> None:
    options = ("--nixl-backend=UCX", "--nixl-op=WRITE", "--nixl-blocks=64KiB,1MiB", "--nixl-min-launches=2")
    env = {name: value for name, value in environment(TERM="xterm").items() if name not in ("CI", "NO_COLOR")}
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", BANDWIDTH, *options, "--nixl-duration=1100ms"]
    _, written = run_on_terminal(words, cwd=ROOT, env=env)
    assert re.search(r"row 1 of 2, \d+ s, [\d.]+ GB/s so far: UCX/WRITE/DRAM:DRAM/64KiB", written), written
    assert re.search(r"row 2 of 2, \d+ s, .*about \d+ s of rows left", written), written
    shown = screen(written)
    assert any(re.match(r"bandwidth [.sFWE]+", line) for line in shown), shown
    assert not any(re.search(r"row \d of 2", line) for line in shown)
