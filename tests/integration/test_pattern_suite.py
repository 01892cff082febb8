# SPDX-License-Identifier: Apache-2.0
"""The suite pattern with the real NIXL: healthy, with a corrupted flow, with a matrix, and without a pattern."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, profile, run
from helpers.pytester_run import run_pytest

pytestmark = pytest.mark.long

SUITE = "suites/pattern"
SMALL = ("--nixl-blocks=64KiB", "--nixl-op=WRITE")
#: A plugin that changes a byte at the target of one flow, through the kernel, before its timed bytes are compared.
POKER = """
import os
from pytest_nixl.checks.pattern.rank_flows import RankFlows

compare = RankFlows._compare

def poke(self, phase, *more):
    if phase == "after the timed transfers":
        buffer = self.buffers[2]
        memory = os.open(f"/proc/{buffer.worker.pid}/mem", os.O_RDWR)
        byte = os.pread(memory, 1, buffer.address + 77)[0]
        os.pwrite(memory, bytes([byte ^ 1]), buffer.address + 77)
        os.close(memory)
    compare(self, phase, *more)

RankFlows._compare = poke
"""
#: A plugin: no other process uses the cores that a pattern needs.
QUIET = "from pytest_nixl.checks.pattern.fairness import PatternSamples\nPatternSamples.disturbed = 0.0\n"


def test_an_incast_is_measured_alone_and_together_and_shown_in_every_report(tmp_path: Path) -> None:
    page, record = tmp_path / "page.html", tmp_path / "record.json"
    run(SUITE, "--nixl-pattern=incast:3", *SMALL, f"--nixl-report={page}", f"--benchmark-json={record}").expect(
        0,
        "1 NOT-APPLICABLE; 4 rows measured)",  # beside other tests a flow may starve: INCONCLUSIVE
        "NOT-APPLICABLE pattern-culprit: this run has only one rank",
        "UCX WRITE DRAM:DRAM incast of 3 ranks: ... Jain's fairness index ",
    )
    keys = [load["fullname"] for load in json.loads(record.read_text())["benchmarks"]]
    form = "UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/{}-0/load={},pattern=incast:3"
    assert keys == [form.format(source, load) for source in (1, 2) for load in ("alone", "together")]
    shown = page.read_text()
    for load in ("alone", "together"):
        assert f"UCX WRITE DRAM:DRAM, load={load},pattern=incast:3, from source to target" in shown


def test_a_bound_and_a_transport_of_the_profile_are_judged(tmp_path: Path) -> None:
    expected = Path(profile(tmp_path / "p.toml", "transports = ['rc_mlx5']"))
    with expected.open("a") as file:
        file.write(
            "[[bound]]\nfigure = 'pattern-bandwidth'\npattern = ['incast:3']\nat_least = '9000 GB/s'\n"
            "source = 'a dream'\n"
        )
    done = run(SUITE, "--nixl-pattern=incast:3", *SMALL, f"--nixl-profile={expected}", fault=QUIET)
    done.expect(1, "4 WRONG-TRANSPORT")
    assert "below its bound of 9000 GB/s (bound of the profile, from: a dream)" in " ".join(done.output.split())


def test_a_matrix_is_measured_with_its_sizes_in_both_operations(tmp_path: Path) -> None:
    (tmp_path / "matrix.txt").write_text("0 64K 0\n0 0 128K\n0 0 0\n")
    run(SUITE, f"--nixl-pattern={tmp_path / 'matrix.txt'}").expect(
        0,
        "2 NOT-APPLICABLE; 8 rows measured)",  # beside other tests a flow may starve: INCONCLUSIVE
        "READ DRAM:DRAM matrix-",
    )


def test_a_corrupted_flow_is_named_and_no_other() -> None:
    done = run(SUITE, "--nixl-pattern=outcast:3", *SMALL, "-v", fault=POKER)
    done.expect(1, "flow 0->2: 1 of 65536 bytes are wrong after the timed transfers, the first at offset 77")
    rows = re.findall(r"^UCX +WRITE .* (0-\d) +load=(\w+),\S+ .* (PASS|CORRUPT)$", done.output, re.MULTILINE)
    assert rows == [
        ("0-1", "alone", "PASS"), ("0-1", "together", "PASS"),
        ("0-2", "alone", "CORRUPT"), ("0-2", "together", "CORRUPT"),
    ]  # fmt: skip


def test_without_a_pattern_a_run_of_all_suites_has_no_test_of_it(pytester: pytest.Pytester) -> None:
    both = (str(ROOT / "suites"), "--pyargs", "pytest_nixl.suites")
    done = run_pytest(pytester, *both, "--collect-only", "-q", in_process=True)
    assert any("suites/bandwidth" in line for line in done.outlines), done.outlines
    assert [line for line in done.outlines if "pattern" in line] == []


def test_a_run_of_this_suite_without_a_pattern_says_what_to_give(pytester: pytest.Pytester) -> None:
    done = run_pytest(pytester, "--pyargs", "pytest_nixl.suites.pattern", in_process=True)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*give --nixl-pattern=incast*", "*, 4 NOT-APPLICABLE;*"])
