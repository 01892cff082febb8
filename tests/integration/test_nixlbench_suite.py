# SPDX-License-Identifier: Apache-2.0
"""The bandwidth suite with nixlbench: its rows are judged and recorded like other rows, under separate keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli_run import Finished, profile, run
from helpers.nixlbench import standin

from pytest_nixl.judge.profile_learning import read_run
from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.store.record_reader import parse_recorded

pytestmark = pytest.mark.long

SUITE = "suites/bandwidth/test_nixlbench.py"
ONE_ROW = ("--nixl-blocks=64KiB", "--nixl-op=WRITE", "--nixl-level=extended")
OURS = "UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1"
#: The row of ours that is like those of nixlbench.
LIKE = f"{OURS}/notify=each,pages=base"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(standin(tmp_path_factory.mktemp("standin")))


def bench(program: str, *arguments: str, play: str = "normal") -> Finished:
    return run(SUITE, *ONE_ROW, f"--nixl-nixlbench={program}", "-W", "error::pytest.PytestWarning", *arguments,
               env={"STANDIN_PLAY": play})  # fmt: skip


def test_rows_of_both_programs_are_shown_and_recorded(program: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    both = ("suites/bandwidth/test_bandwidth.py", SUITE)
    reports = f"--nixl-report={tmp_path / 'page.html'},{tmp_path / 'rows.csv'},{tmp_path / 'rows.prom'}"
    any_speed = profile(tmp_path / "any.toml", "transports = ['cma']\nfloor = '1 KB/s'")
    like = ("--nixl-notify=each", "--nixl-pages=base", f"--nixl-nixlbench={program}", f"--nixl-profile={any_speed}")
    done = run(*both, *ONE_ROW, "-v", *like, f"--benchmark-json={path}", f"--nixl-store={tmp_path}", reports,
               env={"STANDIN_PLAY": "normal"})  # fmt: skip
    assert done.code == 0, done.output
    # The recorded row of the real nixlbench, and the transport that the real UCX reported.
    assert "nixlbench:UCX  WRITE  DRAM:DRAM  64KiB      1      1  3.64" in done.output
    assert "cma/memory  PASS" in done.output
    assert "\nUCX : nixlbench:UCX  WRITE  DRAM:DRAM   64KiB  notify=each,pages=base  " in done.output
    text = path.read_text()
    record = json.loads(text)
    assert "NaN" not in text
    rows = {row["fullname"]: row["extra_info"] for row in record["benchmarks"]}
    assert set(rows) == {LIKE, f"nixlbench:{OURS}"}
    assert rows[f"nixlbench:{OURS}"]["GB/s"] == pytest.approx(3.640889)
    assert rows[f"nixlbench:{OURS}"]["nixlbench_runtime"] == "ASIO"
    assert rows[f"nixlbench:{OURS}"]["transports"] == ["cma/memory"]
    assert {row["pages"] for row in rows.values()} == {"base"}
    assert "p50_us" not in rows[f"nixlbench:{OURS}"]
    # History and reports show it as a separate row. Learned profiles and comparisons leave it out.
    results = parse_recorded(record, "this")
    assert set(map(str, results.rows)) == {LIKE, f"nixlbench:{OURS}"}
    assert set(map(str, read_run(path))) == {LIKE}
    compared = compare_runs(results, results, 0.05)
    assert set(map(str, compared.comparison.rows)) == {LIKE}
    assert Verdict.MISSING not in {result.verdict for result in compared.results}
    assert f"nixlbench:{OURS}" in (tmp_path / "rows.csv").read_text()
    assert 'backend="nixlbench:UCX"' in (tmp_path / "rows.prom").read_text()


SEEDS = "--mode=MG --num_initiator_dev=8 --num_target_dev 8 --check_consistency=1"
#: By name: what the double plays, options, the exit code, and lines.
RUNS = {
    # The recorded row of this block is a fast one.
    "extra flags make a separate row": (
        "normal", (f"--nixl-nixlbench-args={SEEDS}", "--nixl-nixlbench-runtime=ETCD", "--nixl-blocks=128KiB"),
        0, ("nixlbench[MG8x8]:UCX  WRITE",),
    ),
    "wrong bytes": (
        "inconsistent:1", (), 1,
        ("CORRUPT nixlbench:UCX/WRITE", " says: Consistency check failed for iov 0:0", "--check_consistency=1"),
    ),
    "a killed rank": (
        "killed:1", (), 1,
        (f"ERROR nixlbench:{OURS}: the target (nixlbench of rank 1 on ", " was ended by SIGKILL during the run",
         f"repeat: pytest {SUITE} ...--nixl-backend=UCX", "0 rows measured"),
    ),
    # A single flag as a separate argument looks like an option of pytest.
    "an unknown flag": (
        "normal", ("--nixl-nixlbench-args", "--no_such_flag=1"), 1, (" has no --no_such_flag\n", "nixlbench --help"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("play", "arguments", "code", "lines"), RUNS.values(), ids=RUNS)
def test_a_run_with_the_double_says(
    program: str, play: str, arguments: tuple[str, ...], code: int, lines: tuple[str, ...]
) -> None:
    bench(program, *arguments, play=play).expect(code, *lines)


def test_without_nixlbench_its_rows_are_not_applicable() -> None:
    run(SUITE, *ONE_ROW, env={"PATH": "/nowhere"}).expect(
        1,
        ": this host has no nixlbench on its PATH, and --nixl-nixlbench PATH names none",
        "MISSING whole-run: nothing was checked, because the only check was skipped: this host has no nixl",
        "NIXL verdict: NOTHING CHECKED (1 MISSING, 1 NOT-APPLICABLE; 0 rows measured)",
    )
