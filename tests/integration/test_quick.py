# SPDX-License-Identifier: Apache-2.0
"""A quick run of the suites with the real NIXL: on a healthy machine, and with endpoints that cannot work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, run, undisturbed

QUICK = ("suites", "--nixl-level=quick", "--nixl-gate")
#: Nothing listens on port 1.
NOTHING = "http://127.0.0.1:1"
LOOPBACK = ROOT / "pytest_nixl" / "profiles" / "loopback.toml"
ROWS = {f"{op} {size}" for op in ("WRITE", "READ") for size in ("4KiB", "1MiB", "64MiB")}


@pytest.mark.long
def test_a_healthy_machine_passes_the_gate_with_three_sizes_each_way(tmp_path: Path) -> None:
    # A busy machine may be slower than the default profile's floors. README's first command has those.
    text, floors = re.subn(r'^floor = ".*"', 'floor = "1 KB/s"', LOOPBACK.read_text(encoding="utf-8"), flags=re.M)
    assert floors
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    done = run(*QUICK, "-v", f"--nixl-profile={tmp_path / 'p.toml'}", **undisturbed())
    assert done.verdicts == dict.fromkeys(ROWS, "PASS")
    assert re.search(r"^\d+ checks of level standard and \d+ checks of level extended were left out", done.output, re.M)
    assert re.search(r"^NIXL gate: PASS \(\d+ PASS, \d+ NOT-APPLICABLE; 6 rows measured\)", done.output, re.M)
    ran = re.findall(r"^suites/(\w+)/test_\w+\.py::\w+\S* (?:PASSED|SKIPPED)", done.output, re.MULTILINE)
    # The infrastructure is examined before anything is measured.
    assert set(ran) >= {"infrastructure", "uri_validation", "metadata"}
    assert max(at for at, suite in enumerate(ran) if suite == "infrastructure") < ran.index("metadata")
    assert done.code == 0


@pytest.mark.long
def test_a_broken_endpoint_ends_a_quick_run_before_the_first_row() -> None:
    done = run(*QUICK, env={"NIXL_ETCD_ENDPOINTS": NOTHING})
    assert "the run ended because the check 'etcd-answers' failed, which the profile 'loopback' requires" in done.output
    assert done.verdicts == {}
    assert "NIXL gate: FAIL, INTERRUPTED after" in done.output
    assert done.code == 1


@pytest.mark.long
def test_keep_going_goes_on_after_a_broken_endpoint() -> None:
    """A slash after the port: NIXL ignores such an endpoint without an error in Python."""
    row = ("--nixl-op=WRITE", "--nixl-blocks=64KiB")
    done = run(*QUICK, "--nixl-keep-going", *row, **undisturbed({"NIXL_ETCD_ENDPOINTS": f"{NOTHING}/"}))
    assert re.search(r"^FAIL endpoints-well-formed: ", done.output, re.MULTILINE)
    assert set(done.verdicts) == {"WRITE 64KiB"}
    assert "NIXL gate: FAIL (" in done.output
    assert done.code == 1
