# SPDX-License-Identifier: Apache-2.0
"""What a claimant has in etcd: a lease that is kept up, and the key that hangs on it."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pytest_nixl.cluster.group import LeaseLostError
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.members import Candidate
from pytest_nixl.etcd.client import EtcdClient, EtcdError, Lease, Watched, WatchEvent
from pytest_nixl.etcd.transaction import KeyValue, Part, TransactionResult, delete_prefix, empty, get_prefix, txn

T = TypeVar("T")
#: Called with a sentence about who is waited for.
Waiting = Callable[[str], None]

#: Seconds from one sentence about who is waited for to the next one.
SAID_EVERY = 5.0
#: Seconds that etcd may be late with the end of a lease: it looks twice a second.
LATE = 2.0
#: Keys of strangers that the last member to leave removes, at most.
_SWEPT = 64
#: What may mend itself while a request is tried again: an etcd that restarts, or changes its leader.
_PASSING = {"refused", "unreachable", "timeout", "closed", "no-leader", "no-member"}


class Registration:
    """What a claimant has in etcd: a lease that is kept up, and the key that hangs on it."""

    def __init__(
        self,
        client: EtcdClient,
        group: str,
        size: int,
        *,
        ttl: int,
        root: str,
        host: str,
        wanted: int | None,
        group_token: str = "",
    ) -> None:
        self.client = client
        self.group = group
        self.size = size
        self.ttl = ttl
        self.host = host
        self.wanted = wanted
        #: Of this member, and new each time; a group's token is another thing.
        self.token = secrets.token_hex(8)
        self.root = root
        self.values = GroupValues(root, group_token)
        self.members = self.values.members
        self.own = f"{self.members}{self.token}"
        self.frozen = f"{self.root}run/frozen"
        self.gate = f"{self.root}run/gate"
        #: None until it has one.
        self.rank: int | None = None
        self._lease: Lease | None = None
        #: The revision at which this member registered; 0 where the group has no token.
        self._registered = 0
        self._valid_until = 0.0
        #: Why the lease was not refreshed the last time; empty: it was.
        self._unheard = ""
        self._lost = False
        self._left = threading.Event()
        self._keeping: threading.Thread | None = None

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, "the lease is asked for before anything hangs on it"
        return self._lease

    def grant(self, deadline: float) -> None:
        """Ask for the lease, and keep it up from a thread of its own."""

        def ask() -> tuple[Lease, float]:
            # Its time runs in etcd from somewhen after this on: by our clock it ends earlier, never later.
            sent = time.monotonic()
            lease = self.client.lease(self.ttl)
            return lease, sent + lease.ttl

        self._lease, self._valid_until = self.insist(ask, deadline)
        self._keeping = threading.Thread(target=self._keep, name=f"lease of {self.group}", daemon=True)
        self._keeping.start()
        if self.values.sealed:
            self._registered = self.values.registration(
                self.transact(self.values.register(self.token, self._lease), deadline)
            )

    def _keep(self) -> None:
        pause = self.lease.ttl / 3
        while not self._left.wait(pause):
            try:
                sent = time.monotonic()
                self._valid_until = sent + self.lease.refresh()
                self._unheard = ""
                pause = self.lease.ttl / 3
            except EtcdError as error:
                self._unheard = f" (the last time: {error.reason})"
                if error.cause == "no-lease":
                    self._lost = True
                    return
                if time.monotonic() > self._valid_until:
                    return
                pause = self.lease.ttl / 20

    def check(self) -> None:
        if self._lease is not None and (self._lost or time.monotonic() >= self._valid_until):
            raise self.fenced()

    def fenced(self) -> LeaseLostError:
        who = f"{f'rank {self.rank}, ' if self.rank is not None else ''}{self.host}, pid {os.getpid()}"
        return LeaseLostError(
            f"this member of group {self.group!r} ({who}) has no lease any more: etcd heard nothing from it for "
            f"{self.ttl} s, so its place may be another's{self._unheard}",
            "see whether the etcd runs, and whether this host was stopped or cut off from it; then start the run again",
        )

    def insist(self, ask: Callable[[], T], deadline: float) -> T:
        """Ask again while the etcd restarts or changes its leader: only what may be done twice."""
        pause = 0.01
        while True:
            self.check()
            try:
                return ask()
            except EtcdError as error:
                if error.cause == "no-lease":
                    raise self.fenced() from error
                if error.cause not in _PASSING or time.monotonic() + pause > deadline:
                    raise
            # Not a wait for anything: it spares an etcd that is coming up.
            self._left.wait(pause)
            pause = min(2 * pause, 0.5)

    def transact(self, transaction: Part, deadline: float) -> TransactionResult:
        return self.insist(
            lambda: TransactionResult.of(self.client.transaction(transaction, repeatable=True)), deadline
        )

    def watch(self, *watched: Watched, deadline: float, tick: Callable[[], None] | None = None) -> Iterator[WatchEvent]:
        """Yield events, some of them twice, until the deadline. :raises FencedError: when the lease has ended.

        :param tick: called each ``SAID_EVERY`` seconds.
        """
        due = time.monotonic() + SAID_EVERY if tick is not None else deadline
        while (left := deadline - time.monotonic()) > 0:
            # No longer than the lease is known to live: who waits would not hear of its end.
            alive = self._valid_until - time.monotonic()
            for event in self.client.watch(*watched, seconds=max(0.01, min(left, alive, due - time.monotonic()))):
                self.check()
                yield event
            self.check()
            if tick is not None and time.monotonic() >= due:
                tick()
                due = time.monotonic() + SAID_EVERY

    def tell(self, waiting: Waiting, ask: Callable[[], str]) -> None:
        """Say a sentence that the etcd is asked for; none where it does not answer: who waits bears that too."""
        try:
            sentence = ask()
        except EtcdError:
            return
        waiting(sentence)

    def value(self) -> bytes:
        return self.values.member(
            Candidate(self.token, self.host, os.getpid(), self.size, self.wanted), self._registered
        )

    def remove(self, planted: Sequence[KeyValue], deadline: float) -> None:
        """Remove keys under the group's root that nobody of the group has written."""
        for transaction in self.values.remove(planted):
            self.transact(transaction, deadline)

    def leave(self) -> None:
        self._left.set()
        if self._keeping is not None:
            # Not for as long as an etcd that cannot be reached holds its request: it refreshes nothing any more.
            self._keeping.join(LATE)
            self._keeping = None
        if self._lease is None:
            return
        deadline = time.monotonic() + LATE
        lease, self._lease = self._lease, None
        self.insist(lease.revoke, deadline)
        left = get_prefix(self.members, keys_only=True, limit=_SWEPT)
        sweep = txn([empty(self.members)], [delete_prefix(self.root)], [left])
        done = self.transact(sweep, deadline)
        if not done.succeeded and self.values.sealed and not any(item.lease for item in done.found(0).items):
            # A member has a lease: what is left was written by a stranger.
            self.remove(done.found(0).items, deadline)
            self.transact(sweep, deadline)
