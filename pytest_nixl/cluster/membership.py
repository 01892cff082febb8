# SPDX-License-Identifier: Apache-2.0
"""One place in one group, until it is left: who the others are, barriers, and who has been lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from pytest_nixl.cluster.claim import Claim, Waiting
from pytest_nixl.cluster.group import FencedError, Frozen, Member, MemberLostError, MembershipError, MissingRanksError
from pytest_nixl.etcd.client import EtcdError, Lease, Watched
from pytest_nixl.etcd.transaction import Found, at_version, delete, get, get_prefix, present, put, txn

T = TypeVar("T")


class Membership:
    """One place in one group, got by ``joining.join``. As a context manager it leaves at the end."""

    def __init__(self, claim: Claim, frozen: Frozen, rank: int, seen: int) -> None:
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

    def fenced(self) -> FencedError:
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
        done = claim.transact(
            txn(
                [present(claim.own)],
                [
                    put(f"{here}{self.rank:06d}", b"", claim.lease),
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
        gate = done.found(3).first
        if gate is not None and gate.version >= number:
            self._note(done.found(4))
            return True
        if done.found(2).count < self.size:
            return False
        again = get(claim.frozen)
        done = claim.transact(
            txn([at_version(claim.gate, number - 1)], [again, put(claim.gate, b"")], [again]), deadline
        )
        self._note(done.found(0))
        return True

    def _note(self, found: Found) -> None:
        """Take the list as it is now that the gate is open: a place may have been taken over unseen before."""
        if found.first is not None:
            self._frozen = Frozen.of(found.first)

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
            if item.key == claim.gate and item.version >= number:
                return
            if item.key == claim.frozen and not event.deleted:
                self._frozen = Frozen.of(item)
        claim.check()
        raise self._missing(number, timeout)

    def _gate(self, deadline: float) -> int:
        """Return how many barriers were passed."""
        claim = self._claim
        done = claim.transact(txn([], [get(claim.gate), get(claim.frozen)]), deadline)
        self._note(done.found(1))
        gate = done.found(0).first
        return gate.version if gate is not None else 0

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
        here = {int(key[len(prefix) :]) for key in self._claim.client.get_prefix(prefix)}
        absentees = [str(member) for member in self.members if member.rank not in here]
        return f"barrier {number} of group {self.group!r} for {', '.join(absentees) or 'nobody: all are there'}"
