# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that meet in an etcd: each gets a rank of its own, and all get the same list of who has which.

A member is one key with its own random token, kept by a lease. Its rank is the one that its launcher or its user gave
it, else a free place, by create revision. Who completes the group freezes the list in one transaction; the others are
told by a watch. Nothing is read, changed and written back. Where two want one rank, what is frozen is a refusal, which
every member is told.

Every write is one that can be repeated: after a lost answer the second attempt finds its own first one. What is not
certain any more once a lease has ended is refused by the lease itself, or by :class:`LeaseLostError`.

Keys, under ``PREFIX/GROUP/``, or under ``PREFIX/GROUP.SUFFIX/`` where the group has a token (:func:`group_root`), and
every value a seal (``group_values``):

* ``members/TOKEN``: who is there, with its lease; ``registered/TOKEN``, where the group has a token: with the same
  lease, and its create revision is what the member's seal counts on;
* ``run/frozen``: the list, or the refusal, once all were there; ``run/gate``: the number of barriers that were passed;
* ``arrived/BARRIER/RANK``: who waits at a barrier, with its lease.

What is under ``run/`` has no lease, as no single member's end may take it away. It goes with the last member to leave;
where that was killed, with the first one of the next group of this name: a group without members has ended.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import Every, Number, StrictError, Text, check, loads
from pytest_nixl.etcd.transaction import KeyValue

PREFIX = "/pytest-nixl/groups"
#: Seconds that a member lives in etcd without a sign of life.
TTL = 6
#: What a group may be called.
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_OF_TOKEN = re.compile(r"(?P<group>.+)\.[0-9a-f]{16}")


class MembershipError(NixlPluginError):
    """A group could not be joined, or has lost a member."""


class JoinRefusedError(MembershipError):
    """The group is another's: it has all its members, and they are alive. Or its members are in each other's way."""


class MissingRanksError(MembershipError):
    """Not all ranks came in time."""

    late = True


class MemberLostError(MembershipError):
    """A member of a group that had started has gone: its lease ended, or it left."""


class LeaseLostError(MembershipError):
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
class Roster:
    """The list that was frozen, and the key that holds it. With a ``refusal`` there is no list, and will be none.

    :param changes: how often a place of it was taken over: of two lists the one with more is the newer one.
    """

    key: KeyValue
    ttl: int
    members: tuple[Member, ...]
    refusal: str
    changes: int = 0

    @classmethod
    def of(cls, key: KeyValue, value: bytes | None = None) -> Roster:
        """Read it from its key, of which ``value`` is the value where that is sealed.

        :raises StrictError: where no rank has written it.
        """
        plain = loads(key.value if value is None else value)
        check(_LIST, plain)
        members = tuple(Member(rank, *parts) for rank, parts in enumerate(plain["members"]))
        if not members and not plain.get("refusal"):
            raise StrictError("it names no member")
        return cls(key, plain["ttl"], members, plain.get("refusal", ""), plain.get("changes", 0))

    @staticmethod
    def value(ttl: int, members: Sequence[tuple[str, str, int]], *, refusal: str = "", changes: int = 0) -> bytes:
        """What the key holds, of members as token, host and process id in the order of their ranks."""
        return json.dumps({"ttl": ttl, "members": members, "refusal": refusal, "changes": changes}).encode()

    def rank_of(self, token: str) -> int | None:
        return next((member.rank for member in self.members if member.token == token), None)


#: What a host may be called, and what may stand before and after it in a sentence: nothing that moves a cursor.
HOST = Text(255, r"[^\x00-\x1f\x7f-\x9f]+")
PID = Number(0, 1 << 32, whole=True)
SIZE = Number(1, 1_000_000, whole=True)
_LIST = {
    "ttl": Number(1, 86_400, whole=True),
    "members": Every((Text(128, r"[0-9A-Za-z._-]+"), HOST, PID)),
    "refusal?": Text(1 << 16, r"[^\x00-\x1f\x7f-\x9f]*"),
    "changes?": Number(0, 1 << 32, whole=True),
}
