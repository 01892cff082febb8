# SPDX-License-Identifier: Apache-2.0
"""An etcd of three members on three kernels, whose machines lose power during a run of two ranks on this host."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT, Finished, command, environment, eventually
from helpers.namespaces import Host, require_tools
from machine import PYTHON, Machine, MakeMachine

from pytest_nixl.etcd_servers.embedded import etcd_binary

pytest_plugins = ["machine_fixtures"]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

ADDRESSES = ("10.96.0.1", "10.96.0.2", "10.96.0.3")
#: Seconds of a lease that an etcd in machines without KVM does not miss while it elects a leader.
LEASE = 40
#: The seconds that an event has on a busy host; a machine has more of them to boot.
SECONDS = 600.0
MOVING = "tests/cluster/moving.py"


class Members:
    """The members of the etcd, a machine each, and the host on whose switch they are.

    :param disks: a folder of each member that outlives its machine.
    """

    def __init__(self, make_machine: MakeMachine, disks: Path) -> None:
        self.host = Host()
        self.host.run("ip", "link", "add", "switch", "type", "bridge")
        self.host.run("ip", "address", "add", "10.96.0.254/24", "dev", "switch")
        self.host.run("ip", "link", "set", "switch", "up")
        self.urls = [f"http://{address}:2379" for address in ADDRESSES]
        self.machines = [self._plug_in(make_machine, number, disks / str(number)) for number in range(3)]
        for number in range(3):
            self._start(number)
        self.wait_for(0, 1, 2)

    def _plug_in(self, make_machine: MakeMachine, number: int, disk: Path) -> Machine:
        disk.mkdir()
        tap = f"tap{number}"
        self.host.run("ip", "tuntap", "add", tap, "mode", "tap")
        self.host.run("ip", "link", "set", tap, "master", "switch", "up")
        cable = f"tap,id=cable,ifname={tap},script=no,downscript=no"
        card = f"virtio-net-pci,netdev=cable,id=card,mac=52:54:00:00:01:0{number},romfile="
        data = f"local,path={disk},mount_tag=disk,security_model=none"
        return make_machine(
            f"etcd-{number}", memory=768, processors=1, prefix=self.host.prefix,
            arguments=["-netdev", cable, "-device", card, "-virtfs", data],
        )  # fmt: skip

    def _start(self, number: int) -> None:
        """Start a member in its machine, which boots; it has the data of its disk."""
        url, peer = self.urls[number], f"http://{ADDRESSES[number]}:2380"
        peers = ",".join(f"{number_of_peer}=http://{address}:2380" for number_of_peer, address in enumerate(ADDRESSES))
        machine = self.machines[number].booted()
        machine.check(f"ip address add {ADDRESSES[number]}/24 dev eth0 && ip link set eth0 up")
        machine.check("mkdir /disk && mount -t 9p -o trans=virtio,version=9p2000.L,cache=mmap disk /disk")
        machine.start(
            f"exec {etcd_binary()} --name={number} --data-dir=/disk/data --listen-client-urls={url} "
            f"--advertise-client-urls={url} --listen-peer-urls={peer} --initial-advertise-peer-urls={peer} "
            f"--initial-cluster={peers} --heartbeat-interval=500 --election-timeout=5000 --log-level=warn"
        )

    def wait_for(self, *numbers: int) -> None:
        """Wait until these members answer and follow one of them."""

        def agree() -> bool:
            statuses = [self._status(number) for number in numbers]
            leaders = {status.get("leader") for status in statuses}
            return len(leaders) == 1 and leaders <= {status["header"]["member_id"] for status in statuses if status}

        assert eventually(agree, SECONDS), [machine.out for machine in self.machines]

    def _status(self, number: int) -> dict[str, Any]:
        """Return what a member says of itself; nothing if it does not answer."""
        done = self._etcdctl("endpoint", "status", "-w", "json", urls=[self.urls[number]])
        return json.loads(done.stdout)[0]["Status"] if done.returncode == 0 else {}

    def leader(self) -> int:
        """Return the number of the leader."""
        statuses = [self._status(number) for number in range(3)]
        return [status["header"]["member_id"] for status in statuses].index(statuses[0]["leader"])

    def left(self) -> list[str]:
        """Return the keys in the etcd."""
        return self._etcdctl("get", "", "--prefix", "--keys-only", "--command-timeout=60s", check=True).stdout.split()

    def _etcdctl(self, *words: str, urls: Sequence[str] = (), check: bool = False) -> subprocess.CompletedProcess[str]:
        program = str(Path(etcd_binary()).with_name("etcdctl"))
        endpoints = f"--endpoints={','.join(urls or self.urls)}"
        return subprocess.run(
            [*self.host.prefix, program, endpoints, *words],
            env=environment(), capture_output=True, text=True, check=check,
        )  # fmt: skip

    @contextmanager
    def without(self, *numbers: int) -> Iterator[None]:
        """Let machines lose power, and have them back at the end."""
        for number in numbers:
            self.machines[number].power_off()
        try:
            yield
        finally:
            for number in numbers:
                self.machines[number].power_on()
            for number in numbers:
                self._start(number)
            self.wait_for(0, 1, 2)

    def run(self, *words: str) -> Finished:
        """Run a command of Python's on the host of the switch, and print what it prints."""
        done = subprocess.run(
            [*self.host.prefix, PYTHON, "-m", *words],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        print(done.stdout)
        return Finished(done.returncode, done.stdout)

    def say(self) -> Finished:
        """Run ``pytest-nixl etcd``."""
        return self.run("pytest_nixl.cli", "etcd", ",".join(self.urls))


@pytest.fixture(scope="module")
def members(make_machine: MakeMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """Three members that know one leader."""
    require_tools()
    cluster = Members(make_machine, tmp_path_factory.mktemp("disks"))
    with closing(cluster.host):
        yield cluster


class Moving:
    """A run of two ranks on this host, whose etcd is that of the members, and which moves bytes.

    :param folder: for files of the run.
    """

    def __init__(self, members: Members, folder: Path) -> None:
        self._folder = folder
        options = ["--nixl-ranks=2", f"--nixl-etcd={','.join(members.urls)}", f"--nixl-lease={LEASE}s"]
        self._logs = [folder / f"{rank}.log" for rank in range(2)]
        self._ranks = [
            members.host.start(
                *command(MOVING, *options, "--nixl-timeout=120s", f"--nixl-rank={rank}"), log=log,
                env=environment(UCX_TLS="tcp", MOVING=str(folder)),
            )
            for rank, log in enumerate(self._logs)
        ]  # fmt: skip
        self.wait_for_a_transfer()

    def wait_for_a_transfer(self) -> None:
        """Wait for a transfer that began after this call."""
        for _ in range(2):  # the first may have begun before
            (self._folder / "begun").unlink(missing_ok=True)
            assert eventually((self._folder / "begun").exists, SECONDS), self._logs[0].read_text()

    def end(self) -> list[Finished]:
        """Let the run end."""
        (self._folder / "enough").touch()
        return self.wait()

    def wait(self) -> list[Finished]:
        """Wait until both ranks have ended, and print the last line of each."""
        ended = [
            Finished(rank.wait(SECONDS), log.read_text()) for rank, log in zip(self._ranks, self._logs, strict=True)
        ]
        for process in ended:
            print(f"exit code {process.code}: {process.output.splitlines()[-1]}")
        return ended

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def test_run_goes_on_while_the_leader_of_the_etcd_loses_power(members: Members, tmp_path: Path) -> None:
    healthy = members.say()
    assert healthy.code == 0
    assert re.search(r"members (?=.*0)(?=.*1)(?=.*2).*; leader member '\d'", healthy.output)
    lost = members.leader()
    with closing(Moving(members, tmp_path)) as run:
        with members.without(lost):
            began = time.monotonic()
            # Without a leader no lease is kept: the run has to find the new one before its leases end.
            members.wait_for(*({0, 1, 2} - {lost}))
            print(f"the other two have a leader {time.monotonic() - began:.1f} s after the loss")
            while time.monotonic() < began + 1.5 * LEASE:
                run.wait_for_a_transfer()
            done = run.end()
            answers = members.say()
            checks = members.run(
                "pytest", "-p", "no:cacheprovider", "-q", "-rA", "suites/uri_validation/test_deployment.py",
                "suites/metadata/test_namespaces.py::test_the_keys_in_the_etcd_of_this_deployment_are_sound",
                f"--nixl-etcd={','.join(members.urls)}",
            )  # fmt: skip
            remaining = members.left()
        again = members.say()
    assert [rank.code for rank in done] == [0, 0], done[0].output
    assert "NIXL verdict: PASS" in done[0].output
    assert answers.code == 1
    assert f"member-silent: the member at {members.urls[lost]} does not answer: " in answers.output
    assert "remedy: start that host, or check its address" in answers.output
    assert f"1 of 3 do not answer: {ADDRESSES[lost]}:2379: " in checks.output
    assert "NIXL verdict: PASS, with warnings (7 PASS, 2 WARN;" in checks.output
    assert remaining == []
    assert again.code == 0, again.output


def test_run_ends_if_two_members_of_the_etcd_lose_power(members: Members, tmp_path: Path) -> None:
    with closing(Moving(members, tmp_path)) as run, members.without(0, 1):
        began = time.monotonic()
        done = run.wait()
        print(f"both ranks ended {time.monotonic() - began:.1f} s after the loss; the lease is {LEASE} s")
        answers = members.say()
    for rank in done:
        assert rank.code == 1
        assert "lost its etcd lease: etcd heard nothing from it for 40 s" in rank.output
        assert f"(last refresh: no member of the etcd answered: {members.urls[0]}: " in rank.output
        assert "remedy: check that etcd runs" in rank.output
    assert answers.code == 2
    assert "has no leader, and so reads and writes no key: 2 of 3 members do not answer: " in answers.output
    assert "remedy: start the missing members: more than half of them must be up" in answers.output
    # Leases end when a leader is there again. What has none is left, because no rank lived to remove it.
    assert eventually(lambda: all("/run/" in key for key in members.left()), SECONDS), members.left()
    cleaned = members.run("pytest_nixl.cli", "clean", f"--etcd={','.join(members.urls)}")
    assert (cleaned.code, members.left()) == (0, [])
