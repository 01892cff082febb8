# SPDX-License-Identifier: Apache-2.0
"""The values of a group's keys in etcd: the one place where they are sealed, opened, and read into objects.

A value without a valid seal, where the group has a token, is as if it were not there; :attr:`GroupValues.ignored` names
its key. A value that is sealed and still not what a rank writes, or such a one in a group without a token, is a
:class:`MembershipError` that names its key.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

from pytest_nixl.cluster.group import Member, Roster
from pytest_nixl.cluster.members import Candidate, not_of_a_rank
from pytest_nixl.cluster.seals import SealError, Seals
from pytest_nixl.core.strict import Number, StrictError, check, loads
from pytest_nixl.etcd.client import Lease
from pytest_nixl.etcd.transaction import (
    FoundKey,
    KeyValue,
    Part,
    TransactionResult,
    absent,
    delete,
    get,
    get_prefix,
    put,
    txn,
    unchanged,
)

#: Keys that are remembered as ignored, at most: a stranger may write any number of them.
_REMEMBERED = 100
_GATE = {"passed": Number(0, 1 << 32, whole=True)}
_log = logging.getLogger("pytest_nixl")


class GroupValues:
    """Writes and reads the values under one group's root.

    :param token: the group's; empty: every value is believed.
    """

    def __init__(self, root: str, token: str = "") -> None:
        self._seals = Seals(token, root)
        self.members = f"{root}members/"
        self.registered = f"{root}registered/"
        #: Why a key was ignored, by the key.
        self.ignored: dict[str, str] = {}

    @property
    def sealed(self) -> bool:
        """Whether the group has a token."""
        return self._seals.sealed

    # members: their seal counts on the create revision of a key that goes with their lease. Who writes an old member
    # again cannot have that key created again at the same revision.

    def register(self, token: str, lease: Lease) -> Part:
        """Return the transaction that writes the key whose create revision :meth:`member` takes."""
        key = f"{self.registered}{token}"
        return txn([absent(key)], [put(key, b"", lease)], [get(key)])

    @staticmethod
    def registration(done: TransactionResult) -> int:
        """Return that create revision, by the answer to :meth:`register`: the second one, where the first was lost."""
        if done.succeeded:
            return done.revision
        key = done.found(0).first
        assert key is not None, "one of the two transactions has written it"
        return key.create_revision

    def member(self, claimant: Candidate, revision: int) -> bytes:
        """Return the value of a member that registered at this revision."""
        return self._seals.seal(f"{self.members}{claimant.token}", claimant.value, str(revision))

    def ask_members(self) -> tuple[Part, Part]:
        """Return the two parts of a transaction whose answers :meth:`read_members` takes."""
        return get_prefix(self.members, by_creation=True), get_prefix(self.registered, keys_only=True)

    def read_members(self, done: TransactionResult, place: int = 0) -> tuple[list[Candidate], list[KeyValue]]:
        """Return the members in the order in which they came, and the keys among theirs that no member wrote.

        :param place: of the first of the two parts in the transaction.
        """
        registered = {
            item.key[len(self.registered) :]: str(item.create_revision) for item in done.found(place + 1).items
        }
        found, planted = [], []
        for item in done.found(place).items:
            value = self._open(item, registered.get(item.key[len(self.members) :], ""))
            if value is None:
                planted.append(item)
            else:
                found.append(Candidate.of(item.key, value))
        return found, planted

    # the list of members: an old one names no process that is alive, or is older by its number of changes.

    def frozen(
        self, key: str, ttl: int, members: Sequence[tuple[str, str, int]], *, refusal: str = "", changes: int = 0
    ) -> bytes:
        """Return the value of the list."""
        return self._seals.seal(key, Roster.value(ttl, members, refusal=refusal, changes=changes))

    def read_frozen(self, item: KeyValue) -> Roster | None:
        """Return the list; None: the group has not written it."""
        value = self._open(item)
        try:
            return None if value is None else Roster.of(item, value)
        except StrictError as error:
            raise not_of_a_rank(item.key, error) from None

    # the gate: its seal counts on who is on the list.

    def gate(self, key: str, passed: int, members: Sequence[Member]) -> bytes:
        """Return the value of the gate once so many barriers were passed."""
        return self._seals.seal(key, json.dumps({"passed": passed}).encode(), _digest(members))

    def read_gate(self, item: KeyValue | None, members: Sequence[Member]) -> int:
        """Return how many barriers were passed by these members."""
        value = None if item is None else self._open(item, _digest(members))
        if item is None or value is None:
            return 0
        try:
            plain = loads(value)
            check(_GATE, plain)
        except StrictError as error:
            raise not_of_a_rank(item.key, error) from None
        return int(plain["passed"])

    # who has arrived at a barrier.

    def arrival(self, key: str, member: Member) -> bytes:
        """Return the value of a member's key at a barrier."""
        return self._seals.seal(key, b"", member.token)

    def arrived(self, found: FoundKey, prefix: str, members: Sequence[Member]) -> set[int]:
        """Return the ranks among ``members`` that have arrived, by the keys under a barrier's prefix."""
        by_key = {f"{prefix}{member.rank:06d}": member for member in members}
        here = set()
        for item in found.items:
            member = by_key.get(item.key)
            if member is not None and self._open(item, member.token) is not None:
                here.add(member.rank)
        return here

    # messages from one rank to another: between these two processes, and their number is part of the key.

    def message(self, key: str, text: bytes, sender: Member, receiver: Member) -> bytes:
        """Return the value of a message."""
        return self._seals.seal(key, text, f"{sender.token}>{receiver.token}")

    def read_message(self, key: str, stored: bytes, sender: Member, receiver: Member) -> bytes:
        """Return the text of a message. :raises SealError: where it is not from that sender to that receiver."""
        return self._seals.open(key, stored, f"{sender.token}>{receiver.token}")

    def remove(self, planted: Sequence[KeyValue]) -> list[Part]:
        """Return transactions that remove keys which the group has not written, each unless it has changed since."""
        return [txn([unchanged(item)], [delete(item.key)]) for item in planted]

    def ignore(self, key: str, why: str) -> None:
        """Remember, and log once, that the value of a key is not believed."""
        if key not in self.ignored and len(self.ignored) < _REMEMBERED:
            self.ignored[key] = why
            _log.warning("the key %r is ignored: %s", key, why)

    def _open(self, item: KeyValue, sequence: str = "") -> bytes | None:
        try:
            return self._seals.open(item.key, item.value, sequence)
        except SealError as error:
            self.ignore(item.key, str(error))
            return None


def _digest(members: Sequence[Member]) -> str:
    return hashlib.sha256(" ".join(member.token for member in members).encode()).hexdigest()
