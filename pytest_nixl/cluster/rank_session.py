# SPDX-License-Identifier: Apache-2.0
"""The session of one rank in a run of several ranks: it joins, drives or serves, and leaves with all other ranks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl.cluster.command_check import Command, differences
from pytest_nixl.cluster.driver import RankDriver, serve
from pytest_nixl.cluster.etcd import for_agents, meeting_etcd, require_closed
from pytest_nixl.cluster.forensics import SECONDS, forensics
from pytest_nixl.cluster.group import LeaseLostError, MemberLeftError, MemberLostError, MissingRanksError
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.logs import keep, last_words
from pytest_nixl.cluster.membership import LEAVE_SECONDS, Membership
from pytest_nixl.cluster.peer_client import PeerError
from pytest_nixl.cluster.peer_server import Ending, Service
from pytest_nixl.cluster.placement import Placement
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.polling import wait_until
from pytest_nixl.core.strict import StrictError
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.etcd_servers.rank0 import refusals
from pytest_nixl.etcd_servers.sources import EtcdServer
from pytest_nixl.host.devices import HostDevices
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.model.conclusion import interrupted_before
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.processes.supervisor import SupervisorClient

_log = logging.getLogger(__name__)

#: The largest number of ignored keys that the output lists.
_MOST_NAMED = 4


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


class RankSession:
    """The session of this process in a run of several ranks. Making one joins the group and passes its first barrier.

    :param settings: the settings of this rank.
    :param placement: the number of ranks, and the rank of this process.
    :param command: what this rank runs; rank 0 compares it with its own.
    :param supervisor: the supervisor that owns the workers.
    :param say: prints one line to the terminal.
    :raises NixlPluginError: if the etcd cannot be reached, or the group cannot be joined.
    """

    def __init__(
        self,
        settings: Settings,
        placement: Placement,
        command: Command,
        supervisor: SupervisorClient,
        say: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.supervisor = supervisor
        self._command = command
        self._stack = ExitStack()
        self._left = False
        self._seen: list[str] | None = None
        #: The error that ended this rank's part in the group; None if there is none.
        self.fault: NixlPluginError | None = None
        #: Whether this rank ended before the run was over. It then leaves without waiting for the others.
        self.early = False
        #: How the run ends, as rank 0 said; None on rank 0, and as long as rank 0 has not said.
        self.ending: Ending | None = None
        self.driver: RankDriver | None = None
        self.membership: Membership
        try:
            self.etcd = meeting_etcd(settings, placement, supervisor, say)
            self._stack.callback(self.etcd.discard)
            require_closed(settings, self.etcd)
            self.services = RequestHandlers(command, settings, self.etcd, supervisor)
            self._client = self._stack.enter_context(self.etcd.client())
            self.membership = self._join(placement, say)
            self._stack.callback(self.membership.leave)
            _log.info("joined group %s as %s", placement.group, self.name)
            self.membership.barrier(settings.join_timeout, waiting=say)
        except BaseException:
            self._stack.close()
            raise

    def _join(self, placement: Placement, say: Callable[[str], None]) -> Membership:
        settings = self.settings
        try:
            return join(
                self._client,
                placement.group,
                placement.ranks,
                ttl=settings.lease,
                wanted=placement.rank,
                token=settings.group_token,
                timeout=settings.join_timeout,
                waiting=lambda text: say(f"{text}{self._refusals()}"),
            )
        except MissingRanksError as error:
            raise MissingRanksError(f"{error.reason}{self._refusals()}", error.remedy) from None

    def _refusals(self) -> str:
        """Say that the etcd of this rank refuses other ranks: they wait for nothing, and this rank for them."""
        count = refusals(self.etcd) if isinstance(self.etcd, EmbeddedServer) else 0
        return f"; its etcd refused {count} connections for another --nixl-group-token, or none" if count else ""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.membership.rank

    @property
    def drives(self) -> bool:
        """Whether this rank runs the tests."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """The name of this rank in its own output: ``rank 1 of 4 on node-b``."""
        return f"rank {self.rank} of {self.membership.size} on {self.membership.members[self.rank].host}"

    def name_of(self, rank: int) -> str:
        """Return the name of a rank in messages: ``rank 1 on node-b``."""
        member = self.membership.members[rank]
        return f"rank {rank} on {member.host}"

    def agents_etcd(self) -> EtcdServer | None:
        """Return the group's etcd if the NIXL agents of all ranks can use it, else None."""
        return self.etcd if for_agents(self.settings) else None

    def drive(self, on_lease_lost: Callable[[NixlPluginError], None]) -> None:
        """Act as rank 0: check that all ranks run the same command, and connect to the peers.

        :param on_lease_lost: called in another thread if this rank loses its lease; the run must then stop.
        :raises pytest.UsageError: if a rank runs a different command, naming the difference; all ranks get this error.
        """
        self.driver = RankDriver(
            self.membership,
            self.etcd.client,
            timeout=self.settings.timeout,
            on_lease_lost=on_lease_lost,
        )
        commands = self.driver.ask_all("command")
        differing = differences(
            self._command, {self.name_of(rank): self._unpacked(rank, commands[rank]) for rank in commands}
        )
        if differing:
            refusal = "; ".join(differing) + ": start every rank with the same command on the same tests"
            self.finish(Ending(int(pytest.ExitCode.USAGE_ERROR), refusal=refusal))
            raise pytest.UsageError(refusal)

    def _unpacked(self, rank: int, text: str) -> Command:
        try:
            return Command.unpacked(text)
        except StrictError as error:
            raise PeerError(
                f"{self.name_of(rank)} sent an invalid answer to 'command': {error}",
                "install the same version of pytest-nixl on every rank",
            ) from None

    def serve(self) -> Ending:
        """Act as a peer until the run is over, and return how it ends, as rank 0 says.

        :raises pytest.UsageError: if rank 0 refuses to start; it has the text of rank 0.
        :raises NixlPluginError: if rank 0 or the etcd is gone.
        """
        try:
            self.ending = serve(
                self.membership,
                self.etcd.client,
                self.supervisor,
                services=self.services.by_name(),
                own=own_variables(self.settings.programs, memory=self.settings.memory),
            )
        except LeaseLostError as error:
            if not self.settings.etcd_listen:
                raise
            raise MemberLostError(
                f"{self.name_of(0)} is gone, this rank is cut off from the etcd that rank 0 serves, or this host was "
                f"suspended: {error.reason}",
                f"read the last output of rank 0, and check that its host still runs; {error.remedy}",
            ) from error
        if self.ending.refusal:
            self.finish(self.ending)
            raise pytest.UsageError(self.ending.refusal)
        return self.ending

    def finish(self, ending: Ending) -> list[str]:
        """Leave together with all other ranks, because some launchers kill the rest as soon as one rank ends.

        Call it when the reports of this rank are written. It never raises, so that no result is lost.

        :param ending: how the run ends.
        :returns: one sentence for each thing that could not be done.
        """
        if self._left:
            return []
        sentences = []
        try:
            self._keep(ending)
            reported = len(self.faults)
            self._part(ending)
            if len(self.faults) > reported:
                sentences += [str(error) for error in self.faults[reported:]]
                code = ending.code or int(pytest.ExitCode.TESTS_FAILED)
                late = interrupted_before(ending.verdict_fields, self.faults[reported].reason)
                self._keep(replace(ending, code=code, verdict_fields=late))
        except NixlPluginError as error:
            sentences.append(str(error))
        self.close()
        return sentences

    def _keep(self, ending: Ending) -> None:
        keep(self, ending, self.describe_loss() if self.faults else [])

    def _part(self, ending: Ending) -> None:
        """On rank 0, tell the peers how the run ends. On every rank, wait until all are ready to leave."""
        if self.driver is not None:
            self.driver.end(ending)
        if self.faults or self.early:
            return
        try:
            self.membership.barrier(LEAVE_SECONDS)
        except NixlPluginError as error:
            self.fault = error

    @property
    def faults(self) -> list[NixlPluginError]:
        """The errors of the group, such as a lost rank; empty if the group is complete."""
        gone = self.driver.gone if self.driver is not None else []
        return list(dict.fromkeys([*gone, *([self.fault] if self.fault is not None else [])]))

    def ignored(self) -> list[str]:
        """Return sentences that name the keys under the group's root that no member wrote."""
        ignored = self.membership.values.ignored
        sentences = [f"the key {key!r} was ignored: {reason}" for key, reason in list(ignored.items())[:_MOST_NAMED]]
        return [
            *sentences,
            *([f"and {len(ignored) - _MOST_NAMED} more keys were ignored"] if len(ignored) > _MOST_NAMED else []),
        ]

    def close(self) -> None:
        """Leave without waiting for the other ranks' reports."""
        if self._left:
            return
        self._left = True
        if self.driver is not None:
            self.driver.close()
        if self.etcd.kind != "external":
            self._await_others()
        with suppress(NixlPluginError):  # etcd is gone, and the lease expires by itself
            self._stack.close()

    def _await_others(self) -> None:
        """Keep the etcd that this rank serves until the others have left, for a lease and 2 s, or a minute and 2 s."""
        with suppress(NixlPluginError):
            wait_until(
                lambda: self._client.count_prefix(f"{self.membership.root}members/") < 2,
                "the other ranks to leave",
                seconds=min(self.settings.lease, LEAVE_SECONDS) + 2.0,
            )

    def describe_loss(self) -> list[str]:
        """Return lines that describe the group after it lost a rank. They are collected at the first call.

        None are needed if the rank itself has said why it left.
        """
        if all(isinstance(fault, MemberLeftError) for fault in self.faults):
            return []
        if self._seen is None:
            logs = self.services.last_words()
            last_words = self.driver.ask_living_peers("last_words", SECONDS) if self.driver is not None else {}
            for rank in sorted(last_words):
                logs |= last_words[rank]
            self._seen = forensics(
                self._client,
                self.membership.root,
                self.membership.members,
                worker_logs=logs,
                values=self.membership.values,
            )
        return self._seen
