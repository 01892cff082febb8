# SPDX-License-Identifier: Apache-2.0
"""Run an etcd of three members on loopback, to test a change or a loss of its leader."""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import suppress

from helpers.stopped import stop
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.embedded import READY_SECONDS, etcd_binary, find_binary, healthy
from pytest_nixl.processes.supervisor import SupervisorClient

_HOST = "127.0.0.1"


class ThreeNodeEtcd:
    """An etcd of three members. They end with the ``with`` block or with this process.

    :raises ExecutableMissingError: if there is no etcd program.
    """

    def __init__(self, supervisor: SupervisorClient) -> None:
        self._supervisor = supervisor
        program, token = etcd_binary(), secrets.token_hex(4)
        ports = free_ports(6)
        self.members = tuple(Endpoint("http", _HOST, port) for port in ports[:3])
        peers = [f"http://{_HOST}:{port}" for port in ports[3:]]
        names = [f"{token}-{number}" for number in range(3)]
        cluster = ",".join(f"{name}={peer}" for name, peer in zip(names, peers, strict=True))
        # etcd refuses to start if an ETCD_ variable contradicts an option.
        environment = dict.fromkeys(name for name in os.environ if name.startswith("ETCD_"))
        self._pids = []
        for name, member, peer in zip(names, self.members, peers, strict=True):
            arguments = {
                "name": name,
                "data-dir": str(supervisor.directory / f"{name}.data"),
                "listen-client-urls": str(member),
                "advertise-client-urls": str(member),
                "listen-peer-urls": peer,
                "initial-advertise-peer-urls": peer,
                "initial-cluster": cluster,
                "initial-cluster-token": token,
                "heartbeat-interval": "50",
                "election-timeout": "500",
                "log-level": "warn",
            }
            argv = [program, *(f"--{key}={value}" for key, value in arguments.items())]
            self._pids.append(supervisor.spawn(argv, log=f"{name}.log", env=environment))

    @staticmethod
    def possible() -> bool:
        """Whether this machine has the etcd program that it needs."""
        return find_binary() is not None

    def __enter__(self) -> ThreeNodeEtcd:
        try:
            wait_until(
                lambda: all(healthy(str(member)) for member in self.members),
                f"the three members of {self.endpoint}",
                seconds=READY_SECONDS,
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """URLs of all members, separated by commas."""
        return ",".join(map(str, self.members))

    def client(self) -> EtcdClient:
        """Return a new client of all members."""
        return connect(self.members)

    def leader(self) -> int:
        """Return the index of the leader among the members; -1 if there is none."""
        for place, member in enumerate(self.members):
            if self._supervisor.alive(self._pids[place]):
                with connect([member]) as client:
                    status = client.status()
                if status.get("leader") == status["header"]["member_id"]:
                    return place
        return -1

    def change_leader(self) -> None:
        """Transfer the leadership to another member."""
        before = wait_until(lambda: self.leader() + 1, "a leader", seconds=READY_SECONDS) - 1
        with connect([self.members[before]]) as old, connect([self.members[(before + 1) % 3]]) as new:
            target = new.status()["header"]["member_id"]
            with suppress(EtcdError):  # the leader may have changed in this moment
                old.maintenance.transfer_leadership(target)
        wait_until(lambda: self.leader() not in (-1, before), "another leader", seconds=READY_SECONDS)

    def kill_leader(self) -> None:
        """Kill the leader with SIGKILL, and wait until the other two members have elected a new one."""
        before = wait_until(lambda: self.leader() + 1, "a leader", seconds=READY_SECONDS) - 1
        self._supervisor.signal(self._pids[before], signal.SIGKILL)
        self._supervisor.stop(self._pids[before])
        wait_until(lambda: self.leader() != -1, "a leader of the other two", seconds=READY_SECONDS)

    def stop(self, place: int) -> None:
        """Stop a member with SIGSTOP: it still accepts connections, but answers nothing."""
        stop(self._pids[place])

    def resume(self, place: int) -> None:
        """Resume a stopped member."""
        self._supervisor.signal(self._pids[place], signal.SIGCONT)

    def close(self) -> None:
        """Kill all members."""
        for pid in self._pids:
            self._supervisor.signal(pid, signal.SIGKILL)
        for pid in self._pids:
            self._supervisor.stop(pid)
