# SPDX-License-Identifier: Apache-2.0
"""The store: concurrent writers lose nothing, readers see only complete records, other files are reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import ROOT
from helpers.records import KEY, ROW, key, record, write

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.store import store as store_module
from pytest_nixl.store.record_reader import RECORD_FORM, RecordedRun, read_recorded
from pytest_nixl.store.store import FEWEST_NEW, INDEX, Store, find_baseline, newest, read_index, summary

#: Twenty processes that begin to write together, when their standard input ends. Only the first imports anything.
WRITERS = """
import os, sys, traceback
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers.records import KEY, record
from pytest_nixl.store.store import Store

def write(writer):
    sys.stdin.readline()
    for number in range(10):
        data = record(f"image:{writer}", {KEY: [float(number + 1)] * 5}, week=number)
        Store(Path(sys.argv[1])).write({**data, "padding": "x" * 200_000}, "same name")
    os._exit(0)

children = []
for writer in range(20):
    children.append(os.fork())
    if not children[-1]:
        try:
            write(writer)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
print("started", flush=True)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.long
def test_twenty_concurrent_writers_lose_and_damage_no_record(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-c", WRITERS, str(store), str(ROOT / "tests")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        assert writers.stdout.readline() == "started\n"  # all have started before one begins to write
        writers.stdin.close()
        records = 0
        while writers.poll() is None:
            runs, skipped = Store(store).runs() if store.is_dir() else ([], [])
            assert skipped == []
            assert len(runs) >= records
            records = len(runs)
    assert writers.returncode == 0
    runs, skipped = Store(store).runs()
    assert skipped == []
    written = sorted((run.provenance.image.reference, run.rows[ROW].values[0]) for run in runs)
    assert written == sorted((f"image:{writer}", (number + 1) * 1e9) for writer in range(20) for number in range(10))
    assert [path for path in store.iterdir() if path.suffix != ".json"] == []


def test_reports_of_runs_in_the_store_are_passed_over(tmp_path: Path) -> None:
    """``history`` said of each report that --nixl-report had written there that it is not a record."""
    path = write(tmp_path / "run.json", record("a:1", {KEY: [1.0]}))
    (tmp_path / "report.json").write_text(json.dumps({"written_by": "pytest-nixl 0.1.0", "results": []}))
    for read in (Store(tmp_path).summaries, Store(tmp_path).runs):
        records, skipped = read()
        assert ([run.source for run in records], skipped) == ([str(path)], [])
    with pytest.raises(ValueError) as caught:
        read_recorded(tmp_path / "report.json")
    reason = "is a report of a run, and not the run's record"
    assert str(caught.value) == f"{tmp_path}/report.json {reason}: expected {RECORD_FORM}"


def test_the_newest_run_of_an_image_is_found_by_name_digest_or_both(tmp_path: Path) -> None:
    for week, (image, digest) in enumerate((("a:1", "sha256:11"), ("a:2", "sha256:22"), ("a:1", "sha256:33"))):
        write(tmp_path / f"{week}.json", record(image, {KEY: [week + 1.0]}, digest=digest, week=week))
    runs, _ = Store(tmp_path).runs()
    places = {
        image: runs.index(newest_run) if (newest_run := newest(runs, image)) is not None else None
        for image in ("a:1", "a:2", "sha256:11", "a:1@sha256:11", "a:2@sha256:11", "a:3")
    }
    assert places == {"a:1": 2, "a:2": 1, "sha256:11": 0, "a:1@sha256:11": 0, "a:2@sha256:11": None, "a:3": None}
    assert find_baseline(str(tmp_path), "")[0].source == str(tmp_path / "2.json")
    assert find_baseline(str(tmp_path / "0.json"), "")[0].provenance.image.digest == "sha256:11"


def no_baseline(*request: str) -> str:
    """Return why there is no such baseline."""
    with pytest.raises(ValueError) as caught:
        find_baseline(*request)
    return str(caught.value)


def test_a_run_that_was_ended_is_no_baseline_unless_it_may_be_one(tmp_path: Path) -> None:
    for week, interrupted in ((1, "ended by Ctrl-C"), (0, "")):
        data = record(f"image:{week}", {KEY: [1.0]}, week=week)
        data["nixl"]["interrupted"] = interrupted
        write(tmp_path / f"{9 - week}.json", data)
    whole, ended = (str(tmp_path / name) for name in ("9.json", "8.json"))
    left_out = f"left out: {ended} cannot be a baseline (ended by Ctrl-C)"
    baseline, remarks = find_baseline(str(tmp_path), "")
    assert (baseline.source, remarks) == (whole, [left_out])
    assert find_baseline(str(tmp_path), "", whole=False)[0].source == ended, "the newest"
    assert find_baseline(ended, "", whole=False)[0].source == ended
    assert [run.source for run in Store(tmp_path).runs()[0]] == [whole, ended], "the oldest first"
    assert no_baseline(ended, "") == (
        f"{ended} cannot be a baseline (ended by Ctrl-C): expected the record of a completed run"
    )
    assert no_baseline("image:1", str(tmp_path)) == (
        f"there is no file image:1, and {tmp_path} has no run of the image image:1; it has image:0; {left_out}: "
        "expected the record of an earlier run"
    )


def test_a_missing_image_is_reported_with_the_images_of_the_store(tmp_path: Path) -> None:
    for name, image in (("1.json", "b:1"), ("2.json", "a:1"), ("3.json", "b:1"), ("4.json", "")):
        write(tmp_path / name, record(image, {KEY: [1.0], key("1MiB"): [1.0]}))
    (tmp_path / "torn.json").write_text("")
    torn = f"skipped: {tmp_path}/torn.json is empty: expected {RECORD_FORM}"
    empty = tmp_path / "empty"
    empty.mkdir()
    earlier = "expected the record of an earlier run"
    assert no_baseline("c:1", str(tmp_path)) == (
        f"there is no file c:1, and {tmp_path} has no run of the image c:1; it has a:1, b:1; {torn}: {earlier}"
    )
    assert no_baseline("b:1", "/nowhere") == (
        "/nowhere cannot be read (No such file or directory): expected a record or a store"
    )
    assert no_baseline(str(empty), "") == f"{empty} has no record: {earlier}"


def test_a_record_is_named_by_its_label_in_a_store_that_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"
    for label, name in (("-registry/a b:1.5_x.", "registry-a-b-1.5_x"), ("///", "run"), (f"a{'b' * 80}", "b" * 80)):
        path = Store(folder).write(record("a", {KEY: [1.0]}), label)
        assert path.parent == folder
        assert re.fullmatch(rf"\d{{8}}T\d{{6}}-{re.escape(name)}-[0-9a-f]{{12}}\.json", path.name)
        assert read_recorded(path).provenance.image.reference == "a"


REMEDY = (
    "Free space there or make the directory writable and run again; --benchmark-json FILE writes a record elsewhere."
)


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NixlPluginError) as caught:
        Store(tmp_path / "file" / "store").write({}, "x")
    assert caught.value.reason == (
        f"{tmp_path}/file/store cannot be written (Not a directory): this run's verdict is not affected, but its "
        "record is lost"
    )
    assert caught.value.remedy == REMEDY
    assert sorted(os.listdir(tmp_path)) == ["file"]


