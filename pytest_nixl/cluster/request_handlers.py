# SPDX-License-Identifier: Apache-2.0
"""What rank 0 may ask a rank for beside workers: what it runs, what its host is, and to claim a rank."""

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
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.supervisor import SupervisorClient

#: Where a claim of a test's own is made, apart from the groups of runs.
CLAIMS = "/pytest-nixl/claims"


class RequestHandlers:
    """What one rank does when it is asked; of itself, rank 0 asks the same. Values are JSON.

    :param etcd: the group's.
    :param supervisor: owns the workers.
    """

    def __init__(self, command: Command, settings: Settings, etcd: EtcdServer, supervisor: SupervisorClient) -> None:
        self._command = command
        self._settings = settings
        self._etcd = etcd
        self._supervisor = supervisor

    def by_name(self) -> Mapping[str, Service]:
        """Return all of them."""
        own = (self.command, self.address, self.facts, self.claim, self.last_words)
        return {service.__name__: service for service in own}

    def command(self) -> str:
        """Return what this rank runs, packed."""
        return self._command.packed()

    def address(self) -> str:
        """Return the address that this host has towards the etcd, so that others can be told of it."""
        first = parse_endpoints(self._etcd.endpoint)[0]
        family, _, _, _, address = socket.getaddrinfo(first.host, first.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(address)  # nothing is sent: it only chooses a route
            return str(asking.getsockname()[0])

    def facts(self, peers: Sequence[str]) -> dict[str, Any]:
        """Return the facts of this host.

        :param peers: hosts that it must reach.
        """
        found = gather(
            FactsRoot(),
            backends=self._settings.backend,
            etcd=self._etcd.endpoint,
            connect=self._etcd.client,
            peers=peers,
        )
        return found.plain()

    def last_words(self) -> dict[str, str]:
        """Return the last lines of this rank's workers, by the names of their logs."""
        return last_words(self._supervisor, self._settings)

    def claim(self, group: str, size: int, seconds: float) -> int:
        """Claim a rank in a group of the claim's own, leave it again, and return the rank."""
        token = self._settings.group_token
        with (
            self._etcd.client() as client,
            join(client, group, size, timeout=seconds, prefix=CLAIMS, token=token) as place,
        ):
            place.barrier(seconds)
            return place.rank
