# SPDX-License-Identifier: Apache-2.0
"""Of a variable that rank 0 chooses, a peer's worker gets only one of a closed list of names."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.etcd import wait_until
from helpers.two_ranks import two

from pytest_nixl.checks.faults.transfers import environments
from pytest_nixl.checks.raw_tools.tools import UcxPerftest
from pytest_nixl.cluster.peer_client import PeerError
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import not_from_other_ranks
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

#: Variables that load code, run a program, write a file, or let a process wait for ever.
DANGEROUS = {
    "UCX_GDB_COMMAND": "/bin/true",
    "UCX_HANDLE_ERRORS": "debug",
    "UCX_ERROR_MAIL_TO": "root",
    "UCX_ERROR_SIGNALS": "SIGUSR1",
    "UCX_DEBUG_SIGNO": "SIGUSR1",
    "UCX_MEMTRACK_DEST": "file:/tmp/x",
    "UCX_STATS_DEST": "file:/tmp/x",
    "UCX_LOG_FILE": "/tmp/x",
    "UCX_MODULES": "x",
    "NIXL_TELEMETRY_EXPORTER": "../x",
    "NIXL_UCX_EXPECTED_SONAME": "x",
    "CUDA_MPS_PIPE_DIRECTORY": "/tmp/x",
    "UCX_OF_TOMORROW": "y",
    **dict.fromkeys(
        ("LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "PATH", "NIXL_PLUGIN_DIR", "UCX_MODULE_DIR"), "/tmp/x.so"
    ),
}


def test_a_peer_refuses_variables_that_can_run_a_program_or_write_a_file(nixl_private_etcd: PrivateEtcd) -> None:
    with two(nixl_private_etcd) as ranks:
        for name, value in DANGEROUS.items():
            with pytest.raises(PeerError, match=f"rank 0 may not set {name} for a worker of another rank"):
                ranks.peer.start("evil", {"UCX_TLS": "tcp", name: value}, 60)


def test_a_rank_may_give_what_pytest_nixl_itself_gives() -> None:
    for backend in BACKENDS.values():
        assert not_from_other_ranks(backend.environment({})) == []
    assert not_from_other_ranks(UcxPerftest.environment) == []
    for environment in environments("UCX", {}):
        assert not_from_other_ranks(environment) == []


def test_ucx_runs_the_program_of_a_variable_when_a_worker_crashes(nixl_settings: Settings, tmp_path: Path) -> None:
    """Why the list is closed: this is what a rank could do with the variables of UCX. Here it is this rank's own."""
    ran = tmp_path / "ran"
    script = tmp_path / "gdb"
    script.write_text(f"#!/bin/sh\necho ran > {ran}\n")
    script.chmod(0o755)
    variables = {"UCX_HANDLE_ERRORS": "debug", "UCX_GDB_COMMAND": str(script)}
    with Agents(LocalHost(supervisor()), replace(nixl_settings, backend=("UCX",), timeout=120)) as agents:
        agent = agents.start("crash", environment=variables)
        os.kill(agent.worker.pid, signal.SIGSEGV)
        wait_until(ran.exists, 60, "UCX started the program of UCX_GDB_COMMAND")
