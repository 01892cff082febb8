# SPDX-License-Identifier: Apache-2.0
"""An etcd of three members of our own, on loopback: one that can change its leader, or lose it."""

from __future__ import annotations

import os
import secrets
import signal
from types import TracebackType

from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd_servers.binary import etcd_binary
from pytest_nixl.etcd_servers.embedded import READY_SECONDS, free_ports, healthy
from pytest_nixl.processes.supervisor import SupervisorClient

_HOST = "127.0.0.1"


class ThreeNodeEtcd:
    """Three members, which end with the block or with this process.

    :raises ExecutableMissingError: where there is no etcd program.
    """

    def __init__(self, supervisor: SupervisorClient) -> None:
        self._supervisor = supervisor
        program, token = etcd_binary(), secrets.token_hex(4)
        ports = free_ports(6)
        self.members = tuple(Endpoint("http", _HOST, port) for port in ports[:3])
        peers = [f"http://{_HOST}:{port}" for port in ports[3:]]
        names = [f"{token}-{number}" for number in range(3)]
        cluster = ",".join(f"{name}={peer}" for name, peer in zip(names, peers, strict=True))
        # etcd refuses to start where a variable of its own and an option say two things.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """All members, separated by commas."""
        return ",".join(map(str, self.members))

    def client(self) -> EtcdClient:
        """Return a new client of all of them."""
        return connect(self.members)

    def leader(self) -> int:
        """Return the place of the leader among the members."""
        for place, member in enumerate(self.members):
            if self._supervisor.alive(self._pids[place]):
                with connect([member]) as client:
                    status = client.status()
                if status.get("leader") == status["header"]["member_id"]:
                    return place
        return -1

    def change_leader(self) -> None:
        """Have another member lead."""
        before = wait_until(lambda: self.leader() + 1, "a leader", seconds=READY_SECONDS) - 1
        with connect([self.members[before]]) as old, connect([self.members[(before + 1) % 3]]) as new:
            target = new.status()["header"]["member_id"]
            old.raw.post(old.raw.get_url("/maintenance/transfer-leadership"), json={"targetID": target})
        wait_until(lambda: self.leader() not in (-1, before), "another leader", seconds=READY_SECONDS)

    def kill_leader(self) -> None:
        """End the leader by SIGKILL; the other two choose one among them."""
        before = wait_until(lambda: self.leader() + 1, "a leader", seconds=READY_SECONDS) - 1
        self._supervisor.signal(self._pids[before], signal.SIGKILL)
        self._supervisor.stop(self._pids[before])
        wait_until(lambda: self.leader() != -1, "a leader of the other two", seconds=READY_SECONDS)

    def stop(self, place: int) -> None:
        """Stop a member by SIGSTOP: it still takes connections, and answers nothing."""
        self._supervisor.signal(self._pids[place], signal.SIGSTOP)

    def resume(self, place: int) -> None:
        """Let a member that was stopped go on."""
        self._supervisor.signal(self._pids[place], signal.SIGCONT)

    def close(self) -> None:
        """End all members."""
        for pid in self._pids:
            self._supervisor.signal(pid, signal.SIGKILL)
        for pid in self._pids:
            self._supervisor.stop(pid)
