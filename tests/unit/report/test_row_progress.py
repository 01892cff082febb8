# SPDX-License-Identifier: Apache-2.0
"""A row that takes long gets a line now and then while it is measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.cli_run import ROOT, environment
from helpers.pytester_run import PLUGIN

from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.report import row_progress
from pytest_nixl.report.row_progress import ProgressWriter, RowOfRun

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
#: Each row lasts until its first line is written, which is at once.
CONFTEST = """
import os, threading
import pytest
from pytest_nixl.report import row_progress

row_progress.FIRST_LINE_SECONDS = 0.0
written = threading.Event()
write = os.write

def write_and_tell(descriptor, text):
    count = write(descriptor, text)
    if b"row " in text:
        written.set()
    return count

@pytest.fixture
def progress(pytestconfig, monkeypatch):
    if pytestconfig.pluginmanager.get_plugin(row_progress.NAME)._writer is None:
        return lambda: None
    written.clear()
    monkeypatch.setattr(os, "write", write_and_tell)
    return lambda: written.wait(300)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "test_rows.py").write_text(ROWS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def run_rows(rows: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "--benchmark-disable", *options], cwd=rows,
        env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_words_of_a_row() -> None:
    first = RowOfRun(KEY, 1, 4, None)
    assert first.words(0.4, None) == f"row 1 of 4, 0 s: {KEY}"
    third = RowOfRun(KEY, 3, 4, 30.0)
    assert third.words(10.0, 12.34e9) == f"row 3 of 4, 10 s, 12.3 GB/s so far, about 50 s of rows left: {KEY}"
    assert third.words(45.0, None) == f"row 3 of 4, 45 s, about 30 s of rows left: {KEY}"
    large = replace(KEY, block=2 << 20)
    hint = "; to name a slow rank, --nixl-blocks=1MiB is enough"
    assert [hint in RowOfRun(key, 1, 4, None, ranks).words(0.4, None) for key, ranks in
            ((large, 3), (large, 2), (replace(KEY, block=1 << 20), 3))] == [True, False, False]  # fmt: skip
    assert "about 10 min of rows left" in RowOfRun(KEY, 1, 20, 30.0).words(0.0, None)


@pytest.mark.long
def test_a_long_row_gets_a_line(rows: Path) -> None:
    output = run_rows(rows)
    assert re.search(r"^row 1 of 2, \d+ s: UCX/WRITE/DRAM:DRAM/4KiB/batch1/depth1/0-1$", output, re.MULTILINE)
    assert re.search(r"^row 2 of 2, \d+ s, about \d+ s of rows left: UCX/WRITE", output, re.MULTILINE)


@pytest.mark.long
def test_a_quiet_run_has_no_line(rows: Path) -> None:
    assert "row 1 of 2" not in run_rows(rows, "-q")


@pytest.fixture
def pipe() -> Iterator[tuple[int, ProgressWriter]]:
    reading, writing = os.pipe()
    yield reading, ProgressWriter(writing)
    os.close(reading)


def test_the_time_to_the_next_line_doubles(pipe: tuple[int, ProgressWriter], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writer = pipe
    now, waits = [100.0], list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds
        return len(waits) > 3

    monkeypatch.setattr(row_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    doubles = SimpleNamespace(Thread=threading.Thread, Event=lambda: SimpleNamespace(wait=wait, set=lambda: None))
    monkeypatch.setattr(row_progress, "threading", doubles)
    writer.begin("{:.0f} s".format)
    writer.end()
    assert waits == [10.0, 10.0, 20.0, 40.0]
    assert os.read(reading, 100) == b"\n10 s\n\n20 s\n\n40 s\n"


def test_a_short_row_gets_no_line(pipe: tuple[int, ProgressWriter]) -> None:
    reading, writer = pipe
    writer.begin(lambda _: "words")
    writer.close()
    assert os.read(reading, 100) == b""


def test_an_output_without_a_reader_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_progress, "FIRST_LINE_SECONDS", 0.0)
    failures = list[object]()
    monkeypatch.setattr(threading, "excepthook", failures.append)
    reading, writing = os.pipe()
    os.close(reading)
    writer, described = ProgressWriter(writing), threading.Event()

    def describe(_: float) -> str:
        described.set()
        return "words"

    writer.begin(describe)
    assert described.wait(60)
    writer.close()
    assert failures == []
