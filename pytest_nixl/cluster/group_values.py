# SPDX-License-Identifier: Apache-2.0
"""Seal, open and parse the values of a group's keys in etcd. No other module does.

If the group has a token, a value without a valid seal is treated as absent, and :attr:`GroupValues.ignored` names its
key. If a value has a valid seal, or the group has no token, but no rank writes such a value, reading it raises a
:class:`MembershipError` that names the key.
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
    put,
    txn,
    unchanged,
)

#: The largest number of ignored keys that are remembered, because a client without the token may write any number.
_REMEMBERED = 100
_GATE = {"passed": Number(0, 1 << 32, whole=True)}
_log = logging.getLogger("pytest_nixl")


class GroupValues:
    """Writes and reads the values under one group's root.

    :param root: the prefix of the group's keys, with a slash at its end.
    :param token: the group token; empty if every value is to be believed.
    """

    def __init__(self, root: str, token: str = "") -> None:
        self._seals = Seals(token, root)
        self.members = f"{root}members/"
        self.registered = f"{root}registered/"
        #: The reason for which each key was ignored.
        self.ignored: dict[str, str] = {}

    @property
    def sealed(self) -> bool:
        """Whether the group has a token."""
        return self._seals.sealed

    # Members. Their seal contains the create revision of a second key with the same lease. Someone who writes an old
    # member key once more cannot create that second key at its old revision.

    def register(self, token: str, lease: Lease) -> Part:
        """Return the transaction that writes the key whose create revision is an argument of :meth:`member`."""
        key = f"{self.registered}{token}"
        return txn([absent(key)], [put(key, b"", lease)], [get(key)])

    @staticmethod
    def registration(done: TransactionResult) -> int:
        """Return that create revision from the answer to :meth:`register`, or to its repetition."""
        if done.succeeded:
            return done.revision
        key = done.found(0).first
        assert key is not None, "the first of two transactions wrote it"
        return key.create_revision

    def member(self, candidate: Candidate, revision: int) -> bytes:
        """Return the value of the key of a member that registered at this revision."""
        return self._seals.seal(f"{self.members}{candidate.token}", candidate.value, str(revision))

    def ask_members(self) -> tuple[Part, Part]:
        """Return the two parts of a transaction whose answers :meth:`read_members` reads."""
        return get_prefix(self.members, by_creation=True), get_prefix(self.registered, keys_only=True)

    def read_members(self, done: TransactionResult, place: int = 0) -> tuple[list[Candidate], list[KeyValue]]:
        """Return the members in order of arrival, and the keys under ``members/`` that no member wrote.

        :param done: the answer to the transaction.
        :param place: the index of the first of the two parts of :meth:`ask_members` in the transaction.
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

    # The roster. An old roster names no living process, or has a lower number of changes.

    def frozen(
        self, key: str, ttl: int, members: Sequence[tuple[str, str, int]], *, refusal: str = "", changes: int = 0
    ) -> bytes:
        """Return the value of the key of the roster."""
        return self._seals.seal(key, Roster.value(ttl, members, refusal=refusal, changes=changes))

    def read_frozen(self, item: KeyValue) -> Roster | None:
        """Return the roster; None if no member of the group wrote it."""
        value = self._open(item)
        try:
            return None if value is None else Roster.of(item, value)
        except StrictError as error:
            raise not_of_a_rank(item.key, error) from None

    # The gate. Its seal depends on the members of the roster.

    def gate(self, key: str, passed: int, members: Sequence[Member]) -> bytes:
        """Return the value of the gate after ``passed`` barriers."""
        return self._seals.seal(key, json.dumps({"passed": passed}).encode(), _digest(members))

    def read_gate(self, item: KeyValue | None, members: Sequence[Member]) -> int:
        """Return how many barriers these members have passed."""
        value = None if item is None else self._open(item, _digest(members))
        if item is None or value is None:
            return 0
        try:
            plain = loads(value)
            check(_GATE, plain)
        except StrictError as error:
            raise not_of_a_rank(item.key, error) from None
        return int(plain["passed"])

    # Arrivals at a barrier.

    def arrival(self, key: str, member: Member) -> bytes:
        """Return the value of a member's key at a barrier."""
        return self._seals.seal(key, b"", member.token)

    def arrived(self, found: FoundKey, prefix: str, members: Sequence[Member]) -> set[int]:
        """Return the ranks that have arrived at a barrier.

        :param found: the keys of the barrier.
        :param prefix: the prefix of these keys.
        :param members: the members of the group; keys of others are ignored.
        """
        by_key = {f"{prefix}{member.rank:06d}": member for member in members}
        here = set()
        for item in found.items:
            member = by_key.get(item.key)
            if member is not None and self._open(item, member.token) is not None:
                here.add(member.rank)
        return here

    # Messages. Their seal names the sending and the receiving process; the key contains the number of the message.

    def message(self, key: str, text: bytes, sender: Member, receiver: Member) -> bytes:
        """Return the value of a message."""
        return self._seals.seal(key, text, f"{sender.token}>{receiver.token}")

    def read_message(self, key: str, stored: bytes, sender: Member, receiver: Member) -> bytes:
        """Return the text of a message.

        :raises SealError: if it is not from this sender to this receiver.
        """
        return self._seals.open(key, stored, f"{sender.token}>{receiver.token}")

    def remove(self, planted: Sequence[KeyValue]) -> list[Part]:
        """Return transactions that remove keys which no member wrote. A key that has changed since is kept."""
        return [txn([unchanged(item)], [delete(item.key)]) for item in planted]

    def ignore(self, key: str, why: str) -> None:
        """Remember that a key is ignored, and log it once."""
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
