# SPDX-License-Identifier: Apache-2.0
"""The roles in a run of several ranks: rank 0 drives the run, and the peers serve it until the run ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from pytest_nixl.cluster.group import Member, MemberLeftError, MemberLostError, longer_lease
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.messages import Mailbox, Message, PeerLeft
from pytest_nixl.cluster.peer_client import PeerClient
from pytest_nixl.cluster.peer_server import Ending, PeerServer, Service
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.signals import ending_text
from pytest_nixl.core.strict import printable
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.watch import Watched
from pytest_nixl.model.tools import own_variables
from pytest_nixl.processes.supervisor import SupervisorClient

Connect = Callable[[], EtcdClient]
#: Seconds that the last message of a member that is gone may take.
LAST_MESSAGE_SECONDS = 1.0
#: Seconds for which a member that leaves early waits until rank 0 has read why.
FAREWELL_SECONDS = 10.0


class MembershipWatch:
    """Watches members of a group, this process included, and reports those that are gone.

    A process that lost its own lease must stop acting as its rank. The guard notices this even if etcd is silent.

    :param client: a client that nothing else uses, because a watch is always open on it.
    :param membership: the membership of this process.
    :param lost: called with a member and the error that names it, in threads of the guard. It may be called more than
        once for a member.
    :param ranks: the ranks to watch; None for all. If every rank watched all, etcd would send the end of each of n
        ranks n times.
    """

    def __init__(
        self,
        client: EtcdClient,
        membership: Membership,
        lost: Callable[[Member, NixlPluginError], None],
        ranks: Collection[int] | None = None,
    ) -> None:
        self._client = client
        self._membership = membership
        self._lost = lost
        self._ranks = ranks
        self._closed = threading.Event()
        for task in (self._watch, self._check):
            threading.Thread(target=task, name="guard of the group", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        """Tell of the members that are gone, and then of those that go, until this is closed."""
        prefix = self._membership.member_keys
        members = {
            f"{prefix}{member.token}": member
            for member in self._membership.members
            if self._ranks is None or member.rank in self._ranks
        }
        keys = [prefix] if self._ranks is None else members
        watched = [Watched(key, 1, prefix=self._ranks is None, deletions=True) for key in keys]
        try:
            for event in self._membership.follow(self._client, *watched, closed=self._closed, known=members):
                if event.item.key in members:
                    self._gone(members[event.item.key])
        except NixlPluginError as error:
            self._lose_own(error)

    def _check(self) -> None:
        """Check every second, by the clock of this host, that the own lease is alive."""
        while not self._closed.wait(1.0):
            try:
                self._membership.check()
            except NixlPluginError as error:
                self._lose_own(error)
                return

    def _gone(self, member: Member) -> None:
        if member.rank == self._membership.rank:
            self._lose_own(self._membership.lease_lost())
        else:
            self._lost(member, gone(self._membership.group, member, self._membership.ttl))

    def _lose_own(self, error: NixlPluginError) -> None:
        if not self._closed.is_set():
            self._lost(self._membership.members[self._membership.rank], error)


def gone(group: str, member: Member, ttl: int) -> MemberLostError:
    """Return the error that names a member which left during a run.

    :param ttl: the seconds of its lease.
    """
    return MemberLostError(
        f"{member} of group {group!r} is gone: its process ended, or its lease expired because etcd heard nothing "
        "from it",
        f"read the last output of that rank, and check that its host still runs; {longer_lease(ttl, 'its host')}then "
        "start the run again",
    )


class RankDriver:
    """Rank 0's connection to its peers: it starts workers on them, sends requests, and notices peers that are gone.

    :param membership: the membership of rank 0.
    :param connect: makes a client of the group's etcd.
    :param timeout: seconds that a peer may take to answer.
    :param on_lease_lost: called if rank 0 itself loses its lease; the run must then stop.
    """

    def __init__(
        self,
        membership: Membership,
        connect: Connect,
        *,
        timeout: float,
        on_lease_lost: Callable[[NixlPluginError], None] = lambda _: None,
    ) -> None:
        self.membership = membership
        self._on_lease_lost = on_lease_lost
        self.peers: dict[int, PeerClient] = {}
        with ExitStack() as stack:
            self._mailbox = Mailbox(
                stack.enter_context(connect()), membership, handle=self._receive, failed=self._failed
            )
            for member in membership.members[1:]:
                name = f"rank {member.rank} on {member.host}"
                self.peers[member.rank] = PeerClient(member.rank, name, self._sender(member.rank), timeout)
            self._mailbox.open()
            self._guard = MembershipWatch(stack.enter_context(connect()), membership, self._lost)
            self._stack = stack.pop_all()

    @property
    def gone(self) -> list[NixlPluginError]:
        """The errors of the peers that are lost."""
        return [peer.error for peer in self.peers.values() if peer.error is not None]

    def ask_all(self, request: str, /, **arguments: Any) -> dict[int, Any]:
        """Send a request to every peer at the same time, and return the answers by rank.

        :raises NixlPluginError: if a peer does not answer, or refuses; the error is that of the lowest such rank.
        """
        answers = self._ask(self.peers, request, None, arguments)
        for answer in answers.values():
            if isinstance(answer, NixlPluginError):
                raise answer
        return answers

    def ask_living_peers(self, request: str, within: float) -> dict[int, Any]:
        """Send a request to the peers that are not lost, and return the answers by rank.

        :param within: seconds to wait; peers that do not answer in time are left out.
        """
        peers = {rank: peer for rank, peer in self.peers.items() if not peer.gone}
        answers = self._ask(peers, request, within, {})
        return {
            rank: answer for rank, answer in answers.items() if not isinstance(answer, (NixlPluginError, type(None)))
        }

    def _ask(
        self, peers: Mapping[int, PeerClient], request: str, within: float | None, arguments: Mapping[str, Any]
    ) -> dict[int, Any]:
        """Send a request to peers, many of them with one request to etcd; return the answer or the error of each.

        :param within: seconds to wait for all answers; None for the timeout of each peer.
        """
        answers: dict[int, Any] = {}
        sent: dict[int, dict[str, Any]] = {}
        for rank, peer in peers.items():
            try:
                sent[rank] = peer.request(request, **arguments)
            except NixlPluginError as error:
                answers[rank] = error
        start = time.monotonic()
        try:
            self._mailbox.send_each(sent)
            for rank, message in sent.items():
                try:
                    answers[rank] = peers[rank].answer(message, within=within, since=start)
                except NixlPluginError as error:
                    answers[rank] = error
        except NixlPluginError as error:
            answers |= dict.fromkeys(sent, error)
        finally:
            for rank, message in sent.items():
                peers[rank].forget(message)
        return {rank: answers[rank] for rank in peers}

    def end(self, ending: Ending) -> None:
        """Tell every peer how the run ends, and close the connection. Errors are ignored."""
        self._ask(self.peers, "end", None, ending.plain())
        self.close()

    def close(self) -> None:
        """Close the connection to the peers."""
        self._guard.close()
        self._mailbox.close()
        self._stack.close()

    def _sender(self, rank: int) -> Callable[[dict[str, Any]], None]:
        return lambda message: self._mailbox.send(rank, message)

    def _receive(self, sender: int, message: Message) -> None:
        if sender not in self.peers:
            return
        if isinstance(message, PeerLeft):
            cause = printable(message.reason)
            reason = f"{self.membership.members[sender]} of group {self.membership.group!r} left: {cause}"
            self.peers[sender].mark_lost(MemberLeftError(reason, "start the run again on every rank"))
            with suppress(NixlPluginError):
                self._mailbox.send(sender, {"ask": "end", "number": 0, **Ending(1, reason).plain()})
        else:
            self.peers[sender].receive(message)

    def _failed(self, error: NixlPluginError) -> None:
        for peer in self.peers.values():
            peer.mark_lost(error)

    def _lost(self, member: Member, error: NixlPluginError) -> None:
        if member.rank in self.peers:
            # Its last message may say why it left, and comes by another watch. The first error that is known counts.
            grace = threading.Timer(LAST_MESSAGE_SECONDS, self.peers[member.rank].mark_lost, (error,))
            grace.daemon = True
            grace.start()
            return
        self._failed(error)
        self._on_lease_lost(error)


def serve(
    membership: Membership,
    connect: Connect,
    supervisor: SupervisorClient,
    *,
    services: Mapping[str, Service] | None = None,
    own: Mapping[str, str | None] | None = None,
) -> Ending:
    """Act as a peer: handle the requests of rank 0, and return how the run ends, as rank 0 says.

    :param membership: the membership of this rank.
    :param connect: makes a client of the group's etcd.
    :param supervisor: the supervisor that owns the workers.
    :param services: the requests that are not about workers, by name; arguments and results are JSON values.
    :param own: variables of the workers that rank 0 cannot set; None if the programs of the workers are found by PATH.
    :raises MemberLostError: if rank 0 is gone before it said how the run ends.
    :raises LeaseLostError: if this rank lost its lease, also because etcd was away for longer than the lease lasts.
    """
    errors: list[NixlPluginError] = []
    over = threading.Event()

    def failed(error: NixlPluginError) -> None:
        errors.append(error)
        over.set()

    def lost(member: Member, error: NixlPluginError) -> None:
        if member.rank in (0, membership.rank):
            failed(error)

    with ExitStack() as stack:
        mailbox: Mailbox
        serving = PeerServer(
            supervisor,
            membership.rank,
            lambda message: mailbox.send(0, message),
            over.set,
            services or {},
            own_variables({}) if own is None else own,
        )
        stack.callback(serving.close)
        mailbox = Mailbox(
            stack.enter_context(connect()),
            membership,
            handle=lambda sender, message: serving.receive(message) if sender == 0 else None,
            failed=failed,
        )
        stack.callback(mailbox.close)
        try:
            mailbox.open()
            guard = MembershipWatch(stack.enter_context(connect()), membership, lost, {0, membership.rank})
            stack.callback(guard.close)
            over.wait()
        except BaseException as error:  # Ctrl-C or SIGTERM: rank 0 must not guess why this rank is gone
            with suppress(NixlPluginError):
                mailbox.send(0, {"left": ending_text(error)[:256]})
                over.wait(FAREWELL_SECONDS)  # rank 0 answers, before it can see that this rank's lease has ended
            raise
        if serving.ending is not None:
            return serving.ending
        raise errors[0]
