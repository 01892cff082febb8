# SPDX-License-Identifier: Apache-2.0
"""Requests of rank 0 that are not about workers: a rank's command, its host's address and facts, its last log lines."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_nixl.cluster.command_check import Command
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.logs import last_words
from pytest_nixl.cluster.peer_server import Service
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd_servers.sources import EtcdServer
from pytest_nixl.host.devices import HostDevices
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.supervisor import SupervisorClient

#: The prefix of the groups that a check joins, apart from the groups of runs.
CLAIMS = "/pytest-nixl/claims"


class RequestHandlers:
    """Answers the requests of rank 0 on one rank, rank 0 included. Arguments and results are JSON values.

    :param command: what this rank runs.
    :param settings: the settings of this rank.
    :param etcd: the group's etcd.
    :param supervisor: the supervisor that owns the workers.
    """

    def __init__(self, command: Command, settings: Settings, etcd: EtcdServer, supervisor: SupervisorClient) -> None:
        self._command = command
        self._settings = settings
        self._etcd = etcd
        self._supervisor = supervisor

    def by_name(self) -> Mapping[str, Service]:
        """Return the functions that answer requests, by the name of the request."""
        handlers = (self.command, self.address, self.facts, self.devices, self.claim, self.last_words)
        return {service.__name__: service for service in handlers}

    def command(self) -> str:
        """Return what this rank runs, as compressed text."""
        return self._command.packed()

    def address(self) -> str:
        """Return the address from which this host reaches the etcd, for use by other ranks."""
        first = parse_endpoints(self._etcd.endpoint)[0]
        family, _, _, _, address = socket.getaddrinfo(first.host, first.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(address)  # sends nothing, but chooses the route
            return str(asking.getsockname()[0])

    def facts(self, peers: Sequence[str]) -> dict[str, Any]:
        """Return the facts of this host.

        :param peers: hosts that this host must be able to reach.
        """
        facts = gather(
            FactsRoot(),
            backends=self._settings.backend,
            etcd=self._etcd.endpoint,
            connect=self._etcd.client,
            peers=peers,
        )
        return facts.plain()

    def devices(self) -> dict[str, Any]:
        """Return the RDMA devices and GPUs of this host, without the rest of its facts, which take seconds."""
        return HostDevices.here().plain()

    def last_words(self) -> dict[str, str]:
        """Return the last lines of this rank's worker logs, by the name of the log."""
        return last_words(self._supervisor, self._settings)

    def claim(self, group: str, size: int, seconds: float) -> int:
        """Join a separate group, pass one barrier, leave, and return the rank that this process got.

        :param group: the name of that group.
        :param size: its number of ranks.
        :param seconds: the time to wait for the other ranks.
        """
        token = self._settings.group_token
        with (
            self._etcd.client() as client,
            join(client, group, size, timeout=seconds, prefix=CLAIMS, token=token) as place,
        ):
            place.barrier(seconds)
            return place.rank
