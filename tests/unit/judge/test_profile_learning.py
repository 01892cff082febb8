# SPDX-License-Identifier: Apache-2.0
"""Profiles learned from runs of the real suite, and from records with known values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cli_run import bandwidth

from pytest_nixl import cli
from pytest_nixl.judge.profile_learning import learned_profile, read_run
from pytest_nixl.judge.profiles import load_profile, parse_profile
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict

KEY = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 65536)


def record(path: Path, gigabytes: float, *, key: str = str(KEY), verdict: Verdict = Verdict.PASS) -> str:
    extra = {"key": key, "GB/s": gigabytes, "transports": ["cma/memory"]}
    results = [Result("bandwidth", "", verdict, "", row=RowKey.parse(key)).plain()]
    document = {"benchmarks": [{"extra_info": extra}, {"extra_info": {}}], "nixl": {"results": results}}
    path.write_text(json.dumps(document))
    return str(path)


def learn(tmp_path: Path, *runs: str) -> int:
    return cli.main(["profile", "learn", "--name", "mine", "--output", str(tmp_path / "mine.toml"), *runs])


def test_the_floor_is_below_every_good_run_and_an_outlier_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [record(tmp_path / f"{number}.json", value) for number, value in enumerate((10.0, 10.1, 9.9, 10.0, 3.0))]
    assert learn(tmp_path, *runs) == 0
    assert f"{KEY}: {runs[4]} was left out" in capsys.readouterr().out
    expectation = load_profile(str(tmp_path / "mine.toml")).expectation(KEY)
    assert expectation is not None
    assert expectation.floor == pytest.approx(9.5e9)
    assert expectation.transports == ("cma",)
    assert "4 of 5 runs: median 10 GB/s, median absolute deviation 0.05 GB/s; floor = " in expectation.source


@pytest.mark.parametrize(
    ("variant", "notify", "pages"),
    [("", "last", "huge"), ("/notify=each", "each", "huge"), ("/notify=each,pages=base", "each", "base")],
)
def test_floors_are_for_rows_of_the_same_notifications_and_pages(
    tmp_path: Path, variant: str, notify: str, pages: str
) -> None:
    runs = [record(tmp_path / f"{number}.json", 10.0, key=f"{KEY}{variant}") for number in range(3)]
    assert learn(tmp_path, *runs) == 0
    learned = load_profile(str(tmp_path / "mine.toml"))
    assert [(item.notify, item.pages) for item in learned.expectations] == [((notify,), (pages,))]
    conditions = [(notified, other) for notified in ("last", "each") for other in ("huge", "base")]
    applies = [condition for condition in conditions if learned.expectation(KEY.under(*condition)) is not None]
    assert applies == [(notify, pages)]


def test_a_floor_far_below_the_median_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [record(tmp_path / f"{number}.json", value) for number, value in enumerate((2.33, 1.9, 2.75))]
    assert learn(tmp_path, *runs) == 0
    expected = f"{KEY}: its floor of 0.23 GB/s is only 10 % of the median of 2.33 GB/s, because the runs differ: "
    assert expected in capsys.readouterr().out
    for values, share in (((2.33, 2.3, 2.35), ""), ((16.9, 16.0, 15.1), "72 %"), ((16.8, 16.0, 15.2), "")):
        other_records = [record(tmp_path / f"{number}.json", value) for number, value in enumerate(values)]
        (tmp_path / "mine.toml").unlink()
        assert learn(tmp_path, *other_records) == 0
        expected = capsys.readouterr().out
        assert (f"is only {share} of" in expected) == ("is only" in expected) == bool(share), "75 % is enough"
        assert "slowest pair" not in expected


def record_of(path: Path, rows: dict[str, float], *transports: str, bad: dict[str, Verdict] | None = None) -> str:
    """Write a run with several rows, in GB/s; ``bad`` has the verdicts of some."""
    extras = [{"key": key, "GB/s": value, "transports": list(transports)} for key, value in rows.items()]
    results = [Result("bandwidth", "", verdict, "", row=RowKey.parse(key)).plain()
               for key, verdict in (bad or {}).items()]  # fmt: skip
    document = {"benchmarks": [{"extra_info": extra} for extra in extras], "nixl": {"results": results}}
    path.write_text(json.dumps(document))
    return str(path)


LARGE = str(KEY).replace("64KiB", "1MiB")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([str(KEY), LARGE], f"{LARGE} is in {{2}} and not in {{0}}: expected"),
        ([LARGE], f"{LARGE} is in {{2}} and not in {{0}}: expected"),
        ([], f"{KEY} is in {{0}} and not in {{2}}: expected"),
    ],
)
def test_runs_with_different_rows_are_refused_with_the_row_and_both_runs(
    tmp_path: Path, rows: list[str], message: str
) -> None:
    small = str(KEY).replace("64KiB", "4KiB")
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for path, keys in zip(paths, ([str(KEY)], [str(KEY)], rows), strict=True):
        record_of(path, dict.fromkeys([*keys, small], 10.0))
    with pytest.raises(ValueError) as caught:
        learned_profile("mine", paths)
    assert str(caught.value).startswith(f"{paths[2]} and {paths[0]} have different rows: {message.format(*paths)}")


def test_only_rows_of_blocks_that_nixl_moved_are_learned(tmp_path: Path) -> None:
    other_keys = [KEY.measured_by("nixlbench"), *(replace(KEY, variant=((name, "x"),)) for name in ("kv", "pattern"))]
    rows = {str(KEY): 10.0, **{str(key): 1.0 for key in other_keys}}
    assert list(read_run(Path(record_of(tmp_path / "run.json", rows)))) == [KEY]
    for key in other_keys:
        with pytest.raises(ValueError, match=r"has no row of the bandwidth suite"):
            read_run(Path(record_of(tmp_path / "run.json", {str(key): 1.0})))


def test_a_row_of_which_nothing_is_known_is_left_out_of_the_profile_and_no_other(tmp_path: Path) -> None:
    paths = [Path(record_of(tmp_path / f"{number}.json", {str(KEY): value, LARGE: 9.0}, "cma"))
             for number, value in enumerate((1.0, 5.0, 10.0))]  # fmt: skip
    text, _ = learned_profile("größe 🚀", paths)
    learned = parse_profile(text.encode(), "mine")
    assert learned.name == "größe 🚀"
    assert [(item.floor is None, item.transports) for item in learned.expectations] == [
        (True, ("cma",)),
        (False, ("cma",)),
    ]
    for number, value in enumerate((1.0, 5.0, 10.0)):
        record_of(paths[number], {str(KEY): value, LARGE: 9.0})
    learned = parse_profile(learned_profile("mine", paths)[0].encode(), "mine")
    assert [(item.floor is None, item.transports) for item in learned.expectations] == [(False, None)]
    with pytest.raises(ValueError, match="is not one line of text"):
        learned_profile("a\nb", paths)


def test_the_verdict_of_one_pair_of_ranks_is_said_of_its_row(tmp_path: Path) -> None:
    other = str(KEY).replace("0-1", "1-2")
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for first, second in ((str(KEY), other), (other, str(KEY))):
        for path in paths:
            record_of(path, {first: 10.0, second: 10.0}, "tcp", bad={first: Verdict.WRONG_TRANSPORT})
        _, remarks = learned_profile("mine", paths)
        assert sum("1 of 1 rows had the verdict WRONG-TRANSPORT" in remark for remark in remarks) == 3


def test_unusable_runs_are_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [record(tmp_path / f"{number}.json", 10.0) for number in range(3)]
    (tmp_path / "foreign.json").write_text("[]")
    (tmp_path / "empty.json").write_text('{"benchmarks": []}')
    other = record(tmp_path / "other.json", 10.0, key=str(KEY).replace("64KiB", "1MiB"))
    (tmp_path / "mine.toml").write_text("")
    for runs, fragment in (
        (good[:2], "2 runs are too few to learn from: expected at least 3"),
        ([*good, str(tmp_path / "foreign.json")], "foreign.json is not a record of a run"),
        ([*good, str(tmp_path / "empty.json")], "empty.json has no row of the bandwidth suite"),
        ([*good, other], "have different rows"),
        ([*good, str(tmp_path / "missing.json")], "missing.json cannot be read (No such file or directory)"),
        (good, "mine.toml already exists"),
    ):
        assert learn(tmp_path, *runs) == 2
        error_output = capsys.readouterr().err
        assert fragment in error_output
        assert error_output.count("\n") == 1


def test_a_run_with_corrupt_bytes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [record(tmp_path / f"{number}.json", 10.0) for number in range(3)]
    assert learn(tmp_path, *good, record(tmp_path / "bad.json", 10.0, verdict=Verdict.CORRUPT)) == 2
    assert f"bad.json has corrupt bytes in {KEY}" in capsys.readouterr().err


@pytest.mark.parametrize("verdict", [Verdict.WRONG_TRANSPORT, Verdict.IMPLAUSIBLE], ids=str)
def test_what_the_runs_were_judged_is_said_where_a_profile_would_expect_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: Verdict
) -> None:
    runs = [record(tmp_path / f"{number}.json", 10.0, verdict=verdict) for number in range(3)]
    assert learn(tmp_path, *runs) == 0
    output = capsys.readouterr().out
    assert output.count(f"1 of 1 rows had the verdict {verdict}, such as {KEY};") == 3
    assert "over cma: " in output


def test_only_the_rows_and_transports_of_a_verdict_are_said_to_have_it(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    rows = {LARGE: 10.0, str(KEY): 10.0, str(KEY).replace("64KiB", "4KiB"): 10.0}
    for path, transports in zip(paths, (("rc/mlx5_0", "tcp/eth0"), ("rc/mlx5_1",), ("dc/mlx5_0",)), strict=True):
        bad = dict.fromkeys([str(KEY), str(KEY).replace("64KiB", "4KiB")], Verdict.IMPLAUSIBLE)
        record_of(path, rows, *transports, bad=bad)
    text, remarks = learned_profile("mine", paths)
    assert [expectation.transports for expectation in parse_profile(text.encode(), "mine").expectations] == [
        ("rc", "tcp", "dc")
    ] * 3
    assert remarks == [
        f"{path}: 2 of 3 rows had the verdict IMPLAUSIBLE, such as {KEY}; this profile expects the same, over rc and "
        "tcp and dc: if that is wrong, measure again"
        for path in paths
    ]


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


def test_rows_with_gpu_numbers_are_learned_without_them(tmp_path: Path) -> None:
    key = RowKey("UCX", "WRITE", MemoryPair("DRAM", "VRAM"), 65536, devices=DevicePair(0, 3))
    runs = [record(tmp_path / f"{number}.json", 10.0, key=str(key)) for number in range(3)]
    assert learn(tmp_path, *runs) == 0
    expectation = load_profile(str(tmp_path / "mine.toml")).expectation(key)
    assert expectation is not None
    assert expectation.floor is not None


def test_floors_are_learned_from_rows_of_default_agents_only(tmp_path: Path) -> None:
    def rows(path: Path, **gigabytes: float) -> str:
        extras = [
            {"key": f"{KEY}{variant and '/threads='}{variant}", "GB/s": value, "transports": ["cma/memory"]}
            for variant, value in ((name.strip("_"), value) for name, value in gigabytes.items())
        ]
        path.write_text(json.dumps({"benchmarks": [{"extra_info": extra} for extra in extras]}))
        return str(path)

    mixed = [rows(tmp_path / f"{number}.json", _4=1.0, _=10.0) for number in range(3)]
    assert learn(tmp_path, *mixed) == 0
    expectation = load_profile(str(tmp_path / "mine.toml")).expectation(KEY)
    assert expectation is not None
    assert expectation.floor == pytest.approx(9.5e9)


def test_rows_of_several_variants_without_the_default_are_refused(tmp_path: Path) -> None:
    keys = [f"{KEY}/threads={number}" for number in (2, 4)]
    path = tmp_path / "run.json"
    extras = [{"key": key, "GB/s": 1.0, "transports": []} for key in keys]
    path.write_text(json.dumps({"benchmarks": [{"extra_info": extra} for extra in extras]}))
    with pytest.raises(ValueError, match=r"rows of several variants \(threads=2; threads=4\)"):
        read_run(path)


def test_of_several_pairs_the_slowest_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three nodes measure a ring of pairs, and an expectation names none of them."""
    runs = []
    for number in range(3):
        pairs = (("0-1", 10.0, "rc_mlx5/mlx5_0:1"), ("1-2", 8.0, "rc_mlx5/mlx5_1:1"), ("2-0", 9.0, "dc_mlx5/mlx5_0:1"))
        benchmarks = [
            {"extra_info": {"key": str(KEY).replace("0-1", pair), "GB/s": value, "transports": [transport]}}
            for pair, value, transport in pairs
        ]
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({"benchmarks": benchmarks, "nixl": {"results": []}}))
        runs.append(str(path))
    assert learn(tmp_path, *runs) == 0
    assert "each row is learned from the slowest pair of each run" in capsys.readouterr().out
    [expectation] = load_profile(str(tmp_path / "mine.toml")).expectations
    assert expectation.floor == pytest.approx(0.95 * 8e9)
    assert expectation.transports == ("rc_mlx5", "dc_mlx5")


