# SPDX-License-Identifier: Apache-2.0
"""The membership of one process in a group: its lease, its rank, the roster, barriers, and members that were lost."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from pytest_nixl.cluster.group import (
    Candidate,
    LeaseLostError,
    Member,
    MemberLostError,
    MembershipError,
    MissingRanksError,
    Roster,
    longer_lease,
)
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.etcd.client import EtcdClient, Lease
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import (
    KeyValue,
    Part,
    RangeResult,
    TransactionResult,
    absent,
    delete,
    delete_prefix,
    empty,
    get,
    get_prefix,
    nested,
    none_leased,
    present,
    put,
    txn,
    unchanged,
)
from pytest_nixl.etcd.watch import Watched, WatchEvent, anew_if_compacted

T = TypeVar("T")
#: Called with a sentence that names the ranks that have not arrived.
Waiting = Callable[[str], None]

#: Seconds between two such sentences, and the number of ranks up to which they are that frequent. For a sentence a rank
#: reads the keys of all ranks, so that in larger groups each rank says it less often.
MESSAGE_SECONDS = 5.0
FREQUENT_RANKS = 64
#: Seconds after which :meth:`Membership.follow` replaces a watch by a new one.
WATCH_SECONDS = 20.0
#: Seconds that etcd may take to notice that a lease expired: it checks twice a second.
LATE = 2.0
#: The largest number of keys without a seal that the last member to leave removes.
_SWEPT = 64
#: The most seconds that a member which leaves gives an etcd that has too much to do, or waits for other members.
LEAVE_SECONDS = 60.0
#: Causes of an :class:`EtcdError` with which etcd says that it has too much to do, or elects a new leader.
_BUSY = {"busy", "no-leader"}
#: Causes that a retry may cure: these, and those of an etcd that restarts.
_PASSING = {"refused", "unreachable", "timeout", "closed", "no-member", *_BUSY}


class Membership:
    """The membership of this process in a group: a lease that a thread refreshes, and the key attached to it; once the
    roster is frozen, its rank, the members and the barriers. :func:`~pytest_nixl.cluster.joining.join` returns it. As a
    context manager it leaves at the end.

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
        self.member_keys = self.values.members
        self.own_key = f"{self.member_keys}{self.token}"
        self.roster_key = f"{self.root}run/frozen"
        self.gate_key = f"{self.root}run/gate"
        self._began = time.monotonic()
        self._roster: Roster | None = None
        self._rank: int | None = None
        #: The revisions up to which changes under ``run/`` and of the members are known.
        self._seen_run = self._seen_members = 0
        self._gone: dict[str, Member] = {}
        self._passed = 0
        self._lease: Lease | None = None
        #: The revision at which this member registered; 0 if the group has no token.
        self._registered = 0
        self._valid_until = 0.0
        #: Why the last refresh of the lease failed; empty if it succeeded.
        self._unheard = ""
        self._lost = False
        self._left = threading.Event()
        self._keeping: threading.Thread | None = None

    def accept(self, roster: Roster, rank: int, revision: int) -> None:
        """Accept the roster and this member's rank in it.

        :param revision: the etcd revision at which the roster was read.
        """
        self._roster, self._rank = roster, rank
        self._seen_run, self._seen_members = max(revision, roster.key.mod_revision), revision

    @property
    def roster(self) -> Roster:
        """The roster."""
        assert self._roster is not None, "join() returns when the roster is frozen"
        return self._roster

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        assert self._rank is not None, "join() returns when the roster is frozen"
        return self._rank

    @property
    def members(self) -> tuple[Member, ...]:
        """The members by rank. Until the first barrier, a new process may take the rank of one that died."""
        return self.roster.members

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.leave()
        except EtcdError:
            # The error that is being raised says more, and the lease expires by itself.
            if error is None:
                raise

    @property
    def lease(self) -> Lease:
        """The lease of this member. Attach keys to it that must be removed with the member."""
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
        lease = self.lease  # leave() does not wait for a refresh that is slow
        pause = lease.ttl / 3
        denied = False
        while not self._left.wait(pause):
            try:
                sent = time.monotonic()
                self._valid_until = sent + lease.refresh()
                self._unheard = ""
                pause = lease.ttl / 3
                denied = False
            except EtcdError as error:
                self._unheard = f" (last refresh: {error.reason})"
                # An etcd before 3.5.3 that has restarted says so of a lease that it has not read yet (etcd #13675).
                if denied and error.cause == "no-lease":
                    self._lost = True
                    return
                denied = error.cause == "no-lease"
                if time.monotonic() > self._valid_until:
                    return
                pause = lease.ttl / 20

    def check(self) -> None:
        """Check that the lease of this member is alive.

        :raises LeaseLostError: if it has ended, or may have ended by the clock of this host.
        """
        if self._lease is not None and (self._lost or time.monotonic() >= self._valid_until):
            raise self.lease_lost()

    def lease_lost(self) -> LeaseLostError:
        """Return the error that says that this member lost its lease."""
        member = f"{f'rank {self._rank}, ' if self._rank is not None else ''}{self.host}, pid {os.getpid()}"
        return LeaseLostError(
            f"this member of group {self.group!r} ({member}) lost its etcd lease: etcd heard nothing from it for "
            f"{self.ttl} s, so its rank may have been reassigned{self._unheard}",
            "check that etcd runs, and that this host was not suspended or cut off from it; "
            f"{longer_lease(self.ttl, 'this host')}then start the run again",
        )

    def retry(
        self,
        ask: Callable[[], T],
        deadline: float | None = None,
        waiting: Waiting | None = None,
        *,
        busy_until: float = 0.0,
    ) -> T:
        """Retry a request while etcd restarts or elects a leader.

        :param ask: sends the request; it must be safe to send twice.
        :param deadline: until then; None: for as long as a lease lasts.
        :param waiting: called every ``MESSAGE_SECONDS`` seconds with a sentence about the last attempt.
        :param busy_until: until then, if it is later than the deadline, as long as etcd answers that it is busy.
        :raises LeaseLostError: if the lease has ended.
        """
        pause = 0.01
        began = time.monotonic()
        deadline = began + self.ttl if deadline is None else deadline
        due = began + MESSAGE_SECONDS
        while True:
            self.check()
            try:
                return ask()
            except EtcdError as error:
                if error.cause == "no-lease":
                    raise self.lease_lost() from error
                now = time.monotonic()
                until = max(deadline, busy_until) if error.cause in _BUSY else deadline
                if error.cause not in _PASSING or now + pause > until:
                    raise
                if waiting is not None and now >= due:
                    so_far = f"{now - began:.0f} s of {deadline - began:.0f} s"
                    waiting(f"waiting for the etcd of group {self.group!r}; {so_far}; last attempt: {error.reason}")
                    due = now + MESSAGE_SECONDS
            # This pause only keeps the load on a starting etcd low.
            self._left.wait(pause)
            pause = min(2 * pause, 0.5)

    def transact(self, transaction: Part, deadline: float, busy_until: float = 0.0) -> TransactionResult:
        """Return the result of a transaction; parameters as :meth:`retry`."""
        return self.retry(
            lambda: TransactionResult.of(self.client.transaction(transaction, repeatable=True)),
            deadline,
            busy_until=busy_until,
        )

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
        :param tick: called every ``MESSAGE_SECONDS`` seconds, and less often with more than 64 ranks.
        :raises LeaseLostError: when the lease has ended.
        """
        pause = MESSAGE_SECONDS * max(1.0, self.size / FREQUENT_RANKS)
        due = time.monotonic() + pause if tick is not None else deadline
        while (remaining := deadline - time.monotonic()) > 0:
            # Watch no longer than the lease is known to live: a watch does not report the end of the own lease in time.
            certain = self._valid_until - time.monotonic()
            compacted = True  # unless the watch ends otherwise
            with anew_if_compacted():
                for event in self.client.watch(
                    *watched, seconds=max(0.01, min(remaining, certain, due - time.monotonic()))
                ):
                    self.check()
                    yield event
                compacted = False
            self.check()
            if compacted:
                watched, missed = self._read_anew(self.client, watched, known, deadline)
                yield from missed
            if tick is not None and time.monotonic() >= due:
                tick()
                due = time.monotonic() + pause

    def follow(
        self, client: EtcdClient, *watched: Watched, closed: threading.Event, known: Collection[str] = ()
    ) -> Iterator[WatchEvent]:
        """Yield what watched keys show now, and then their events, until ``closed`` is set.

        An event may be yielded twice.

        :param client: a client that nothing else uses, because a watch is always open on it.
        :param known: watched keys that existed. One that is gone is reported as deleted.
        """
        while not closed.is_set():
            with anew_if_compacted():
                watched, missed = self._read_anew(client, watched, known)
                events: Iterable[WatchEvent] = missed
                while not closed.is_set():
                    for event in events:
                        if closed.is_set():
                            return
                        watched = tuple(watch.after(event) for watch in watched)
                        yield event
                    events = client.watch(*watched, seconds=WATCH_SECONDS)

    def _read_anew(
        self, client: EtcdClient, watched: Sequence[Watched], known: Collection[str], deadline: float | None = None
    ) -> tuple[tuple[Watched, ...], list[WatchEvent]]:
        """Read the watched keys, as after etcd has compacted their history.

        :returns: what to watch from this revision on, and the missed events that the keys still show: the last write
            of each key, and the deletion of known keys.
        """
        requests = [
            get_prefix(watch.key, keys_only=watch.deletions) if watch.prefix else get(watch.key) for watch in watched
        ]
        reading = txn([], requests)
        done = self.retry(lambda: TransactionResult.of(client.transaction(reading)), deadline)
        item_lists = [done.range_result(place).items for place in range(len(watched))]
        present = {item.key for items in item_lists for item in items}
        return tuple(replace(watch, since=done.revision + 1) for watch in watched), [
            *(
                WatchEvent(item, deleted=False)
                for watch, items in zip(watched, item_lists, strict=True)
                for item in items
                if not watch.deletions and item.mod_revision >= watch.since
            ),
            *(WatchEvent(KeyValue(key, b"", 0, done.revision, 0), deleted=True) for key in known if key not in present),
        ]

    def report_wait(self, waiting: Waiting, ask: Callable[[], str], limit: float) -> None:
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
        """Leave the group: end the lease, and remove the group's keys if this was the last member."""
        self._left.set()
        if self._keeping is not None:
            # With a limit, because a request to an unreachable etcd may hang. The thread sends no further refresh.
            self._keeping.join(LATE)
            self._keeping = None
        if self._lease is None:
            return
        # Many ranks that leave at once keep etcd busy. If it does not answer, the lease expires without this member.
        deadline = time.monotonic() + LATE
        busy_until = min(self._valid_until, time.monotonic() + LEAVE_SECONDS)
        lease, self._lease = self._lease, None
        self.retry(lease.revoke, deadline, busy_until=busy_until)
        # Every member's key has a lease. If none of the remaining keys has one, no member wrote them.
        planted = txn([none_leased(self.member_keys)], [get_prefix(self.member_keys, keys_only=True, limit=_SWEPT)])
        sweep = txn([empty(self.member_keys)], [delete_prefix(self.root)], [nested(planted)])
        done = self.transact(sweep, deadline, busy_until)
        if not done.succeeded and self.values.sealed and (remaining := done.inner(0)).succeeded:
            self.remove(remaining.range_result(0).items, deadline)
            self.transact(sweep, deadline, busy_until)

    def barrier(self, timeout: float = 60.0, waiting: Waiting | None = None) -> None:
        """Wait until every rank has arrived. The first barrier starts the run: the roster is then final.

        A rank sends two requests, whatever the number of ranks; three, if the group has a token.

        :param timeout: seconds to wait for the other ranks.
        :param waiting: called every five seconds of the wait (less often with more than 64 ranks), with a sentence that
            names the missing ranks.
        :raises MissingRanksError: if some ranks have not arrived before the timeout, naming them.
        :raises MemberLostError: if the run had started and a member is gone.
        :raises LeaseLostError: if the lease of this member has ended.
        """
        deadline = time.monotonic() + timeout
        number = self._passed + 1
        if not self._arrive(number, deadline):
            self._wait_for_gate(number, deadline, timeout, waiting)
        self._passed = number

    def _arrive(self, number: int, deadline: float) -> bool:
        """Write the key that says that this rank has arrived; return whether the barrier is open."""
        arrived = f"{self.root}arrived/"
        before = f"{arrived}{number - 1:06d}/{self.rank:06d}"
        folder = f"{arrived}{number:06d}/"
        own_key = f"{folder}{self.rank:06d}"
        done = self.transact(
            txn(
                [present(self.own_key)],
                [
                    put(own_key, self.values.arrival(own_key, self.members[self.rank]), self.lease),
                    delete(before),
                    get_prefix(folder, count_only=True),
                    get(self.gate_key),
                    self._newer_roster(),
                ],
            ),
            deadline,
        )
        if not done.succeeded:
            raise self.lease_lost()
        self._note(done.range_result(4))
        gate = done.range_result(3).first
        while self.values.read_gate(gate, self.members) < number:
            if done.range_result(2).count < self.size or not self._all_are_at(folder, deadline):
                return False
            # Several ranks may try to open the gate. Only a rank that finds it unchanged succeeds.
            as_seen = unchanged(gate) if gate is not None else absent(self.gate_key)
            again = [self._newer_roster(), get(self.gate_key)]
            opened = self.values.gate(self.gate_key, number, self.members)
            opening = self.transact(txn([as_seen], [put(self.gate_key, opened), *again], again), deadline)
            place = 1 if opening.succeeded else 0
            self._note(opening.range_result(place))
            gate = opening.range_result(place + 1).first
            if time.monotonic() > deadline:
                return False
        return True

    def _newer_roster(self) -> Part:
        """Return the part of a transaction that reads the roster if it was written after the known one.

        A roster names every rank. If each rank read it at each barrier, the bytes would grow with the square of the
        number of ranks.
        """
        return get(self.roster_key, after=self.roster.key.mod_revision)

    def _all_are_at(self, prefix: str, deadline: float) -> bool:
        """Whether every rank wrote its own key at a barrier. Without a token this is not checked."""
        if not self.values.sealed:
            return True
        done = self.transact(txn([], [get_prefix(prefix), self._newer_roster()]), deadline)
        self._note(done.range_result(1))
        return len(self.values.arrived(done.range_result(0), prefix, self.members)) == self.size

    def _note(self, arrivals: RangeResult) -> None:
        """Accept the roster that was read with the gate: a rank may have been reassigned before the gate opened."""
        if arrivals.first is not None:
            self._take(arrivals.first)

    def _take(self, item: KeyValue) -> None:
        """Accept a roster with a valid seal, with this process at its rank, and not older than the known one."""
        frozen = self.values.read_frozen(item)
        if frozen is None:
            return
        if frozen.rank_of(self.token) == self.rank and frozen.changes >= self.roster.changes:
            self._roster = frozen
        else:
            self.values.ignore(item.key, "it is the roster of another run, or an older roster of this run")

    def _wait_for_gate(self, number: int, deadline: float, timeout: float, waiting: Waiting | None) -> None:
        def say() -> None:
            if waiting is not None:
                self.report_wait(waiting, lambda: f"waiting at {self._missing_members(number)}", timeout)

        watched = (
            Watched(f"{self.root}run/", self._seen_run + 1, prefix=True),
            Watched(self.member_keys, self._seen_members + 1, prefix=True, deletions=True),
        )
        self._refuse_lost(number)
        present = {f"{self.member_keys}{member.token}" for member in self.members if member.token not in self._gone}
        for event in self.watch(*watched, deadline=deadline, known=present, tick=say if waiting else None):
            item = event.item
            if item.key.startswith(self.member_keys):
                self._seen_members = item.mod_revision
                if item.key == self.own_key:
                    raise self.lease_lost()
                gone = [member for member in self.members if item.key.endswith(f"/{member.token}")]
                self._gone.update({member.token: member for member in gone})
                # A member that passed this barrier and then left may be reported before the gate is.
                if gone and self._gate(deadline) >= number:
                    return
                self._refuse_lost(number)
                continue
            self._seen_run = item.mod_revision
            if event.deleted:
                continue
            if item.key == self.gate_key and self.values.read_gate(item, self.members) >= number:
                return
            if item.key == self.roster_key:
                members = self.members
                self._take(item)
                # An arrival may now be that of a member. If this rank is the last one, nobody else opens the gate.
                if self.members != members and self._arrive(number, deadline):
                    return
        self.check()
        raise self._missing(number, timeout)

    def _gate(self, deadline: float) -> int:
        """Return how many barriers the group has passed."""
        done = self.transact(txn([], [get(self.gate_key), self._newer_roster()]), deadline)
        self._note(done.range_result(1))
        return self.values.read_gate(done.range_result(0).first, self.members)

    def _refuse_lost(self, number: int) -> None:
        """Check that no member is lost once the run has started.

        :raises MemberLostError: names the lost members.
        """
        lost = [member for member in self.members if member.token in self._gone]
        if lost and number > 1:
            raise MemberLostError(
                f"group {self.group!r} has lost {', '.join(map(str, lost))}: its lease expired, or it left",
                f"read the last output of each lost rank; {longer_lease(self.ttl, 'its host')}then start the run again",
            )

    def _missing(self, number: int, timeout: float) -> MembershipError:
        lost = [member for member in self.members if member.token in self._gone]
        gone = f"; the lease of {', '.join(map(str, lost))} expired, and no process took that rank" if lost else ""
        return MissingRanksError(
            f"waited {timeout:g} s at {self._missing_members(number)}{gone}", "read the last output of these ranks"
        )

    def _missing_members(self, number: int) -> str:
        prefix = f"{self.root}arrived/{number:06d}/"
        done = TransactionResult.of(self.client.transaction(txn([], [get_prefix(prefix)])))
        arrived_tokens = self.values.arrived(done.range_result(0), prefix, self.members)
        missing = [str(member) for member in self.members if member.rank not in arrived_tokens]
        barrier = f"barrier {number} of group {self.group!r}"
        return f"{barrier} for {', '.join(missing)}" if missing else f"{barrier}: all ranks arrived"
