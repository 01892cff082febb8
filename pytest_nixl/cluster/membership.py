# SPDX-License-Identifier: Apache-2.0
"""One place in one group, until it is left: who the others are, barriers, and who has been lost."""

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
)
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.registration import Registration, Waiting
from pytest_nixl.etcd.client import EtcdError, Lease, Watched
from pytest_nixl.etcd.transaction import (
    FoundKey,
    KeyValue,
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

T = TypeVar("T")


class Membership:
    """One place in one group, got by ``joining.join``. As a context manager it leaves at the end."""

    def __init__(self, claim: Registration, frozen: Roster, rank: int, seen: int) -> None:
        self._claim = claim
        self._frozen = frozen
        #: This member's rank, from 0.
        self.rank = claim.rank = rank
        #: Revisions until which all that happened under ``run/`` and to members is known.
        self._seen_run = self._seen_members = seen
        self._lost: dict[str, Member] = {}
        self._passed = 0

    @property
    def group(self) -> str:
        """The group's name."""
        return self._claim.group

    @property
    def root(self) -> str:
        """The prefix of all keys of the group; it ends with a slash."""
        return self._claim.root

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._frozen.members)

    @property
    def members(self) -> tuple[Member, ...]:
        """Every rank. Until the first barrier a place may be taken over, by who replaces one that died."""
        return self._frozen.members

    @property
    def values(self) -> GroupValues:
        """Writes and reads the values of the group's keys."""
        return self._claim.values

    @property
    def lease(self) -> Lease:
        """The lease that keeps this member: hang keys on it that must go with it."""
        return self._claim.lease

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.leave()
        except EtcdError:
            # The error that is under way says more, and the lease ends by itself.
            if error is None:
                raise

    def check(self) -> None:
        """:raises FencedError: where this member's lease has ended, or may have, by its own clock."""
        self._claim.check()

    def fenced(self) -> LeaseLostError:
        """Return the error of this member's own end as its rank."""
        return self._claim.fenced()

    def insist(self, ask: Callable[[], T]) -> T:
        """Ask an etcd that restarts or changes its leader again, while the lease lives: only what may be done twice.

        :raises FencedError: where the lease has ended meanwhile.
        """
        return self._claim.insist(ask, time.monotonic() + self._claim.ttl)

    def barrier(self, timeout: float = 60.0, waiting: Waiting | None = None) -> None:
        """Wait until every rank has come here. The first barrier starts the group: its places are then final.

        It takes each rank two requests, whatever their number.

        :param timeout: seconds.
        :param waiting: called every five seconds of the wait, with a sentence that names who has not come.
        :raises MissingRanksError: where some have not come in time, naming them.
        :raises MemberLostError: where the group had started, and one of them has gone.
        :raises FencedError: where this member's own lease has ended.
        """
        deadline = time.monotonic() + timeout
        number = self._passed + 1
        if not self._arrive(number, deadline):
            self._wait_for_gate(number, deadline, timeout, waiting)
        self._passed = number

    def leave(self) -> None:
        """Give the place up: end the lease, and remove what the group has left behind if this was its last member."""
        self._claim.leave()

    def _arrive(self, number: int, deadline: float) -> bool:
        """Say that we are here; return whether the barrier is open."""
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
                    get(claim.frozen),
                ],
            ),
            deadline,
        )
        if not done.succeeded:
            raise claim.fenced()
        self._note(done.found(4))
        gate = done.found(3).first
        while claim.values.read_gate(gate, self.members) < number:
            if done.found(2).count < self.size or not self._all_are_at(here, deadline):
                return False
            # The gate is opened once, by whoever finds it as it was seen.
            as_seen = unchanged(gate) if gate is not None else absent(claim.gate)
            again = [get(claim.frozen), get(claim.gate)]
            opened = claim.values.gate(claim.gate, number, self.members)
            opening = claim.transact(txn([as_seen], [put(claim.gate, opened), *again], again), deadline)
            place = 1 if opening.succeeded else 0
            self._note(opening.found(place))
            gate = opening.found(place + 1).first
            if time.monotonic() > deadline:
                return False
        return True

    def _all_are_at(self, here: str, deadline: float) -> bool:
        """Whether the keys at a barrier are every rank's own; without a token that is taken for granted."""
        claim = self._claim
        if not claim.values.sealed:
            return True
        done = claim.transact(txn([], [get_prefix(here), get(claim.frozen)]), deadline)
        self._note(done.found(1))
        return len(claim.values.arrived(done.found(0), here, self.members)) == self.size

    def _note(self, found: FoundKey) -> None:
        """Take the list as it is now that the gate is open: a place may have been taken over unseen before."""
        if found.first is not None:
            self._take(found.first)

    def _take(self, item: KeyValue) -> None:
        """Take a list that is this group's, has this member at its rank, and is no older than the one that is known."""
        frozen = self._claim.values.read_frozen(item)
        if frozen is None:
            return
        if frozen.rank_of(self._claim.token) == self.rank and frozen.changes >= self._frozen.changes:
            self._frozen = frozen
        else:
            self._claim.values.ignore(item.key, "it is a list of another run, or an older one of this run")

    def _wait_for_gate(self, number: int, deadline: float, timeout: float, waiting: Waiting | None) -> None:
        claim = self._claim

        def say() -> None:
            if waiting is not None:
                claim.tell(waiting, lambda: f"waiting at {self._absentees(number)}")

        watched = (
            Watched(f"{claim.root}run/", self._seen_run + 1, prefix=True),
            Watched(claim.members, self._seen_members + 1, prefix=True, deletions=True),
        )
        self._refuse_lost(number)
        for event in claim.watch(*watched, deadline=deadline, tick=say if waiting else None):
            item = event.item
            if item.key.startswith(claim.members):
                self._seen_members = item.mod_revision
                if item.key == claim.own:
                    raise claim.fenced()
                gone = [member for member in self.members if item.key.endswith(f"/{member.token}")]
                self._lost.update({member.token: member for member in gone})
                # Who was at this barrier and left behind it may be told of before the barrier.
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
                self._take(item)
        claim.check()
        raise self._missing(number, timeout)

    def _gate(self, deadline: float) -> int:
        """Return how many barriers were passed."""
        claim = self._claim
        done = claim.transact(txn([], [get(claim.gate), get(claim.frozen)]), deadline)
        self._note(done.found(1))
        return claim.values.read_gate(done.found(0).first, self.members)

    def _refuse_lost(self, number: int) -> None:
        """:raises MemberLostError: where the group has started and is not whole any more."""
        lost = [member for member in self.members if member.token in self._lost]
        if lost and number > 1:
            raise MemberLostError(
                f"group {self.group!r} has lost {', '.join(map(str, lost))}: the lease ended, or that rank left",
                "read what that rank printed last; start the group again",
            )

    def _missing(self, number: int, timeout: float) -> MembershipError:
        lost = [member for member in self.members if member.token in self._lost]
        gone = f"; the lease of {', '.join(map(str, lost))} has ended, and nobody took that place" if lost else ""
        return MissingRanksError(
            f"waited {timeout:g} s at {self._absentees(number)}{gone}", "read what these ranks printed last"
        )

    def _absentees(self, number: int) -> str:
        prefix = f"{self.root}arrived/{number:06d}/"
        done = TransactionResult.of(self._claim.client.transaction(txn([], [get_prefix(prefix)])))
        here = self._claim.values.arrived(done.found(0), prefix, self.members)
        absentees = [str(member) for member in self.members if member.rank not in here]
        return f"barrier {number} of group {self.group!r} for {', '.join(absentees) or 'nobody: all are there'}"
