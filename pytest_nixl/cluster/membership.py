# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that meet in an etcd: each gets a rank of its own, and all get the same list of who has which.

A member is one key with its own random token, kept by a lease. Its rank is the one that its launcher or its user gave
it, else a free place, by create revision. Who completes the group freezes the list in one transaction; the others are
told by a watch. Nothing is read, changed and written back. Where two want one rank, what is frozen is a refusal, which
every member is told.

Every write is one that can be repeated: after a lost answer the second attempt finds its own first one. What is not
certain any more once a lease has ended is refused by the lease itself, or by :class:`FencedError`.

Keys, under ``PREFIX/GROUP/``, or under ``PREFIX/GROUP.SUFFIX/`` where the group has a token (:func:`group_root`):

* ``members/TOKEN``: who is there, with its lease;
* ``run/frozen``: the list, or the refusal, once all were there; ``run/gate``: its version is the number of barriers
  that were passed;
* ``arrived/BARRIER/RANK``: who waits at a barrier, with its lease.

What is under ``run/`` has no lease, as no single member's end may take it away. It goes with the last member to leave;
where that was killed, with the first one of the next group of this name: a group without members has ended.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from pytest_nixl.cluster.claimants import Claimant, may_settle, quarrel, seat, who_is_missing
from pytest_nixl.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, EtcdError, Event, Lease, Watched
from pytest_nixl.etcd.transaction import (
    Done,
    Found,
    KeyValue,
    Part,
    absent,
    at_version,
    delete,
    delete_prefix,
    empty,
    get,
    get_prefix,
    nested,
    present,
    put,
    txn,
    unchanged,
)

T = TypeVar("T")
#: Called with a sentence about who is waited for.
Waiting = Callable[[str], None]

PREFIX = "/pytest-nixl/groups"
#: Seconds that a member lives in etcd without a sign of life.
TTL = 6
#: Seconds from one sentence about who is waited for to the next one.
SAID_EVERY = 5.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_OF_TOKEN = re.compile(r"(?P<group>.+)\.[0-9a-f]{16}")
#: What may mend itself while a request is tried again: an etcd that restarts, or changes its leader.
_PASSING = {"refused", "unreachable", "timeout", "closed", "no-leader", "no-member"}
#: Seconds that etcd may be late with the end of a lease: it looks twice a second.
_LATE = 2.0


class MembershipError(NixlPluginError):
    """A group could not be joined, or has lost a member."""


class RefusedError(MembershipError):
    """The group is another's: it has all its members, and they are alive. Or its members are in each other's way."""


class MissingRanksError(MembershipError):
    """Not all ranks came in time."""


class MemberLostError(MembershipError):
    """A member of a group that had started has gone: its lease ended, or it left."""


class FencedError(MembershipError):
    """The own lease has ended, or may have: this member must not act as its rank any more."""


@dataclass(frozen=True)
class Member:
    """One rank, as every member sees it."""

    rank: int
    token: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


def group_root(prefix: str, group: str, token: str = "") -> str:
    """Return the start of all keys of a group, with a slash at its end: who does not know the token never meets it."""
    suffix = f".{hmac.new(token.encode(), group.encode(), hashlib.sha256).hexdigest()[:16]}" if token else ""
    return f"{prefix.rstrip('/')}/{group}{suffix}/"


def group_name(folder: str) -> tuple[str, bool]:
    """Return the name of the group whose keys are in ``PREFIX/FOLDER/``, and whether it has a token."""
    match = _OF_TOKEN.fullmatch(folder)
    return (match["group"], True) if match else (folder, False)


