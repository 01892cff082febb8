# SPDX-License-Identifier: Apache-2.0
"""A host that has an NVIDIA GPU on its PCI bus and no driver: NIXL refuses some values of UCX_TLS there.

NIXL and UCX are real. The GPU is two files of sysfs, all that NIXL looks at.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT, command, environment
from helpers.needs import need_programs

from pytest_nixl.core.rdma_fault import allows_cuda

#: Makes an agent with each value of UCX_TLS that it is given, and prints the values that NIXL takes.
TAKEN = """
import json, os, sys
from nixl._api import nixl_agent, nixl_agent_config
taken = []
for number, value in enumerate(sys.argv[1:]):
    os.environ["UCX_TLS"] = value
    try:
        nixl_agent(str(number), nixl_agent_config(backends=["UCX"]))
    except Exception:
        continue
    taken.append(value)
print("\\n" + json.dumps(taken), flush=True)
os._exit(0)
"""
VALUES = (
    "tcp", "rc,tcp", "tcp,CUDA_COPY", "tcp, cuda_copy", "^cuda", "^cuda_copy", "^posix,cuda",
    "tcp,cuda_copy", "tcp,\\cuda_copy", "cuda,tcp", "tcp,all", "all", "^ib", "^posix,cuda_ipc",
)  # fmt: skip


def run(*inner: str, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command on such a host, and return what it wrote to stdout."""
    need_programs("unshare", "mount", root=True)
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", gpu_standin.PCI_TREE, "-", *inner], cwd=cwd,
        env=environment(**variables), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.stdout


def test_nixl_takes_the_values_that_allow_cuda_memory() -> None:
    taken = json.loads(run(sys.executable, "-c", TAKEN, *VALUES).splitlines()[-1])
    assert taken == [value for value in VALUES if allows_cuda(value)]
    assert 0 < len(taken) < len(VALUES)


def test_the_refusal_is_named(tmp_path: Path) -> None:
    remedy = "add cuda_copy to UCX_TLS (`export UCX_TLS=tcp,cuda_copy`), or unset UCX_TLS"
    (tmp_path / "test_it.py").write_text("def test_it(nixl_agent):\n    assert nixl_agent.get_plugin_list()\n")
    output = run(*command("-q", "--nixl-backend=UCX", "test_it.py"), cwd=tmp_path, UCX_TLS="tcp")
    reason = "UCX_TLS=tcp is set here, and allows no CUDA memory, but this host has an NVIDIA GPU (0000:1a:00.0): NIXL "
    assert f"{reason}refuses UCX (NIXL_ERR_BACKEND) (in rank 0 (" in output
    assert f"remedy: {remedy}\n" in output
    told = run(sys.executable, "-m", "pytest_nixl.cli", "doctor", "--json", "--backend=UCX", UCX_TLS="tcp")
    [results] = [load for load in json.loads(told)["checks"] if load["id"] == "transports-allowed"]
    assert (results["verdict"], results["remedy"]) == ("FAIL", remedy)
    assert results["reason"] == (
        "UCX_TLS=tcp allows no CUDA memory, but this host has an NVIDIA GPU, so NIXL refuses UCX (NIXL_ERR_BACKEND)"
    )


@pytest.mark.long
def test_faults_are_also_made_over_tcp() -> None:
    test = "suites/faults/test_transfers.py::test_a_notification_to_a_dead_agent_returns"
    output = run(*command("-q", "--nixl-backend=UCX", "--nixl-level=extended", "-rA", test))
    assert re.search(r"NIXL verdict: PASS \(1 PASS", output), output
