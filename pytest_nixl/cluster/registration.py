# SPDX-License-Identifier: Apache-2.0
"""The registration of a process with a group: a lease that a thread refreshes, and the member key attached to it."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from pytest_nixl.cluster.group import LeaseLostError, longer_lease
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.members import Candidate
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.lease import Lease
from pytest_nixl.etcd.transaction import (
    KeyValue,
    Part,
    TransactionResult,
    delete_prefix,
    empty,
    get,
    get_prefix,
    nested,
    none_leased,
    txn,
)
from pytest_nixl.etcd.watch import Watched, WatchEvent, anew_if_compacted

T = TypeVar("T")
#: Called with a sentence that names the ranks that have not arrived.
Waiting = Callable[[str], None]

#: Seconds between two such sentences, and the number of ranks up to which they are that frequent. For a sentence a rank
#: reads the keys of all ranks, so that in larger groups each rank says it less often.
SAID_EVERY = 5.0
SAID_BY = 64
#: Seconds that etcd may take to notice that a lease expired: it checks twice a second.
LATE = 2.0
#: The largest number of keys without a seal that the last member to leave removes.
_SWEPT = 64
#: Causes of an :class:`EtcdError` that a retry may cure: etcd restarts, or elects a new leader.
_PASSING = {"refused", "unreachable", "timeout", "closed", "no-leader", "no-member"}


class Registration:
    """The registration of a process with a group: a lease that a thread refreshes, and the member key attached to it.

    :param client: the etcd client of this process.
    :param group: the name of the group.
    :param size: the number of ranks that this process expects.
    :param ttl: seconds after which etcd ends the lease of a process that it hears nothing from.
    :param root: the prefix of the group's keys, with a slash at its end.
    :param host: the host name that messages use for this process.
    :param wanted: the rank that this process requests; None for any.
    :param group_token: the shared secret of all ranks; empty if there is none.
    """

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
        #: A random name of this member, new in each run. It is unrelated to the group token.
        self.token = secrets.token_hex(8)
        self.root = root
        self.values = GroupValues(root, group_token)
        self.members = self.values.members
        self.own = f"{self.members}{self.token}"
        self.frozen = f"{self.root}run/frozen"
        self.gate = f"{self.root}run/gate"
        self._began = time.monotonic()
        #: The assigned rank; None until the roster is frozen.
        self.rank: int | None = None
        self._lease: Lease | None = None
        #: The revision at which this member registered; 0 if the group has no token.
        self._registered = 0
        self._valid_until = 0.0
        #: Why the last refresh of the lease failed; empty if it succeeded.
        self._unheard = ""
        self._lost = False
        self._left = threading.Event()
        self._keeping: threading.Thread | None = None

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, "grant() is called before the lease is used"
        return self._lease

    def grant(self, deadline: float, waiting: Waiting | None = None) -> None:
        """Request the lease, and start the thread that refreshes it.

        :param waiting: as in :meth:`retry`.
        """

        def ask() -> tuple[Lease, float]:
            # etcd starts the lease after this moment, so that it expires by this clock first, never later.
            sent = time.monotonic()
            lease = self.client.lease(self.ttl)
            return lease, sent + lease.ttl

        self._lease, self._valid_until = self.retry(ask, deadline, waiting)
        self.ttl = max(self.ttl, self._lease.ttl)  # etcd grants more than asked if its election timeout is long
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
                self._unheard = f" (last refresh: {error.reason})"
                if error.cause == "no-lease":
                    self._lost = True
                    return
                if time.monotonic() > self._valid_until:
                    return
                pause = self.lease.ttl / 20

    def check(self) -> None:
        if self._lease is not None and (self._lost or time.monotonic() >= self._valid_until):
            raise self.lease_lost()

    def lease_lost(self) -> LeaseLostError:
        who = f"{f'rank {self.rank}, ' if self.rank is not None else ''}{self.host}, pid {os.getpid()}"
        return LeaseLostError(
            f"this member of group {self.group!r} ({who}) lost its etcd lease: etcd heard nothing from it for "
            f"{self.ttl} s, so its rank may have been reassigned{self._unheard}",
            "check that etcd runs, and that this host was not suspended or cut off from it; "
            f"{longer_lease(self.ttl, 'this host')}then start the run again",
        )

    def retry(self, ask: Callable[[], T], deadline: float, waiting: Waiting | None = None) -> T:
        """Retry a request while etcd restarts or elects a leader, until the deadline.

        :param ask: sends the request; it must be safe to send twice.
        :param waiting: called every ``SAID_EVERY`` seconds with a sentence about the last attempt.
        :raises LeaseLostError: if the lease has ended.
        """
        pause = 0.01
        began = time.monotonic()
        due = began + SAID_EVERY
        while True:
            self.check()
            try:
                return ask()
            except EtcdError as error:
                if error.cause == "no-lease":
                    raise self.lease_lost() from error
                now = time.monotonic()
                if error.cause not in _PASSING or now + pause > deadline:
                    raise
                if waiting is not None and now >= due:
                    so_far = f"{now - began:.0f} s of {deadline - began:.0f} s"
                    waiting(f"waiting for the etcd of group {self.group!r}; {so_far}; last attempt: {error.reason}")
                    due = now + SAID_EVERY
            # This pause only keeps the load on a starting etcd low.
            self._left.wait(pause)
            pause = min(2 * pause, 0.5)

    def transact(self, transaction: Part, deadline: float) -> TransactionResult:
        return self.retry(lambda: TransactionResult.of(self.client.transaction(transaction, repeatable=True)), deadline)

    def watch(
        self,
        *watched: Watched,
        deadline: float,
        known: Collection[str] = (),
        tick: Callable[[], None] | None = None,
    ) -> Iterator[WatchEvent]:
        """Yield events until the deadline. After a compaction by etcd, read the keys and go on.

        An event may be yielded twice.

        :param known: watched keys that exist now. One that is gone after a compaction is reported as deleted.
        :param tick: called every ``SAID_EVERY`` seconds, and less often with more than 64 ranks.
        :raises LeaseLostError: when the lease has ended.
        """
        pause = SAID_EVERY * max(1.0, self.size / SAID_BY)
        due = time.monotonic() + pause if tick is not None else deadline
        while (left := deadline - time.monotonic()) > 0:
            # Watch no longer than the lease is known to live: a watch does not report the end of the own lease in time.
            certain = self._valid_until - time.monotonic()
            compacted = True  # unless the watch ends otherwise
            with anew_if_compacted():
                for event in self.client.watch(*watched, seconds=max(0.01, min(left, certain, due - time.monotonic()))):
                    self.check()
                    yield event
                compacted = False
            self.check()
            if compacted:
                watched, missed = self._read_anew(watched, known, deadline)
                yield from missed
            if tick is not None and time.monotonic() >= due:
                tick()
                due = time.monotonic() + pause

    def _read_anew(
        self, watched: Sequence[Watched], known: Collection[str], deadline: float
    ) -> tuple[tuple[Watched, ...], list[WatchEvent]]:
        """Read the watched keys after etcd has compacted their history.

        :returns: what to watch from this revision on, and the missed events that the keys still show: the last write
            of each key, and the deletion of known keys.
        """
        asked = [get_prefix(each.key, keys_only=each.deletions) if each.prefix else get(each.key) for each in watched]
        done = self.transact(txn([], asked), deadline)
        found = [done.found(place).items for place in range(len(watched))]
        present = {item.key for items in found for item in items}
        return tuple(replace(each, since=done.revision + 1) for each in watched), [
            *(
                WatchEvent(item, deleted=False)
                for each, items in zip(watched, found, strict=True)
                for item in items
                if not each.deletions and item.mod_revision >= each.since
            ),
            *(WatchEvent(KeyValue(key, b"", 0, done.revision, 0), deleted=True) for key in known if key not in present),
        ]

    def tell(self, waiting: Waiting, ask: Callable[[], str], limit: float) -> None:
        """Pass on a sentence that is built from the group's keys, or why etcd does not answer; with the time so far.

        :param limit: the seconds that this process waits at most.
        """
        try:
            sentence = ask()
        except EtcdError as error:
            sentence = f"waiting for an answer: {error.reason}"
        waiting(f"{sentence}; {time.monotonic() - self._began:.0f} s of {limit:g} s")

    def value(self) -> bytes:
        return self.values.member(
            Candidate(self.token, self.host, os.getpid(), self.size, self.wanted), self._registered
        )

    def remove(self, planted: Sequence[KeyValue], deadline: float) -> None:
        """Remove keys under the group's root that no member wrote."""
        for transaction in self.values.remove(planted):
            self.transact(transaction, deadline)

    def leave(self) -> None:
        self._left.set()
        if self._keeping is not None:
            # With a limit, because a request to an unreachable etcd may hang. The thread sends no further refresh.
            self._keeping.join(LATE)
            self._keeping = None
        if self._lease is None:
            return
        deadline = time.monotonic() + LATE
        lease, self._lease = self._lease, None
        self.retry(lease.revoke, deadline)
        # Every member's key has a lease. If none of the remaining keys has one, no member wrote them.
        planted = txn([none_leased(self.members)], [get_prefix(self.members, keys_only=True, limit=_SWEPT)])
        sweep = txn([empty(self.members)], [delete_prefix(self.root)], [nested(planted)])
        done = self.transact(sweep, deadline)
        if not done.succeeded and self.values.sealed and (remaining := done.inner(0)).succeeded:
            self.remove(remaining.found(0).items, deadline)
            self.transact(sweep, deadline)
