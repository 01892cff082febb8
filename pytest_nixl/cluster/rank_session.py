# SPDX-License-Identifier: Apache-2.0
"""One process's part in a run of several ranks: it joins, drives or serves, and leaves when all have written theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from pytest_nixl.cluster.command_check import Command, differences
from pytest_nixl.cluster.etcd import for_agents, meeting_etcd, require_closed
from pytest_nixl.cluster.forensics import SECONDS, forensics
from pytest_nixl.cluster.group import TTL, LeaseLostError, MemberLostError
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.logs import keep
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.peer_client import PeerError
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.cluster.placement import Placement
from pytest_nixl.cluster.request_handlers import RequestHandlers
from pytest_nixl.cluster.session import RankDriver, serve
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.polling import wait_until
from pytest_nixl.core.strict import StrictError
from pytest_nixl.etcd_servers.sources import EtcdServer
from pytest_nixl.model.conclusion import interrupted_before
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.processes.supervisor import SupervisorClient

_log = logging.getLogger(__name__)

#: Seconds that a rank waits at the end for the others to have written their reports.
LEAVE_SECONDS = 60.0
#: Keys of strangers that are named.
_TOLD = 4


class RankSession:
    """The place of this process among the ranks of a run."""

    def __init__(
        self,
        settings: Settings,
        asked: Placement,
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
        #: What this rank itself met with; None: nothing.
        self.fault: NixlPluginError | None = None
        #: Whether it was ended before the run was over: it then leaves without the others.
        self.early = False
        #: How rank 0 said that the run ends; None: this is rank 0, or it has not said.
        self.ending: Ending | None = None
        self.driver: RankDriver | None = None
        try:
            self.etcd = meeting_etcd(settings, asked, supervisor, say)
            self._stack.callback(self.etcd.discard)
            require_closed(settings, self.etcd)
            self.services = RequestHandlers(command, settings, self.etcd, supervisor)
            self._client = self._stack.enter_context(self.etcd.client())
            self.membership: Membership = join(
                self._client,
                asked.group,
                asked.ranks,
                wanted=asked.rank,
                token=settings.group_token,
                timeout=settings.join_timeout,
                waiting=say,
            )
            self._stack.callback(self.membership.leave)
            _log.info("joined group %s as %s", asked.group, self.name)
            self.membership.barrier(settings.join_timeout, waiting=say)
        except BaseException:
            self._stack.close()
            raise

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
        """How this rank names itself: ``rank 1 of 4 on node-b``."""
        return f"rank {self.rank} of {self.membership.size} on {self.membership.members[self.rank].host}"

    def name_of(self, rank: int) -> str:
        """How failures name a rank."""
        member = self.membership.members[rank]
        return f"rank {rank} on {member.host}"

    def agents_etcd(self) -> EtcdServer | None:
        """Return the etcd of the group, where NIXL's agents of all ranks can use it; None: they cannot."""
        return self.etcd if for_agents(self.settings) else None

    def drive(self, fenced: Callable[[NixlPluginError], None]) -> None:
        """Be rank 0: see that all run the same command, then have their workers at hand.

        :param fenced: called, in another thread, where this rank loses its place: the run must not go on.
        :raises pytest.UsageError: where a rank is unlike this one, naming the difference; it is told, too.
        """
        self.driver = RankDriver(
            self.membership,
            self.etcd.client,
            timeout=self.settings.timeout,
            fenced=fenced,
        )
        others = self.driver.ask_all("command")
        found = differences(self._command, {self.name_of(rank): self._unpacked(rank, others[rank]) for rank in others})
        if found:
            refusal = "; ".join(found) + ": start every rank with the same command on the same tests"
            self.finish(Ending(int(pytest.ExitCode.USAGE_ERROR), refusal=refusal))
            raise pytest.UsageError(refusal)

    def _unpacked(self, rank: int, text: str) -> Command:
        try:
            return Command.unpacked(text)
        except StrictError as error:
            raise PeerError(
                f"{self.name_of(rank)} answered 'command' with what no rank of this version answers: {error}",
                "see that every rank has the same pytest-nixl",
            ) from None

    def serve(self) -> Ending:
        """Be a peer until the run is over, and return how rank 0 says that it ends.

        :raises pytest.UsageError: where rank 0 refuses to start, with its words.
        :raises NixlPluginError: where rank 0 or the etcd has gone.
        """
        try:
            self.ending = serve(
                self.membership,
                self.etcd.client,
                self.supervisor,
                services=self.services.by_name(),
                own=own_variables(self.settings.programs),
            )
        except LeaseLostError as error:
            if not self.settings.etcd_listen:
                raise
            raise MemberLostError(
                f"{self.name_of(0)} has gone, or this rank is cut off from the etcd that it serves: {error.reason}",
                "read what that rank printed last, and see whether its host still runs",
            ) from error
        if self.ending.refusal:
            self.finish(self.ending)
            raise pytest.UsageError(self.ending.refusal)
        return self.ending

    def finish(self, ending: Ending) -> list[str]:
        """Leave, together with all others: whoever ends first may have the rest killed by its launcher.

        Called when this rank's reports are written.

        :returns: sentences on what could not be done; it never raises, as what was measured is not lost for it.
        """
        if self._left:
            return []
        said = []
        try:
            self._keep(ending)
            told = len(self.faults)
            self._part(ending)
            if len(self.faults) > told:
                said += [str(error) for error in self.faults[told:]]
                code = ending.code or int(pytest.ExitCode.TESTS_FAILED)
                late = interrupted_before(ending.told, self.faults[told].reason)
                self._keep(replace(ending, code=code, told=late))
        except NixlPluginError as error:
            said.append(str(error))
        self.close()
        return said

    def _keep(self, ending: Ending) -> None:
        keep(self, ending, self.look() if self.faults else [])

    def _part(self, ending: Ending) -> None:
        """Tell the peers how it ends, where this is rank 0, and wait until all are ready to leave."""
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
        """What went wrong with the group. Empty: nothing did, and it is whole."""
        gone = self.driver.gone if self.driver is not None else []
        return list(dict.fromkeys([*gone, *([self.fault] if self.fault is not None else [])]))

    def ignored(self) -> list[str]:
        """Return sentences on the keys under the group's root that nobody of the group has written."""
        found = self.membership.values.ignored
        told = [f"the key {key!r} was ignored: {why}" for key, why in list(found.items())[:_TOLD]]
        return [*told, *([f"and {len(found) - _TOLD} more keys were ignored"] if len(found) > _TOLD else [])]

    def close(self) -> None:
        """Leave, whatever the others do."""
        if self._left:
            return
        self._left = True
        if self.driver is not None:
            self.driver.close()
        if self.etcd.kind != "external":
            self._await_others()
        with suppress(NixlPluginError):  # the etcd has gone, and the lease ends by itself
            self._stack.close()

    def _await_others(self) -> None:
        """Keep the etcd that is ours until the others have left it, but no longer than the lease of a dead one."""
        with suppress(NixlPluginError):
            wait_until(
                lambda: self._client.count_prefix(f"{self.membership.root}members/") < 2,
                "the other ranks to leave",
                seconds=TTL + 2.0,
            )

    def look(self) -> list[str]:
        """Return what can be seen of the group where it broke, the first time it is asked for: lines for a person."""
        if self._seen is None:
            logs = self.services.last_words()
            others = self.driver.ask_those_left("last_words", SECONDS) if self.driver is not None else {}
            for rank in sorted(others):
                logs |= others[rank]
            self._seen = forensics(
                self._client,
                self.membership.root,
                self.membership.members,
                worker_logs=logs,
                values=self.membership.values,
            )
        return self._seen
