# SPDX-License-Identifier: Apache-2.0
"""Joining a group: from a claim to a membership, or to the words for why not."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from pytest_nixl.cluster.group import (
    NAME,
    PREFIX,
    TTL,
    JoinRefusedError,
    Member,
    MissingRanksError,
    Roster,
    group_name,
    group_root,
)
from pytest_nixl.cluster.members import Candidate, may_settle, quarrel, seat, shorten, who_is_missing
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.registration import LATE, Registration, Waiting
from pytest_nixl.etcd.client import EtcdClient, EtcdError, Watched
from pytest_nixl.etcd.transaction import (
    FoundKey,
    KeyValue,
    TransactionResult,
    absent,
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
    freezes it instead: four requests at most, however many ranks there are, and one more where there is a token.

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
    if not NAME.fullmatch(group):
        raise ValueError(f"group {group!r} has characters that no key may have: expected letters, digits, . _ and -")
    if size < 1:
        raise ValueError(f"a group of {size} ranks cannot be joined: expected 1 or more")
    if wanted is not None and wanted < 0:
        raise ValueError(f"rank {wanted} cannot be had: ranks are counted from 0")
    root = group_root(prefix, group, token)
    claim = Registration(
        client, group, size, ttl=ttl, root=root, host=host or socket.gethostname(), wanted=wanted, group_token=token
    )
    try:
        return Joining(claim, timeout, waiting).run()
    except BaseException:
        # Whatever ends it, Ctrl-C too: a claim that nobody holds must not stand in others' way.
        with suppress(EtcdError):  # then the lease ends by itself
            claim.leave()
        raise


class Joining:
    """The way from a claim to a membership."""

    def __init__(self, claim: Registration, timeout: float, waiting: Waiting | None) -> None:
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
            if frozen is None and not claimed:
                self._in_time()
                continue  # the list that was in the way was nobody's of this group
            if frozen is None and count >= claim.size:
                frozen = self._freeze()
            if frozen is None:
                frozen = self._wait_for_list()
            if frozen.refusal and claimed and (frozen.rank_of(claim.token) is not None or not claim.values.sealed):
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

    def _place(self) -> tuple[Roster | None, int]:
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

    def _list_in(self, found: FoundKey) -> Roster | None:
        """Return the list among the keys under ``run/``; one that the group has not written is removed."""
        key = _named(found, self._claim.frozen)
        frozen = self._claim.values.read_frozen(key) if key is not None else None
        if key is not None and frozen is None:
            self._claim.remove([key], self._deadline)
        return frozen

    def _in_time(self) -> None:
        """:raises MissingRanksError: where the time to join is over: somebody writes false keys again and again."""
        if time.monotonic() > self._deadline:
            raise self._missing()

    def _freeze(self) -> Roster:
        """Freeze the list, or the refusal of one, unless somebody has."""
        claim = self._claim
        claimants = self._first_claimants()
        patience = min(self._deadline, time.monotonic() + claim.ttl + LATE)
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
        while True:
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
            if (frozen := self._list_in(done.found(1))) is not None:
                return frozen
            self._in_time()

    def _first_claimants(self) -> list[Candidate]:
        """Return who came first, as many as there are places, if so many are there."""
        claim = self._claim
        # Those that nobody of the group has written stay: they are not counted, and are in nobody's way yet.
        members, _ = claim.values.read_members(claim.transact(txn([], claim.values.ask_members()), self._deadline))
        return members[: claim.size]

    def _one_goes(self, claimants: Sequence[Candidate], patience: float) -> tuple[Roster | None, bool]:
        """Wait until one of them has gone; return the list where it is frozen meanwhile, and whether one has."""
        claim = self._claim
        watched = (
            Watched(claim.frozen, self._seen + 1),
            Watched(claim.members, self._seen + 1, prefix=True, deletions=True),
        )
        keys = {f"{claim.members}{claimant.token}" for claimant in claimants}
        for event in claim.watch(*watched, deadline=patience, tick=self._tick):
            written = event.item.key == claim.frozen and not event.deleted
            if written and (frozen := claim.values.read_frozen(event.item)) is not None:
                return frozen, False
            if event.item.key in keys:
                return None, True
        return None, False

    def _outcome(self, claimants: Sequence[Candidate]) -> bytes:
        """What is to be frozen."""
        claim = self._claim
        if problem := quarrel(claimants, claim.size):
            refusal = f"group {claim.group!r} cannot start: {problem}"
            listed = [(member.token, member.host, member.pid) for member in claimants]
            return claim.values.frozen(claim.frozen, claim.ttl, listed, refusal=refusal)
        listed = [(member.token, member.host, member.pid) for member in seat(claimants, claim.size)]
        return claim.values.frozen(claim.frozen, claim.ttl, listed)

    def _wait_for_list(self) -> Roster:
        claim = self._claim
        for event in claim.watch(Watched(claim.frozen, self._seen + 1), deadline=self._deadline, tick=self._tick):
            if not event.deleted and (frozen := claim.values.read_frozen(event.item)) is not None:
                return frozen
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
        done = TransactionResult.of(claim.client.transaction(txn([], claim.values.ask_members())))
        here, planted = claim.values.read_members(done)
        hint = (
            f"; not counted: {shorten([repr(item.key) for item in planted])}, without a seal of this group"
            if planted
            else ""
        )
        return who_is_missing(here, claim.group, claim.size) + hint

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
        done = claim.transact(txn([], asked), time.monotonic() + LATE)
        keys = [item.key for place in (0, 1) for item in done.found(place).items]
        waiting: Counter[str] = Counter()
        started = {key.removesuffix("run/frozen") for key in keys if key.endswith("/run/frozen")}
        for key in keys:
            folder, _, rest = key[len(prefix) :].partition("/")
            if rest.startswith("members/") and group_name(folder)[0] == claim.group:
                waiting[f"{prefix}{folder}/"] += 1
        return sum(count for root, count in waiting.items() if root != claim.root and root not in started)

    def _take_over(self, frozen: Roster) -> Roster | None:
        """Wait for the place of a member that died before the group started, or for the group's end.

        A full group may have dead members in it, whose leases have not ended yet: it is given that long, and no longer.

        :returns: the list with us in it; None where the group has ended.
        """
        claim = self._claim
        patience = min(self._deadline, time.monotonic() + frozen.ttl + LATE)
        while True:
            now = claim.transact(
                txn([], [*claim.values.ask_members(), get_prefix(f"{claim.root}run/")]), self._deadline
            )
            self._seen = now.revision
            members, planted = claim.values.read_members(now)
            there = {f"{claim.members}{member.token}" for member in members}
            run = now.found(2)
            current = self._list_in(run)
            if current is None:
                return None
            frozen = current
            gate = _named(run, claim.gate)
            started = claim.values.read_gate(gate, frozen.members) > 0
            if gate is not None and not started:
                planted.append(gate)
            if planted:
                claim.remove(planted, self._deadline)
                self._in_time()
                continue
            if frozen.rank_of(claim.token) is not None:
                return frozen  # by an attempt of ours whose answer was lost
            if claim.own in there:
                # Who came too late to be listed makes the group look alive.
                claim.transact(txn([unchanged(frozen.key)], [delete(claim.own)]), self._deadline)
                continue
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

    def _why_not(self, frozen: Roster, started: bool) -> str:
        """Say why the group could not take us, even if it had room; empty where it could."""
        if frozen.refusal:
            return frozen.refusal
        size = len(frozen.members)
        if size != self._claim.size:
            return f"it has {size} ranks, and this claimant was told {self._claim.size}"
        return "it has started" if started else ""

    def _occupied(self, others_are_free: bool) -> str:
        if others_are_free:
            return f"rank {self._claim.wanted}, which this claimant was given, is another's"
        return "all its members are there"

    def _replace(self, frozen: Roster, vacant: Member) -> Roster | None:
        claim = self._claim
        members = [
            (member.token, member.host, member.pid) if member != vacant else (claim.token, claim.host, os.getpid())
            for member in frozen.members
        ]
        value = claim.values.frozen(claim.frozen, frozen.ttl, members, changes=frozen.changes + 1)
        done = claim.transact(
            txn(
                [unchanged(frozen.key), absent(claim.gate), absent(f"{claim.members}{vacant.token}")],
                [put(claim.own, claim.value(), claim.lease), put(claim.frozen, value), get(claim.frozen)],
            ),
            self._deadline,
        )
        if not done.succeeded:
            return None
        self._seen = done.revision
        return self._list_in(done.found(2))

    def _something_happens(self, patience: float) -> bool:
        """Wait until the group's list, gate or members change; False: they did not in time."""
        claim = self._claim
        watched = (
            Watched(f"{claim.root}run/", self._seen + 1, prefix=True),
            Watched(claim.members, self._seen + 1, prefix=True, deletions=True),
        )
        return any(True for _ in claim.watch(*watched, deadline=patience))

    def _refused(self, frozen: Roster, why: str = "") -> JoinRefusedError:
        claim = self._claim
        if frozen.refusal:
            return JoinRefusedError(
                frozen.refusal,
                "give each process a rank of its own (look at --nixl-rank, and at what the launcher sets, such as "
                "SLURM_PROCID), and each job a group of its own",
            )
        return JoinRefusedError(
            f"group {claim.group!r} takes nobody in: {why}: {', '.join(str(member) for member in frozen.members)}",
            "give each job a group of its own; or, where that one is to be replaced, end it first",
        )


def _named(found: FoundKey, key: str) -> KeyValue | None:
    return next((item for item in found.items if item.key == key), None)
