# SPDX-License-Identifier: Apache-2.0
"""The shipped files for clusters, run as written: they are green for a healthy subject, and red for a broken one.

Real are Slurm, ``mpirun``, kustomize, etcd and NIXL; nodes are network namespaces. What a file marks with "yours" is
replaced by options at the end of its command line, which also leave one row of the level quick.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT, Finished, environment, eventually
from helpers.kubelet import Given, command_of, container_of, variables_of
from helpers.kubernetes_rules import Manifest, Pod, pods_of
from helpers.kustomize import OVERLAYS, built, rank_pod
from helpers.namespaces import ENDS_WITH_ALL, Host, Network, network, require_tools
from helpers.needs import need_programs
from ranks import Ranks, all_end_with, reports, run_ranks
from servers import ETCD_PORT, Slurm, keys, require_slurm, slurm

from pytest_nixl.etcd_servers.binary import etcd_binary

NODES, PODS = ("node-0", "node-1"), ("nixl-0", "nixl-1")
SBATCH, RUN = ROOT / "deploy" / "slurm" / "pytest-nixl.sbatch", ROOT / "deploy" / "mpi" / "run.sh"
#: One row of the checks that take seconds.
SHORT = ("--nixl-level=quick", "--nixl-blocks=64KiB", "--nixl-op=WRITE", "--nixl-duration=20ms")
#: What a user of nodes without GPU and RDMA device gives in place of the lines that are marked with "yours".
OVER_TCP = ("--nixl-backend=UCX", "--nixl-profile=tcp-loopback", "--nixl-memory=DRAM:DRAM")
#: A later option wins: no byte that goes over TCP is what this profile expects.
NOT_TCP = "--nixl-profile=loopback"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two nodes and the host on which jobs are started; the pods of a Job, and the one behind the Service of etcd."""
    require_tools()
    with network(tmp_path_factory.mktemp("network"), *NODES, "login", *PODS, "nixl-etcd") as made:
        yield made


def variables(**more: str) -> dict[str, str]:
    """Return the environment of a user whose PATH begins with the programs of this Python."""
    return environment(PATH=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])), **more)


def passed(folder: Path, hosts: Sequence[str]) -> None:
    """Assert that every rank reports that the gate is passed and that the one row was measured."""
    found = reports(folder, len(hosts), logs=".", junit="junit")
    assert [report["host"] for report in found] == list(hosts)
    for report in found:
        told = (report["verdict"], report["gate"], report["exit_code"], report["rows"], report["failing"])
        assert told == ("PASS", True, 0, 1, [])


