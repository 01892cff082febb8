# SPDX-License-Identifier: Apache-2.0
"""The membership of one process in a group: its rank, the roster, barriers, and members that were lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from pytest_nixl.cluster.group import (
    LeaseLostError,
    Member,
    MemberLostError,
    MembershipError,
    MissingRanksError,
    Roster,
    longer_lease,
)
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.registration import Registration, Waiting
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.lease import Lease
from pytest_nixl.etcd.transaction import (
    FoundKey,
    KeyValue,
    Part,
    TransactionResult,
    absent,
    delete,
    get,
    get_prefix,
    present,
    put,
    txn,
    unchanged,
)
from pytest_nixl.etcd.watch import Watched

T = TypeVar("T")


class Membership:
    """The membership of this process in a group. :func:`join` returns it. As a context manager it leaves at the end.

    :param claim: the registration of this process.
    :param frozen: the roster.
    :param rank: the rank of this process.
    :param seen: the etcd revision at which the roster was read.
    """

    def __init__(self, claim: Registration, frozen: Roster, rank: int, seen: int) -> None:
        self._claim = claim
        self._frozen = frozen
        #: This member's rank, from 0.
        self.rank = claim.rank = rank
        #: The revisions up to which changes under ``run/`` and of the members are known.
        self._seen_run, self._seen_members = max(seen, frozen.key.mod_revision), seen
        self._lost: dict[str, Member] = {}
        self._passed = 0

    @property
    def group(self) -> str:
        """The group's name."""
        return self._claim.group

    @property
    def root(self) -> str:
        """The prefix of the group's keys, with a slash at its end."""
        return self._claim.root

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self._frozen.members)

    @property
    def members(self) -> tuple[Member, ...]:
        """The members by rank. Until the first barrier, a new process may take the rank of one that died."""
        return self._frozen.members

    @property
    def values(self) -> GroupValues:
        """Writes and reads the values of the group's keys."""
        return self._claim.values

    @property
    def ttl(self) -> int:
        """The seconds after which etcd ends the lease of a member that it hears nothing from."""
        return self._claim.ttl

    @property
    def lease(self) -> Lease:
        """The lease of this member. Attach keys to it that must be removed with the member."""
        return self._claim.lease

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.leave()
        except EtcdError:
            # The error that is being raised says more, and the lease expires by itself.
            if error is None:
                raise

    def check(self) -> None:
        """Check that the lease of this member is alive.

        :raises LeaseLostError: if it has ended, or may have ended by the clock of this host.
        """
        self._claim.check()

    def lease_lost(self) -> LeaseLostError:
        """Return the error that says that this member lost its lease."""
        return self._claim.lease_lost()

    def retry(self, ask: Callable[[], T]) -> T:
        """Retry a request while etcd restarts or elects a leader, for as long as a lease lasts.

        :param ask: sends the request; it must be safe to send twice.
        :raises LeaseLostError: if the lease has ended meanwhile.
        """
        return self._claim.retry(ask, time.monotonic() + self.ttl)

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

    def leave(self) -> None:
        """Leave the group: end the lease, and remove the group's keys if this was the last member."""
        self._claim.leave()

    def _arrive(self, number: int, deadline: float) -> bool:
        """Write the key that says that this rank has arrived; return whether the barrier is open."""
        claim, arrived = self._claim, f"{self._claim.root}arrived/"
        before = f"{arrived}{number - 1:06d}/{self.rank:06d}"
        here = f"{arrived}{number:06d}/"
        own = f"{here}{self.rank:06d}"
        done = claim.transact(
            txn(
                [present(claim.own)],
                [
                    put(own, claim.values.arrival(own, self.members[self.rank]), claim.lease),
                    delete(before),
                    get_prefix(here, count_only=True),
                    get(claim.gate),
                    self._newer_roster(),
                ],
            ),
            deadline,
        )
        if not done.succeeded:
            raise claim.lease_lost()
        self._note(done.found(4))
        gate = done.found(3).first
        while claim.values.read_gate(gate, self.members) < number:
            if done.found(2).count < self.size or not self._all_are_at(here, deadline):
                return False
            # Several ranks may try to open the gate. Only a rank that finds it unchanged succeeds.
            as_seen = unchanged(gate) if gate is not None else absent(claim.gate)
            again = [self._newer_roster(), get(claim.gate)]
            opened = claim.values.gate(claim.gate, number, self.members)
            opening = claim.transact(txn([as_seen], [put(claim.gate, opened), *again], again), deadline)
            place = 1 if opening.succeeded else 0
            self._note(opening.found(place))
            gate = opening.found(place + 1).first
            if time.monotonic() > deadline:
                return False
        return True

    def _newer_roster(self) -> Part:
        """Return the part of a transaction that reads the roster if it was written after the known one.

        A roster names every rank. If each rank read it at each barrier, the bytes would grow with the square of the
        number of ranks.
        """
        return get(self._claim.frozen, after=self._frozen.key.mod_revision)

    def _all_are_at(self, here: str, deadline: float) -> bool:
        """Whether every rank wrote its own key at a barrier. Without a token this is not checked."""
        claim = self._claim
        if not claim.values.sealed:
            return True
        done = claim.transact(txn([], [get_prefix(here), self._newer_roster()]), deadline)
        self._note(done.found(1))
        return len(claim.values.arrived(done.found(0), here, self.members)) == self.size

    def _note(self, found: FoundKey) -> None:
        """Accept the roster that was read with the gate: a rank may have been reassigned before the gate opened."""
        if found.first is not None:
            self._take(found.first)

    def _take(self, item: KeyValue) -> None:
        """Accept a roster with a valid seal, with this process at its rank, and not older than the known one."""
        frozen = self._claim.values.read_frozen(item)
        if frozen is None:
            return
        if frozen.rank_of(self._claim.token) == self.rank and frozen.changes >= self._frozen.changes:
            self._frozen = frozen
        else:
            self._claim.values.ignore(item.key, "it is the roster of another run, or an older roster of this run")

    def _wait_for_gate(self, number: int, deadline: float, timeout: float, waiting: Waiting | None) -> None:
        claim = self._claim

        def say() -> None:
            if waiting is not None:
                claim.tell(waiting, lambda: f"waiting at {self._missing_members(number)}", timeout)

        watched = (
            Watched(f"{claim.root}run/", self._seen_run + 1, prefix=True),
            Watched(claim.members, self._seen_members + 1, prefix=True, deletions=True),
        )
        self._refuse_lost(number)
        present = {f"{claim.members}{member.token}" for member in self.members if member.token not in self._lost}
        for event in claim.watch(*watched, deadline=deadline, known=present, tick=say if waiting else None):
            item = event.item
            if item.key.startswith(claim.members):
                self._seen_members = item.mod_revision
                if item.key == claim.own:
                    raise claim.lease_lost()
                gone = [member for member in self.members if item.key.endswith(f"/{member.token}")]
                self._lost.update({member.token: member for member in gone})
                # A member that passed this barrier and then left may be reported before the gate is.
                if gone and self._gate(deadline) >= number:
                    return
                self._refuse_lost(number)
                continue
            self._seen_run = item.mod_revision
            if event.deleted:
                continue
            if item.key == claim.gate and claim.values.read_gate(item, self.members) >= number:
                return
            if item.key == claim.frozen:
                known = self.members
                self._take(item)
                # An arrival may now be that of a member. If this rank is the last one, nobody else opens the gate.
                if self.members != known and self._arrive(number, deadline):
                    return
        claim.check()
        raise self._missing(number, timeout)

    def _gate(self, deadline: float) -> int:
        """Return how many barriers the group has passed."""
        claim = self._claim
        done = claim.transact(txn([], [get(claim.gate), self._newer_roster()]), deadline)
        self._note(done.found(1))
        return claim.values.read_gate(done.found(0).first, self.members)

    def _refuse_lost(self, number: int) -> None:
        """Check that no member is lost once the run has started.

        :raises MemberLostError: names the lost members.
        """
        lost = [member for member in self.members if member.token in self._lost]
        if lost and number > 1:
            raise MemberLostError(
                f"group {self.group!r} has lost {', '.join(map(str, lost))}: its lease expired, or it left",
                f"read the last output of each lost rank; {longer_lease(self.ttl, 'its host')}then start the run again",
            )

    def _missing(self, number: int, timeout: float) -> MembershipError:
        lost = [member for member in self.members if member.token in self._lost]
        gone = f"; the lease of {', '.join(map(str, lost))} expired, and no process took that rank" if lost else ""
        return MissingRanksError(
            f"waited {timeout:g} s at {self._missing_members(number)}{gone}", "read the last output of these ranks"
        )

    def _missing_members(self, number: int) -> str:
        prefix = f"{self.root}arrived/{number:06d}/"
        done = TransactionResult.of(self._claim.client.transaction(txn([], [get_prefix(prefix)])))
        here = self._claim.values.arrived(done.found(0), prefix, self.members)
        missing = [str(member) for member in self.members if member.rank not in here]
        barrier = f"barrier {number} of group {self.group!r}"
        return f"{barrier} for {', '.join(missing)}" if missing else f"{barrier}: all ranks arrived"
