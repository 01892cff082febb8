# SPDX-License-Identifier: Apache-2.0
"""Join a group: register, wait for the roster, and return the membership or raise the reason for the refusal."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from pytest_nixl.cluster.group import (
    NAME,
    PREFIX,
    TTL,
    Candidate,
    JoinRefusedError,
    Member,
    MissingRanksError,
    Roster,
    group_name,
    group_root,
    may_settle,
    rank_conflicts,
    seat,
    who_is_missing,
)
from pytest_nixl.cluster.membership import LATE, Membership, Waiting
from pytest_nixl.core.sentences import named
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import (
    KeyValue,
    RangeResult,
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
from pytest_nixl.etcd.watch import Watched


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
    """Join a group of ``size`` ranks, and return when all of them have joined.

    A process sends at most four requests, whatever the size of the group, and one more if the group has a token. It
    requests a lease, registers, and watches for the roster; the process that completes the group reads the members and
    writes the roster instead of watching.

    :param client: a client of the etcd in which the group meets.
    :param group: the name that all ranks of this run share, and no other run uses: 1 to 128 letters, digits, ``.``,
        ``_`` and ``-``.
    :param size: the number of ranks, 1 or more.
    :param ttl: seconds after which a member that etcd hears nothing from counts as dead; its rank is then free.
    :param timeout: seconds to wait until all ranks have joined.
    :param prefix: the prefix of the keys of all groups.
    :param host: the name of this host in messages; empty for its host name.
    :param wanted: the rank that this process requests, from 0; None for any.
    :param token: the shared secret of all ranks. Processes with another token, or with none, are in another group.
    :param waiting: called every five seconds of the wait (less often with more than 64 ranks), with a sentence that
        names the missing ranks.
    :raises ValueError: if group, size or requested rank is not valid.
    :raises JoinRefusedError: if the group is already complete, naming its members; or if two members request one
        rank, or one requests a rank outside the group, for every member of the group.
    :raises MissingRanksError: if not all ranks joined before the timeout, naming those that did.
    :raises LeaseLostError: if the lease ended before the group was complete.
    :raises EtcdError: if etcd cannot be reached, or refuses.
    """
    if not NAME.fullmatch(group):
        raise ValueError(f"{group!r} is not a valid group name: expected 1 to 128 letters, digits, . _ and -")
    if size < 1:
        raise ValueError(f"a group cannot have {size} ranks: expected 1 or more")
    if wanted is not None and wanted < 0:
        raise ValueError(f"{wanted} is not a valid rank: ranks are counted from 0")
    root = group_root(prefix, group, token)
    membership = Membership(
        client, group, size, ttl=ttl, root=root, host=host or socket.gethostname(), wanted=wanted, group_token=token
    )
    try:
        Joining(membership, timeout, waiting).run()
        return membership
    except BaseException:
        # Release the registration on any exit, including Ctrl-C, so that it does not block other processes.
        with suppress(EtcdError):  # etcd does not answer: the lease expires by itself
            membership.leave()
        raise


class Joining:
    """One attempt to join a group. Parameters as :func:`join`; the membership has its rank at the end."""

    def __init__(self, membership: Membership, timeout: float, waiting: Waiting | None) -> None:
        self._membership = membership
        self._timeout = timeout
        self._waiting = waiting
        self._deadline = time.monotonic() + timeout
        self._seen = 0
        #: Every process that has registered so far, by its token: one that is killed before the start is named.
        self._arrived: dict[str, Candidate] = {}

    def run(self) -> None:
        this = self._membership
        this.grant(self._deadline, self._waiting)
        while True:
            frozen, count = self._register()
            claimed = count > 0
            if frozen is None and not claimed:
                self._check_timeout()
                continue  # the key of the roster was not written by this group, and was removed
            if frozen is None and count >= this.size:
                frozen = self._freeze()
            if frozen is None:
                frozen = self._wait_for_roster()
            if frozen.refusal and claimed and (frozen.rank_of(this.token) is not None or not this.values.sealed):
                raise self._refused(frozen)
            if frozen.rank_of(this.token) is None:
                frozen = self._take_over(frozen)
            if frozen is not None:
                break  # else the group that used this name has ended, and this process registers again
        rank = frozen.rank_of(this.token)
        assert rank is not None, "_take_over returns no roster without this process"
        if len(frozen.members) != this.size:
            raise self._refused(frozen, self._why_not(frozen, started=False))
        this.accept(frozen, rank, self._seen)

    def _register(self) -> tuple[Roster | None, int]:
        """Register.

        :returns: the roster if it is already frozen, else None; and the number of registered processes, 0 if this
            process is not one of them.
        """
        this = self._membership
        run, members = f"{this.root}run/", this.member_keys
        write, count = put(this.own_key, this.value(), this.lease), get_prefix(members, count_only=True)
        # The first member removes the keys that an earlier group left. A group with a frozen roster takes no further
        # member. A process that finds its own key has already registered: the answer was lost.
        join = txn(
            [absent(this.own_key), absent(this.roster_key)],
            [write, count],
            [get(this.own_key), count, get_prefix(run)],
        )
        done = this.transact(txn([empty(members)], [delete_prefix(run), write, count], [nested(join)]), self._deadline)
        self._seen = done.revision
        if done.succeeded:
            return None, done.range_result(2).count
        inner = done.inner(0)
        if inner.succeeded:
            return None, inner.range_result(1).count
        frozen = self._roster_in(inner.range_result(2))
        return frozen, inner.range_result(1).count if inner.range_result(0).first else 0

    def _roster_in(self, roster_key: RangeResult) -> Roster | None:
        """Return the roster from the keys under ``run/``. Remove the key if no member of the group wrote it."""
        key = _find_key(roster_key, self._membership.roster_key)
        frozen = self._membership.values.read_frozen(key) if key is not None else None
        if key is not None and frozen is None:
            self._membership.remove([key], self._deadline)
        return frozen

    def _check_timeout(self) -> None:
        """Check the timeout in loops that a client without the token could keep running by writing keys.

        :raises MissingRanksError: after the timeout.
        """
        if time.monotonic() > self._deadline:
            raise self._missing()

    def _freeze(self) -> Roster:
        """Freeze the roster, or the refusal, unless another process already has."""
        this = self._membership
        candidates = self._first_candidates()
        until = min(self._deadline, time.monotonic() + this.ttl + LATE)
        while len(candidates) == this.size and may_settle(candidates, this.size):
            # One process may have been killed and started again before the lease of the killed one ended.
            frozen, settled = self._wait_until_one_leaves(candidates, until)
            if frozen is not None:
                return frozen
            if not settled:
                break
            candidates = self._first_candidates()
        if len(candidates) < this.size:
            return self._wait_for_roster()  # a member left meanwhile, and its replacement freezes the roster
        while True:
            # Only for the group whose members were read: it is the same one as long as the own key exists.
            done = this.transact(
                txn(
                    [absent(this.roster_key), present(this.own_key)],
                    [put(this.roster_key, self._value_to_freeze(candidates)), get(this.roster_key)],
                    [get(this.own_key), get(this.roster_key)],
                ),
                self._deadline,
            )
            if not done.succeeded and done.range_result(0).first is None:
                raise this.lease_lost()
            if (frozen := self._roster_in(done.range_result(1))) is not None:
                return frozen
            self._check_timeout()

    def _first_candidates(self) -> list[Candidate]:
        """Return the processes that registered first, at most one for each rank."""
        this = self._membership
        # Keys that no member wrote are not counted. They may stay, because they block nothing yet.
        members, _ = this.values.read_members(this.transact(txn([], this.values.ask_members()), self._deadline))
        return members[: this.size]

    def _wait_until_one_leaves(self, candidates: Sequence[Candidate], until: float) -> tuple[Roster | None, bool]:
        """Wait until one of these processes leaves.

        :returns: the roster if it is frozen meanwhile, else None; and whether one of the processes left.
        """
        this = self._membership
        watched = (
            Watched(this.roster_key, self._seen + 1),
            Watched(this.member_keys, self._seen + 1, prefix=True, deletions=True),
        )
        keys = {f"{this.member_keys}{candidate.token}" for candidate in candidates}
        for event in this.watch(*watched, deadline=until, known=keys, tick=self._report):
            written = event.item.key == this.roster_key and not event.deleted
            if written and (frozen := this.values.read_frozen(event.item)) is not None:
                return frozen, False
            if event.item.key in keys:
                return None, True
        return None, False

    def _value_to_freeze(self, candidates: Sequence[Candidate]) -> bytes:
        """Return the value to freeze: the roster, or the refusal if requests conflict."""
        this = self._membership
        problem = rank_conflicts(candidates, this.size)
        refusal = f"group {this.group!r} cannot start: {problem}" if problem else ""
        seated = candidates if problem else seat(candidates, this.size)
        listed = [(member.token, member.host, member.pid) for member in seated]
        return this.values.frozen(this.roster_key, this.ttl, listed, refusal=refusal)

    def _wait_for_roster(self) -> Roster:
        this = self._membership
        for event in this.watch(Watched(this.roster_key, self._seen + 1), deadline=self._deadline, tick=self._report):
            if not event.deleted and (frozen := this.values.read_frozen(event.item)) is not None:
                return frozen
        this.check()
        raise self._missing()

    @property
    def _report(self) -> Callable[[], None] | None:
        """Return the function that names the missing ranks; None if the caller does not want to hear of them."""
        waiting = self._waiting
        if waiting is None:
            return None
        return lambda: self._membership.report_wait(
            waiting, lambda: f"waiting for {self._missing_ranks()}{self._with_other_token()[0]}", self._timeout
        )

    def _missing_ranks(self) -> str:
        this = self._membership
        done = TransactionResult.of(this.client.transaction(txn([], this.values.ask_members())))
        present, planted = this.values.read_members(done)
        hint = (
            f"; not counted, without a seal of this group: {named((repr(item.key) for item in planted), 8)}"
            if planted
            else ""
        )
        self._arrived |= {presence.token: presence for presence in present}
        gone = [
            presence for token, presence in self._arrived.items() if token not in {member.token for member in present}
        ]
        gone_again = f"; registered, and is gone again: {named(map(_named, gone), 8)}" if gone else ""
        return who_is_missing(present, this.group, this.size) + gone_again + hint

    def _missing(self) -> MissingRanksError:
        hint, strangers = self._with_other_token()
        return MissingRanksError(
            f"waited {self._timeout:g} s for {self._missing_ranks()}{hint}",
            "give every rank the same --nixl-group-token; or, if these are different runs, give each its own "
            "--nixl-group"
            if strangers
            else "start the missing ranks with the same --nixl-etcd and --nixl-group; if they run, read their output",
        )

    def _with_other_token(self) -> tuple[str, int]:
        """Return a hint at processes that wait with another token, and their number."""
        strangers = self._count_other_tokens()
        processes = "1 process waits" if strangers == 1 else f"{strangers} processes wait"
        hint = f"; {processes} in a group of the same name with another --nixl-group-token" if strangers else ""
        return hint, strangers

    def _count_other_tokens(self) -> int:
        """Return how many processes wait in groups with the same name and another token."""
        this = self._membership
        # The root is PREFIX/FOLDER/, and the folder is the group's name with or without a suffix.
        prefix = this.root.rstrip("/").rpartition("/")[0] + "/"
        named = f"{prefix}{this.group}"
        requests = [get_prefix(f"{named}{end}", keys_only=True) for end in ("/", ".")]
        done = this.transact(txn([], requests), time.monotonic() + LATE)
        keys = [item.key for place in (0, 1) for item in done.range_result(place).items]
        waiting: Counter[str] = Counter()
        started = {key.removesuffix("run/frozen") for key in keys if key.endswith("/run/frozen")}
        for key in keys:
            folder, _, key_end = key[len(prefix) :].partition("/")
            if key_end.startswith("members/") and group_name(folder)[0] == this.group:
                waiting[f"{prefix}{folder}/"] += 1
        return sum(count for root, count in waiting.items() if root != this.root and root not in started)

    def _take_over(self, frozen: Roster) -> Roster | None:
        """Wait until a member dies before the group starts and take its rank, or wait until the group ends.

        The wait lasts no longer than a lease, because a complete group may have dead members whose leases have not
        ended yet.

        :returns: the roster with this process in it; None if the group has ended.
        :raises JoinRefusedError: if no rank became free.
        """
        this = self._membership
        until = min(self._deadline, time.monotonic() + frozen.ttl + LATE)
        while True:
            now = this.transact(txn([], [*this.values.ask_members(), get_prefix(f"{this.root}run/")]), self._deadline)
            self._seen = now.revision
            members, planted = this.values.read_members(now)
            present = {f"{this.member_keys}{member.token}" for member in members}
            run = now.range_result(2)
            current = self._roster_in(run)
            if current is None:
                return None
            frozen = current
            gate = _find_key(run, this.gate_key)
            started = this.values.read_gate(gate, frozen.members) > 0
            if gate is not None and not started:
                planted.append(gate)
            if planted:
                this.remove(planted, self._deadline)
                self._check_timeout()
                continue
            if frozen.rank_of(this.token) is not None:
                return frozen  # an earlier attempt succeeded, and its answer was lost
            if this.own_key in present:
                # Remove the own key: a process that is not on the roster must not make the group look alive.
                this.transact(txn([unchanged(frozen.key)], [delete(this.own_key)]), self._deadline)
                continue
            why_not = self._why_not(frozen, started)
            free = [member for member in frozen.members if this.member_keys + member.token not in present]
            vacant = next((member for member in free if this.wanted in (None, member.rank)), None)
            if not present:
                return None
            if vacant is not None and not why_not:
                if (replaced := self._replace(frozen, vacant)) is not None:
                    return replaced
            elif not self._wait_for_change(present, until):
                all_taken = "all its ranks are taken"
                taken = f"rank {this.wanted}, which this process requests, is taken" if free else all_taken
                raise self._refused(frozen, why_not or taken)

    def _why_not(self, frozen: Roster, started: bool) -> str:
        """Say why this process could not join even if a rank were free; empty if it could."""
        if frozen.refusal:
            return frozen.refusal
        size = len(frozen.members)
        if size != self._membership.size:
            return f"it has {size} ranks, but this process has --nixl-ranks={self._membership.size}"
        return "the run has already started" if started else ""

    def _replace(self, frozen: Roster, vacant: Member) -> Roster | None:
        this = self._membership
        members = [
            (member.token, member.host, member.pid) if member != vacant else (this.token, this.host, os.getpid())
            for member in frozen.members
        ]
        value = this.values.frozen(this.roster_key, frozen.ttl, members, changes=frozen.changes + 1)
        done = this.transact(
            txn(
                [unchanged(frozen.key), absent(this.gate_key), absent(f"{this.member_keys}{vacant.token}")],
                [
                    put(this.own_key, this.value(), this.lease),
                    put(this.roster_key, value),
                    get(this.roster_key),
                ],
            ),
            self._deadline,
        )
        if not done.succeeded:
            return None
        self._seen = done.revision
        return self._roster_in(done.range_result(2))

    def _wait_for_change(self, present: Collection[str], until: float) -> bool:
        """Wait until the group's roster, gate or members change; return whether they did in time.

        :param present: the keys of the members that etcd has.
        """
        this = self._membership
        watched = (
            Watched(f"{this.root}run/", self._seen + 1, prefix=True),
            Watched(this.member_keys, self._seen + 1, prefix=True, deletions=True),
        )
        return any(True for _ in this.watch(*watched, deadline=until, known=present))

    def _refused(self, frozen: Roster, reason: str = "") -> JoinRefusedError:
        this = self._membership
        if frozen.refusal:
            return JoinRefusedError(
                frozen.refusal,
                "give each process a different --nixl-rank (or check what the launcher sets, such as SLURM_PROCID), "
                "and give each job its own --nixl-group",
            )
        return JoinRefusedError(
            f"group {this.group!r} is closed: {reason}; its members are "
            f"{', '.join(str(member) for member in frozen.members)}",
            "give each job its own --nixl-group; or, to replace that group, end its processes first",
        )


def _named(candidate: Candidate) -> str:
    return f"{'a rank' if candidate.requested_rank is None else f'rank {candidate.requested_rank}'} on {candidate}"


def _find_key(found_keys: RangeResult, key: str) -> KeyValue | None:
    return next((item for item in found_keys.items if item.key == key), None)
