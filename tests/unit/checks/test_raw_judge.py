# SPDX-License-Identifier: Apache-2.0
"""A row beside a raw tool over the same transport: what the tool says, the verdict, and which of the two is slow."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.raw_tools import check, tools
from pytest_nixl.checks.raw_tools.check import RawComparison, compare, few, judge_ratio, judge_raw, same_way
from pytest_nixl.checks.raw_tools.tools import RAW_TOOLS, RawPair
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.processes.external_program import ToolError
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run

HOST = MemoryPair("DRAM", "DRAM")
WRITE = RowKey("UCX", "WRITE", HOST, 65536)
UCX_PERFTEST, FI_RMA_BW = RAW_TOOLS["UCX"], RAW_TOOLS["LIBFABRIC"]


def versus(
    nixl: float, raw: float, *, floor: float = 1e9, bound: float | None = None, failed: bool = False,
    comparable: bool = True, busy: float = 0.0,
) -> RawComparison:  # fmt: skip
    figure = RawMeasurement("ucx_perftest", "ucp_put_bw", raw, "UCX 1.13.1", ("tcp/eth0",), busy)
    expected = Expectation("made by a test", floor=floor, raw=bound)
    return RawComparison(WRITE, RawRatio(WRITE, nixl, figure, comparable), expected, failed)


RAW = "ucx_perftest (ucp_put_bw, UCX 1.13.1)"
SAME = "over the same transport (tcp/eth0)"
OTHERWISE = f"{RAW} used tcp/eth0 and NIXL did not, so the two cannot be compared"
FABRIC = (
    f"the fabric is slow: {RAW} moves 0.1 GB/s (0.8 Gb/s) {SAME}, which is also below the floor of 1 GB/s (8 Gb/s), "
    "and NIXL moves"
)
FAST = f"{RAW} moves 4 GB/s (32 Gb/s) {SAME}"
NIXL_IS_SLOW = (
    "The network is not the cause. Compare how NIXL and the raw tool run: their transports and devices "
    "(UCX_PROTO_INFO=y), their versions of UCX, the agent's environment, the cores of its container (cpu.max), "
    "--nixl-depth and --nixl-batch."
)
FABRIC_IS_SLOW = (
    "Search for the fault with the raw tool alone, without NIXL: check the rate and errors of the interface (ethtool "
    "DEVICE, ethtool -S DEVICE, rdma link), its MTU, a shaper (tc qdisc show dev DEVICE), and other traffic; then run "
    "this again."
)
SAME_TRANSPORT = (
    "Make both use the same transport: set it in the environment of every rank (UCX_TLS, UCX_NET_DEVICES; "
    "FI_PROVIDER), and run this again."
)
DISTURBED = "Stop other processes on the machine and run this again."
BUSY = "but other processes used 1.5 of the raw tool's cores"


@pytest.mark.parametrize(
    ("comparison", "verdict", "reason", "remedy"),
    [
        (versus(2e9, 4e9), "PASS", f"NIXL moves 2 GB/s (16 Gb/s), 50 % of the raw tool: {FAST}", ""),
        (versus(2e9, 4e9, busy=1.5), "PASS", f"NIXL moves 2 GB/s (16 Gb/s), 50 % of the raw tool: {FAST}", ""),
        (versus(2e9, 4e9, bound=0.5), "PASS", f"NIXL moves 2 GB/s (16 Gb/s), 50 % of the raw tool: {FAST}", ""),
        # A raw tool that is below the floor is no fault of a row that is not.
        (versus(1e9, 5e8), "PASS", "NIXL moves 1 GB/s (8 Gb/s), 200 % of the raw tool: "
         f"{RAW} moves 0.5 GB/s (4 Gb/s) {SAME}", ""),
        (versus(1e9, 4e9, bound=0.5), "FAIL",
         f"NIXL is slow: it moves 1 GB/s (8 Gb/s), 25 % of the raw tool, and the profile requires 50 %: {FAST}",
         NIXL_IS_SLOW),
        (versus(1e9, 4e9, bound=0.5, busy=1.5), "INCONCLUSIVE",
         f"NIXL moves 1 GB/s (8 Gb/s) and {FAST}, {BUSY}", DISTURBED),
        (versus(2e8, 4e9, failed=True, busy=DISTURBED_CORES), "FAIL",
         f"NIXL is slow: it moves 0.2 GB/s (1.6 Gb/s), 5 % of what the fabric carries: {FAST}", NIXL_IS_SLOW),
        (versus(2e8, 4e9, failed=True, busy=1.5), "INCONCLUSIVE",
         f"NIXL moves 0.2 GB/s (1.6 Gb/s) and {FAST}, {BUSY}", DISTURBED),
        (versus(1e8, 1e9, failed=True), "FAIL", "NIXL is slow: it moves 0.1 GB/s (0.8 Gb/s), 10 % of what the fabric "
         f"carries: {RAW} moves 1 GB/s (8 Gb/s) {SAME}", NIXL_IS_SLOW),
        (versus(8e7, 1e8, failed=True), "FAIL", f"{FABRIC} 80 % of it", FABRIC_IS_SLOW),
        (versus(5e7, 1e8, failed=True), "FAIL", f"{FABRIC} 50 % of it", FABRIC_IS_SLOW),  # half is not "only"
        (versus(2e7, 1e8, failed=True), "FAIL", f"{FABRIC} only 20 % of that", FABRIC_IS_SLOW),
        (versus(2e9, 4e9, comparable=False), "NOT-APPLICABLE", OTHERWISE, ""),
        (versus(2e9, 4e9, comparable=False, bound=0.1), "UNKNOWN", OTHERWISE, SAME_TRANSPORT),
        (versus(2e8, 4e9, comparable=False, failed=True), "UNKNOWN", OTHERWISE, SAME_TRANSPORT),
    ],
)  # fmt: skip
def test_each_ratio_has_its_verdict_and_its_sentence(
    comparison: RawComparison, verdict: str, reason: str, remedy: str
) -> None:
    assert judge_ratio(comparison) == Judgement(Verdict(verdict), f"UCX WRITE DRAM:DRAM of 64KiB: {reason}", remedy)


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
        ((), (), False),
        (("tcp/a", "cma"), ("cma", "tcp/a"), True),
        (("tcp/a", "tcp/b"), ("tcp/b", "tcp/c"), True),  # one common device is enough
    ],
)
def test_transports_with_a_common_name_and_device_are_comparable(
    ours: tuple[str, ...], theirs: tuple[str, ...], same: bool
) -> None:
    assert same_way(ours, theirs) is same


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


#: Output of ucx_perftest 1.13.1 of Debian, over TCP.
SAID = """
[1795262674.835864] [vm:20842:0]     ucp_context.c:1849 UCX  INFO  Version 1.13.1 (loaded from /lib/libucp.so.0)
[1795262674.849323] [vm:20842:0]      ucp_worker.c:1763 UCX  INFO    ep_cfg[0]: rma_am(tcp/lo)
[thread 0]               148    183.362  6792.494  6792.494      147.22     147.22         147         147
[thread 0]               324    182.681  5814.165  6261.056      171.99     159.72         172         160
Final:                  2000      6.599   366.636   366.636     2727.50    2727.50        2728        2728
"""


def test_the_last_line_of_the_table_is_read_in_bytes_per_second() -> None:
    assert UCX_PERFTEST.read(SAID, 1 << 20) == pytest.approx((1 << 20) / 366.636e-6)
    assert UCX_PERFTEST.read(SAID.partition("Final:")[0], 1 << 20) == pytest.approx((1 << 20) / 6261.056e-6)
    assert UCX_PERFTEST.read(SAID.partition("[thread 0]")[0], 1 << 20) is None
    assert UCX_PERFTEST.version(SAID) == "UCX 1.13.1"
    assert UCX_PERFTEST.transports(SAID, WRITE, ()) == ("tcp/lo",)
    shared = SAID.replace("rma_am(tcp/lo)", "rma(sysv/memory posix/memory)")
    assert UCX_PERFTEST.transports(shared, WRITE, ()) == ("sysv/memory", "posix/memory")
    assert UCX_PERFTEST.transports("", WRITE, ()) == ()
    two_lanes = SAID.replace("rma_am(tcp/lo)", "rma_am(tcp/lo tcp/eth0 tcp/lo)")
    assert UCX_PERFTEST.transports(two_lanes, WRITE, ()) == ("tcp/lo", "tcp/eth0")


@pytest.mark.parametrize("rate", ["2860.00", "2600.00"])
def test_another_unit_of_the_tool_is_refused(rate: str) -> None:
    """A version whose MB were 10^6 bytes would print 4.9 % more."""
    fault = f"contradictory figures: 1048576 bytes in 366.636 us are not {rate} MB/s of 2^20 bytes"
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}$"):
        UCX_PERFTEST.read(SAID.replace("2727.50", rate), 1 << 20)


#: Output of fi_rma_bw of libfabric 2.5.1, over its tcp provider.
FABTESTS = """
bytes   iters   total       time     MB/sec    usec/xfer   Mxfers/sec
64k     500     31m         2.10s     15.60    4200.91       0.00
"""


def test_the_table_of_fabtests_is_read_in_bytes_per_second() -> None:
    assert FI_RMA_BW.read(FABTESTS, 65536) == pytest.approx(15.60e6)
    assert FI_RMA_BW.transports(FABTESTS, WRITE, ("tcp/veth0",)) == ("tcp",)
    for rate in ("14.88", "16.32"):
        fault = f"contradictory figures: 65536 bytes in 4200.91 us are not {rate} MB/s of 10^6 bytes"
        with pytest.raises(ValueError, match=f"^{re.escape(fault)}$"):
            FI_RMA_BW.read(FABTESTS.replace("15.60", rate), 65536)


@pytest.mark.parametrize(
    ("size", "value"), [("512", 512), ("64k", 64 << 10), ("4m", 4 << 20), ("2g", 2 << 30), ("", None)]
)
def test_each_size_of_fabtests_has_its_unit(size: str, value: int | None) -> None:
    """A line without a size is not one of the table."""
    line = f"{size}     500     31m         2.10s     {(value or 512) / 100:.2f}    100.00       0.00"
    assert FI_RMA_BW.read(line, 1) == (None if value is None else pytest.approx(value * 1e4, rel=1e-3))


@pytest.mark.parametrize(
    "line",
    [
        "x64k     500     31m         2.10s     15.60    4200.91       0.00",
        "64k     500     31m         2.10s     15.60    4200.91       0.00  more",
        "64k     500     31m         2.10s     15.60       0.00",
        "64k     500     31m         2.10s     4200.91       0.00",
        "64k     500     31m         2.10     15.60    4200.91       0.00",
    ],
)
def test_a_line_of_another_form_is_not_one_of_the_table_of_fabtests(line: str) -> None:
    assert FI_RMA_BW.read(f"{line}\n", 65536) is None


def test_rounded_figures_are_believed_and_a_missing_version_is_none() -> None:
    assert FI_RMA_BW.read(FABTESTS.replace("15.60", "15.85"), 65536) == pytest.approx(15.85e6)
    assert UCX_PERFTEST.read(SAID.replace("2727.50", "2750.00"), 1 << 20) == pytest.approx(FINAL)
    assert UCX_PERFTEST.version("UCX  INFO  Version \n") == ""
    assert UCX_PERFTEST.transports("ep_cfg[0]: xrma(tcp/lo)", WRITE, ()) == ()


def test_each_side_of_a_tool_gets_the_row() -> None:
    row = replace(WRITE, memory=MemoryPair("DRAM", "VRAM"), depth=4)
    assert UCX_PERFTEST.server(row, 100, 10, 7000, ()) == ["-p", "7000"]
    size = ["-s", "65536", "-n", "100", "-w", "10", "-O", "4", "-m", "host,cuda"]
    for op, test in (("WRITE", "ucp_put_bw"), ("READ", "ucp_get")):
        client = UCX_PERFTEST.client(replace(row, op=op), 100, 10, 7000, (), "b")
        assert client == ["b", "-p", "7000", "-t", test, *size]
    for op, test in (("WRITE", "writedata"), ("READ", "read")):
        arguments = f"-p efa -e rdm -o {test} -S 65536 -I 100 -w 10 -W 4 -U -E=7000".split()
        given = replace(row, op=op), 100, 10, 7000, ("efa/rdmap0", "tcp/eth0")
        assert FI_RMA_BW.server(*given) == arguments
        assert FI_RMA_BW.client(*given, "b") == [*arguments, "b"]


@pytest.mark.parametrize(("memory", "ucx", "fabtests"), [("DRAM", True, True), ("VRAM", True, False)])
def test_a_tool_can_use_the_memory_of_its_help(memory: str, ucx: bool, fabtests: bool) -> None:
    help = "     -m <memory>\n             host - System memory\n             cuda - NVIDIA GPU memory\n"
    assert (UCX_PERFTEST.can(help, memory), FI_RMA_BW.can(help, memory)) == (ucx, fabtests)
    assert not UCX_PERFTEST.can("-m host or cuda - none\n", memory)


def test_a_few_rows_and_the_largest_failed_one_are_measured_again() -> None:
    keys = [RowKey("UCX", "WRITE", HOST, 4096 << step) for step in range(15)]
    assert [key.block for key in few(keys, lambda _: False)] == [4096, 4096 << 7, 4096 << 14]
    assert [key.block for key in few(keys, lambda key: key.block < 65536)] == [4096, 32768, 4096 << 7, 4096 << 14]
    assert few(keys[:1], lambda _: True) == keys[:1]


def row(block: int, verdict: Verdict = Verdict.PASS, *, bandwidth: float = 2e9, **changes: Any) -> Result:
    """Return the result of a row, whose floor is 1 GB/s; it failed if it is below that."""
    summary = replace(SUMMARY, bandwidth=bandwidth, floor=1e9)
    key = replace(WRITE, block=block, **changes)
    return Result("bandwidth", "t.py::t", verdict, row=key, summary=summary)


SUMMARY = RowSummary(1e9, 1e-6, 1e-6, 10, 0.0, 0.0, ("tcp/lo",))
SLOW: dict[str, Any] = {"verdict": Verdict.FAIL, "bandwidth": 0.5e9}
KIB = 1024
ERROR = ToolError("the tool has ended", "unpack another one", "its output")


@dataclass
class Compared:
    """What a comparison with doubles of the raw tool gave, and the rows that the tool measured, with their ranks."""

    judgement: Judgement
    ratios: tuple[RawRatio, ...]
    measured: list[tuple[tuple[object, ...], int]]
    causes: dict[RowKey, str]


@pytest.fixture
def compared(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Compared]:
    """Compare rows with a raw tool that moves 4 GB/s, or fails at some blocks."""

    def run_comparison(
        *rows: Result, kind: RowKey = WRITE, bound: float | None = None, several: bool = False,
        fails: Sequence[int] = (), missing: str = "", cannot: str = "",
    ) -> Compared:  # fmt: skip
        measured: list[tuple[tuple[object, ...], int]] = []
        rates = {result.row: result.summary.bandwidth for result in rows if result.summary}

        def open_pair(tool: object, hosts: object, address: str, *limits: float) -> MagicMock:
            assert (tool, limits) == (UCX_PERFTEST, (30.0, 90.0))

            def measure(key: RowKey, expected: float, transports: Sequence[str]) -> RawMeasurement:
                measured.append(((*cast(tuple[str, str], hosts), address), key.block))
                assert (expected, transports) == (rates[key], ("tcp/lo",))
                if key.block in fails:
                    raise ERROR
                return RawMeasurement("ucx_perftest", "ucp_put_bw", 4e9, "", ("tcp/lo",), 0.0)

            pair = MagicMock(missing=missing, measure=measure)
            pair.cannot.side_effect = lambda memory: cannot.format(memory)
            pair.__enter__.return_value = pair
            return pair

        monkeypatch.setattr(check, "RawPair", open_pair)
        causes: dict[RowKey, str] = {}
        record = SimpleNamespace(results=list(rows), explain=causes.__setitem__)
        run = SimpleNamespace(record=record, settings=make_settings(timeout=30.0, start_timeout=90.0))
        answers = {"address": [f"10.0.0.{rank}" for rank in range(8)]}
        hosts = [f"host {rank}" for rank in range(8)]
        cluster = SimpleNamespace(hosts=hosts, several=several, ask=answers.__getitem__)
        profile = SimpleNamespace(expectation=lambda key: Expectation("a test", floor=1e9, raw=bound))
        judgement, ratios = compare(kind, cast(Run, run), cast(Cluster, cluster), cast(Profile, profile))
        return Compared(judgement, ratios, measured, causes)

    return run_comparison


def test_a_few_rows_of_the_largest_depth_are_measured_again_and_failed_ones_of_other_pairs(
    compared: Callable[..., Compared],
) -> None:
    """Not those of another kind, batch or variant, nor those whose bytes say nothing about bandwidth."""
    first = [row(KIB << step, depth=4) for step in range(7)]
    first[4] = row(KIB << 4, depth=4, **SLOW)
    others = [row(KIB << step, depth=4, pair=(0, rank), **SLOW) for rank in (2, 3, 4, 5) for step in (2, 0)]
    left_out = [
        row(KIB << 9, depth=1), row(KIB << 9, depth=4, batch=2), row(KIB << 9, depth=4, op="READ"),
        row(KIB << 9, depth=4, backend="LIBFABRIC"), row(KIB << 9, depth=4, memory=MemoryPair("DRAM", "VRAM")),
        row(KIB << 9, Verdict.CORRUPT, depth=4), row(KIB << 9, depth=4, variant=(("footprint", "64MiB"),)),
        row(KIB << 9, depth=4, variant=(("kv", "scattered-prepped"),)),
        row(KIB << 9, depth=4, variant=(("load", "alone"), ("pattern", "incast:3"))),
        row(KIB << 3, depth=4, pair=(0, 6)),
    ]  # fmt: skip
    result = compared(*left_out, *others, *first, several=True)
    at = ("host 0", "host 1", "10.0.0.1")
    assert result.measured == [
        *((at, KIB << step) for step in (0, 3, 4, 6)),
        *((("host 0", f"host {rank}", f"10.0.0.{rank}"), KIB << 2) for rank in (2, 3, 4)),
    ]
    assert result.judgement.verdict is Verdict.FAIL
    assert [cast(RowKey, ratio.row).block for ratio in result.ratios[:4]] == [KIB << step for step in (0, 3, 4, 6)]
    assert all((ratio.raw.value, ratio.comparable) == (4e9, True) for ratio in result.ratios)
    cause = "NIXL is slow: it moves 0.5 GB/s (4 Gb/s), 12 % of what the fabric carries: "
    assert {key.block: text.startswith(cause) for key, text in result.causes.items()} == {
        KIB << 4: True, KIB << 2: True,
    }  # fmt: skip
    assert compared(row(KIB, Verdict.FAIL, bandwidth=2e9)).causes == {}, "it failed by its latency alone"


@pytest.mark.parametrize(
    ("rows", "options", "verdict", "reason"),
    [
        ([row(KIB)], {"fails": [KIB]}, "WARN", "no raw figure to compare with: the tool has ended"),
        ([row(KIB)], {"fails": [KIB], "bound": 0.5}, "UNKNOWN", "no raw figure to compare with: the tool has ended"),
        ([row(KIB, **SLOW), row(2 * KIB)], {"fails": [KIB]}, "UNKNOWN",
         "no raw figure to compare with: the tool has ended"),
        ([row(KIB, **SLOW), row(KIB, pair=(0, 2), **SLOW), row(2 * KIB, pair=(0, 2), **SLOW)], {"fails": [2 * KIB]},
         "FAIL", "UCX WRITE DRAM:DRAM of 1KiB: NIXL is slow: it moves 0.5 GB/s (4 Gb/s), 12 % of what the fabric "
         "carries: ucx_perftest (ucp_put_bw) moves 4 GB/s (32 Gb/s) over the same transport (tcp/lo)"),
        ([row(KIB), row(2 * KIB, pair=(0, 2), **SLOW)], {"fails": [2 * KIB]}, "UNKNOWN",
         "no raw figure to compare with: the tool has ended"),
        ([], {}, "NOT-APPLICABLE",
         "no row of UCX WRITE DRAM:DRAM with batch 1 and --nixl-footprint=row was measured"),
        ([row(KIB)], {"kind": replace(WRITE, backend="POSIX")}, "NOT-APPLICABLE",
         "POSIX moves bytes to files, not between two ranks"),
        ([row(KIB)], {"missing": "it"}, "NOT-APPLICABLE",
         "it was not found: give its directory with --nixl-raw-tools-dir=DIR; docs/how-to/raw-tools.md says how to "
         "unpack one"),
        ([row(KIB)], {"cannot": "it was built without {}"}, "NOT-APPLICABLE", "it was built without DRAM:DRAM"),
    ],
)  # fmt: skip
def test_a_run_without_a_raw_figure_says_why_and_decides_nothing_about_nixl(
    compared: Callable[..., Compared], rows: list[Result], options: dict[str, Any], verdict: str, reason: str
) -> None:
    result = compared(*rows, **options)
    assert (result.judgement.verdict.value, result.judgement.reason) == (verdict, reason)
    if "no raw figure" in reason:
        assert result.judgement.remedy == "unpack another one\nits output"
    assert {ranks[2] for ranks, _ in result.measured} <= {"127.0.0.1"}


@pytest.mark.parametrize(
    ("installed", "missing"), [("", "one and other"), ("one", "other"), ("other", "one"), ("one other", "")]
)
def test_a_raw_tool_is_missing_where_it_is_not_installed_and_cannot_use_memory_that_its_help_lacks(
    installed: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only for GPU memory its help is asked for, of the side that needs it."""
    help_requests: list[str] = []

    def open_tool(place: str, *_: object) -> MagicMock:
        def start(arguments: list[str]) -> SimpleNamespace:
            help_requests.append(f"{place} {arguments}")
            lines = "  host - memory\n" + "  cuda - memory\n" * (place == "one")
            return SimpleNamespace(final_output=lambda seconds: lines if seconds == 10 else "")

        tool = MagicMock(where=place, is_installed=place in installed.split(), start=start)
        tool.__enter__.return_value = tool
        return tool

    monkeypatch.setattr(tools, "Tool", open_tool)
    with RawPair(UCX_PERFTEST, ("one", "other"), "b", 9.0) as pair:  # type: ignore[arg-type]
        assert pair.missing == missing
        assert [pair.cannot(MemoryPair.parse(memory)) for memory in ("DRAM:DRAM", "VRAM:DRAM", "DRAM:VRAM")] == [
            "", "", "other was built without VRAM",
        ]  # fmt: skip
    assert help_requests == ["one ['-h']", "other ['-h']"]


