# SPDX-License-Identifier: Apache-2.0
"""Servers that a cluster already has, on hosts of its own network: an etcd and Slurm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers.cli_run import environment, eventually
from helpers.namespaces import ENDS_WITH_ALL, Host, Network
from helpers.needs import need_programs

from pytest_nixl.etcd_servers.embedded import etcd_binary

ETCD_PORT = 2379

_SLURM = """\
ClusterName=test
SlurmctldHost={controller}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def etcd(host: Host, folder: Path) -> Iterator[str]:
    """Run an etcd on a host until the block ends, and yield its URL."""
    url, peer = f"http://{host.address}:{ETCD_PORT}", "http://127.0.0.1:2380"
    command = [
        etcd_binary(), "--name=etcd", f"--data-dir={folder / 'etcd.data'}",
        f"--listen-client-urls={url},http://127.0.0.1:{ETCD_PORT}", f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=etcd={peer}",
        "--heartbeat-interval=10", "--election-timeout=100", "--log-level=warn", "--unsafe-no-fsync",
    ]  # fmt: skip
    log = folder / "etcd.log"
    # The environment has no ETCD_ variables, which would configure it.
    with host.running(*command, log=log, env=environment()):
        assert eventually(lambda: host.listens(ETCD_PORT)), log.read_text()
        yield url


def keys(host: Host) -> list[str]:
    """Return the keys in the etcd of a host."""
    etcdctl = Path(etcd_binary()).with_name("etcdctl")
    return host.run(str(etcdctl), "get", "", "--prefix", "--keys-only").split()


def require_slurm() -> None:
    """Skip the test if Slurm is not installed; fail in CI, where it can be installed."""
    need_programs("slurmctld", "slurmd", "srun", "sinfo", packages="slurmctld slurmd slurm-client")


class Slurm:
    """A Slurm whose nodes are hosts of a network.

    :param controller: the host of ``slurmctld``.
    :param conf: the path of its ``slurm.conf``.
    """

    def __init__(self, controller: Host, conf: Path) -> None:
        self.controller = controller
        self.env = {"SLURM_CONF": str(conf)}

    def states(self) -> list[str]:
        """Return the state of each node."""
        return self._ask("sinfo", "-hNo", "%T").split()

    def wait(self, job: str, seconds: float) -> int:
        """Wait for the end of a job, and return its exit code. ``sbatch --wait`` would ask after 2, 10, and 42 s.

        :raises AssertionError: it has not ended in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pairs = self._ask("scontrol", "show", "job", "-o", job).split()
            fields = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if fields["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return int(fields["ExitCode"].partition(":")[0])
            time.sleep(0.2)
        raise AssertionError(f"job {job} has not ended within {seconds:g} s")

    def _ask(self, *command: str) -> str:
        return self.controller.run("env", f"SLURM_CONF={self.env['SLURM_CONF']}", *command)


@contextmanager
def slurm(network: Network, folder: Path, controller: str, nodes: Sequence[str]) -> Iterator[Slurm]:
    """Run Slurm on the named hosts until the block ends. Its jobs end with it."""
    conf = folder / "slurm.conf"
    lines = "\n".join(f"NodeName={name} NodeAddr={network[name].address} CPUs=2 State=UNKNOWN" for name in nodes)
    conf.write_text(_SLURM.format(controller=controller, folder=folder, nodes=lines))
    # The /sys of a host has no cgroups.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    daemons = {controller: ["slurmctld", "-D", "-c"], **{name: ["slurmd", "-D", "-c", "-N", name] for name in nodes}}
    started = Slurm(network[controller], conf)
    with ExitStack() as stack:
        for name, daemon in daemons.items():
            # The shell in between reaps processes whose parents have ended.
            argv = [*ENDS_WITH_ALL, "sh", "-c", '"$@" & wait', "sh", *daemon]
            log = folder / f"{daemon[0]}-{name}.log"
            stack.enter_context(network[name].running(*argv, log=log, env=environment(**started.env)))
        up = eventually(lambda: _answers(started) == ["idle"] * len(nodes))
        assert up, "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("slurm*.log")))
        yield started


def _answers(started: Slurm) -> list[str]:
    if not started.controller.listens(6817):
        return []
    return started.states()
