# SPDX-License-Identifier: Apache-2.0
"""The lines that explain results: each names the command that explains its check or finding."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_nixl.core.units import format_size
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.row_key import RowKey, UnknownKey
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.table import lines
from pytest_nixl.session.selection import check_ids_by_suite

CHECKS = sorted({check for checks in check_ids_by_suite().values() for check in checks})


def pages(check: str, finding: str = "") -> list[str]:
    """Return the pages that the report of one failed check names."""
    failed = Result(check, "t.py::test", Verdict.FAIL, "it is wrong", "mend it", finding=finding)
    shown_lines = texts([failed])
    return [line.removeprefix("    about: ") for line in shown_lines if line.startswith("    about: ")]


def test_a_failed_check_names_the_command_that_explains_it_or_its_finding() -> None:
    assert [pages(check) for check in CHECKS] == [[f"pytest-nixl explain {check}"] for check in CHECKS]
    commands = [[f"pytest-nixl explain {finding}"] for finding in FINDINGS]
    assert [pages("bandwidth", finding) for finding in FINDINGS] == commands
    assert pages("mine") == [], "a check of a user has no page"


def texts(results: list[Result], **options: Any) -> list[str]:
    """Return the lines of a report without the gate."""
    return [line.text for line in lines(results, gate=False, **options)]


def result(check: str, verdict: Verdict, *, remedy: str = "") -> Result:
    """Return the result of a check that is not of a row."""
    return Result(check, f"t.py::{check}", verdict, f"the reason of {check}", remedy)


def test_what_is_wrong_comes_first_and_the_most_severe_before_the_rest() -> None:
    results = [
        result("fine", Verdict.PASS),
        result("odd", Verdict.WARN),
        result("other-machine", Verdict.NOT_APPLICABLE),
        result("slow", Verdict.FAIL, remedy="mend it"),
        result("wrong-bytes", Verdict.CORRUPT),
    ]
    shown_lines = texts(results)
    assert shown_lines == [
        "NIXL verdict: FAIL (1 PASS, 1 FAIL, 1 CORRUPT, 1 WARN, 1 NOT-APPLICABLE; 0 rows measured)",
        "CORRUPT wrong-bytes: the reason of wrong-bytes",
        "FAIL slow: the reason of slow",
        "    remedy: mend it",
        "WARN odd: the reason of odd",
        "NOT-APPLICABLE other-machine: the reason of other-machine",
        shown_lines[0],
    ]


def test_a_healthy_run_has_its_verdict_once() -> None:
    shown_lines = texts([result("fine", Verdict.PASS)])
    assert shown_lines == ["NIXL verdict: PASS (1 PASS; 0 rows measured)"]


@pytest.mark.parametrize("everything", [False, True])
def test_many_checks_that_do_not_apply_are_counted_unless_everything_is_wanted(everything: bool) -> None:
    results = [result(f"check-{number}", Verdict.NOT_APPLICABLE) for number in range(6)]
    shown_lines = texts(results, everything=everything)[:-1]
    if everything:
        assert shown_lines == [f"NOT-APPLICABLE check-{number}: the reason of check-{number}" for number in range(6)]
    else:
        assert shown_lines == ["NOT-APPLICABLE: 6 checks; -v names them, each with its reason"]


def row(block: str, op: str, verdict: Verdict = Verdict.PASS, variant: str = "") -> Result:
    """Return the result of a measured row."""
    text = f"UCX/{op}/DRAM:DRAM/{block}/{'batch4096' if variant else 'batch1'}/depth1/0-1{variant}"
    figures = RowSummary(1.234e9, 26e-6, 77777e-6, 10, 6e8, 0.0, ("cma/memory",))
    reason = "" if verdict is Verdict.PASS else f"UCX {op} DRAM:DRAM of {block}: it is too slow"
    return Result("bandwidth", f"t.py::{text}", verdict, reason, row=RowKey.parse(text), summary=figures)


SIZES = [format_size(1 << power) for power in range(12, 27)]
KV = [f"/kv={way},model=generic,tokens=1024" for way in ("scattered-prepped", "contiguous-merged")]


def default_run() -> list[Result]:
    """Return the rows of a default run, all of which passed."""
    usual = [row(size, op) for op in ("WRITE", "READ") for size in SIZES]
    return [*usual, *(row("32KiB", op, variant=variant) for op in ("WRITE", "READ") for variant in KV)]


def test_rows_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of that grows with the square of their number: 4140 rows took 1.9 s instead of 0.05 s."""
    compared: list[object] = []

    def compare(first: Result, other: object) -> bool:
        compared.append(other)
        return first is other

    monkeypatch.setattr(Result, "__eq__", compare)
    results = [*default_run()[1:], row("4KiB", "WRITE", Verdict.FAIL)]
    assert "UCX DRAM:DRAM, over cma/memory: 29 PASS" in texts(results, width=80)
    assert compared == []


def test_many_rows_with_the_same_fault_are_named_in_one_line() -> None:
    results = [row(size, "WRITE", Verdict.WRONG_TRANSPORT) for size in SIZES]
    shown_lines = texts(results, width=80)
    assert shown_lines[1:3] == [
        "WRONG-TRANSPORT 15 rows: it is too slow",
        f"    rows: UCX WRITE DRAM:DRAM {' '.join(SIZES)}",
    ]
    apart = texts(results)
    assert len([line for line in apart if line.startswith("WRONG-TRANSPORT: UCX WRITE DRAM:DRAM of ")]) == 15


