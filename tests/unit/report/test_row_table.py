# SPDX-License-Identifier: Apache-2.0
"""The tables of rows on the terminal as whole texts: the columns and lines that a width leaves, and how they align."""

from __future__ import annotations

import math

import pytest

from pytest_nixl.core.units import format_size
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Outcome, Verdict
from pytest_nixl.report.row_table import tables

NAN = math.nan


def row(
    key: str, gigabytes: float, verdict: Verdict = Verdict.PASS, *, floor: float = 6e8,
    transports: tuple[str, ...] = ("cma/memory",), latencies: tuple[float, float, float] = (26e-6, 30e-6, 77777e-6),
) -> Result:  # fmt: skip
    """Return the result of a measured row."""
    text = f"UCX/{key}" if "/batch" in key else f"UCX/{key}/batch1/depth1/0-1"
    p50, p90, p99 = latencies
    summary = RowSummary(gigabytes * 1e9, p50, p99, 10, floor, 9e9 if floor else 0.0, transports, p90=p90)
    return Result("bandwidth", text, verdict, row=RowKey.parse(text), summary=summary)


PLAIN = row("WRITE/DRAM:DRAM/4KiB", 1.234)
WARNED = row(
    "READ/DRAM:VRAM@3/1MiB/batch8/depth4/2-5", 20, Verdict.WARN, floor=0.0, transports=(), latencies=(NAN,) * 3
)
MISSING = Result("bandwidth", "m", Verdict.MISSING, row=RowKey.parse("UCX/READ/DRAM:DRAM/2MiB/batch1/depth1/0-1"))
FEW = [PLAIN, WARNED, MISSING]
VARIED = [row(f"WRITE/DRAM:DRAM/4KiB/batch1/depth1/0-1/threads={count}", count) for count in (2, 8)]
VARIED.append(row("READ/DRAM:DRAM/4KiB/batch1/depth1/0-1/threads=2", 3))
#: Ten rows of one kind: WRITE without bounds, READ over another transport from 32 KiB on.
MANY = [
    row(f"{op}/DRAM:DRAM/{format_size(1 << power)}", power, floor=0.0 if op == "WRITE" else 6e8,
        transports=("sysv", "tcp") if power > 14 and op == "READ" else ("cma/memory",))
    for op in ("WRITE", "READ") for power in range(12, 17)
]  # fmt: skip
OF_RANKS = [
    row(f"WRITE/DRAM:DRAM/4KiB/batch{batch}/depth2/{ranks}", 1)
    for batch in (1, 16, 32) for ranks in ("0-1", "1-2", "2-0")
]  # fmt: skip

WHOLE = """\
backend  op     memory       block  batch  depth  ranks  GB/s  Gb/s  p50 us  p99 us  floor  transport   verdict
UCX      WRITE  DRAM:DRAM     4KiB      1      1    0-1  1.23  9.87      26   77777    0.6  cma/memory  PASS
UCX      READ   DRAM:VRAM@3   1MiB      8      4    2-5    20   160       -       -      -  unknown     WARN
UCX      READ   DRAM:DRAM     2MiB      1      1    0-1     -     -       -       -      -  -           MISSING"""
WITHOUT_GBIT = """\
backend  op     memory       block  batch  depth  ranks  GB/s  p50 us  p99 us  floor  transport   verdict
UCX      WRITE  DRAM:DRAM     4KiB      1      1    0-1  1.23      26   77777    0.6  cma/memory  PASS
UCX      READ   DRAM:VRAM@3   1MiB      8      4    2-5    20       -       -      -  unknown     WARN
UCX      READ   DRAM:DRAM     2MiB      1      1    0-1     -       -       -      -  -           MISSING"""
NARROW = """\
backend  op     memory       block  batch  depth  ranks  GB/s  transport   verdict
UCX      WRITE  DRAM:DRAM     4KiB      1      1    0-1  1.23  cma/memory  PASS
UCX      READ   DRAM:VRAM@3   1MiB      8      4    2-5    20  unknown     WARN
UCX      READ   DRAM:DRAM     2MiB      1      1    0-1     -  -           MISSING"""
TWO_TABLES = """\
backend  op     memory     block  batch  depth  GB/s  Gb/s  p50 us  p99 us  floor  transport   verdict
UCX      WRITE  DRAM:DRAM   4KiB      1      1  1.23  9.87      26   77777    0.6  cma/memory  PASS
backend  op     memory     block  batch  depth  variant    GB/s  Gb/s  p50 us  p99 us  floor  transport   verdict
UCX      WRITE  DRAM:DRAM   4KiB      1      1  threads=2     2    16      26   77777    0.6  cma/memory  PASS
UCX      WRITE  DRAM:DRAM   4KiB      1      1  threads=8     8    64      26   77777    0.6  cma/memory  PASS
UCX      READ   DRAM:DRAM   4KiB      1      1  threads=2     3    24      26   77777    0.6  cma/memory  PASS"""
SHORT_AND_PLAIN = """\
UCX DRAM:DRAM 4KiB, over cma/memory: 3 PASS
threads  WRITE GB/s  Gb/s  p50 us  p99 us  floor  READ GB/s  Gb/s  p50 us  p99 us  floor
2                 2    16      26   77777    0.6          3    24      26   77777    0.6
8                 8    64      26   77777    0.6          -     -       -       -      -
backend  op     memory     block  GB/s  Gb/s  p50 us  p99 us  floor  transport   verdict
UCX      WRITE  DRAM:DRAM   4KiB  1.23  9.87      26   77777    0.6  cma/memory  PASS"""
MANY_SIZES = """\
UCX DRAM:DRAM, over cma/memory or sysv+tcp: 10 PASS
block  WRITE GB/s  Gb/s  p50 us  p99 us  floor  READ GB/s  Gb/s  p50 us  p99 us  floor
 4KiB          12    96      26   77777      -         12    96      26   77777    0.6
 8KiB          13   104      26   77777      -         13   104      26   77777    0.6
16KiB          14   112      26   77777      -         14   112      26   77777    0.6
32KiB          15   120      26   77777      -         15   120      26   77777    0.6
64KiB          16   128      26   77777      -         16   128      26   77777    0.6"""
MANY_RANKS = """\
UCX DRAM:DRAM 4KiB depth2, over cma/memory: 9 PASS
batch  ranks  WRITE GB/s  Gb/s  p50 us  p90 us  p99 us  floor  ceiling
1                      1     8      26      30   77777    0.6        9
1      1-2             1     8      26      30   77777    0.6        9
1      2-0             1     8      26      30   77777    0.6        9
16                     1     8      26      30   77777    0.6        9
16     1-2             1     8      26      30   77777    0.6        9
16     2-0             1     8      26      30   77777    0.6        9
32                     1     8      26      30   77777    0.6        9
32     1-2             1     8      26      30   77777    0.6        9
32     2-0             1     8      26      30   77777    0.6        9"""


