# SPDX-License-Identifier: Apache-2.0
"""Profiles learned from runs of the real suite, and from records with known values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cli_run import bandwidth

from pytest_nixl import cli
from pytest_nixl.judge.profile_learning import learned_profile, read_run
from pytest_nixl.judge.profiles import parse_profile
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict

KEY = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 65536)
LARGE, SMALL = str(replace(KEY, block=1 << 20)), str(replace(KEY, block=4096))
#: The GB/s of a row, or these and its transports.
Row = float | tuple[float, Sequence[str]]


def record(path: Path, rows: Mapping[str, Row], bad: Mapping[str, Verdict] | None = None) -> Path:
    """Write a run. Rows went over cma, if they do not say; ``bad`` has the verdicts of some."""
    pairs = {key: row if isinstance(row, tuple) else (row, ["cma/memory"]) for key, row in rows.items()}
    extras = [{"key": key, "GB/s": rate, "transports": list(names)} for key, (rate, names) in pairs.items()]
    results = [Result("bandwidth", "", (bad or {}).get(key, Verdict.PASS), "", row=RowKey.parse(key)) for key in rows]
    document = {
        "benchmarks": [{"extra_info": extra} for extra in (*extras, {})],
        "nixl": {"results": [result.plain() for result in results]},
    }
    path.write_text(json.dumps(document))
    return path


def records(folder: Path, *runs: Mapping[str, Row], bad: Mapping[str, Verdict] | None = None) -> list[Path]:
    return [record(folder / f"{number}.json", rows, bad) for number, rows in enumerate(runs)]


def learn(tmp_path: Path, *runs: str) -> int:
    return cli.main(["profile", "learn", "--name", "mine", "--output", str(tmp_path / "mine.toml"), *runs])


MACHINE = """
[machine]
nics = 8
nic_rate = "400 Gb/s"
nics_per_gpu = 1
gpus = 8
nic_kind = "rc"
gpu = "H100"
scaling = "25%"
source = "facts"
"""
LIKE = f'[profile]\nname = "like"\n[required]\nchecks = ["rdma-devices", "bandwidth"]\n{MACHINE}'
#: What is learned from the runs of the test below.
LEARNED = f"""[profile]
name = "größe 🚀"
summary = "learned from 5 runs"

[required]
checks = ["nixl-loads", "backend-loads", "bandwidth", "rdma-devices"]
{MACHINE}
[[expect]]
backend = ["UCX"]
op = ["WRITE"]
memory = ["DRAM:DRAM"]
blocks = "64KiB"
batch = [1]
depth = [1]
notify = ["last"]
pages = ["huge"]
floor = "9.5 GB/s"
transports = ["cma", "tcp"]
source = "4 of 5 runs: median 10 GB/s, median absolute deviation 0.05 GB/s; floor = min(0.95 median, median - 5 MAD)"

[[expect]]
backend = ["LIBFABRIC"]
op = ["READ"]
memory = ["DRAM:VRAM"]
blocks = "1MiB"
batch = [8]
depth = [2]
notify = ["last"]
pages = ["huge"]
floor = "7.6 GB/s"
transports = ["efa", "srd"]
source = "5 of 5 runs: median 8 GB/s, median absolute deviation 0 GB/s; floor = min(0.95 median, median - 5 MAD)"

