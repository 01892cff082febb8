# SPDX-License-Identifier: Apache-2.0
"""The report of a small run that has something for each part of each format."""

from __future__ import annotations

from typing import Any

from helpers.records import key, record
from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

WRITE_ROW, READ_ROW = key("4KiB"), "UCX/READ/DRAM:VRAM/64KiB/batch8/depth4/2-5/notify=each"
BARE_ROW = key("1MiB", backend="LIBFABRIC")
HOST: dict[str, Any] = {"name": "n-a", "cpu": "a CPU", "cores": 8, "gpus": 0, "nics": {}}
#: A name with every sign that a format has a meaning for.
IMAGE, DIGEST = 'reg/"a"|\\nb*\nc:2', f"sha256:{32 * '12'}"


def small_run(image: str, slow: float, week: int, results: tuple[Result, ...] = ()) -> RecordedRun:
    """Return a run of two rows with bounds, and of one without after the first week."""
    spread = (1.0, 1.01, 0.99, 1.02, 0.98)
    versions = {"nixl": "1.5.1", "ucx": f"1.{19 + week}.0"}
    figures = {"floor": 5e8, "ceiling": 9e9, "p50_us": 1.5, "p90_us": 2.0, "p99_us": 4.0, "p99.9_us": 8.0,
               "transports": ["rc/mlx5_0:1", "tcp/eth0"]}  # fmt: skip
    rows = {WRITE_ROW: [2.0 * value for value in spread], READ_ROW: [slow * value for value in spread]}
    data = record(image, rows, digest=DIGEST, week=week, versions=versions, results=results, extra=figures, **HOST)
    bare = {"p50_us": 0.5, "p90_us": 0.0, "p99_us": float("nan"), "p99.9_us": 3.0, "transports": []}
    data["benchmarks"][1:1] = record(image, {BARE_ROW: [4.0]} if week else {}, extra=bare)["benchmarks"]
    return parse_recorded(data, "r.json")


def small_report() -> RunReport:
    """Return the report of a run with a result of each outcome, a comparison, a ratio and three figures."""
    slow, fast = (RowSummary(1.9e9, 1e-5, 2e-5, 10, 5e8, 9e9, ("tcp/eth0",)) for _ in range(2))
    raw = RawMeasurement("ucx_perftest", "ucp_get_bw", 4e9, "UCX 1.18", ("rc/mlx5_0:1", "tcp/eth0"))
    ratio = RawRatio(RowKey.parse(READ_ROW), 1.9e9, raw)
    measured = [Figure.of("registration", seconds, {"backend": "UCX", "count": 1, "size": size})
                for seconds, size in ((1e-3, 4096), (2e-3, 8192), (3e-3, 4096))]  # fmt: skip
    results = (
        Result("etcd-uri", "u", Verdict.WARN, "a | and <b>\n*_`[end]\\", "Leave it out."),
        Result("a,b:c", "r", Verdict.FAIL, "too slow", "Look at 100 %.", RowKey.parse(READ_ROW), slow, "pytest r",
               ratios=(ratio,)),
        Result("bandwidth", "w", Verdict.FAIL, "slow, too", "Look at 100 %.", RowKey.parse(WRITE_ROW), fast),
        Result("gpus", "g", Verdict.NOT_APPLICABLE, "no GPU"),
        Result("limit", "l", Verdict.PASS, "no lease", finding="NIXL-ETCD-STALE-KEY", known_limit=True),
        Result("registration", "r", Verdict.PASS, measured=tuple(measured)),
        Result("stale", "s", Verdict.INCONCLUSIVE, "no lease", finding="NIXL-ETCD-HTTPS-PLAINTEXT"),
    )  # fmt: skip
    before, run = small_run("reg/nixl:1", 2.0, 0), small_run(IMAGE, 1.0, 1, results)
    return RunReport(run, compare_runs(before, run, 0.05), durations={"w": 1.23456}, seconds=9.87654, exit_code=1)
