# SPDX-License-Identifier: Apache-2.0
"""A row beside a raw tool over the same transport: what the tool says, the verdict, and which of the two is slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_nixl.checks.raw_tools.check import RawComparison, compare, few, judge_ratio, judge_raw, same_way
from pytest_nixl.checks.raw_tools.tools import RAW_TOOLS
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
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


def test_another_unit_of_the_tool_is_refused() -> None:
    """A version whose MB were 10^6 bytes would print 4.9 % more."""
    with pytest.raises(ValueError, match=r"contradictory figures: 1048576 bytes in 366.636 us are not 2860.00 MB/s of"):
        UCX_PERFTEST.read(SAID.replace("2727.50", "2860.00"), 1 << 20)


#: Output of fi_rma_bw of libfabric 2.5.1, over its tcp provider.
FABTESTS = """
bytes   iters   total       time     MB/sec    usec/xfer   Mxfers/sec
64k     500     31m         2.10s     15.60    4200.91       0.00
"""


def test_the_table_of_fabtests_is_read_in_bytes_per_second() -> None:
    assert FI_RMA_BW.read(FABTESTS, 65536) == pytest.approx(15.60e6)
    assert FI_RMA_BW.transports(FABTESTS, WRITE, ("tcp/veth0",)) == ("tcp",)
    with pytest.raises(ValueError, match=r"65536 bytes in 4200.91 us are not 14.88 MB/s of 10\^6 bytes"):
        FI_RMA_BW.read(FABTESTS.replace("15.60", "14.88"), 65536)


@pytest.mark.parametrize(
    ("size", "value"), [("512", 512), ("64k", 64 << 10), ("4m", 4 << 20), ("2g", 2 << 30), ("", None)]
)
def test_each_size_of_fabtests_has_its_unit(size: str, value: int | None) -> None:
    """A line without a size is not one of the table."""
    line = f"{size}     500     31m         2.10s     {(value or 512) / 100:.2f}    100.00       0.00"
    assert FI_RMA_BW.read(line, 1) == (None if value is None else pytest.approx(value * 1e4, rel=1e-3))


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


#: A ucx_perftest that accepts one client, which prints the table above.
STANDIN = f"""#!{sys.executable}
import socket, sys, time
if sys.argv[1] == "-p":
    socket.create_server(("", int(sys.argv[2]))).accept()
else:
    socket.create_connection((sys.argv[1], int(sys.argv[sys.argv.index("-p") + 1])))
    print({SAID!r})
"""


@pytest.mark.parametrize("ends", [True, False])
def test_rows_of_the_largest_depth_are_measured_again(
    ends: bool, make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a tool that takes long, so that its present figure counts."""
    monkeypatch.setattr("pytest_nixl.checks.raw_tools.tools.LONGEST", 60.0 if ends else 0.0)
    monkeypatch.setattr("pytest_nixl.checks.raw_tools.tools.contention_of", lambda *_: 0.0)
    (tmp_path / "ucx_perftest").write_text(STANDIN if ends else f"{STANDIN}    sys.stdout.flush(), time.sleep(600)\n")
    (tmp_path / "ucx_perftest").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    keys = [replace(WRITE, block=1 << 20, batch=batch, depth=depth) for batch, depth in ((1, 1), (1, 4), (4, 8))]
    figures = RowSummary(1e9, 1e-6, 1e-6, 10, 0.0, 0.0, ("tcp/lo",))
    verdict = Verdict.PASS if ends else Verdict.FAIL
    figures = replace(figures, floor=0.0 if ends else 2e9)
    results = [Result("bandwidth", "t.py::t", verdict, row=key, summary=figures) for key in keys]
    causes: dict[RowKey, str] = {}
    record = SimpleNamespace(results=results, explain=causes.__setitem__)
    run = SimpleNamespace(record=record, settings=make_settings())
    cluster = SimpleNamespace(hosts=(LocalHost(supervisor(), 0), LocalHost(supervisor(), 1)), several=False)
    judgement, ratios = compare(WRITE, cast(Run, run), cast(Cluster, cluster), load_profile("loopback"))
    assert judgement.verdict is verdict, judgement
    assert [ratio.row for ratio in ratios] == [keys[1]]
    cause = judgement.reason.removeprefix("UCX WRITE DRAM:DRAM of 1MiB (depth 4): ")
    assert causes == ({} if ends else {keys[1]: cause})