[[expect]]
backend = ["UCX"]
op = ["WRITE"]
memory = ["DRAM:DRAM"]
blocks = "1MiB"
batch = [1]
depth = [1]
notify = ["last"]
pages = ["huge"]
transports = ["cma"]
source = "5 of 5 runs: median 7 GB/s, median absolute deviation 3 GB/s; floor = min(0.95 median, median - 5 MAD)"
"""


def test_a_profile_has_each_row_with_its_floor_transports_and_source(tmp_path: Path) -> None:
    """Of the pairs of ranks and GPUs of a row the slowest counts. Rows of other variants and programs do not."""
    gpu = RowKey("LIBFABRIC", "READ", MemoryPair("DRAM", "VRAM"), 1 << 20, batch=8, depth=2)
    first, second = replace(gpu, devices=DevicePair(0, 3)), replace(gpu, pair=(1, 2))
    others = [replace(KEY, variant=((name, "4"),)) for name in ("kv", "pattern", "threads")]
    ignored = {str(key): 1.0 for key in (KEY.measured_by("nixlbench"), *others)}
    values = ((10.0, 1.0), (10.1, 4.0), (9.9, 7.0), (10.0, 10.0), (3.0, 17.0))
    measured: list[dict[str, Row]] = [
        {str(KEY): (value, ["tcp/lo"] if number == 3 else ["cma/memory"]), str(first): (9.0, ["efa/a"]),
         str(second): (8.0, ["srd"]), LARGE: large, SMALL: (large, []), **ignored}
        for number, (value, large) in enumerate(values)
    ]  # fmt: skip
    runs = records(tmp_path, *measured)
    text, remarks = learned_profile("größe 🚀", runs, parse_profile(LIKE.encode(), "like"))
    assert f"{text}\n" == LEARNED
    no_floor = "no floor, because fewer than 3 runs agree or their spread is too large"
    assert remarks == [
        f"{KEY}: {runs[4]} was left out, because it is far from the other runs",
        f"{LARGE}: {no_floor}",
        f"{SMALL}: {no_floor}",
        "an expectation is for all pairs of ranks and GPUs: each row is learned from the slowest pair of each run",
        "2 OF 4 ROWS HAVE NO FLOOR, and will pass however slow they are: make more runs on quiet machines and learn "
        "from all of them, or write these floors by hand",
    ]
    learned = parse_profile(text.encode(), "mine")
    assert learned.machine == parse_profile(LIKE.encode(), "like").machine
    assert learned.expectation(replace(first, pair=(2, 0))) is learned.expectations[1]


@pytest.mark.parametrize(
    ("variant", "notify", "pages"),
    [("", "last", "huge"), ("/notify=each", "each", "huge"), ("/notify=each,pages=base", "each", "base")],
)
def test_floors_are_for_rows_of_the_same_notifications_and_pages(
    tmp_path: Path, variant: str, notify: str, pages: str
) -> None:
    runs = records(tmp_path, *[{f"{KEY}{variant}": 10.0}] * 3)
    learned = parse_profile(learned_profile("mine", runs)[0].encode(), "mine")
    assert [(item.notify, item.pages) for item in learned.expectations] == [((notify,), (pages,))]
    conditions = [(notified, other) for notified in ("last", "each") for other in ("huge", "base")]
    applies = [condition for condition in conditions if learned.expectation(KEY.under(*condition)) is not None]
    assert applies == [(notify, pages)]


@pytest.mark.parametrize(
    ("values", "figures"),
    [
        ((2.33, 1.9, 2.75), ("0.23", "10", "2.33")),
        ((2.33, 2.3, 2.35), ()),
        ((16.9, 16.0, 15.1), ("11.5", "72", "16")),
        ((16.8, 16.0, 15.2), ()),  # 75 % is enough
    ],
)
def test_a_floor_far_below_the_median_is_reported(
    tmp_path: Path, values: tuple[float, ...], figures: tuple[str, ...]
) -> None:
    _, remarks = learned_profile("mine", records(tmp_path, *({str(KEY): value} for value in values)))
    text = (
        "{}: its floor of {} GB/s is only {} % of the median of {} GB/s, because the runs differ: a loss down to it "
        "passes. Learn from runs on a quiet machine, or write a floor by hand"
    )
    assert remarks == ([text.format(KEY, *figures)] if figures else [])


@pytest.mark.parametrize(
    ("rows", "row", "places"), [([str(KEY), LARGE], LARGE, (2, 0)), ([LARGE], LARGE, (2, 0)), ([], str(KEY), (0, 2))]
)
def test_runs_with_different_rows_are_refused_with_the_row_and_both_runs(
    tmp_path: Path, rows: list[str], row: str, places: tuple[int, int]
) -> None:
    paths = records(tmp_path, *(dict.fromkeys([*keys, SMALL], 10.0) for keys in ([str(KEY)], [str(KEY)], rows)))
    with pytest.raises(ValueError) as caught:
        learned_profile("mine", paths)
    assert str(caught.value) == (
        f"{paths[2]} and {paths[0]} have different rows: {row} is in {paths[places[0]]} and not in {paths[places[1]]}: "
        "expected runs with the same options"
    )


def test_a_run_without_rows_of_blocks_or_of_several_variants_is_refused(tmp_path: Path) -> None:
    others = [KEY.measured_by("nixlbench"), *(replace(KEY, variant=((name, "x"),)) for name in ("kv", "pattern"))]
    no_row, several = (
        "has no row of the bandwidth suite: expected",
        "has rows of several variants (threads=2; threads=4), ",
    )
    for rows, fault in (
        *(([str(key)], no_row) for key in others),
        ([f"{KEY}/threads={number}" for number in (4, 2)], several),
    ):
        path = record(tmp_path / "run.json", dict.fromkeys(rows, 1.0))
        with pytest.raises(ValueError) as caught:
            read_run(path)
        assert str(caught.value).startswith(f"{path} {fault}")


def test_a_row_of_which_nothing_is_known_is_left_out_of_the_profile_and_no_other(tmp_path: Path) -> None:
    runs = records(tmp_path, *({str(KEY): (value, []), LARGE: (9.0, [])} for value in (1.0, 5.0, 10.0)))
    learned = parse_profile(learned_profile("mine", runs)[0].encode(), "mine")
    assert [(item.floor is None, item.transports) for item in learned.expectations] == [(False, None)]
    with pytest.raises(ValueError, match="is not one line of text"):
        learned_profile("a\nb", runs)


@pytest.mark.parametrize("verdict", [Verdict.WRONG_TRANSPORT, Verdict.IMPLAUSIBLE])
def test_only_the_rows_and_transports_of_a_verdict_are_said_to_have_it(tmp_path: Path, verdict: Verdict) -> None:
    """The verdict of one pair of ranks is that of its row."""
    over = (("rc/mlx5_0", "tcp/eth0"), ("rc/mlx5_1",), ("dc/mlx5_0",))
    other = str(replace(KEY, pair=(1, 2)))
    for first, second in ((str(KEY), other), (other, str(KEY))):
        rows = ({LARGE: (10.0, ["cma"]), **dict.fromkeys((first, second, SMALL), (10.0, names))} for names in over)
        runs = records(tmp_path, *rows, bad={first: verdict, SMALL: verdict})
        *remarks, _ = learned_profile("mine", runs)[1]
        assert remarks == [
            f"{path}: 2 of 3 rows had the verdict {verdict}, such as {KEY}; this profile expects the same, over rc and "
            "tcp and dc: if that is wrong, measure again"
            for path in runs
        ]


def test_unusable_runs_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = list(map(str, records(tmp_path, *[{str(KEY): 10.0}] * 3)))
    (tmp_path / "foreign.json").write_text("[]")
    (tmp_path / "empty.json").write_text('{"benchmarks": []}')
    record(tmp_path / "bad.json", {str(KEY): 10.0}, {str(KEY): Verdict.CORRUPT})
    for runs, fragment in (
        (good[:2], "2 runs are too few to learn from: expected at least 3"),
        ([*good, str(tmp_path / "foreign.json")], "foreign.json is not a record of a run"),
        ([*good, str(tmp_path / "empty.json")], "empty.json has no row of the bandwidth suite"),
        ([*good, str(tmp_path / "bad.json")], f"bad.json has corrupt bytes in {KEY}: a profile is learned from good"),
        ([*good, str(tmp_path / "missing.json")], "missing.json cannot be read (No such file or directory)"),
    ):
        assert learn(tmp_path, *runs) == 2
        error_output = capsys.readouterr().err
        assert fragment in error_output
        assert error_output.count("\n") == 1


@pytest.mark.long
def test_runs_of_the_suite_give_a_profile_that_the_suite_can_use(tmp_path: Path) -> None:
    runs = [str(tmp_path / f"run{number}.json") for number in range(3)]
    for run in runs:
        assert bandwidth("--nixl-op=WRITE", f"--benchmark-json={run}").code == 0
    assert learn(tmp_path, *runs) == 0
    done = bandwidth("--nixl-op=WRITE", f"--nixl-profile={tmp_path / 'mine.toml'}")
    # The floor depends on the noise of this machine, but the row has an expectation, and its transport is accepted.
    assert done.verdicts["WRITE 64KiB"] not in ("NO-EXPECTATION", "WRONG-TRANSPORT", "UNKNOWN", "ERROR")
    assert done.code in (0, 1)