@pytest.mark.parametrize(
    ("rows", "width", "text"),
    [
        (FEW, None, WHOLE),
        (FEW, 111, WHOLE),
        (FEW, 110, WITHOUT_GBIT),
        (FEW, 50, NARROW),
        ([PLAIN, *VARIED], None, TWO_TABLES),
        ([], None, ""),
        ([*VARIED, PLAIN], 88, SHORT_AND_PLAIN),
        (MANY, 86, MANY_SIZES),
        (OF_RANKS, 70, MANY_RANKS),
    ],
    ids=[
        "no width", "wide enough", "one too narrow", "narrow", "variants apart", "no row", "variants together",
        "many sizes", "many ranks",
    ],
)  # fmt: skip
def test_a_table_is_as_wide_as_the_terminal(rows: list[Result], width: int | None, text: str) -> None:
    assert "\n".join(line.text for line in tables(rows, gate=False, width=width)) == text


@pytest.mark.parametrize(
    ("rows", "line", "heads"),
    [
        ([PLAIN], 0, {
            92: "GB/s Gb/s p50us p99us floor", 91: "GB/s Gb/s p50us p99us floor", 80: "GB/s Gb/s p99us floor",
            79: "GB/s p99us floor", 72: "GB/s Gb/s floor", 71: "GB/s floor", 64: "GB/s", 1: "GB/s",
        }),
        (FEW, 0, {
            111: "GB/s Gb/s p50us p99us floor", 110: "GB/s p50us p99us floor", 105: "GB/s p50us p99us floor",
            104: "GB/s Gb/s p99us floor", 96: "GB/s Gb/s floor", 88: "GB/s Gb/s", 87: "GB/s",
        }),
        (MANY, 1, {
            120: "GB/s Gb/s p50us p90us p99us floor ceiling", 119: "GB/s Gb/s p50us p99us floor",
            86: "GB/s Gb/s p50us p99us floor", 85: "GB/s p50us p99us floor", 74: "GB/s p50us p99us floor",
            73: "GB/s p50us p99us", 60: "GB/s p50us p99us", 59: "GB/s p99us", 44: "GB/s p99us", 43: "GB/s", 1: "GB/s",
        }),
    ],
    ids=["one row", "a line each", "a line for each size"],
)  # fmt: skip
def test_a_terminal_has_the_figures_that_fit(rows: list[Result], line: int, heads: dict[int, str]) -> None:
    shown = {width: list(tables(rows, gate=False, width=width))[line].text.replace(" us", "us") for width in heads}
    figures = {"GB/s", "Gb/s", "p50us", "p90us", "p99us", "floor", "ceiling"}
    names = {width: [name for name in text.split() if name in figures] for width, text in shown.items()}
    assert names == {width: text.split() * (1 if rows is not MANY else 2) for width, text in heads.items()}


@pytest.mark.parametrize("rows", [MANY[:8], [*MANY, MANY[0]]], ids=["few", "one measured twice"])
def test_few_rows_and_rows_that_were_measured_twice_have_a_line_each(rows: list[Result]) -> None:
    lines = [line.text.split() for line in tables(rows, gate=False, width=200)]
    assert [line[:2] for line in lines] == [["backend", "op"], *(["UCX", row.nodeid.split("/")[1]] for row in rows)]


def test_a_line_has_the_outcome_of_its_verdict() -> None:
    for gate, missing in ((False, Outcome.WARN), (True, Outcome.FAIL)):
        undecided = row("READ/DRAM:DRAM/2MiB", 1, Verdict.INCONCLUSIVE)
        shown = [line.outcome for line in tables([*MANY, *FEW[1:], undecided], gate=gate, width=200)]
        assert shown == [None, None, *[Outcome.PASS] * 5, None, Outcome.WARN, Outcome.FAIL, missing]
