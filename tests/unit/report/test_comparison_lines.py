# SPDX-License-Identifier: Apache-2.0
"""The comparison of two runs on the terminal as a whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.records import key, record

from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Outcome, Verdict
from pytest_nixl.report.comparison import lines
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

ROWS = {key("4KiB"): 1.0, key("1MiB"): 2.0, key("2MiB"): 4.0}
WRONG = Result("bandwidth", "x", Verdict.WRONG_TRANSPORT, "no", row=RowKey.parse(key("1MiB")))
CORRUPT = Result("bandwidth", "x", Verdict.CORRUPT, "no", row=RowKey.parse(key("2MiB")))
ALL = """
against a:1 of 2026-03-02 03:00 UTC on the host h1
changed: host name: h1 -> h2
changed: UCX_TLS=tcp is set in this run, and was not set before
row                       GB/s before  GB/s now           change [90 %]  launches       p  verdict
UCX WRITE DRAM:DRAM 4KiB            1       0.5  -50.0 % [-50.0, -50.0]       6:5  0.0022  REGRESSED
UCX WRITE DRAM:DRAM 1MiB            2         1                 -50.0 %                    WRONG-TRANSPORT (tcp/eth0 \
before, unknown now)
UCX WRITE DRAM:DRAM 2MiB            4         2                 -50.0 %                    CORRUPT
regression: REGRESSED (all rows together: -50.0 % (between -50.0 % and -50.0 %), 6 launches against 5, p = 0.0022)"""
FAILED = """
against a:1 of 2026-03-02 03:00 UTC on this host
row                       GB/s before  GB/s now  change [90 %]  launches  p  verdict
UCX WRITE DRAM:DRAM 1MiB            2         1        -50.0 %               WRONG-TRANSPORT
regression: WRONG-TRANSPORT"""


def half(*sizes: str, name: str = "h1", transports: Sequence[str] = ("tcp/eth0",), **options: Any) -> RecordedRun:
    """Return a run with half of the bandwidth of some rows."""
    data = record("a:1", {key(size): [ROWS[key(size)] / 2] * 6 for size in sizes}, name=name, **options)
    for row in data["benchmarks"]:
        if row["name"] == key("1MiB"):
            row["extra_info"]["transports"] = transports
    return parse_recorded(data, "now.json")


@pytest.mark.parametrize(
    ("now", "text", "outcomes"),
    [
        (half("4KiB", "1MiB", "2MiB", name="h2", transports=(), results=[WRONG, CORRUPT],
              environment={"UCX_TLS": "tcp"}),
         ALL, [Outcome.FAIL] * 3),
        (half("1MiB", results=[WRONG]), FAILED, [Outcome.FAIL]),
    ],
    ids=["rows that lost and rows that failed", "only a row that failed"],
)  # fmt: skip
def test_each_row_is_compared_or_has_its_verdict(now: RecordedRun, text: str, outcomes: list[Outcome]) -> None:
    before = parse_recorded(record("a:1", {name: [rate] * 5 for name, rate in ROWS.items()}, name="h1"), "before.json")
    shown = list(lines(compare_runs(before, now, 0.05), gate=True))
    assert "\n".join(line.text for line in shown) == text
    assert [line.outcome for line in shown[-len(outcomes) - 1 : -1]] == outcomes
    assert shown[-1].outcome is Outcome.FAIL


@pytest.mark.parametrize(("gate", "ends"), [(False, Outcome.WARN), (True, Outcome.FAIL)])
def test_a_comparison_that_decides_nothing_fails_with_the_gate_only(gate: bool, ends: Outcome) -> None:
    undecided = parse_recorded(record("a:1", {key("4KiB"): [0.5, 1.0, 2.0]}), "run.json")
    assert list(lines(compare_runs(undecided, undecided, 0.05), gate=gate))[-1].outcome is ends
