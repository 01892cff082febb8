# SPDX-License-Identifier: Apache-2.0
"""The check in ``deploy/reframe`` with the real ReFrame: it passes and fails as the verdict says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT, environment

CHECK = ROOT / "deploy" / "reframe" / "nixl_check.py"
ROW = "UCX/WRITE/DRAM-DRAM/64KiB/batch1/depth1/0-1"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not find_spec("reframe") and not os.environ.get("CI"), reason="ReFrame is not installed"),
]


def reframe(folder: Path, *arguments: str, **changes: str) -> tuple[int, str, dict[str, Any]]:
    """Run the check for one row, and return ReFrame's exit code, its output, and its report of the check.

    Of the other checks, those are made that the profile requires.
    """
    report, temporary = folder / "report.json", folder / "temporary"
    temporary.mkdir()
    # ReFrame starts the pytest that is first on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    changes["PYTEST_ADDOPTS"] = "-k 'test_bandwidth or loads or etcd_answers or finds_another or well_formed'"
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "reframe"), "-c", str(CHECK), "-r", f"--prefix={folder}"),
            f"--report-file={report}", "-S", "NixlCheck.level=quick",
            "-S", "NixlCheck.more=--nixl-op=WRITE,--nixl-blocks=64KiB", *arguments,
        ],
        cwd=folder, env=environment(PATH=path, HOME=str(folder), TMPDIR=str(temporary), **changes), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    # ReFrame keeps its logs in the folder of temporary files, which is otherwise the system's.
    remaining = [*temporary.iterdir()]
    assert remaining
    assert all(each.match("rfm-*.log") for each in remaining), remaining
    [document] = json.loads(report.read_text())["runs"][0]["testcases"]
    return done.returncode, done.stdout, document


def test_a_healthy_machine_passes_and_its_rows_are_performance_variables(tmp_path: Path) -> None:
    code, output, results = reframe(tmp_path)
    assert (code, results["result"]) == (0, "pass"), output
    assert [name.rpartition(":")[2] for name in results["perfvalues"]] == [ROW]
    [(value, *_, unit, _)] = results["perfvalues"].values()
    assert value > 0
    assert unit == "GB/s"


def test_a_backend_that_falls_back_to_tcp_fails_with_its_reason_and_remedy(tmp_path: Path) -> None:
    code, output, results = reframe(tmp_path, UCX_TLS="tcp")
    assert (code, results["result"]) == (1, "fail"), output
    assert "the verdict is FAIL; WRONG-TRANSPORT bandwidth: UCX WRITE DRAM:DRAM of 64KiB: went over " in output
    assert "remedy: Unset UCX_TLS on every rank: UCX_TLS=tcp is set in this run." in output


def test_a_run_that_pytest_refuses_fails(tmp_path: Path) -> None:
    code, output, _ = reframe(tmp_path, "-S", "NixlCheck.profile=no-such-profile")
    assert code == 1
    assert "the verdict is REFUSED; " in output
    assert "no-such-profile" in output


def test_several_ranks_share_an_etcd_and_a_token(tmp_path: Path) -> None:
    """Only the script of the job is read: this machine has one node."""
    reframe(tmp_path, "-S", "NixlCheck.ranks=2", "-S", "NixlCheck.executable=true")
    [script] = tmp_path.rglob("rfm_job.sh")
    lines = script.read_text().splitlines()
    assert sum(line.startswith("export NIXL_GROUP_TOKEN=${NIXL_GROUP_TOKEN:-$(od ") for line in lines) == 1
    assert lines[-1].endswith("--nixl-etcd-listen=0.0.0.0:23790 --nixl-op=WRITE --nixl-blocks=64KiB")