class Program:
    """A started program of a raw tool, which tells in turn what it has printed, and whether it has ended.

    :param looks: the output and the exit code at each look; None: it runs.
    """

    def __init__(self, log: list[str], name: str, looks: Sequence[tuple[str, int | None]]) -> None:
        self._log, self.name, self._looks = log, name, list(looks)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.append(f"{self.name} closed")

    def poll_within(self, seconds: float) -> int | None:
        if len(self._looks) > 1:
            self._looks.pop(0)
        return self._looks[0][1]

    def poll(self) -> int | None:
        return self.poll_within(0)

    def output(self) -> str:
        return self._looks[0][0]

    def listens(self, port: int) -> bool:
        return "Waiting" in self.output()

    def kill(self) -> None:
        self._log.append(f"{self.name} killed")

    def wait(self, seconds: float) -> int:
        self._log.append(f"{self.name} waited for within {seconds:g} s")
        return 0

    def failure(self, fault: str, remedy: str = "") -> ToolError:
        return ToolError(f"{self.name} {fault}", remedy)


Looks = Sequence[tuple[str, int | None]]
READY: Looks = [("", None), ("Waiting", None)]
DONE: Looks = [("", None), (SAID, 0)]
FINAL, OVERALL = (1 << 20) / 366.636e-6, (1 << 20) / 6261.056e-6
RUNNING = SAID.partition("Final:")[0]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RawMeasurement, list[str]]]:
    """Measure with programs that are doubles, on a clock on which each look takes a second."""

    def run_tool(servers: Sequence[Looks], client: Looks, expected: float = 1e9) -> tuple[RawMeasurement, list[str]]:
        log: list[str] = []
        starts, now, ports = iter(servers), count(100), count(7000)
        monkeypatch.setattr(tools, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
        monkeypatch.setattr(tools, "contention_of", lambda first, other: 0.5 if first.name == "client" else None)

        def open_tool(place: str, name: str, timeout: float, start_timeout: float) -> MagicMock:
            assert (name, timeout, start_timeout) == ("ucx_perftest", 9.0, 90.0)

            def start(arguments: list[str], variables: object) -> Program:
                assert variables == UCX_PERFTEST.environment
                log.append(f"{place} starts {' '.join(arguments)}")
                return Program(log, place, next(starts) if place == "server" else client)

            tool = MagicMock(start=start, versions={"ucx": "1.20"})
            tool.worker.call.side_effect = lambda command: next(ports)
            tool.__enter__.return_value = tool
            return tool

        monkeypatch.setattr(tools, "Tool", open_tool)
        with RawPair(UCX_PERFTEST, ("client", "server"), "b", 9.0, 90.0) as pair:  # type: ignore[arg-type]
            try:
                return pair.measure(replace(WRITE, block=1 << 20, depth=4), expected, ("tcp/lo",)), log
            except ToolError as error:
                return RawMeasurement(error.reason, "", 0.0), log

    return run_tool


def started(port: int, number: int, warmup: int) -> str:
    return f"client starts b -p {port} -t ucp_put_bw -s 1048576 -n {number} -w {warmup} -O 4 -m host,host"


@pytest.mark.parametrize(
    ("client", "expected", "number", "warmup", "value", "ending"),
    [
        (DONE, 1e9, 143, 14, FINAL, []),
        (DONE, 1e3, 8, 1, FINAL, []),
        (DONE, 1e15, 200_000, 20_000, FINAL, []),
        # Of a tool that takes long, its present figure counts, and its server does not end by itself.
        ([("", None), (RUNNING, None)], 1e9, 143, 14, OVERALL, ["server killed"]),
    ],
)
def test_a_raw_tool_moves_as_many_blocks_as_fit_into_its_time(
    measure: Callable[..., tuple[RawMeasurement, list[str]]],
    client: Looks,
    expected: float,
    number: int,
    warmup: int,
    value: float,
    ending: list[str],
) -> None:
    measurement, log = measure([READY], client, expected)
    assert measurement == RawMeasurement(
        "ucx_perftest", "ucp_put_bw", measurement.value, "UCX 1.13.1", ("tcp/lo",), 0.5
    )
    assert measurement.value == pytest.approx(value)
    assert log == [
        "server starts -p 7000", started(7000, number, warmup), "client closed", *ending,
        "server waited for within 9 s", "server closed",
    ]  # fmt: skip


TAKEN: Looks = [("", None), ("Address already in use", 1)]
NOTHING: Looks = [("", None)]


@pytest.mark.parametrize(
    ("servers", "client", "reason"),
    [
        ([TAKEN, TAKEN, READY], DONE, ""),
        ([TAKEN] * 5, DONE, "server ended with exit code 1"),
        ([[("no device", 7)]], DONE, "server ended with exit code 7"),
        ([NOTHING], DONE, "server did not listen within 9 s"),
        ([READY], [("", None), ("", 3)], "client ended with exit code 3 against b"),
        ([READY], [("", None), ("", 0)], "client ended without printing a figure"),
        ([READY], NOTHING, "client moved nothing within 9 s and was killed"),
        ([[*READY, ("", 5)]], NOTHING, "server ended with exit code 5 while its client was connected to b"),
        ([READY], [(SAID.replace("2727.50", "2860.00"), None)],
         "client printed output that cannot be read: contradictory figures: 1048576 bytes in 366.636 us are not "
         "2860.00 MB/s of 2^20 bytes"),
    ],
)  # fmt: skip
def test_a_raw_tool_that_fails_is_named_with_its_end(
    measure: Callable[..., tuple[RawMeasurement, list[str]]], servers: Sequence[Looks], client: Looks, reason: str
) -> None:
    """Another process may take the port in between, which is tried again with another one."""
    measurement, log = measure(servers, client)
    assert measurement.tool == (reason or "ucx_perftest")
    served = [step for step in log if step.startswith("server starts")]
    assert served == [f"server starts -p {7000 + number}" for number in range(len(servers))]
