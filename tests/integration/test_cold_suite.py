# SPDX-License-Identifier: Apache-2.0
"""Cold rows in whole runs of the suite bandwidth with the real NIXL: beside the hot ones, alone, and with a fault."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, Finished, run, undisturbed

pytestmark = pytest.mark.long

COLD = "suites/bandwidth/test_cold.py"
#: In pytest: a host with a small cache, so that its footprint is 2 MiB.
SMALL_CACHE = """
from pytest_nixl.session import footprint
footprint.last_level_cache = lambda root: 1 << 20
"""
#: In pytest: the workers walk only the first half of the footprint.
HALF = """
from pytest_nixl.measure.link import Link
prepare = Link._prepare
Link._prepare = lambda self, block, batch, count, depth: prepare(self, block, batch, count // 2, depth)
"""


def measured(*arguments: str, fault: str = "") -> Finished:
    """Run tests with a fault, on a host with a small cache."""
    return run(*arguments, "--nixl-blocks=64KiB,128KiB", fault=SMALL_CACHE + fault, **undisturbed())


def test_hot_and_cold_rows_are_side_by_side_and_two_rows(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    done = measured(BANDWIDTH, COLD, "--nixl-level=extended", "--nixl-gate", f"--benchmark-json={record}")
    done.expect(0, "NIXL gate: PASS (8 PASS; 8 rows measured")
    keys = {load["fullname"] for load in json.loads(record.read_text())["benchmarks"]}
    hot = {f"UCX/{op}/DRAM:DRAM/{size}/batch1/depth1/0-1" for op in ("WRITE", "READ") for size in ("64KiB", "128KiB")}
    assert keys == hot | {f"{key}/footprint=2MiB" for key in hot}
    lines = re.findall(
        r"^cold : hot  UCX  (\w+) +DRAM:DRAM +(\w+)  footprint=2MiB  pages=huge  [\d.]+  \(", done.output, re.M
    )
    assert sorted(lines) == sorted((op, size) for op in ("WRITE", "READ") for size in ("64KiB", "128KiB"))


def test_all_rows_walk_if_the_option_says_so(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    options = (
        "--nixl-footprint=3MiB", "--nixl-op=READ", "--nixl-level=extended", f"--benchmark-json={record}",
        f"--nixl-store={tmp_path / 'store'}", "--nixl-image=one:1",
    )  # fmt: skip
    done = measured(BANDWIDTH, COLD, *options, "--nixl-gate")
    done.expect(0, "--nixl-footprint=3MiB", "all rows walk the 3MiB of --nixl-footprint")
    keys = [load["fullname"] for load in json.loads(record.read_text())["benchmarks"]]
    [stored] = (tmp_path / "store").rglob("*.json")
    assert json.loads(stored.read_text())["nixl"]["provenance"]["environment"]["(footprint)"] == "3MiB"
    assert len(keys) == 2
    assert all(key.endswith("/0-1/footprint=3MiB") for key in keys)


def test_a_cold_row_of_which_a_part_is_not_moved_is_corrupt() -> None:
    """The command repeats this check, whose rows no other option selects."""
    measured(COLD, "--nixl-op=WRITE", "--nixl-level=extended", "-k", "64KiB", fault=HALF).expect(
        1,
        "CORRUPT: UCX WRITE DRAM:DRAM of 64KiB (footprint 2MiB): 1048576 of 2097152 bytes are wrong ",
        "repeat: pytest ...test_cold.py::",
    )
