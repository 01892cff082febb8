# SPDX-License-Identifier: Apache-2.0
"""A row that takes long gets a line now and then while it is measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import ROOT, environment
from helpers.pytester_run import PLUGIN

from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.report import row_progress
from pytest_nixl.report.row_progress import ProgressWriter, RowOfRun, RowProgress
from pytest_nixl.session.run import LiveRecord

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
def progress(monkeypatch):
    written.clear()
    monkeypatch.setattr(os, "write", write_and_tell)
    return lambda: written.wait(300)
"""


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
def test_a_long_row_gets_a_line(tmp_path: Path) -> None:
    (tmp_path / "test_rows.py").write_text(ROWS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "--benchmark-disable"], cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^row 1 of 2, \d+ s: UCX/WRITE/DRAM:DRAM/4KiB/batch1/depth1/0-1$", done.stdout, re.MULTILINE)
    assert re.search(r"^row 2 of 2, \d+ s, about \d+ s of rows left: UCX/WRITE", done.stdout, re.MULTILINE)


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


class Scene:
    """A run whose clock a test sets, with doubles of pytest's session and of what writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 0, quiet: bool = False, **run: object) -> None:
        self.now, self.lines, self.ended = 0.0, list[Callable[[float], str]](), 0
        session = SimpleNamespace(membership=SimpleNamespace(size=ranks)) if ranks else None
        self.run = SimpleNamespace(record=LiveRecord(), rank_session=session, **{"parallel": False, **run})
        monkeypatch.setattr(row_progress, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(row_progress, "ProgressWriter", lambda descriptor: self)
        monkeypatch.setattr(row_progress, "sys", SimpleNamespace(stdout=SimpleNamespace(fileno=lambda: 1)))
        monkeypatch.setattr(row_progress, "os", SimpleNamespace(dup=lambda descriptor: descriptor + 1))
        self.items = [SimpleNamespace(nodeid="other", fixturenames=())] + [
            SimpleNamespace(nodeid=f"row-{block}", fixturenames=("nixl_rows",),
                            callspec=SimpleNamespace(params={"program_row": replace(KEY, block=block)}))
            for block in (4096, 65536, 4 << 20)
        ]  # fmt: skip
        self.config = SimpleNamespace(
            option=SimpleNamespace(collectonly=False), get_verbosity=lambda: -1 if quiet else 0,
            pluginmanager=SimpleNamespace(has_plugin=lambda name: name == "terminalreporter"),
        )  # fmt: skip
        self.plugin = RowProgress(cast(Any, self.run))

    def begin(self, describe: Callable[[float], str]) -> None:
        self.lines.append(describe)
        self.now += 1.0

    def end(self) -> None:
        self.ended += 1

    close = end

    def collect(self) -> None:
        self.plugin.pytest_collection_finish(cast(Any, SimpleNamespace(config=self.config, items=self.items)))

    def measure(self, number: int, seconds: float) -> None:
        """Let a test run to the end of its call, for some seconds."""
        item: Any = self.items[number]
        self.plugin.pytest_runtest_setup(item)
        for when in ("setup", "call"):
            self.now += seconds if when == "call" else 0.0
            report = pytest.TestReport(item.nodeid, ("t.py", 1, ""), {}, "passed", None, cast(Any, when))
            self.plugin.pytest_runtest_logreport(report)


def test_each_row_is_described_with_the_time_of_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, ranks=3)
    scene.collect()
    for number, seconds in enumerate((1.0, 29.0, 9.0)):
        scene.measure(number, seconds)
    assert scene.ended == 3
    scene.plugin.pytest_runtest_setup(cast(Any, scene.items[3]))
    samples = Samples(KEY, (1.0,), (100_000,), (1e-6,))
    scene.run.record.samples_so_far = samples
    keys = [item.callspec.params["program_row"] for item in scene.items[1:]]
    assert [describe(7.0) for describe in scene.lines] == [
        f"row 1 of 3, 7 s, 6.55 GB/s so far: {keys[0]}",
        f"row 2 of 3, 7 s, 6.55 GB/s so far, about 53 s of rows left: {keys[1]}",
        f"row 3 of 3, 7 s, 6.55 GB/s so far, about 13 s of rows left: {keys[2]}"
        "; to name a slow rank, --nixl-blocks=1MiB is enough",
    ]
    scene.plugin.pytest_runtest_setup(cast(Any, scene.items[1]))
    assert scene.run.record.samples_so_far is None, "a row begins without those of the one before it"
    scene.plugin.pytest_unconfigure()
    scene.plugin.pytest_unconfigure()
    assert scene.ended == 4, "it is closed once"


@pytest.mark.parametrize("change", ["parallel", "collectonly", "no terminal", "quiet", "no row"])
def test_no_progress_is_written_without_a_reader_or_a_row(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    scene = Scene(monkeypatch, parallel=change == "parallel", quiet=change == "quiet")
    scene.config.option.collectonly = change == "collectonly"
    if change == "no terminal":
        scene.config.pluginmanager.has_plugin = lambda name: False
    scene.items = scene.items[:1] if change == "no row" else scene.items
    scene.collect()
    scene.measure(-1, 1.0)
    assert (scene.lines, scene.ended) == ([], 0)
