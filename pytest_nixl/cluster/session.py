# SPDX-License-Identifier: Apache-2.0
"""One rank's part in a run of many: rank 0 drives, the others serve until it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from pytest_nixl.cluster.group import Member, MemberLostError
from pytest_nixl.cluster.mailbox import Mailbox
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.messages import Message
from pytest_nixl.cluster.peer_client import PeerClient
from pytest_nixl.cluster.peer_server import Ending, PeerServer, Service
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, Watched
from pytest_nixl.etcd.transaction import TransactionResult, get_prefix, txn
from pytest_nixl.model.tools import own_variables
from pytest_nixl.processes.supervisor import SupervisorClient

Connect = Callable[[], EtcdClient]
#: Seconds for which one watch of the members waits.
_WATCH = 20.0


class MembershipWatch:
    """Watches the members of a group, the own place too, and says which of them has gone.

    Who has lost its own must not go on as its rank; that it has is also seen where the etcd says nothing any more.

    :param client: of its own: a watch is always open on it.
    :param lost: called with the member and what became of it, in threads of the guard's own; with one member possibly
        more than once.
    """

    def __init__(
        self, client: EtcdClient, membership: Membership, lost: Callable[[Member, NixlPluginError], None]
    ) -> None:
        self._client = client
        self._membership = membership
        self._lost = lost
        self._closed = threading.Event()
        for task in (self._watch, self._check):
            threading.Thread(target=task, name="guard of the group", daemon=True).start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def _watch(self) -> None:
        members = {member.token: member for member in self._membership.members}
        prefix = f"{self._membership.root}members/"
        try:
            asked = self._membership.insist(lambda: self._client.transaction(txn([], [get_prefix(prefix)])))
            done = TransactionResult.of(asked)
            here = {item.key for item in done.found(0).items}
            for token, member in members.items():
                if f"{prefix}{token}" not in here:
                    self._gone(member)
            since = done.revision + 1
            while not self._closed.is_set():
                watched = Watched(prefix, since, prefix=True, deletions=True)
                for event in self._client.watch(watched, seconds=_WATCH):
                    since = event.item.mod_revision + 1
                    if self._closed.is_set():
                        return
                    found = members.get(event.item.key.removeprefix(prefix))
                    if found is not None:
                        self._gone(found)
        except NixlPluginError as error:
            self._lose_own(error)

    def _check(self) -> None:
        """See each second that the own lease lives, by the own clock."""
        while not self._closed.wait(1.0):
            try:
                self._membership.check()
            except NixlPluginError as error:
                self._lose_own(error)
                return

    def _gone(self, member: Member) -> None:
        if member.rank == self._membership.rank:
            self._lose_own(self._membership.fenced())
        else:
            self._lost(member, gone(self._membership.group, member))

    def _lose_own(self, error: NixlPluginError) -> None:
        if not self._closed.is_set():
            self._lost(self._membership.members[self._membership.rank], error)


def gone(group: str, member: Member) -> MemberLostError:
    """Return the error of a member that has gone in the midst of a run."""
    return MemberLostError(
        f"{member} of group {group!r} has gone: its process ended, or etcd heard nothing from it for its lease's time",
        "read what that rank printed last, and see whether its host still runs",
    )


class RankDriver:
    """Rank 0: the peers, as places of workers.

    :param connect: makes a client of the group's etcd.
    :param timeout: seconds that a peer may take to answer.
    :param fenced: called where this rank has lost its own place: the run is over.
    """

    def __init__(
        self,
        membership: Membership,
        connect: Connect,
        *,
        timeout: float,
        fenced: Callable[[NixlPluginError], None] = lambda _: None,
    ) -> None:
        self.membership = membership
        self._fenced = fenced
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
        """What became of the peers that have gone."""
        return [peer.error for peer in self.peers.values() if peer.error is not None]

    def ask_all(self, what: str, **arguments: Any) -> dict[int, Any]:
        """Ask every peer at the same time, and return the answers by rank.

        :raises NixlPluginError: where one does not answer, or refuses; of several the one of the lowest rank.
        """
        with ThreadPoolExecutor(max(1, min(len(self.peers), 64))) as pool:
            asked = {rank: pool.submit(peer.ask, what, **arguments) for rank, peer in self.peers.items()}
        return {rank: each.result() for rank, each in asked.items()}

    def ask_those_left(self, what: str, within: float) -> dict[int, Any]:
        """Ask the peers that have not gone, and return the answers that come within so many seconds, by rank."""

        def ask(peer: PeerClient) -> Any:
            with suppress(NixlPluginError):
                return peer.ask(what, within=within)

        left = {rank: peer for rank, peer in self.peers.items() if not peer.gone}
        with ThreadPoolExecutor(max(1, min(len(left), 64))) as pool:
            answers = dict(zip(left, pool.map(ask, left.values()), strict=True))
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def end(self, ending: Ending) -> None:
        """Tell every peer how the run ends. Peers that have gone are past telling."""
        with ThreadPoolExecutor(max(1, min(len(self.peers), 64))) as pool:
            for peer in self.peers.values():
                pool.submit(_tell, peer, ending)
        self.close()

    def close(self) -> None:
        """Listen no more."""
        self._guard.close()
        self._mailbox.close()
        self._stack.close()

    def _sender(self, rank: int) -> Callable[[dict[str, Any]], None]:
        return lambda message: self._mailbox.send(rank, message)

    def _receive(self, sender: int, message: Message) -> None:
        if sender in self.peers:
            self.peers[sender].receive(message)

    def _failed(self, error: NixlPluginError) -> None:
        for peer in self.peers.values():
            peer.lost(error)

    def _lost(self, member: Member, error: NixlPluginError) -> None:
        if member.rank in self.peers:
            self.peers[member.rank].lost(error)
            return
        self._failed(error)
        self._fenced(error)


def _tell(peer: PeerClient, ending: Ending) -> None:
    with suppress(NixlPluginError):
        peer.ask("end", **ending.plain())


def serve(
    membership: Membership,
    connect: Connect,
    supervisor: SupervisorClient,
    *,
    services: Mapping[str, Service] | None = None,
    own: Mapping[str, str | None] | None = None,
) -> Ending:
    """Be a peer: do what rank 0 asks for, and return how it says that the run ends.

    :param services: what it may ask for beside workers, by name; each is called with JSON values and returns some.
    :param own: variables of its workers that rank 0 has no say in; None: where programs are is left to PATH.
    :raises MemberLostError: where rank 0 has gone before it said.
    :raises FencedError: where this rank has lost its place, or the etcd has gone for longer than its lease lives.
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
        mailbox.open()
        guard = MembershipWatch(stack.enter_context(connect()), membership, lost)
        stack.callback(guard.close)
        over.wait()
        if serving.ending is not None:
            return serving.ending
        raise errors[0]
