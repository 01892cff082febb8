# SPDX-License-Identifier: Apache-2.0
"""The store: concurrent writers lose nothing, readers see only complete records, other files are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.cli_run import ROOT
from helpers.records import KEY, ROW, key, record, write

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.store import store as store_module
from pytest_nixl.store.record_reader import RecordedRun, read_recorded
from pytest_nixl.store.store import INDEX, Store, find_baseline, newest

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


def test_files_that_are_not_records_are_skipped_and_reported(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json", record("image:1", {KEY: [1.0]}))
    (tmp_path / "torn.json").write_text(good.read_text()[:-100])
    (tmp_path / "empty.json").touch()
    (tmp_path / "foreign.json").write_text('{"name": "something else"}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "no-rows.json").write_text('{"datetime": "2026-01-01T00:00:00", "benchmarks": []}')
    (tmp_path / "later-form.json").write_text(good.read_text().replace('"form": 1', '"form": 2'))
    (tmp_path / "readme.txt").write_text("not looked at")
    (tmp_path / "folder.json").mkdir()
    runs, skipped = Store(tmp_path).runs()
    assert [run.source for run in runs] == [str(good)]
    reasons = {Path(text.removeprefix("skipped: ").split()[0]).name: text for text in skipped}
    bad = {"torn.json", "empty.json", "foreign.json", "list.json", "no-rows.json", "later-form.json", "folder.json"}
    assert set(reasons) == bad
    assert Store(tmp_path).summaries()[1] == skipped
    assert "torn.json is incomplete or not JSON (" in reasons["torn.json"]
    assert "empty.json is empty: expected a file that the bandwidth suite wrote" in reasons["empty.json"]
    assert "is not a record of a run (KeyError: 'datetime')" in reasons["foreign.json"]
    assert "has no row of the bandwidth suite" in reasons["no-rows.json"]
    assert "its format version is 2, and this pytest-nixl reads 1" in reasons["later-form.json"]


def test_reports_of_runs_in_the_store_are_passed_over(tmp_path: Path) -> None:
    """``history`` said of each report that --nixl-report had written there that it is not a record."""
    path = write(tmp_path / "run.json", record("a:1", {KEY: [1.0]}))
    for name, by in (("report.json", "written_by"),):
        (tmp_path / name).write_text(json.dumps({by: "pytest-nixl 0.1.0", "results": []}))
    for read in (Store(tmp_path).summaries, Store(tmp_path).runs):
        records, skipped = read()
        assert [run.source for run in records] == [str(path)]
        assert skipped == []
    with pytest.raises(ValueError, match=r"report\.json is a report of a run, and not the run's record: expected a"):
        read_recorded(tmp_path / "report.json")


def test_a_record_with_a_row_twice_is_refused(tmp_path: Path) -> None:
    data = record("image:1", {KEY: [1.0]})
    path = write(tmp_path / "twice.json", {**data, "benchmarks": data["benchmarks"] * 2})
    with pytest.raises(ValueError, match=f"contains the row {KEY} twice"):
        read_recorded(path)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_launch_without_a_valid_bandwidth_is_refused(tmp_path: Path, value: float) -> None:
    path = write(tmp_path / "bad.json", record("image:1", {KEY: [1.0]}))
    path.write_text(path.read_text().replace('"launches": [1000000000.0]', f'"launches": [{json.dumps(value)}]'))
    with pytest.raises(ValueError, match="a launch that is not a bandwidth"):
        read_recorded(path)


def test_a_record_of_pytest_benchmark_alone_has_one_launch(tmp_path: Path) -> None:
    data = record("image:1", {KEY: [1.5]})
    del data["nixl"], data["benchmarks"][0]["extra_info"]["launches"]
    data["benchmarks"][0]["extra_info"]["initiator_nixl"] = "1.4.0"
    run = read_recorded(write(tmp_path / "old.json", data))
    assert run.rows[ROW].values == (1.5e9,)
    assert run.provenance.versions == {"nixl": "1.4.0"}
    assert run.provenance.host == {"name": "there"}
    assert run.name == "old"


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
    assert [run.source for run in Store(tmp_path).runs()[0]] == [whole, ended], "the oldest first"
    with pytest.raises(ValueError, match=r"8.json cannot be a baseline \(ended by Ctrl-C\): expected the record of a"):
        find_baseline(ended, "")
    assert find_baseline(ended, "", whole=False)[0].source == ended
    with pytest.raises(ValueError, match="has no run of the image image:1; it has image:0; left out: "):
        find_baseline("image:1", str(tmp_path))


def test_a_record_is_named_by_its_label_in_a_store_that_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "store"
    path = Store(folder).write(record("a", {KEY: [1.0]}), "-registry/a b:1.5_x.")
    assert path.parent == folder
    assert path.name.split("-", 1)[1].rpartition("-")[0] == "registry-a-b-1.5_x"
    assert read_recorded(path).provenance.image.reference == "a"
    assert "-run-" in Store(folder).write({}, "///").name


def test_a_missing_image_is_reported_with_the_images_of_the_store(tmp_path: Path) -> None:
    write(tmp_path / "a.json", record("a:1", {KEY: [1.0], key("1MiB"): [1.0]}))
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(ValueError) as caught:
        find_baseline("b:1", str(tmp_path))
    assert str(caught.value).startswith(
        f"there is no file b:1, and {tmp_path} has no run of the image b:1; it has a:1; skipped: "
    )
    with pytest.raises(ValueError, match="nowhere cannot be read \\(No such file or directory\\)"):
        find_baseline("b:1", "/nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="empty has no record: expected the record of an earlier run"):
        find_baseline(str(empty), "")


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NixlPluginError) as caught:
        Store(tmp_path / "file" / "store").write({}, "x")
    assert caught.value.reason.startswith(f"{tmp_path}/file/store cannot be written (")
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


def test_a_large_store_is_read_once_and_then_by_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for week in range(80):
        write(tmp_path / f"{week:03d}.json", record(f"image:{week // 10}", {KEY: [week + 1.0] * 3}, week=week))
    (tmp_path / "torn.json").write_text("{")
    old = time.time() - 3600
    for path in tmp_path.iterdir():
        os.utime(path, (old, old))
    opened: list[str] = []
    read = read_recorded

    def counted(path: Path) -> RecordedRun:
        opened.append(path.name)
        return read(path)

    monkeypatch.setattr(store_module, "read_recorded", counted)
    store = Store(tmp_path)
    first = store.summaries()
    assert len(opened) == 81
    assert (tmp_path / INDEX).is_file()
    opened.clear()
    assert store.summaries() == first
    assert opened == []
    whole, _ = store.runs()
    assert [(run.source, run.when, run.provenance) for run in first[0]] == [
        (run.source, run.when, run.provenance) for run in whole
    ]
    assert [run.rows[ROW].bandwidth for run in first[0]] == [run.rows[ROW].bandwidth for run in whole]
    assert [run.rows[ROW].transports for run in first[0]] == [run.rows[ROW].transports for run in whole]
    # Changed records are read again, deleted ones are left out, and new ones are included.
    opened.clear()
    write(tmp_path / "005.json", record("image:other", {KEY: [7.0]}, week=5))
    write(tmp_path / "new.json", record("image:new", {KEY: [9.0]}, week=90))
    (tmp_path / "006.json").unlink()
    runs, _ = store.summaries()
    assert sorted(opened) == ["005.json", "new.json"]
    assert len(runs) == 80
    assert runs[5].provenance.image.reference == "image:other"
    assert find_baseline("image:new", str(tmp_path))[0].rows[ROW].latencies
    # A store that was moved has the same index, but its own paths.
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    runs, skipped = Store(moved).summaries()
    assert {Path(run.source).parent for run in runs} == {moved}
    assert skipped[0].startswith(f"skipped: {moved / 'torn.json'} is incomplete or not JSON (")


@pytest.mark.parametrize(
    "index",
    [
        b"", b"{", b"null", b"[1]", b'{"form": 2}', b'{"form": 1}', b"\xff\xfe", b"[" * 100_000,
        b'{"form": 1, "provenances": [], "keys": [], "transports": [], "files": {"000.json": [1, 2, 3]}}',
        b'{"form": 1, "provenances": [], "keys": [], "transports": [], "files": {"000.json": [1, 2, "x", 9, []]}}',
        b'{"form": 1, "provenances": 5, "keys": {}, "transports": [[]], "files": []}',
    ],
)  # fmt: skip
def test_an_unusable_index_is_ignored(tmp_path: Path, index: bytes) -> None:
    write(tmp_path / "000.json", record("image:1", {KEY: [1.0]}))
    (tmp_path / INDEX).write_bytes(index)
    runs, skipped = Store(tmp_path).summaries()
    assert ([run.name for run in runs], skipped) == (["image:1"], [])


@pytest.mark.parametrize("kind", ["directory", "FIFO", "link to itself"])
def test_an_index_that_cannot_be_written_is_not_an_error(tmp_path: Path, kind: str) -> None:
    for week in range(70):
        path = write(tmp_path / f"{week}.json", record("image:1", {KEY: [1.0]}, week=week))
        os.utime(path, (1.0, 1.0))
    index = tmp_path / INDEX
    if kind == "directory":
        index.mkdir()
    elif kind == "FIFO":
        os.mkfifo(index)
    else:
        index.symlink_to(index)
    assert len(Store(tmp_path).summaries()[0]) == 70
    assert len(Store(tmp_path).summaries()[0]) == 70
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_file_written_moments_ago_is_not_taken_from_the_index(tmp_path: Path) -> None:
    for week in range(70):
        write(tmp_path / f"{week}.json", record("image:1", {KEY: [1.0]}, week=week))
    Store(tmp_path).summaries()
    state = (tmp_path / "0.json").stat()
    write(tmp_path / "0.json", record("image:2", {KEY: [1.0]}))
    os.utime(tmp_path / "0.json", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (tmp_path / "0.json").stat().st_size == state.st_size
    assert Store(tmp_path).summaries()[0][0].name == "image:2"