def measured(key: str, gigabytes: float, verdict: Verdict = Verdict.PASS, *ratios: RawRatio) -> Result:
    """Return the result of a row of 4 KiB from host memory to host memory, by backend, operation and variant."""
    backend, op, *variant = key.split("/")
    row = RowKey.parse("/".join((backend, op, "DRAM:DRAM/4KiB/batch1/depth1/0-1", *variant)))
    figures = RowSummary(gigabytes * 1e9, 1e-6, 1e-6, 1, 0.0, 0.0, ())
    return Result("bandwidth", key, verdict, row=row, summary=figures, ratios=ratios)


RAW = RawMeasurement("fi_rma_bw", "rma", 4e9, "1.22", ("efa", "tcp"))
RAW_KEY = RowKey.parse("UCX/READ/DRAM:VRAM@2/1MiB/batch8/depth4/2-5/pages=base")
LAST, BASE = "UCX/WRITE", "UCX/WRITE/notify=each,pages=base"


@pytest.mark.parametrize(
    ("results", "ratios"),
    [
        ([measured(LAST, 2), measured("LIBFABRIC/WRITE", 1), measured("POSIX/WRITE", 5), measured("UCX/READ", 3)],
         ["LIBFABRIC : UCX  WRITE  DRAM:DRAM    4KiB  pages=huge  0.50",
          "POSIX : UCX  WRITE  DRAM:DRAM    4KiB  pages=huge  2.50"]),
        ([measured(LAST, 2), measured(LAST, 1), measured("LIBFABRIC/WRITE", 1, Verdict.CORRUPT)], []),
        ([measured(LAST, 2.4), measured("nixlbench:UCX/WRITE", 0.4)], []),
        ([measured(LAST, 2.4), measured("UCX/WRITE/notify=each", 0.5), measured(BASE, 0.5),
          measured("nixlbench:UCX/WRITE", 0.4), measured("nixlbench:LIBFABRIC/WRITE", 0.1)],
         ["UCX : nixlbench:UCX  WRITE  DRAM:DRAM    4KiB  notify=each,pages=base  1.25"]),
        ([measured("UCX/WRITE/notify=each", 0.5), measured(BASE, 0.5),
          measured("nixlbench[use_hugepages=1]:UCX/WRITE", 1)],
         ["UCX : nixlbench[use_hugepages=1]:UCX  WRITE  DRAM:DRAM    4KiB  notify=each  pages=huge  0.50"]),
        ([measured(LAST, 4), measured("UCX/WRITE/footprint=1GiB", 1), measured("UCX/READ/footprint=1GiB", 1)],
         ["cold : hot  UCX  WRITE  DRAM:DRAM    4KiB  footprint=1GiB  pages=huge  0.25  (1 of 4 GB/s with the bytes of "
          "each transfer in the caches)"]),
        ([measured(LAST, 4, Verdict.ERROR), measured("UCX/WRITE/footprint=1GiB", 1)], []),
        ([measured(LAST, 4, Verdict.PASS, RawRatio(RAW_KEY, 1e9, RAW), RawRatio(RAW_KEY, 2e9, RAW, comparable=False),
                   RawRatio(UnknownKey("later"), 2e9, RAW))],
         ["UCX : fi_rma_bw  READ   DRAM:VRAM@2    1MiB  batch8  depth4  2-5  pages=base  0.25  of 4 GB/s by fi_rma_bw "
          "(rma, 1.22) over efa+tcp",
          "later : fi_rma_bw  0.50  of 4 GB/s by fi_rma_bw (rma, 1.22) over efa+tcp"]),
    ],
    ids=["backends", "twice, or wrong", "nixlbench notifies", "nixlbench", "huge pages", "cold", "failed", "raw"],
)  # fmt: skip
def test_rows_are_compared_with_those_that_are_alike(results: list[Result], ratios: list[str]) -> None:
    assert [text for text in texts(results) if " : " in text] == ratios


def test_one_cause_of_many_checks_stands_once_above_them() -> None:
    """A dead etcd is one sentence, with the checks under it and one page, not as many sentences as checks need it."""
    ids = [
        "metadata-by-etcd", "metadata-update", "namespace-keys", "publish-to-found", "metadata-fits-etcd",
        "ranks-agree", "metadata-invalidation",
    ]  # fmt: skip
    results = [Result(id, "x", Verdict.ERROR, "etcd: connection refused", "Start that etcd.") for id in ids]
    shown_lines = texts(results, width=200)
    assert shown_lines[1:] == [
        "ERROR 7 checks: etcd: connection refused",
        f"    checks: {', '.join(ids)}",
        "    remedy: Start that etcd.",
        "    about: pytest-nixl explain metadata-by-etcd",
        shown_lines[-1],
    ]
    whole = texts(results)
    assert sum("about:" in line for line in whole) == 7


def test_the_cause_of_several_rows_stands_above_them() -> None:
    cause = Result("regression", "", Verdict.WRONG_TRANSPORT, "UCX_TLS=tcp is set in this run")
    shown_lines = texts([row("4KiB", "WRITE", Verdict.WRONG_TRANSPORT), cause])
    assert [line.partition(": ")[0] for line in shown_lines[1:3]] == ["WRONG-TRANSPORT regression", "WRONG-TRANSPORT"]
