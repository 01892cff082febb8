# SPDX-License-Identifier: Apache-2.0
"""A row beside a raw tool over the same transport: the verdict, and which of the two is slow."""

from __future__ import annotations

import pytest

from pytest_nixl.checks.raw_tools.check import RawComparison, judge_ratio, judge_raw, same_way
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import RawMeasurement, RawRatio
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.verdicts import Verdict

WRITE = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 65536)


def versus(
    nixl: float, raw: float, *, floor: float = 1e9, bound: float | None = None, failed: bool = False,
    comparable: bool = True, busy: float = 0.0,
) -> RawComparison:  # fmt: skip
    figure = RawMeasurement("ucx_perftest", "ucp_put_bw", raw, "UCX 1.13.1", ("tcp/eth0",), busy)
    expected = Expectation("made by a test", floor=floor, raw=bound)
    return RawComparison(WRITE, RawRatio(WRITE, nixl, figure, comparable), expected, failed)


@pytest.mark.parametrize(
    ("comparison", "verdict", "reason"),
    [
        (versus(2e9, 4e9), Verdict.PASS, "50 % of the raw tool: ucx_perftest (ucp_put_bw, UCX 1.13.1) moves 4 GB/s"),
        (versus(2e9, 4e9, bound=0.5), Verdict.PASS, "50 % of the raw tool"),
        (versus(2e9, 5e9, bound=0.5), Verdict.FAIL, "NIXL is slow: it moves 2 GB/s (16 Gb/s), 40 % of the raw tool"),
        (versus(8e7, 1e8, failed=True), Verdict.FAIL, "the fabric is slow: ucx_perftest (ucp_put_bw, UCX 1.13.1) moves "
         "0.1 GB/s (0.8 Gb/s) over the same transport (tcp/eth0), which is also below the floor of 1 GB/s"),
        (versus(2e7, 1e8, failed=True), Verdict.FAIL, "and NIXL moves only 20 % of that"),
        (versus(2e8, 4e9, failed=True), Verdict.FAIL, "NIXL is slow: it moves 0.2 GB/s (1.6 Gb/s), 5 % of what the "
         "fabric carries: ucx_perftest (ucp_put_bw, UCX 1.13.1) moves 4 GB/s"),
        (versus(2e8, 4e9, failed=True, comparable=False), Verdict.UNKNOWN, "used tcp/eth0 and NIXL did not"),
        (versus(2e9, 4e9, bound=0.1, comparable=False), Verdict.UNKNOWN, "used tcp/eth0 and NIXL did not"),
        (versus(2e9, 4e9, comparable=False), Verdict.NOT_APPLICABLE, "used tcp/eth0 and NIXL did not"),
        (versus(2e8, 4e9, failed=True, busy=1.5), Verdict.INCONCLUSIVE, "used 1.5 of the raw tool's cores"),
        (versus(2e9, 4e9, busy=1.5), Verdict.PASS, "50 % of the raw tool"),
    ],
)  # fmt: skip
def test_each_ratio_has_its_verdict(comparison: RawComparison, verdict: Verdict, reason: str) -> None:
    judgement = judge_ratio(comparison)
    assert judgement.verdict is verdict
    assert reason in judgement.reason
    assert judgement.reason.startswith("UCX WRITE DRAM:DRAM of 64KiB: ")
    assert bool(judgement.remedy) == (verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE))
    assert DISTURBED_CORES < 1.5


def test_the_worst_row_decides_the_verdict_of_the_link() -> None:
    good, bad = versus(2e9, 4e9), versus(2e8, 4e9, failed=True)
    other = versus(2e9, 4e9, comparable=False)
    assert judge_raw([good, bad, other]).verdict is Verdict.FAIL
    assert "50 %" not in judge_raw([good, bad]).reason
    assert judge_raw([good, other]).verdict is Verdict.PASS
    assert judge_raw([other]).verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (("tcp/lo",), ("tcp/lo",), True),
        (("tcp/lo", "tcp/eth0"), ("tcp/lo",), True),
        (("tcp",), ("tcp/eth0",), True),
        (("tcp/eth1",), ("tcp/eth0",), False),
        (("cma/memory",), ("sysv/memory", "posix/memory"), False),
        (("cma/memory",), ("tcp/lo",), False),
        (("tcp/lo",), (), False),
    ],
)
def test_transports_with_a_common_name_and_device_are_comparable(
    ours: tuple[str, ...], theirs: tuple[str, ...], same: bool
) -> None:
    assert same_way(ours, theirs) is same


