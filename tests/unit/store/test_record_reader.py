# SPDX-License-Identifier: Apache-2.0
"""Files that are not records: each is reported and left out, and the other files of the store are read."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from helpers.records import KEY, ROW, key, record, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_nixl import cli
from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import MOST_LAUNCHES
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.files import csv_text, metrics_text
from pytest_nixl.report.github import workflow_commands
from pytest_nixl.report.history import courses, lines, of_one_machine
from pytest_nixl.report.page import page
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.provenance import Provenance
from pytest_nixl.store.record_reader import LARGEST, RECORD_FORM, RecordedRun, parse_recorded
from pytest_nixl.store.store import Store, find_baseline

DEEP = 100_000


def full(week: float = 0) -> dict[str, Any]:
    """Return a record in which every field has a value."""
    ratio = RawRatio(ROW, 1e9, RawMeasurement("ucx_perftest", "ucp_put_bw", 2e9, "UCX 1.18", ("tcp/eth0",)))
    figures = RowSummary(1e9, 1e-5, 2e-5, 10, 1e8, 1e10, ("tcp/eth0",), (1e9,) * 5, 1e-5, 3e-5)
    results = [
        Result("bandwidth", "test.py::test", Verdict.PASS, row=ROW, summary=figures, ratios=(ratio,)),
        Result("etcd", "test.py::other", Verdict.WARN, "a reason", "a remedy", finding="X"),
    ]
    rows = {KEY: [1.0] * 5, key("1MiB"): [2.0] * 5, key("1MiB", pair="1-0"): [2.5] * 5}
    extra = {"floor": 1e6, "ceiling": 1e12}
    document = record(
        "image:1", rows, week=week, results=results, versions={"nixl": "1.5.1"}, environment={"UCX_TLS": "tcp"},
        extra=extra, nics={"eth0": "1000 Mb/s"},
    )  # fmt: skip
    document["nixl"]["notes"] = ["a note"]
    return document


TEXT = json.dumps(full())
TOO_DEEP, TORN, NOT_UTF8 = "is JSON that is nested too deep: ", "is incomplete or not JSON (", "is not UTF-8: "
#: The content of each kind of bad file, and what is said of it.
BAD: dict[str, tuple[str | bytes | Callable[[Path], object], str]] = {
    "deep": ("[" * DEEP, TOO_DEEP),
    "deep-closed": ("[" * DEEP + "]" * DEEP, TOO_DEEP),
    "deep-object": ('{"a":' * DEEP + "1" + "}" * DEEP, TOO_DEEP),
    "deep-inside": (TEXT.replace('"1000 Mb/s"', "[" * 900 + "]" * 900), "nested"),
    "torn": (TEXT[:-100], TORN),
    "empty": (" \n", "is empty: expected a file that the bandwidth suite wrote with --nixl-store, "),
    "zeros": ("\0" * 1000, TORN),
    "half": (TEXT.replace("image:1", "\\ud800"), NOT_UTF8),
    "half-capital": (TEXT.replace("image:1", "\\uD800"), NOT_UTF8),
    "numbers": (TEXT.replace("2000000000.0", "1" + "0" * 400), "is not a record of a run ("),
    "key": (TEXT.replace(KEY, "a/b"), "'a/b' is not a row key"),
    "year": (TEXT.replace("2026-03-02", "0001-01-01").replace("+00:00", "+14:00"), "of a run (OverflowError: "),
    "bytes": (b"\xff\x00\xfe" * 100, TORN),
    "latin": (TEXT.replace("image:1", "image:\xe9").encode("latin-1"), NOT_UTF8),
    "list": ("[1, 2]", "is not a record of a run (AttributeError: "),
    "no-rows": ('{"datetime": "2026-01-01T00:00:00", "benchmarks": []}', "has no row of the bandwidth suite: "),
    "huge": (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 100 * LARGEST), "has more than 64 MiB"),
    "fifo": (os.mkfifo, "is a FIFO"),
    "folder": (Path.mkdir, "is a directory"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "cannot be read (No such file or directory)"),
    "circle": (lambda path: path.symlink_to(path.name), "cannot be read (Too many levels of symbolic links)"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
}


def bad_files(folder: Path) -> None:
    """Create one bad file of each kind."""
    folder.mkdir(exist_ok=True)
    for name, (content, _) in BAD.items():
        path = folder / f"{name}.json"
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_each_bad_file_is_reported_and_left_out(tmp_path: Path) -> None:
    bad_files(tmp_path)
    good = write(tmp_path / "good.json", full())
    (tmp_path / "readme.txt").write_text("not looked at")
    names = sorted(BAD, key="{}.json".format)
    for runs, skipped in (Store(tmp_path).runs(), Store(tmp_path).summaries()):
        assert [run.source for run in runs] == [str(good)]
        assert [sentence.split()[1] for sentence in skipped] == [f"{tmp_path}/{name}.json" for name in names]
        for sentence, name in zip(skipped, names, strict=True):
            assert BAD[name][1] in sentence
            assert "\n" not in sentence
            assert len(sentence) < 800


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Drop root's privilege to read every file for the duration of the test."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_file_without_read_permission_is_reported(request: pytest.FixtureRequest) -> None:
    with TemporaryDirectory() as name:  # not below pytest's temporary directory, which only its owner may enter
        store = Path(name)
        store.chmod(0o755)
        write(store / "good.json", full()).chmod(0o644)
        write(store / "secret.json", full()).chmod(0)
        request.getfixturevalue("as_nobody")
        runs, skipped = Store(store).summaries()
        os.seteuid(os.getuid())
    assert len(runs) == 1
    assert skipped == [f"skipped: {store / 'secret.json'} cannot be read (Permission denied)"]


def test_history_and_report_leave_out_bad_files_and_report_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    bad_files(store)
    for week in range(3):
        write(store / f"good-{week}.json", full(week))
    outputs = [str(tmp_path / name) for name in ("a.html", "a.csv", "a.prom")]
    row = "UCX WRITE DRAM:DRAM of 64KiB"  # as the terminal names it
    for arguments, line in (
        (["history", str(store)], "\n3 runs from 2026-03-02"),
        (["history", str(store), "--row", row], f"{KEY}: 3 runs"),
        (["report", str(store), *outputs, "--baseline", "image:1"], ""),
    ):
        assert cli.main(arguments) == 0
        out, err = capsys.readouterr()
        assert (err, line in out) == ("", True)
        assert all(f"skipped: {store / name}.json " in out for name in BAD)
    assert all(Path(path).stat().st_size for path in outputs)
    for arguments, reason in (
        (["history", str(store / "good-0.json")], "good-0.json is a file: give the directory of --nixl-store"),
        (["report", str(store / "deep.json"), str(tmp_path / "b.html")], BAD["deep"][1]),
    ):
        assert cli.main(arguments) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), reason in err) == ("", 1, True)


FIGURES = {"floor": 1e6, "ceiling": 2e12, "p50_us": 10.0, "p90_us": 20.0, "p99_us": 30.0, "p99.9_us": 40.0,
           "others_cores": [0.1, 0.2], "gpu_waits_us": [5.0, 7.0], "steps_us": {"post": 3.0, "wait": 0.0}}  # fmt: skip


@pytest.mark.parametrize("when", ["2026-03-02T03:00:00Z", "2026-03-02T03:00:00", "2026-03-02T05:00:00+02:00"])
def test_a_record_is_read_with_the_units_of_its_values_and_its_time_in_utc(when: str) -> None:
    document = record("image:1", {KEY: [1.0, 3.0]}, extra=FIGURES)
    document["datetime"], document["nixl"]["notes"] = when, ["first", "second"]
    document["nixl"]["provenance"]["environment"] = {"(level)": "quick", "UCX_TLS": "tcp"}
    run = parse_recorded(document, "x.json")
    assert (run.when.isoformat(), run.notes) == ("2026-03-02T03:00:00+00:00", ("first", "second"))
    assert run.provenance.environment == {"(level)": "quick", "UCX_TLS": "tcp"}
    [summary] = run.rows.values()
    assert summary == RowSummary(
        2e9, 1e-5, 3e-5, 0, 1e6, 2e12, ("tcp/eth0",), (1e9, 3e9), 2e-5, 4e-5,
        {"post": 3e-6, "wait": 0.0}, (0.1, 0.2), (5e-6, 7e-6),
    )  # fmt: skip


def test_a_record_of_pytest_benchmark_alone_has_one_launch() -> None:
    data = record("image:1", {KEY: [1.5]})
    del data["nixl"], data["benchmarks"][0]["extra_info"]["launches"]
    data["benchmarks"][0]["extra_info"] |= {"initiator_nixl": "1.4.0", "initiator_host": "here", "target_nixl": "1"}
    data["benchmarks"].append({"name": "another plugin's"})
    run = parse_recorded(data, "a/old.json")
    assert run.rows[ROW].values == (1.5e9,)
    assert run.provenance == Provenance(versions={"nixl": "1.4.0"}, host={"name": "there"})
    assert run.name == "old"


def test_a_record_without_a_row_has_its_results_of_which_some_are_not_measured() -> None:
    lost, other = RowKey.parse(key("1MiB")), RowKey.parse(key("2MiB"))
    results = [
        Result("bandwidth", f"t{number}", verdict, row=row)
        for number, (verdict, row) in enumerate((
            (Verdict.ERROR, lost), (Verdict.MISSING, other), (Verdict.ERROR, ROW), (Verdict.ERROR, None),
            (Verdict.FAIL, RowKey.parse(key("4MiB"))),
        ))
    ]  # fmt: skip
    run = parse_recorded(record("image:1", {KEY: [1.0]}, results=results), "x.json")
    assert run.unmeasured == {lost: run.results[0], other: run.results[1]}
    run = parse_recorded(record("image:1", {}, results=results), "x.json")
    assert (run.rows, list(run.unmeasured)) == ({}, [lost, other, ROW])


NOT_A_NUMBER = "has a floor, a ceiling, a latency, a contention or a GPU's wait that is not a number from zero on"
MORE_LAUNCHES = MOST_LAUNCHES + 1


def refusal(document: Any) -> str:
    """Return why a record is refused, without what every such sentence says."""
    with pytest.raises(ValueError) as caught:
        parse_recorded(document, "x.json")
    whole = re.fullmatch(rf"x\.json is not a record of a run \((.*)\): expected {RECORD_FORM}", str(caught.value))
    assert whole is not None, caught.value
    return whole[1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"transports": "tcp"}, f"TypeError: the row {KEY} has transports that are not a list"),
        ({"launches": [1.0] * MORE_LAUNCHES},
         f"ValueError: a row has {MORE_LAUNCHES} launches, more than the maximum of {MOST_LAUNCHES}"),
        *(({"launches": [1e9, value]}, f"ValueError: the row {KEY} has a launch that is not a bandwidth")
          for value in (0.0, -1.0, 9e-4, 1.1e18, math.nan, math.inf)),
        *(({name: value}, f"ValueError: the row {KEY} {NOT_A_NUMBER}")
          for name in ("floor", "ceiling", "p50_us", "p90_us", "p99_us", "p99.9_us") for value in (-1.0, math.inf)),
        *(({name: [1.0, value]}, f"ValueError: the row {KEY} {NOT_A_NUMBER}")
          for name in ("others_cores", "gpu_waits_us") for value in (-1.0, math.inf)),
        *(({"steps_us": steps},
           f"ValueError: the row {KEY} has more than 16 steps, or one that is not a number from zero on")
          for steps in ({"a": 1.0, "b": -1.0}, {"a": math.inf}, {f"{number}": 1.0 for number in range(17)})),
    ],
)  # fmt: skip
def test_a_row_that_no_run_writes_is_refused(row: dict[str, Any], reason: str) -> None:
    document = record("image:1", {KEY: [1.0, 3.0]}, extra=FIGURES)
    document["benchmarks"][0]["extra_info"] |= row
    assert refusal(document) == reason


def test_a_record_of_another_form_or_with_a_row_twice_or_without_a_time_is_refused() -> None:
    document = record("image:1", {KEY: [1.0]})
    twice = {**document, "benchmarks": document["benchmarks"] * 2}
    assert refusal(twice) == f"ValueError: it contains the row {KEY} twice"
    later = {**document, "nixl": {**document["nixl"], "form": 2}}
    assert refusal(later) == "ValueError: its format version is 2, and this pytest-nixl reads 1"
    assert refusal({"name": "something else"}) == "KeyError: 'datetime'"


def test_a_record_at_its_limits_is_read() -> None:
    document = record("image:1", {KEY: [1.0]}, extra={**FIGURES, "p50_us": float("nan"), "p90_us": None})
    steps = {f"{number:02}" + "x" * 31: 1.0 for number in range(16)}
    document["benchmarks"][0]["extra_info"].update(launches=[1e-3] * (MOST_LAUNCHES - 1) + [1e18], steps_us=steps)
    [row] = parse_recorded(document, "x.json").rows.values()
    assert row.values == (1e-3,) * (MOST_LAUNCHES - 1) + (1e18,)
    assert list(row.steps) == [name[:32] for name in steps]
    assert (math.isnan(row.p50), math.isnan(row.p90), row.p99) == (True, True, 3e-5)


def test_a_bound_or_a_latency_too_small_to_be_drawn_is_zero() -> None:
    tiny = {**FIGURES, "floor": 9e-10, "ceiling": 5e-324, "p50_us": 9e-10, "p99_us": 1e-9}
    [row] = parse_recorded(record("image:1", {KEY: [1.0]}, extra=tiny), "x.json").rows.values()
    assert (row.floor, row.ceiling, row.p50, row.p99) == (0.0, 0.0, 0.0, 1e-15)


@pytest.mark.parametrize(("levels", "read"), [(13, True), (14, False)])
def test_facts_of_a_host_may_be_nested_16_deep(levels: int, read: bool) -> None:
    document = full()
    deep: Any = "x"
    for _ in range(levels):
        deep = [deep]
    document["nixl"]["provenance"]["host"]["nics"] = {"eth0": deep}
    with nullcontext() if read else pytest.raises(ValueError, match="its host is nested deeper than 16 levels"):
        parse_recorded(document, "x.json")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value inside another value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        yield from places(inner, (*path, step))


PLACES = list(places(full()))
#: Values that replace any other value.
VALUES = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 10**400, -(10**30), 0.0, -0.0, 1e308, -1.5, 5e-324, float("nan"), float("inf"),
         "", "x", "a/b", "1" * 5000, "\x00\x1b[2J", "\ud800", "<script>", "9999-12-31T23:59:59-14:00", "PASS", [], {},
         [[]], [None], {"": None}, [{}] * 3, {"form": 1}, ["a"] * 7]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
)  # fmt: skip


def used(run: RecordedRun, earlier_runs: list[RecordedRun]) -> None:
    """Use a run in every way in which the package uses records."""
    runs = sorted([run, *earlier_runs], key=lambda one: one.order)
    runs_used, reasons = of_one_machine(runs)
    text = "\n".join([*reasons, *(line.text for line in lines(runs_used, courses(runs_used)))])
    for before, now in ((earlier_runs[0], run), (run, earlier_runs[0])):
        report = RunReport(now, compare_runs(before, now, 0.05), tuple(runs))
        text += page(report) + csv_text(report) + metrics_text(report) + "".join(workflow_commands(report))
    text.encode()


@pytest.mark.long
@settings(max_examples=int(os.environ.get("PYTEST_NIXL_EXAMPLES", "120")), deadline=None,
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES[1:]), VALUES), min_size=1, max_size=3))
def test_a_record_with_any_value_anywhere_is_used_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    data = full(1)
    for path, value in changes:
        inner = data
        try:
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = copy.deepcopy(value)
        except (TypeError, LookupError):
            continue  # an earlier change removed this path
    earlier_runs = [parse_recorded(full(week), f"{week}.json") for week in (0, 2, 3)]
    folder = Path(os.environ["PYTEST_NIXL_TMP"])
    path_ = folder / "changed.json"
    path_.write_text(json.dumps(data))
    runs, skipped = Store(folder).summaries()
    whole, skipped_too = Store(folder).runs()
    assert skipped == skipped_too
    assert len(runs) == len(whole) == 1 - len(skipped)
    for run in whole:
        used(run, earlier_runs)
        assert find_baseline(str(folder), "")[0].source == run.source
    for sentence in skipped:
        assert re.match(r"skipped: \S+changed\.json .*: expected ", sentence, re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return a folder for the files of all examples."""
    path = tmp_path_factory.mktemp("records")
    monkeypatch.setenv("PYTEST_NIXL_TMP", str(path))
    yield
    shutil.rmtree(path)