@dataclass(frozen=True)
class _Frozen:
    """The list that was frozen, and the key that holds it. With a ``refusal`` there is no list, and will be none."""

    key: KeyValue
    ttl: int
    members: tuple[Member, ...]
    refusal: str

    @classmethod
    def of(cls, key: KeyValue) -> _Frozen:
        plain = json.loads(key.value)
        members = (Member(rank, *parts) for rank, parts in enumerate(plain["members"]))
        return cls(key, plain["ttl"], tuple(members), plain.get("refusal", ""))

    def rank_of(self, token: str) -> int | None:
        return next((member.rank for member in self.members if member.token == token), None)


class Membership:
    """One place in one group, made by :func:`join`. As a context manager it leaves at the end."""

    def __init__(self, claim: _Claim, frozen: _Frozen, rank: int, seen: int) -> None:
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
            self._frozen = _Frozen.of(found.first)

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
                self._frozen = _Frozen.of(item)
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


class _Claim:
    """What a claimant has in etcd: a lease that is kept up, and the key that hangs on it."""

    def __init__(
        self, client: EtcdClient, group: str, size: int, *, ttl: int, root: str, host: str, wanted: int | None
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
        self.members = f"{self.root}members/"
        self.own = f"{self.members}{self.token}"
        self.frozen = f"{self.root}run/frozen"
        self.gate = f"{self.root}run/gate"
        #: None until it has one.
        self.rank: int | None = None
        self._lease: Lease | None = None
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

    def fenced(self) -> FencedError:
        who = f"{f'rank {self.rank}, ' if self.rank is not None else ''}{self.host}, pid {os.getpid()}"
        return FencedError(
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

    def transact(self, transaction: Part, deadline: float) -> Done:
        return self.insist(lambda: Done.of(self.client.transaction(transaction)), deadline)

    def watch(self, *watched: Watched, deadline: float, tick: Callable[[], None] | None = None) -> Iterator[Event]:
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
        return Claimant(self.token, self.host, os.getpid(), self.size, self.wanted).value

    def leave(self) -> None:
        self._left.set()
        if self._keeping is not None:
            # Not for as long as an etcd that cannot be reached holds its request: it refreshes nothing any more.
            self._keeping.join(_LATE)
            self._keeping = None
        if self._lease is None:
            return
        deadline = time.monotonic() + _LATE
        lease, self._lease = self._lease, None
        self.insist(lease.revoke, deadline)
        self.insist(lambda: self.client.transaction(txn([empty(self.members)], [delete_prefix(self.root)])), deadline)


def join(
    client: EtcdClient,
    group: str,
    size: int,
    *,
    ttl: int = TTL,
    timeout: float = 60.0,
    prefix: str = PREFIX,
    host: str = "",
    wanted: int | None = None,
    token: str = "",
    waiting: Waiting | None = None,
) -> Membership:
    """Join a group of ``size`` ranks, and return when all of them are there.

    It takes a lease, a claim, and the watch that waits for the others; who completes the group reads the list and
    freezes it instead: four requests at most, however many ranks there are.

    :param group: a name that all ranks are given, and nobody else; letters, digits, ``.``, ``_`` and ``-``.
    :param ttl: seconds after which a member that died is taken for dead; its place is then free.
    :param timeout: seconds for all ranks to come.
    :param host: how failures name this machine; empty for its host name.
    :param wanted: the rank that the launcher or the user gave this process; None: any.
    :param token: what all ranks are given and no stranger knows; without it, or with another one, nobody meets them.
    :param waiting: called every five seconds of the wait for the others, with a sentence that names who is missing.
    :raises RefusedError: where the group has all its members already, naming them; and for every member of a group in
        which one rank is wanted twice, or one that there is not.
    :raises MissingRanksError: where not all came in time, naming who did.
    :raises FencedError: where the lease ended before the group was there.
    :raises EtcdError: where the etcd cannot be reached, or refuses.
    """
    if not _NAME.fullmatch(group):
        raise ValueError(f"group {group!r} has characters that no key may have: expected letters, digits, . _ and -")
    if size < 1:
        raise ValueError(f"a group of {size} ranks cannot be joined: expected 1 or more")
    if wanted is not None and wanted < 0:
        raise ValueError(f"rank {wanted} cannot be had: ranks are counted from 0")
    root = group_root(prefix, group, token)
    claim = _Claim(client, group, size, ttl=ttl, root=root, host=host or socket.gethostname(), wanted=wanted)
    try:
        return _Joining(claim, timeout, waiting).run()
    except BaseException:
        # Whatever ends it, Ctrl-C too: a claim that nobody holds must not stand in others' way.
        with suppress(EtcdError):  # then the lease ends by itself
            claim.leave()
        raise


class _Joining:
    """The way from a claim to a membership."""

    def __init__(self, claim: _Claim, timeout: float, waiting: Waiting | None) -> None:
        self._claim = claim
        self._timeout = timeout
        self._waiting = waiting
        self._deadline = time.monotonic() + timeout
        self._seen = 0

    def run(self) -> Membership:
        claim = self._claim
        claim.grant(self._deadline)
        while True:
            frozen, count = self._place()
            claimed = count > 0
            if frozen is None and count >= claim.size:
                frozen = self._freeze()
            if frozen is None:
                frozen = self._wait_for_list()
            if frozen.refusal and claimed:
                raise self._refused(frozen)
            if frozen.rank_of(claim.token) is None:
                frozen = self._take_over(frozen)
            if frozen is not None:
                break  # else the group that was in the way has ended
        rank = frozen.rank_of(claim.token)
        assert rank is not None, "a list without us is left by another way"
        if len(frozen.members) != claim.size:
            raise self._refused(frozen, self._why_not(frozen, started=False))
        return Membership(claim, frozen, rank, self._seen)

    def _place(self) -> tuple[_Frozen | None, int]:
        """Claim a place; return the list, where it is frozen already, and how many have a place: 0 if not we too."""
        claim = self._claim
        run, members = f"{claim.root}run/", claim.members
        write, count = put(claim.own, claim.value(), claim.lease), get_prefix(members, count_only=True)
        # The first member of all sweeps what a group that has ended left behind. A group that has frozen its list takes
        # nobody; and who finds a key of its own has been here, and lost the answer.
        join = txn(
            [absent(claim.own), absent(claim.frozen)],
            [write, count],
            [get(claim.own), get_prefix(members, count_only=True), get_prefix(run)],
        )
        done = claim.transact(txn([empty(members)], [delete_prefix(run), write, count], [nested(join)]), self._deadline)
        self._seen = done.revision
        if done.succeeded:
            return None, done.found(2).count
        inner = done.inner(0)
        if inner.succeeded:
            return None, inner.found(1).count
        frozen = self._list_in(inner.found(2))
        return frozen, inner.found(1).count if inner.found(0).first else 0

    def _list_in(self, found: Found) -> _Frozen | None:
        key = next((item for item in found.items if item.key == self._claim.frozen), None)
        return _Frozen.of(key) if key is not None else None

    def _freeze(self) -> _Frozen:
        """Freeze the list, or the refusal of one, unless somebody has."""
        claim = self._claim
        claimants = self._first_claimants()
        patience = min(self._deadline, time.monotonic() + claim.ttl + _LATE)
        while len(claimants) == claim.size and may_settle(claimants, claim.size):
            # One of them may be the successor of another one that was killed, and whose lease has not ended yet.
            frozen, settled = self._one_goes(claimants, patience)
            if frozen is not None:
                return frozen
            if not settled:
                break
            claimants = self._first_claimants()
        if len(claimants) < claim.size:
            return self._wait_for_list()  # one has gone meanwhile, and who replaces it freezes the list
        # Only in the group that was read: while our own key is there it is the same one.
        done = claim.transact(
            txn(
                [absent(claim.frozen), present(claim.own)],
                [put(claim.frozen, self._outcome(claimants)), get(claim.frozen)],
                [get(claim.own), get(claim.frozen)],
            ),
            self._deadline,
        )
        if not done.succeeded and done.found(0).first is None:
            raise claim.fenced()
        key = done.found(1).first
        assert key is not None, "one of the two transactions has written it"
        return _Frozen.of(key)

    def _first_claimants(self) -> list[Claimant]:
        """Return who came first, as many as there are places, if so many are there."""
        claim = self._claim
        members = get_prefix(claim.members, limit=claim.size, by_creation=True)
        found = claim.transact(txn([], [members]), self._deadline).found(0)
        return [Claimant.of(item.key, item.value) for item in found.items]

    def _one_goes(self, claimants: Sequence[Claimant], patience: float) -> tuple[_Frozen | None, bool]:
        """Wait until one of them has gone; return the list where it is frozen meanwhile, and whether one has."""
        claim = self._claim
        watched = (
            Watched(claim.frozen, self._seen + 1),
            Watched(claim.members, self._seen + 1, prefix=True, deletions=True),
        )
        keys = {f"{claim.members}{claimant.token}" for claimant in claimants}
        for event in claim.watch(*watched, deadline=patience, tick=self._tick):
            if event.item.key == claim.frozen and not event.deleted:
                return _Frozen.of(event.item), False
            if event.item.key in keys:
                return None, True
        return None, False

    def _outcome(self, claimants: Sequence[Claimant]) -> bytes:
        """What is to be frozen."""
        claim = self._claim
        if problem := quarrel(claimants, claim.size):
            refusal = f"group {claim.group!r} cannot start: {problem}"
            return json.dumps({"ttl": claim.ttl, "members": [], "refusal": refusal}).encode()
        listed = [[member.token, member.host, member.pid] for member in seat(claimants, claim.size)]
        return json.dumps({"ttl": claim.ttl, "members": listed}).encode()

    def _wait_for_list(self) -> _Frozen:
        claim = self._claim
        for event in claim.watch(Watched(claim.frozen, self._seen + 1), deadline=self._deadline, tick=self._tick):
            if not event.deleted:
                return _Frozen.of(event.item)
        claim.check()
        raise self._missing()

    @property
    def _tick(self) -> Callable[[], None] | None:
        """Says who is waited for."""
        waiting = self._waiting
        if waiting is None:
            return None
        return lambda: self._claim.tell(waiting, lambda: f"waiting for {self._absent()}")

    def _absent(self) -> str:
        claim = self._claim
        here = [Claimant.of(item.key, item.value) for item in claim.client.by_creation(claim.members)]
        return who_is_missing(here, claim.group, claim.size)

    def _missing(self) -> MissingRanksError:
        apart = self._apart()
        wait = "waits" if apart == 1 else "wait"
        hint = f"; {apart} {wait} under the same name with another --nixl-group-token" if apart else ""
        return MissingRanksError(
            f"waited {self._timeout:g} s for {self._absent()}{hint}",
            "give all of them the same --nixl-group-token, or groups of different names"
            if apart
            else "start the others with the same etcd and the same group; read what those that are missing printed",
        )

    def _apart(self) -> int:
        """Return how many wait in groups of the same name and another token."""
        claim = self._claim
        # The folder is the last part: the prefix, and the name with or without a suffix.
        prefix = claim.root.rstrip("/").rpartition("/")[0] + "/"
        named = f"{prefix}{claim.group}"
        asked = [get_prefix(f"{named}{end}", keys_only=True) for end in ("/", ".")]
        done = claim.transact(txn([], asked), time.monotonic() + _LATE)
        keys = [item.key for place in (0, 1) for item in done.found(place).items]
        waiting: Counter[str] = Counter()
        started = {key.removesuffix("run/frozen") for key in keys if key.endswith("/run/frozen")}
        for key in keys:
            folder, _, rest = key[len(prefix) :].partition("/")
            if rest.startswith("members/") and group_name(folder)[0] == claim.group:
                waiting[f"{prefix}{folder}/"] += 1
        return sum(count for root, count in waiting.items() if root != claim.root and root not in started)

    def _take_over(self, frozen: _Frozen) -> _Frozen | None:
        """Wait for the place of a member that died before the group started, or for the group's end.

        A full group may have dead members in it, whose leases have not ended yet: it is given that long, and no longer.

        :returns: the list with us in it; None where the group has ended.
        """
        claim = self._claim
        patience = min(self._deadline, time.monotonic() + frozen.ttl + _LATE)
        while True:
            now = claim.transact(
                txn([], [get_prefix(claim.members, keys_only=True), get_prefix(f"{claim.root}run/")]), self._deadline
            )
            self._seen = now.revision
            there = {item.key for item in now.found(0).items}
            current = self._list_in(now.found(1))
            if current is None:
                return None
            frozen = current
            if frozen.rank_of(claim.token) is not None:
                return frozen  # by an attempt of ours whose answer was lost
            if claim.own in there:
                # Who came too late to be listed makes the group look alive.
                claim.transact(txn([unchanged(frozen.key)], [delete(claim.own)]), self._deadline)
                continue
            started = any(item.key == claim.gate for item in now.found(1).items)
            why_not = self._why_not(frozen, started)
            free = [member for member in frozen.members if claim.members + member.token not in there]
            vacant = next((member for member in free if claim.wanted in (None, member.rank)), None)
            if not there:
                return None
            if vacant is not None and not why_not:
                if (taken := self._replace(frozen, vacant)) is not None:
                    return taken
            elif not self._something_happens(patience):
                raise self._refused(frozen, why_not or self._occupied(bool(free)))

    def _why_not(self, frozen: _Frozen, started: bool) -> str:
        """Say why the group could not take us, even if it had room; empty where it could."""
        size = len(frozen.members)
        if size != self._claim.size:
            return f"it has {size} ranks, and this claimant was told {self._claim.size}"
        return "it has started" if started else ""

    def _occupied(self, others_are_free: bool) -> str:
        if others_are_free:
            return f"rank {self._claim.wanted}, which this claimant was given, is another's"
        return "all its members are there"

    def _replace(self, frozen: _Frozen, vacant: Member) -> _Frozen | None:
        claim = self._claim
        members = [
            [member.token, member.host, member.pid] if member != vacant else [claim.token, claim.host, os.getpid()]
            for member in frozen.members
        ]
        value = json.dumps({"ttl": frozen.ttl, "members": members}).encode()
        done = claim.transact(
            txn(
                [unchanged(frozen.key), at_version(claim.gate, 0), absent(f"{claim.members}{vacant.token}")],
                [put(claim.own, claim.value(), claim.lease), put(claim.frozen, value), get(claim.frozen)],
            ),
            self._deadline,
        )
        if not done.succeeded:
            return None
        key = done.found(2).first
        assert key is not None, "it was written by the same transaction"
        self._seen = done.revision
        return _Frozen.of(key)

    def _something_happens(self, patience: float) -> bool:
        """Wait until the group's list, gate or members change; False: they did not in time."""
        claim = self._claim
        watched = (
            Watched(f"{claim.root}run/", self._seen + 1, prefix=True),
            Watched(claim.members, self._seen + 1, prefix=True, deletions=True),
        )
        return any(True for _ in claim.watch(*watched, deadline=patience))

    def _refused(self, frozen: _Frozen, why: str = "") -> RefusedError:
        claim = self._claim
        if frozen.refusal:
            return RefusedError(
                frozen.refusal,
                "give each process a rank of its own (look at --nixl-rank, and at what the launcher sets, such as "
                "SLURM_PROCID), and each job a group of its own",
            )
        return RefusedError(
            f"group {claim.group!r} takes nobody in: {why}: {', '.join(str(member) for member in frozen.members)}",
            "give each job a group of its own; or, where that one is to be replaced, end it first",
        )
