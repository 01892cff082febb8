# SPDX-License-Identifier: Apache-2.0
"""The values of a row and the result of a check: how they are computed, written and restored."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl.model.expectation import Expectation, Machine
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary, measured_rows
from pytest_nixl.model.row_key import RowKey, UnknownKey
from pytest_nixl.model.samples import BUSY_GPU, DISTURBED_CORES, Samples
from pytest_nixl.model.verdicts import Verdict

KEY = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1000)
#: Two launches of three windows and of one: 2 KB/s, and 5 KB/s.
SAMPLES = Samples(
    KEY, (1.0, 1.0, 2.0, 1.0), (1, 2, 10, 5), (4e-6, 1e-6, 3e-6, 2e-6), ("tcp/eth0",), windows_of_launches=(3, 1),
    contention=(0.1, 0.2), gpu_waits=(1e-5, 2e-5),
)  # fmt: skip


def test_the_summary_of_samples_has_their_values_and_the_bounds_of_the_row() -> None:
    summary = RowSummary.of(SAMPLES, Expectation("s", floor=1e3), Machine(1, 9e3, 0, "", "", "s"))
    assert summary == RowSummary(
        bandwidth=3500.0, p50=2e-6, p99=4e-6, transfers=18, floor=1e3, ceiling=9e3, transports=("tcp/eth0",),
        values=(2000.0, 5000.0), p90=4e-6, p999=4e-6, contention=(0.1, 0.2), gpu_waits=(1e-5, 2e-5),
    )  # fmt: skip
    bare = RowSummary.of(replace(SAMPLES, latencies=(), contention=(0.1,), gpu_waits=(1e-5,) * 3), Expectation("s"))
    assert (bare.floor, bare.ceiling, bare.latencies, bare.contention, bare.gpu_waits) == (0.0, 0.0, {}, (), ())


def test_the_latencies_of_a_summary_are_those_that_are_known() -> None:
    known = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "p99.9": 4.0}
    for left_out in ((), ("p50",), ("p90", "p99.9"), ("p99",)):
        latencies = {name: value for name, value in known.items() if name not in left_out}
        assert RowSummary.of_launches((1.0,), (), latencies).latencies == latencies


@pytest.mark.parametrize(
    ("contention", "gpu_waits", "used", "undisturbed"),
    [
        ((), (), ((), (), ()), (1.0, 2.0, 3.0)),
        ((DISTURBED_CORES, 0.4, 0.0), (), ((), ("cores",), ()), (1.0, 3.0)),
        ((), (BUSY_GPU, 0.0, 2 * BUSY_GPU), ((), (), ("a GPU",)), (1.0, 2.0)),
        ((0.4, 0.0, 0.4), (1.0, 1.0, 0.0), (("cores", "a GPU"), ("a GPU",), ("cores",)), ()),
    ],
)
def test_a_launch_is_disturbed_by_what_other_processes_used(
    contention: tuple[float, ...], gpu_waits: tuple[float, ...], used: Any, undisturbed: tuple[float, ...]
) -> None:
    summary = RowSummary.of_launches((1.0, 2.0, 3.0), (), contention=contention, gpu_waits=gpu_waits)
    assert (summary.used_by_others, summary.undisturbed) == (used, undisturbed)


RAW = RawMeasurement("ucx_perftest", "ucp_put_bw", 4e9, "UCX 1.18", ("tcp/eth0",))
SUMMARY = RowSummary(1.234567891e9, 1.23456e-6, math.nan, 10, 0.0, 2e9, ("tcp/eth0", "cma"), (1e9,), 2e-6, 3e-6)
WHOLE = Result(
    "bandwidth", "t.py::t", Verdict.FAIL, "too slow", "Look.", KEY, SUMMARY, "pytest t.py", "F",
    (RawRatio(KEY, 1e9, RAW, comparable=False),), True, (Figure("connect", 0.1, "s", {"backend": "UCX"}),), "a row",
)  # fmt: skip
TEXT = "UCX/WRITE/DRAM:DRAM/1000B/batch1/depth1/0-1"
PLAIN: dict[str, Any] = {
    "check": "bandwidth", "nodeid": "t.py::t", "verdict": "FAIL", "reason": "too slow", "remedy": "Look.", "row": TEXT,
    "repeat": "pytest t.py", "finding": "F", "known_limit": True, "subject": "a row",
    "ratios": [{
        "row": TEXT, "nixl": 1e9, "comparable": False,
        "raw": {"tool": "ucx_perftest", "test": "ucp_put_bw", "value": 4e9, "version": "UCX 1.18",
                "transports": ["tcp/eth0"], "others": 0.0},
    }],
    "figures": {
        "bandwidth": 1.234567891e9, "p50": 1.23456e-6, "p99": None, "transfers": 10, "floor": 0.0, "ceiling": 2e9,
        "transports": ["tcp/eth0", "cma"], "values": [1e9], "p90": 2e-6, "p999": 3e-6,
    },
    "measured": [{"name": "connect", "value": 0.1, "unit": "s", "labels": {"backend": "UCX"}}],
}  # fmt: skip


def test_a_result_is_written_as_json_and_restored() -> None:
    bare = Result("c", "", Verdict.PASS)
    steps = replace(WHOLE, summary=replace(SUMMARY, p99=1.0, steps={"post": 1e-6}))
    assert WHOLE.plain() == PLAIN
    assert bare.plain() == {
        "check": "c", "nodeid": "", "verdict": "PASS", "reason": "", "remedy": "", "row": "", "figures": None,
        "repeat": "", "finding": "", "ratios": [], "known_limit": False,
    }  # fmt: skip
    assert steps.plain()["figures"] == {**PLAIN["figures"], "p99": 1.0, "steps": {"post": 1e-6}}
    for result in (bare, steps):
        assert Result.from_plain(json.loads(json.dumps(result.plain()))) == result
    restored = Result.from_plain(PLAIN)
    assert repr(restored) == repr(WHOLE), "a latency that is not known is NaN, which equals nothing"


def test_the_properties_of_a_result() -> None:
    assert WHOLE.properties() == [
        ("nixl_check", "bandwidth"), ("nixl_verdict", "FAIL"), ("nixl_reason", "too slow"), ("nixl_finding", "F"),
        ("nixl_known_limit", "not met"), ("nixl_row", TEXT), ("nixl_gigabytes_per_second", 1.234568),
        ("nixl_p50_microseconds", 1.235), ("nixl_transports", "tcp/eth0,cma"),
    ]  # fmt: skip
    assert Result("c", "", Verdict.WARN).properties() == [("nixl_check", "c"), ("nixl_verdict", "WARN")]
    late = replace(WHOLE, summary=replace(SUMMARY, p50=math.nan, p99=2.34567e-6)).properties()
    assert late[7:] == [("nixl_p99_microseconds", 2.346), ("nixl_transports", "tcp/eth0,cma")]


def test_a_result_has_a_name_that_is_the_same_in_each_run() -> None:
    names = [
        Result("c", "", Verdict.PASS, row=row, subject=subject).name for row in (None, KEY) for subject in ("", "s")
    ]
    assert names == ["c", "c[s]", f"c[{TEXT}]", f"c[{TEXT}]"]


def test_the_rows_of_results_are_those_with_a_key_and_values() -> None:
    results = [WHOLE, replace(WHOLE, summary=None), replace(WHOLE, row=None), replace(WHOLE, row=UnknownKey("later"))]
    assert list(measured_rows(results)) == [(KEY, WHOLE)]


@pytest.mark.parametrize(
    ("test", "version", "words"),
    [("t", "v", "ucx_perftest (t, v)"), ("t", "", "ucx_perftest (t)"), ("", "v", "ucx_perftest (v)")],
)
def test_a_raw_tool_is_named_with_its_test_and_version(test: str, version: str, words: str) -> None:
    assert replace(RAW, test=test, version=version).words == words


@pytest.mark.parametrize(
    ("nixl", "raw", "share"),
    [(1e9, 4e9, 0.25), (0.0, 1.0, 0.0), *((bad, 1.0, None) for bad in (-1.0, math.inf, math.nan)),
     *((1.0, bad, None) for bad in (0.0, -1.0, math.inf, math.nan))],
)  # fmt: skip
def test_a_ratio_is_that_of_two_bandwidths(nixl: float, raw: float, share: float | None) -> None:
    ratio = RawRatio(KEY, nixl, replace(RAW, value=raw))
    if share is not None:
        ratio.check_plain()
        assert ratio.value == share
        return
    with pytest.raises(ValueError, match=f"^the raw figure of the row {TEXT} is not a number above zero$"):
        ratio.check_plain()