FULL = """
import resource, signal, sys
from pathlib import Path
from pytest_nixl.store.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
Store(Path(sys.argv[1])).write({"padding": "x" * 10_000}, "x")
"""


def test_a_file_that_cannot_be_written_completely_is_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = subprocess.run([sys.executable, "-c", FULL, str(store)], capture_output=True, text=True, check=False)
    assert (
        "cannot be written (File too large): this run's verdict is not affected, but its record is lost" in done.stderr
    )
    assert list(store.iterdir()) == []


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the records that are read from now on."""
    opened: list[str] = []

    def read(path: Path) -> RecordedRun:
        opened.append(path.name)
        return read_recorded(path)

    monkeypatch.setattr(store_module, "read_recorded", read)
    return opened


def test_a_large_store_is_read_once_and_then_by_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "000-torn.json").write_text("{")
    (tmp_path / "000-zfolder.json").mkdir()
    for week in range(FEWEST_NEW):
        image = f"image:{week // 10}"
        data = record(image, {KEY: [week + 1.0] * 3}, week=week, extra={"transports": ["tcp", f"rc/{week % 3}"]})
        data["nixl"]["interrupted"] = f"in week {week}"
        write(tmp_path / f"{week:03d}.json", data)
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    opened = counting(monkeypatch)
    store = Store(tmp_path)
    first = store.summaries()
    assert len(opened) == FEWEST_NEW + 2
    opened.clear()
    assert store.summaries() == first
    assert opened == ["000-zfolder.json"], "what is no file is not in the index"
    state = (tmp_path / "001.json").stat()
    entry = read_index(tmp_path / INDEX).entry("001.json", state)
    assert entry is not None
    assert entry.state is state
    whole, skipped = store.runs()
    assert first == ([summary(run) for run in whole], skipped)
    # Changed records are read again, deleted ones are left out, and new ones are included.
    opened.clear()
    write(tmp_path / "005.json", record("image:other", {KEY: [7.0]}, week=5))
    write(tmp_path / "new.json", record("image:new", {KEY: [9.0]}, week=90))
    (tmp_path / "006.json").unlink()
    runs, _ = store.summaries()
    assert sorted(opened) == ["000-zfolder.json", "005.json", "new.json"]
    assert len(runs) == FEWEST_NEW
    assert runs[5].provenance.image.reference == "image:other"
    assert find_baseline("image:new", str(tmp_path))[0].rows[ROW].latencies
    # A store that was moved has the same index, but its own paths.
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    runs, skipped = Store(moved).summaries()
    assert {Path(run.source).parent for run in runs} == {moved}
    assert skipped[0].startswith(f"skipped: {moved / '000-torn.json'} is incomplete or not JSON (")


def filled(folder: Path, records: int = FEWEST_NEW) -> Store:
    """Return a store with one record of each week."""
    for week in range(records):
        write(folder / f"{week}.json", record("image:1", {KEY: [1.0]}, week=week))
    return Store(folder)


def test_a_small_store_has_no_index(tmp_path: Path) -> None:
    assert len(filled(tmp_path, FEWEST_NEW - 1).summaries()[0]) == FEWEST_NEW - 1
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ('"form": 1', '"form": 2'), ('"files"', '"file"'), (r"^.*$", ""), (r"^.*$", "{"), (r"^.*$", "null"),
        (r"^.*$", "[1]"), (r"^.*$", "[" * 100_000), (r'"provenances": \[', '"provenances": [5, '),
        ('"files": {.*}}', '"files": []}'), ('"files": {.*}}', '"files": {"000.json": [1, 2, 3]}}'),
        (r"1000000000\.0", "0.0"), (r"1000000000\.0", "1e999"), (r"1000000000\.0", '"x"'), (r"\[\[0, ", "[[7, "),
        (r"\+00:00", ""), ('"nics": {', '"nics": {"deep": ' + "[" * 20 + "]" * 20 + ", "),
        ('"provenances": ', '"provenances": 5, "x": '),
    ],
)  # fmt: skip
def test_an_unusable_index_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, other: str) -> None:
    monkeypatch.setattr(store_module, "FEWEST_NEW", 1)
    for name in ("000.json", "001.json"):
        path = write(tmp_path / name, record("image:1", {KEY: [1.0]}, nics={name: ""}))
        os.utime(path, (1e9, 1e9))
    first = Store(tmp_path).summaries()
    usable = (tmp_path / INDEX).read_text()
    changed = re.sub(part, lambda _: other, usable, count=1)
    assert changed != usable
    (tmp_path / INDEX).write_text(changed)
    opened = counting(monkeypatch)
    assert Store(tmp_path).summaries() == first
    assert opened == ["000.json", "001.json"]


@pytest.mark.parametrize("kind", ["directory", "FIFO", "link to itself"])
def test_an_index_that_cannot_be_written_is_not_an_error(tmp_path: Path, kind: str) -> None:
    store = filled(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (1.0, 1.0))
    index = tmp_path / INDEX
    if kind == "directory":
        index.mkdir()
    elif kind == "FIFO":
        os.mkfifo(index)
    else:
        index.symlink_to(index)
    for _ in range(2):
        assert len(store.summaries()[0]) == FEWEST_NEW
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_file_written_moments_ago_is_not_taken_from_the_index(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.summaries()
    state = (tmp_path / "0.json").stat()
    write(tmp_path / "0.json", record("image:2", {KEY: [1.0]}))
    os.utime(tmp_path / "0.json", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (tmp_path / "0.json").stat().st_size == state.st_size
    assert store.summaries()[0][0].name == "image:2"
