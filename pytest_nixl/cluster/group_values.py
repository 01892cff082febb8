# SPDX-License-Identifier: Apache-2.0
"""Seal, open and parse the values of a group's keys in etcd. No other module does.

If the group has a token, a value without a valid seal is treated as absent, and :attr:`GroupValues.ignored` names its
key. If a value has a valid seal, or the group has no token, but no rank writes such a value, reading it raises a
:class:`MembershipError` that names the key.

A seal is an HMAC-SHA256 over the key, a sequence and the value. The sequence is different for every value of a key, so
that an old value, or the value of another key, is refused like a forged one. The seal is checked before the value is
parsed. A seal does not encrypt: everyone who can read the etcd can read the value.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
from collections.abc import Sequence

from pytest_nixl.cluster.group import Candidate, Member, Roster, not_of_a_rank
from pytest_nixl.core.strict import Number, StrictError, check, loads
from pytest_nixl.etcd.client import Lease
from pytest_nixl.etcd.transaction import (
    KeyValue,
    Part,
    RangeResult,
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
_LABEL = b"pytest-nixl: values of a group in etcd, 1"
_HEX = hashlib.sha256().digest_size * 2
_SEAL = re.compile(rb"[0-9a-f]{%d} " % _HEX)


class SealError(StrictError):
    """A value has no valid seal for its key and its sequence."""


class Seals:
    """Seals and opens the values of one group. Without a token, values have no seal and every value is believed.

    :param token: the shared secret of all ranks; empty if there is none.
    :param root: the prefix of the group's keys.
    """

    def __init__(self, token: str, root: str) -> None:
        key = hmac.new(token.encode(), _LABEL + b"\0" + root.encode(), hashlib.sha256).digest()
        self._mac = hmac.new(key, digestmod=hashlib.sha256) if token else None

    @property
    def sealed(self) -> bool:
        """Whether the group has a token."""
        return self._mac is not None

    def seal(self, key: str, value: bytes, sequence: str = "") -> bytes:
        """Return the value with its seal, to be stored under ``key``.

        :param sequence: what makes this value unique, as far as the key does not: its writer, reader and number.
        """
        return value if self._mac is None else self._digest(key, value, sequence) + b" " + value

    def open(self, key: str, stored: bytes, sequence: str = "") -> bytes:
        """Check the seal of what is stored under ``key``, and return the value without it.

        :raises SealError: if the seal is not valid.
        """
        if self._mac is None:
            return stored
        value = stored[_HEX + 1 :]
        if not hmac.compare_digest(self._digest(key, value, sequence) + b" ", stored[: _HEX + 1]):
            raise SealError(
                "it has no valid seal of this group: its writer does not have the group token, or the value is old"
            )
        return value

    def _digest(self, key: str, value: bytes, sequence: str) -> bytes:
        assert self._mac is not None, "only a group with a token has seals"
        mac = self._mac.copy()
        for part in (key.encode(errors="surrogateescape"), sequence.encode(), value):
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.hexdigest().encode()


def unsealed(stored: bytes) -> bytes:
    """Return a value without its seal, unchecked: only for text that nothing else depends on."""
    return stored[_HEX + 1 :] if _SEAL.match(stored) else stored


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
        key = done.range_result(0).first
        assert key is not None, "the first of two transactions wrote it"
        return key.create_revision

    def member(self, candidate: Candidate, revision: int) -> bytes:
        """Return the value of the key of a member that registered at this revision."""
        return self._seals.seal(f"{self.members}{candidate.token}", candidate.value, str(revision))

    def ask_members(self) -> tuple[Part, Part]:
        """Return the two parts of a transaction whose answers :meth:`read_members` reads."""
        return get_prefix(self.members, by_creation=True), get_prefix(self.registered, keys_only=True)

    def read_members(self, done: TransactionResult) -> tuple[list[Candidate], list[KeyValue]]:
        """Return the members in order of arrival, and the keys under ``members/`` that no member wrote.

        :param done: the answer to the transaction, which begins with the two parts of :meth:`ask_members`.
        """
        registered = {
            item.key[len(self.registered) :]: str(item.create_revision) for item in done.range_result(1).items
        }
        members, planted = [], []
        for item in done.range_result(0).items:
            value = self._open(item, registered.get(item.key[len(self.members) :], ""))
            if value is None:
                planted.append(item)
            else:
                members.append(Candidate.of(item.key, value))
        return members, planted

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

    def arrived(self, arrivals: RangeResult, prefix: str, members: Sequence[Member]) -> set[int]:
        """Return the ranks that have arrived at a barrier.

        :param arrivals: the keys of the barrier.
        :param prefix: the prefix of these keys.
        :param members: the members of the group; keys of others are ignored.
        """
        by_key = {f"{prefix}{member.rank:06d}": member for member in members}
        tokens = set()
        for item in arrivals.items:
            member = by_key.get(item.key)
            if member is not None and self._open(item, member.token) is not None:
                tokens.add(member.rank)
        return tokens

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

    def ignore(self, key: str, reason: str) -> None:
        """Remember that a key is ignored, and log it once."""
        if key not in self.ignored and len(self.ignored) < _REMEMBERED:
            self.ignored[key] = reason
            _log.warning("the key %r is ignored: %s", key, reason)

    def _open(self, item: KeyValue, sequence: str = "") -> bytes | None:
        try:
            return self._seals.open(item.key, item.value, sequence)
        except SealError as error:
            self.ignore(item.key, str(error))
            return None


def _digest(members: Sequence[Member]) -> str:
    return hashlib.sha256(" ".join(member.token for member in members).encode()).hexdigest()