def failures(folder: Path, hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what failed by its check, after an assertion that every rank reports that the gate is not passed."""
    found = reports(folder, len(hosts), logs=".", junit="junit")
    assert [report["host"] for report in found] == list(hosts)
    assert {(report["verdict"], report["gate"], report["exit_code"]) for report in found} == {("FAIL", True, 1)}
    return {each["check"]: each for each in found[0]["failing"]}


class TestSlurm:
    """``pytest-nixl.sbatch``, submitted with the real ``sbatch``."""

    @pytest.fixture(scope="class")
    def started(self, net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
        require_slurm()
        need_programs("sbatch", packages="slurm-client")
        with slurm(net, tmp_path_factory.mktemp("slurm"), "login", NODES) as running:
            yield running

    def submit(self, net: Network, started: Slurm, folder: Path, *options: str) -> tuple[Finished, Path, str]:
        """Submit the job in a folder, and wait for its end.

        :returns: how ``sbatch`` ended, the folder of the results, and the output of the job.
        """
        # The nodes have no GPU.
        command = ["env", f"--chdir={folder}", "sbatch", "--wait", "--gpus-per-node=0", str(SBATCH), *options]
        env = variables(UCX_TLS="tcp", **started.env)
        [done] = run_ranks([net["login"]], folder / "sbatch", *ENDS_WITH_ALL, *command, env=env)
        outputs = list(folder.glob("nixl-*.out"))
        assert len(outputs) == 1, done.output
        return done, outputs[0].with_suffix(""), outputs[0].read_text()

    def test_a_healthy_cluster_passes(self, net: Network, started: Slurm, tmp_path: Path) -> None:
        done, results, output = self.submit(net, started, tmp_path, *OVER_TCP, *SHORT)
        assert done.code == 0, done.output + output
        assert "NIXL gate: PASS (" in output
        assert f"pytest-nixl: exit code 0, results in {results}\n" in output
        passed(results, NODES)

    def test_bytes_over_another_transport_fail(self, net: Network, started: Slurm, tmp_path: Path) -> None:
        done, results, output = self.submit(net, started, tmp_path, *OVER_TCP, *SHORT, NOT_TCP)
        assert done.code == 1, done.output + output
        assert f"pytest-nixl: exit code 1, results in {results}\n" in output
        failed = failures(results, NODES)["bandwidth"]
        assert failed["verdict"] == "WRONG-TRANSPORT"
        assert "tcp" in failed["reason"]

    def test_nodes_that_are_not_those_of_the_file_fail(self, net: Network, started: Slurm, tmp_path: Path) -> None:
        """Without any option: the file expects the GPUs and the network cards of a p5.48xlarge."""
        done, results, output = self.submit(net, started, tmp_path)
        assert done.code == 1, done.output + output
        assert f"pytest-nixl: exit code 1, results in {results}\n" in output
        assert {"gpus", "rdma-devices"} <= failures(results, NODES).keys()


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
        given = variables(RESULTS=str(folder / "results"), MPIRUN_OPTIONS="--allow-run-as-root", **env)
        ending: Sequence[str] = ENDS_WITH_ALL
        if nodes:
            # The stand-in for ssh looks for the processes of this machine, and therefore the limit ends all.
            ending, given["TIME_LIMIT"] = (), "240"
            self.ssh(folder / "bin", [net[name] for name in nodes])
            path = os.pathsep.join((str(folder / "bin"), given["PATH"]))
            given |= {"HOSTS": ",".join(nodes), "PATH": path}
            given["MPIRUN_OPTIONS"] += " -x UCX_TLS"
        [done] = run_ranks([net["login"]], folder / "mpirun", *ending, str(RUN), "2", *options, env=given)
        return done

    def test_one_healthy_host_passes(self, net: Network, tmp_path: Path) -> None:
        """With the default profile, as the file says for a first test."""
        done = self.run(net, tmp_path, (), *SHORT)
        assert done.code == 0, done.output
        assert "NIXL gate: PASS (" in done.output
        assert f"pytest-nixl: exit code 0, results in {tmp_path / 'results'}\n" in done.output
        passed(tmp_path / "results", ("login", "login"))

    def test_a_host_that_falls_back_to_tcp_fails(self, net: Network, tmp_path: Path) -> None:
        done = self.run(net, tmp_path, (), *SHORT, UCX_TLS="tcp")
        assert done.code == 1, done.output
        assert f"pytest-nixl: exit code 1, results in {tmp_path / 'results'}\n" in done.output
        failed = failures(tmp_path / "results", ("login", "login"))["bandwidth"]
        assert failed["verdict"] == "WRONG-TRANSPORT"
        assert "tcp" in failed["reason"]

    @pytest.mark.parametrize(("more", "code"), [((), 0), ((NOT_TCP,), 1)], ids=["healthy", "unhealthy"])
    def test_two_hosts(self, net: Network, tmp_path: Path, more: tuple[str, ...], code: int) -> None:
        done = self.run(net, tmp_path, NODES, *OVER_TCP, *SHORT, *more, UCX_TLS="tcp")
        assert done.code == code, done.output
        if code == 0:
            passed(tmp_path / "results", NODES)
        else:
            assert failures(tmp_path / "results", NODES)["bandwidth"]["verdict"] == "WRONG-TRANSPORT"


class TestTcpOverlay:
    """The overlay ``tcp``: the containers of its pods, started by :mod:`helpers.kubelet`."""

    @pytest.fixture(scope="class")
    def manifest(self, net: Network) -> Manifest:
        return built(OVERLAYS / "tcp")

    @pytest.fixture(scope="class")
    def etcd(self, net: Network, manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
        """The etcd of the overlay, with the program of this Python, behind the name of its Service."""
        folder, host = tmp_path_factory.mktemp("etcd"), net["nixl-etcd"]
        (pod,) = (pod for each in manifest.documents for pod in pods_of(each) if not pod.runs_ranks)
        program = container_of(pod)["command"]
        assert program == ["/usr/local/bin/etcd"]
        program[:] = [etcd_binary()]
        given = Given(folder)
        log = folder / "etcd.log"
        env = environment(**variables_of(pod, given))
        with host.running(*ENDS_WITH_ALL, *command_of(pod, given), log=log, env=env):
            assert eventually(lambda: host.listens(ETCD_PORT)), log.read_text()
            yield host

    def run(
        self, net: Network, pod: Pod, folder: Path, images: Sequence[Mapping[str, str]]
    ) -> tuple[list[Finished], Path]:
        """Run the pods of the Job, and wait until all have ended.

        :param images: the variables of the image that each pod gets.
        :returns: how each pod ended, and the folder of the results in the volume.
        """
        uid = str(uuid.uuid4())
        container_of(pod)["args"] += SHORT
        with Ranks(folder / "pods") as ranks:
            for index, (name, image) in enumerate(zip(PODS, images, strict=True)):
                given = Given(
                    folder / name,
                    claims={"nixl-results": folder / "volume"},
                    secrets={"nixl-group": {"token": "hunter2"}},
                    labels={"batch.kubernetes.io/controller-uid": uid},
                    # The controller of Jobs adds the index, and a kubelet the address of the API server.
                    variables={**image, "JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
                )
                ranks.start(net[name], *ENDS_WITH_ALL, *command_of(pod, given), **variables_of(pod, given))
            return ranks.finish(), folder / "volume" / uid

    def pod(self, manifest: Manifest) -> Pod:
        """The pod of the Job, of which there is one for each of two hosts."""
        pod = rank_pod(Manifest(manifest.name, manifest.text))
        assert pod.owner["spec"]["completions"] == len(PODS)
        return pod

    def test_healthy_pods_pass(self, net: Network, manifest: Manifest, etcd: Host, tmp_path: Path) -> None:
        done, results = self.run(net, self.pod(manifest), tmp_path, [variables(), variables()])
        all_end_with(0, done)
        assert "NIXL gate: PASS (" in done[0].output
        passed(results, PODS)
        assert "hunter2" not in "".join(one.output for one in done)
        assert keys(etcd) == []

    def test_a_node_with_an_image_without_plugins_fails(
        self, net: Network, manifest: Manifest, etcd: Host, tmp_path: Path
    ) -> None:
        """As if the second node had an older image of the same name."""
        (tmp_path / "none").mkdir()
        images = [variables(), variables(NIXL_PLUGIN_DIR=str(tmp_path / "none"))]
        done, results = self.run(net, self.pod(manifest), tmp_path, images)
        all_end_with(1, done)
        failed = failures(results, PODS)
        assert "nixl-1" in failed["nixl-loads"]["reason"]
        assert keys(etcd) == []
