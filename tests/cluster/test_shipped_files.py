# SPDX-License-Identifier: Apache-2.0
"""The shipped files for Slurm and MPI, run as written: green for a healthy subject, and red for a broken one.

Real are Slurm, ``mpirun`` and NIXL; nodes are network namespaces. What a file marks with "yours" is replaced by options
at the end of its command line, which also leave one row of the level quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, Finished
from helpers.namespaces import ENDS_WITH_ALL, Host, Network
from helpers.needs import need_programs
from ranks import PATIENCE, hosts, run_ranks
from servers import Slurm, require_slurm, slurm
from shipped import NOT_TCP, OVER_TCP, SHORT, failures, passed, variables, went_over_tcp

from pytest_nixl.judge.profile_learning import read_run

NODES = ("node-0", "node-1")
SBATCH, RUN = ROOT / "deploy" / "slurm" / "pytest-nixl.sbatch", ROOT / "deploy" / "mpi" / "run.sh"


#: Two nodes, and the host on which jobs are started.
net = hosts(*NODES, "login")


@pytest.fixture(scope="module")
def started(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require_slurm()
    need_programs("sbatch", packages="slurm-client")
    with slurm(net, tmp_path_factory.mktemp("slurm"), "login", NODES) as running:
        yield running


class TestSlurm:
    """``pytest-nixl.sbatch``, submitted with the real ``sbatch``."""

    def wait(
        self, net: Network, started: Slurm, folder: Path, command: Sequence[str], env: Mapping[str, str]
    ) -> Finished:
        """Submit a job, wait for its end, and return its exit code with the output of ``sbatch``."""
        [submitted] = run_ranks([net["login"]], folder / "sbatch", *command, env=env)
        assert submitted.code == 0, submitted.output
        return Finished(started.wait(submitted.output.split()[-1], PATIENCE), submitted.output)

    def submit(
        self, net: Network, started: Slurm, folder: Path, *options: str, **env: str
    ) -> tuple[Finished, Path, str]:
        """Submit the job in a folder, and wait for its end.

        :param env: the variables of the file, and others.
        :returns: how ``sbatch`` ended, the folder of the results, and the output of the job.
        """
        # The nodes have no GPU.
        command = ["env", f"--chdir={folder}", "sbatch", "--parsable", "--gpus-per-node=0", str(SBATCH), *options]
        env = variables(UCX_TLS="tcp", **started.env, **env)
        done = self.wait(net, started, folder, command, env)
        outputs = list(folder.glob("nixl-*.out"))
        assert len(outputs) == 1, done.output
        return done, outputs[0].with_suffix(""), outputs[0].read_text()

    def test_a_healthy_cluster_passes(self, net: Network, started: Slurm, tmp_path: Path) -> None:
        done, results, output = self.submit(net, started, tmp_path, *OVER_TCP, *SHORT, PROFILE="tcp-loopback")
        assert done.code == 0, done.output + output
        assert "NIXL gate: PASS (" in output
        assert f"next: open {results / 'report.html'}\n" in output
        assert f"pytest-nixl: exit code 0, results in {results}\n" in output
        passed(results, NODES)

    def test_without_a_profile_the_rows_between_nodes_are_recorded(
        self, net: Network, started: Slurm, tmp_path: Path
    ) -> None:
        """For a profile to learn. The default profile is for one host, and judges no row between two."""
        memory = "--nixl-memory=DRAM:DRAM"
        done, results, output = self.submit(net, started, tmp_path, memory, *SHORT)
        assert done.code == 0, done.output + output
        assert "pytest-nixl: measured, and not judged, because PROFILE is not set" in output
        assert "the default profile, loopback, is for one host, and the ranks are on 2: " in output
        [row] = read_run(results / "run.json").values()
        assert row.transports == ("tcp/veth0",)
        assert row.verdict == ""

    def test_a_container_is_never_left_out(self, net: Network, started: Slurm, tmp_path: Path) -> None:
        """Without pyxis the job fails, and does not run on the node itself."""
        done, results, output = self.submit(
            net, started, tmp_path, *SHORT, PROFILE="tcp-loopback", CONTAINER_IMAGE="registry.example#vllm:7"
        )
        assert done.code not in (0, 1), done.output + output  # that of srun
        assert "unrecognized option '--container-image=registry.example#vllm:7'" in output
        assert not list(results.glob("rank-*"))

    def test_nodes_that_are_not_those_of_the_file_fail(self, net: Network, started: Slurm, tmp_path: Path) -> None:
        """The profile expects the EFA devices of a p5.48xlarge."""
        libfabric = "--nixl-backend=LIBFABRIC"
        done, results, output = self.submit(net, started, tmp_path, libfabric, *SHORT, PROFILE="p5.48xlarge")
        assert done.code == 1, done.output + output
        assert f"pytest-nixl: exit code 1, results in {results}\n" in output
        reason = failures(results, NODES)["rdma-devices"]["reason"]
        assert reason == "all 2 ranks: 0 EFA devices instead of the 32 in the profile: none"

    def test_ranks_of_mpirun_are_numbered_by_mpirun(self, net: Network, started: Slurm, tmp_path: Path) -> None:
        """On each other node Slurm's variables number the processes that start the ranks of ``mpirun``."""
        program = "import os; from pytest_nixl.cluster.placement import placement_by_launcher as f; p = f(os.environ); "
        program += "print('placed:', p.launcher, p.rank, p.ranks, 'step:', os.environ.get('SLURM_STEP_NUM_TASKS'))"
        script = tmp_path / "job.sh"
        script.write_text(
            f'#!/bin/sh\nexec mpirun --allow-run-as-root --map-by ppr:1:node "{sys.executable}" -c "{program}"\n'
        )
        command = [
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--ntasks-per-node=1",
            f"--output={tmp_path}/job.out",
            str(script),
        ]
        done = self.wait(net, started, tmp_path, command, variables(**started.env))
        output = (tmp_path / "job.out").read_text()
        assert done.code == 0, done.output + output
        placed = sorted(line for line in output.splitlines() if line.startswith("placed:"))
        assert placed == ["placed: Open MPI 0 2 step: None", "placed: Open MPI 1 2 step: 1"]