@pytest.mark.parametrize(
    ("comparison", "reason", "remedy"),
    [
        (versus(2e9, 4e9, comparable=False),
         "ucx_perftest (ucp_put_bw, UCX 1.13.1) used tcp/eth0 and NIXL did not, so the two cannot be compared", ""),
        (versus(2e9, 4e9),
         "NIXL moves 2 GB/s (16 Gb/s), 50 % of the raw tool: ucx_perftest (ucp_put_bw, UCX 1.13.1) moves 4 GB/s "
         "(32 Gb/s) over the same transport (tcp/eth0)", ""),
        (versus(5e7, 1e8, failed=True),  # half of the raw tool is not "only"
         "the fabric is slow: ucx_perftest (ucp_put_bw, UCX 1.13.1) moves 0.1 GB/s (0.8 Gb/s) over the same transport "
         "(tcp/eth0), which is also below the floor of 1 GB/s (8 Gb/s), and NIXL moves 50 % of it", "Search for the "),
        (versus(1e9, 4e9, bound=0.5),
         "NIXL is slow: it moves 1 GB/s (8 Gb/s), 25 % of the raw tool, and the profile requires 50 %: ucx_perftest "
         "(ucp_put_bw, UCX 1.13.1) moves 4 GB/s (32 Gb/s) over the same transport (tcp/eth0)", "The network is not "),
        (versus(1e9, 4e9, bound=0.5, busy=1.5),
         "NIXL moves 1 GB/s (8 Gb/s) and ucx_perftest (ucp_put_bw, UCX 1.13.1) moves 4 GB/s (32 Gb/s) over the same "
         "transport (tcp/eth0), but other processes used 1.5 of the raw tool's cores", "Stop other processes on the "),
        (versus(2e8, 4e9, failed=True, comparable=False),
         "ucx_perftest (ucp_put_bw, UCX 1.13.1) used tcp/eth0 and NIXL did not, so the two cannot be compared",
         "Make both use the same transport: "),
    ],
)  # fmt: skip
def test_the_whole_sentence_of_each_ratio(comparison: RawComparison, reason: str, remedy: str) -> None:
    judged = judge_ratio(comparison)
    assert judged.reason == f"UCX WRITE DRAM:DRAM of 64KiB: {reason}"
    assert judged.remedy.startswith(remedy)


def test_limits_of_a_ratio_are_exact() -> None:
    assert judge_ratio(versus(2e9, 4e9, bound=0.5)).verdict is Verdict.PASS, "at the bound"
    assert judge_ratio(versus(1e8, 1e9, failed=True)).reason.count("NIXL is slow"), "the raw tool is at the floor"
    assert judge_ratio(versus(1e8, 4e9, failed=True, busy=DISTURBED_CORES)).verdict is Verdict.FAIL
    assert judge_ratio(versus(1e8, 4e9, failed=True, busy=DISTURBED_CORES + 0.01)).verdict is Verdict.INCONCLUSIVE


def test_without_a_profile_no_row_has_a_bound_or_a_floor() -> None:
    figure = RawMeasurement("tool", "test", 1e8)
    comparison = RawComparison(WRITE, RawRatio(WRITE, 1e7, figure), None, failed=True)
    assert comparison.bound is None
    assert judge_ratio(comparison).verdict is Verdict.FAIL
    assert "NIXL is slow" in judge_ratio(comparison).reason
    lone = RawComparison(WRITE, RawRatio(WRITE, 1e7, figure, comparable=False), None)
    assert judge_ratio(lone).reason.endswith("tool (test) used a transport that it does not report and NIXL did not, "
                                             "so the two cannot be compared")  # fmt: skip


def test_the_reasons_of_all_rows_with_the_worst_verdict_are_told_once() -> None:
    bad, worse = versus(2e8, 4e9, failed=True), versus(1e8, 4e9, failed=True)
    judged = judge_raw([bad, versus(2e9, 4e9), worse, bad])
    assert judged.reason == f"{judge_ratio(bad).reason}; {judge_ratio(worse).reason}"
    assert judged.remedy == judge_ratio(bad).remedy
    order = [versus(2e8, 4e9, failed=True, comparable=False), versus(2e8, 4e9, failed=True, busy=1.0),
             versus(2e9, 4e9), versus(2e9, 4e9, comparable=False)]  # fmt: skip
    verdicts = [judge_raw(order[start:]).verdict for start in range(4)]
    assert verdicts == [Verdict.UNKNOWN, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.NOT_APPLICABLE]


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [((), (), False), (("tcp/a", "cma"), ("cma", "tcp/a"), True), (("tcp/a", "tcp/b"), ("tcp/b", "tcp/c"), True)],
)
def test_one_common_device_is_enough(ours: tuple[str, ...], theirs: tuple[str, ...], same: bool) -> None:
    assert same_way(ours, theirs) is same
