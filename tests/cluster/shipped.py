# SPDX-License-Identifier: Apache-2.0
"""What the tests of the shipped files for clusters share: the options of a short run, and what its ranks report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.cli_run import ROOT, environment
from ranks import reports

#: One row, whose figure decides nothing, and the checks of the level quick without those that take most of its time.
SHORT = (
    "--nixl-level=quick", "--nixl-blocks=64KiB", "--nixl-op=WRITE", "--nixl-duration=20ms",
    "-p", "helpers.no_contention", "-p", "helpers.short_launches", "-k",
    "not variables-known and not memory_is_taken_for and not telemetry_of_a_transfer and not publishes_through and "
    "not bytes_of_every_transfer",
)  # fmt: skip
#: What a user of nodes without GPU and RDMA device gives in place of the lines that are marked with "yours".
OVER_TCP = ("--nixl-backend=UCX", "--nixl-profile=tcp-loopback", "--nixl-memory=DRAM:DRAM")
#: Behind the others, because the last one counts. This profile accepts no byte that goes over TCP.
NOT_TCP = "--nixl-profile=loopback"


def variables(**more: str) -> dict[str, str]:
    """Return the environment of a user whose PATH begins with the programs of this Python, with our doubles."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return environment(PATH=path, PYTHONPATH=str(ROOT / "tests"), **more)


def passed(folder: Path, hosts: Sequence[str]) -> None:
    """Assert that every rank reports that the gate is passed and that the one row was measured."""
    rank_reports = reports(folder, len(hosts), logs=".", junit="junit")
    assert "NIXL gate" in (folder / "report.html").read_text(), "the file writes the page"
    assert [report["host"] for report in rank_reports] == list(hosts)
    for report in rank_reports:
        summary = (report["verdict"], report["gate"], report["exit_code"], report["rows"], report["failing"])
        assert summary == ("PASS", True, 0, 1, [])


def failures(folder: Path, hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what failed by its check, after an assertion that every rank reports that the gate is not passed."""
    rank_reports = reports(folder, len(hosts), logs=".", junit="junit")
    assert [report["host"] for report in rank_reports] == list(hosts)
    assert {(report["verdict"], report["gate"], report["exit_code"]) for report in rank_reports} == {("FAIL", True, 1)}
    return {failing["check"]: failing for failing in rank_reports[0]["failing"]}


def went_over_tcp(folder: Path, hosts: Sequence[str]) -> None:
    """Assert that every rank reports that the gate is not passed, because bytes went over TCP."""
    failing = failures(folder, hosts)
    assert set(failing) == {"bandwidth"}, "nothing else fails"
    failed = failing["bandwidth"]
    assert failed["verdict"] == "WRONG-TRANSPORT"
    assert "tcp" in failed["reason"]