class TestMpi:
    """``run.sh``, with the real ``mpirun``."""

    def ssh(self, folder: Path, hosts: Sequence[Host]) -> None:
        """Write a stand-in for ``ssh``, because the nodes have no server of it. Variables of ours do not cross."""
        cases = "".join(f"    {host.name}) pid={host.pid} ;;\n" for host in hosts)
        folder.mkdir()
        (folder / "ssh").write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\n'
            f"case $host in\n{cases}    *) exit 255 ;;\nesac\n"
            "unset NIXL_GROUP_TOKEN MASTER_ADDR UCX_TLS\n"
            'exec nsenter --target="$pid" --net --uts --mount --wd=/ sh -c "$*"\n'
        )
        (folder / "ssh").chmod(0o755)

    def run(self, net: Network, folder: Path, nodes: Sequence[str], *options: str, **env: str) -> Finished:
        """Run the script with two ranks: on two nodes, or on the host of the script if ``nodes`` is empty."""
        settings = variables(RESULTS=str(folder / "results"), MPIRUN_OPTIONS="--allow-run-as-root", **env)
        ending: Sequence[str] = ENDS_WITH_ALL
        if nodes:
            # The stand-in for ssh looks for the processes of this machine, and therefore the limit ends all.
            ending, settings["TIME_LIMIT"] = (), "240"
            self.ssh(folder / "bin", [net[name] for name in nodes])
            path = os.pathsep.join((str(folder / "bin"), settings["PATH"]))
            settings |= {"HOSTS": ",".join(nodes), "PATH": path}
            settings["MPIRUN_OPTIONS"] += " -x UCX_TLS"
        [done] = run_ranks([net["login"]], folder / "mpirun", *ending, str(RUN), "2", *options, env=settings)
        return done

    def test_one_healthy_host_passes(self, net: Network, tmp_path: Path) -> None:
        """With the default profile, as the file says for a first test."""
        done = self.run(net, tmp_path, (), *SHORT)
        assert done.code == 0, done.output
        assert "NIXL gate: PASS (" in done.output
        assert f"next: open {tmp_path / 'results' / 'report.html'}\n" in done.output
        assert f"pytest-nixl: exit code 0, results in {tmp_path / 'results'}\n" in done.output
        passed(tmp_path / "results", ("login", "login"))

    @pytest.mark.parametrize(
        ("more", "code"),
        [pytest.param((), 0, marks=pytest.mark.whole), ((NOT_TCP,), 1)],
        ids=["healthy", "unhealthy"],
    )
    def test_two_hosts(self, net: Network, tmp_path: Path, more: tuple[str, ...], code: int) -> None:
        done = self.run(net, tmp_path, NODES, *OVER_TCP, *SHORT, *more, UCX_TLS="tcp")
        assert done.code == code, done.output
        if code == 0:
            passed(tmp_path / "results", NODES)
        else:
            went_over_tcp(tmp_path / "results", NODES)