SECRET = "hunter2-hunter2"


@pytest.mark.parametrize("command", ["report", "history"])
def test_secrets_that_an_older_version_recorded_are_hidden(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions before this one recorded values whose shape or name they did not know as that of a secret."""
    document = full()
    ours = document["nixl"]
    ours["results"][1]["reason"] = f"it sent Authorization: Bearer {SECRET} to http://etcd:{SECRET}@etcd:2379"
    ours["results"][1]["remedy"] = f"run ucx_perftest --password {SECRET}"
    ours["notes"] = [f'{{"password": "{SECRET}"}}']
    ours["interrupted"] = f"ended: token={SECRET}"
    ours["provenance"]["environment"] |= {
        "NIXL_APITOKEN": SECRET, "NIXL_UNKNOWN": SECRET, "UCX_ARGS": f"--password {SECRET}", "UCX_TLS": "tcp",
        "(started with)": f"env --password {SECRET}",
    }  # fmt: skip
    ours["provenance"]["image"]["source"] = f"https://user:{SECRET}@registry.example"
    ours["provenance"]["host"]["name"] = f"password={SECRET}"
    written, page = write(tmp_path / "run.json", document), tmp_path / "page.html"
    assert cli.main(["report", str(written), str(page)] if command == "report" else ["history", str(tmp_path)]) == 0
    assert SECRET not in "".join(capsys.readouterr())
    assert command == "history" or SECRET not in page.read_text()
    read = parse_recorded(document, "x.json")
    assert SECRET not in repr(read)
    assert read.provenance.environment["UCX_TLS"] == "tcp"
    assert read.provenance.environment["NIXL_APITOKEN"] == "***"
    assert read.results[1].reason == "it sent Authorization: ***"


def test_secrets_in_a_record_without_our_part_are_hidden() -> None:
    document = full()
    del document["nixl"]
    document["machine_info"] = {"node": f"token={SECRET}"}
    document["benchmarks"][0]["extra_info"]["initiator_nixl"] = f"--password {SECRET}"
    assert SECRET not in repr(parse_recorded(document, "x.json").provenance)