def test_rows_without_a_floor_are_counted_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [record(tmp_path / f"{number}.json", value) for number, value in enumerate((1.0, 5.0, 10.0))]
    assert learn(tmp_path, *runs) == 0
    assert "\n1 OF 1 ROWS HAVE NO FLOOR, and will pass however slow they are: " in capsys.readouterr().out
    (tmp_path / "mine.toml").unlink()
    assert learn(tmp_path, *(record(tmp_path / f"{number}.json", 5.0) for number in range(3))) == 0
    assert "NO FLOOR" not in capsys.readouterr().out


def test_machine_and_required_checks_are_those_of_another_profile(tmp_path: Path) -> None:
    runs = [record(tmp_path / f"{number}.json", 10.0) for number in range(3)]
    like = tmp_path / "like.toml"
    like.write_text(
        '[profile]\nname = "like"\n\n[required]\nchecks = ["rdma-devices", "bandwidth"]\n\n[machine]\nnics = 8\n'
        'nic_rate = "400 Gb/s"\nnic_kind = "rc"\nnics_per_gpu = 1\ngpus = 8\ngpu = "H100"\nscaling = "25%"\n'
        'source = "facts"\n'
    )
    assert learn(tmp_path, *runs, f"--like={like}") == 0
    learned = load_profile(str(tmp_path / "mine.toml"))
    assert learned.machine == load_profile(str(like)).machine
    assert learned.required == ("nixl-loads", "backend-loads", "bandwidth", "rdma-devices")
