# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that meet in an etcd: every process gets a different rank, and all get the same roster.

Each member owns one key, named by a random token and attached to a lease. A member gets the rank that its launcher or
its user requests; the others get the free ranks in order of create revision. The process that completes the group
writes ("freezes") the roster in one transaction, and the others learn of it by a watch. No value is ever read, changed
and written back. If two processes request one rank, a refusal is frozen instead of the roster, and every member raises
it.

Every write can safely be repeated: if its answer is lost, the second attempt finds the result of the first. Once a
lease has ended, etcd refuses the writes that depend on it, or :class:`LeaseLostError` does.

The keys lie under ``PREFIX/GROUP/``. If the group has a token, they lie under ``PREFIX/GROUP.SUFFIX/``
(:func:`group_root`), and every value has a seal (``group_values``):

* ``members/TOKEN``: a member; attached to its lease. ``registered/TOKEN`` exists only if the group has a token; it has
  the same lease, and the member's seal contains its create revision.
* ``run/frozen``: the roster or the refusal, once all members have registered. ``run/gate``: the number of passed
  barriers.
* ``arrived/BARRIER/RANK``: a member that waits at a barrier; attached to its lease.

Keys under ``run/`` have no lease, so that the end of one member does not remove them. The last member to leave removes
them. If that member was killed, the first member of the next group of this name removes them, because a group without
members has ended.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.sentences import named
from pytest_nixl.core.strict import Every, Number, OneOf, StrictError, Text, check, loads
from pytest_nixl.etcd.transaction import KeyValue

PREFIX = "/pytest-nixl/groups"
#: Seconds after which etcd ends the lease of a member that it hears nothing from, unless ``--nixl-lease`` is given.
TTL = 6
#: The least and the most seconds of that option. By default etcd grants no lease of less than 2 s.
LEAST_LEASE, MOST_LEASE = 2, 3600
#: The valid names of a group.
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_OF_TOKEN = re.compile(r"(?P<group>.+)\.[0-9a-f]{16}")


class MembershipError(NixlPluginError):
    """A group could not be joined, or has lost a member."""


class JoinRefusedError(MembershipError):
    """The group cannot be joined: it is complete and its members are alive, or its members request the same rank."""


class MissingRanksError(MembershipError):
    """Not all ranks arrived before the timeout."""

    late = True


class MemberLostError(MembershipError):
    """A member left a group that had started, or its lease expired."""


class MemberLeftError(MemberLostError):
    """A member left a group that had started, and said why."""


class LeaseLostError(MembershipError):
    """The lease of this process has ended, or may have: the process must stop acting as its rank."""


def longer_lease(ttl: int, host: str) -> str:
    """Return the remedy for a lease that ended because a host was busy; empty if no longer lease is accepted.

    :param ttl: the seconds of that lease.
    :param host: the words for that host.
    """
    longer = min(10 * ttl, MOST_LEASE)
    return f"if {host} is busy with other work, give every rank --nixl-lease={longer}s; " if longer > ttl else ""


@dataclass(frozen=True)
class Member:
    """One entry of the roster.

    :param rank: from 0.
    :param token: the random name of the process in this run.
    :param host: its host name.
    :param pid: its process id.
    """

    rank: int
    token: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


def group_root(prefix: str, group: str, token: str = "") -> str:
    """Return the prefix of a group's keys, with a slash at its end.

    The prefix depends on the token, so that processes with different tokens never meet.

    :param prefix: the prefix of the keys of all groups.
    :param group: the group's name.
    :param token: the shared secret of all ranks; empty if there is none.
    """
    suffix = f".{hmac.new(token.encode(), group.encode(), hashlib.sha256).hexdigest()[:16]}" if token else ""
    return f"{prefix.rstrip('/')}/{group}{suffix}/"


def group_name(folder: str) -> tuple[str, bool]:
    """Return the name of the group whose keys are in ``PREFIX/FOLDER/``, and whether it has a token."""
    match = _OF_TOKEN.fullmatch(folder)
    return (match["group"], True) if match else (folder, False)


@dataclass(frozen=True)
class Roster:
    """The frozen roster of a group, and the key that holds it; or the refusal, if the group cannot start.

    :param key: the key in etcd as it was read.
    :param ttl: seconds of the members' leases.
    :param members: the members by rank.
    :param refusal: why the group cannot start; empty if it can.
    :param changes: how many ranks of the roster were reassigned. Of two rosters the one with more changes is newer.
    """

    key: KeyValue
    ttl: int
    members: tuple[Member, ...]
    refusal: str
    changes: int = 0

    @classmethod
    def of(cls, key: KeyValue, value: bytes | None = None) -> Roster:
        """Read the roster from its key.

        :param value: the value without its seal; None if the group has no token.
        :raises StrictError: if the value is not one that a rank writes.
        """
        plain = loads(key.value if value is None else value)
        check(_LIST, plain)
        members = tuple(Member(rank, *parts) for rank, parts in enumerate(plain["members"]))
        if not members and not plain.get("refusal"):
            raise StrictError("it lists no member")
        return cls(key, plain["ttl"], members, plain.get("refusal", ""), plain.get("changes", 0))

    @staticmethod
    def value(ttl: int, members: Sequence[tuple[str, str, int]], *, refusal: str = "", changes: int = 0) -> bytes:
        """Return the value of the key.

        :param members: token, host and process id of each member, by rank.
        """
        return json.dumps({"ttl": ttl, "members": members, "refusal": refusal, "changes": changes}).encode()

    def rank_of(self, token: str) -> int | None:
        return next((member.rank for member in self.members if member.token == token), None)


#: A host name as messages may print it: without control characters.
HOST = Text(255, r"[^\x00-\x1f\x7f-\x9f]+")
PID = Number(0, 1 << 32, whole=True)
SIZE = Number(1, 1_000_000, whole=True)
_LIST = {
    "ttl": Number(1, 86_400, whole=True),
    "members": Every((Text(128, r"[0-9A-Za-z._-]+"), HOST, PID)),
    "refusal?": Text(1 << 16, r"[^\x00-\x1f\x7f-\x9f]*"),
    "changes?": Number(0, 1 << 32, whole=True),
}


#: The largest number of names or ranks, and of conflicts, that one sentence lists.
_NAMED, _MOST_CONFLICTS = 8, 4
_CLAIMANT = {"host": HOST, "pid": PID, "size": SIZE, "requested_rank?": OneOf((None, Number(0, 1_000_000, whole=True)))}


@dataclass(frozen=True)
class Candidate:
    """A process that registered with a group.

    :param token: its random name in this run.
    :param host: its host name.
    :param pid: its process id.
    :param size: the number of ranks that it expects.
    :param requested_rank: the rank that its launcher or its user gave it; None for any.
    """

    token: str
    host: str
    pid: int
    size: int
    requested_rank: int | None = None

    @classmethod
    def of(cls, key: str, value: bytes) -> Candidate:
        """Read a registration from its key in etcd.

        :raises MembershipError: if the value is not one that a rank writes.
        """
        try:
            plain = loads(value)
            check(_CLAIMANT, plain)
        except StrictError as error:
            raise not_of_a_rank(key, error) from None
        return cls(key.rsplit("/", 1)[1], **plain)

    @property
    def value(self) -> bytes:
        """The value of its key in etcd."""
        return json.dumps(
            {"host": self.host, "pid": self.pid, "size": self.size, "requested_rank": self.requested_rank}
        ).encode()

    def __str__(self) -> str:
        return f"{self.host} (pid {self.pid})"


def not_of_a_rank(key: str, error: StrictError) -> MembershipError:
    """Return the error for a key whose value no rank of this version writes."""
    return MembershipError(
        f"the key {key!r} has a value that no rank of this version writes: {error}",
        "remove that key; or give every rank a --nixl-group-token, or a --nixl-group that nothing else writes to",
    )


def seat(candidates: Sequence[Candidate], size: int) -> list[Candidate]:
    """Return the processes in the order of their ranks. Requested ranks are given out first, then the free ones.

    :param candidates: as many as there are ranks, in order of arrival, without a conflict: see :func:`rank_conflicts`.
    """
    by_rank = {candidate.requested_rank: candidate for candidate in candidates}
    without_rank = (candidate for candidate in candidates if candidate.requested_rank is None)
    return [by_rank[rank] if rank in by_rank else next(without_rank) for rank in range(size)]


def rank_conflicts(candidates: Sequence[Candidate], size: int) -> str:
    """Say why the processes cannot all have the ranks that they request; empty if they can."""
    sentences = [
        f"rank {rank} is requested {'twice' if len(owners) == 2 else f'{len(owners)} times'}, by {_and(owners)}"
        for rank, owners in _rivals(candidates).items()
    ]
    sentences += [
        f"rank {candidate.requested_rank}, requested by {candidate}, is not in the range 0 to {size - 1}"
        for candidate in _out_of_range(candidates, size)
    ]
    if not sentences:
        return ""
    more = [f"{len(sentences) - _MOST_CONFLICTS} more conflicts"] if len(sentences) > _MOST_CONFLICTS else []
    return "; ".join([*sentences[:_MOST_CONFLICTS], *more, *_sizes(candidates)])


def may_settle(candidates: Sequence[Candidate], size: int) -> bool:
    """Whether the conflict may end with a lease: every rank in conflict is requested from a single host.

    Such a conflict arises if a process was killed and started again before the lease of the killed one expired.
    """
    rivals = _rivals(candidates).values()
    return (
        bool(rivals)
        and not _out_of_range(candidates, size)
        and all(len({owner.host for owner in owners}) == 1 for owners in rivals)
    )


def who_is_missing(candidates: Sequence[Candidate], group: str, size: int) -> str:
    """Complete the sentence "waiting for …": name the missing ranks, and the conflicts between those that arrived."""
    count = f"{len(candidates)} of {size} arrived"
    missing = sorted(
        set(range(size))
        - {candidate.requested_rank for candidate in candidates if candidate.requested_rank is not None}
    )
    if candidates and missing and all(candidate.requested_rank is not None for candidate in candidates):
        text = f"rank{'s' * (len(missing) > 1)} {named(map(str, missing), _NAMED)} of group {group!r} ({count})"
    elif len(candidates) < size:
        arrived = named(map(str, candidates), _NAMED) or "none"
        text = f"{size - len(candidates)} of {size} ranks of group {group!r}; arrived: {arrived}"
    else:
        text = f"the start of group {group!r} ({count})"
    problem = rank_conflicts(candidates, size)
    return "; ".join([text, *([problem] if problem else _sizes(candidates))])


def _rivals(candidates: Iterable[Candidate]) -> dict[int, list[Candidate]]:
    """Return the ranks that more than one process requests, with these processes."""
    rivals: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        if candidate.requested_rank is not None:
            rivals.setdefault(candidate.requested_rank, []).append(candidate)
    return {rank: rivals[rank] for rank in sorted(rivals) if len(rivals[rank]) > 1}


def _out_of_range(candidates: Iterable[Candidate], size: int) -> list[Candidate]:
    return [
        candidate
        for candidate in candidates
        if candidate.requested_rank is not None and candidate.requested_rank >= size
    ]


def _sizes(candidates: Iterable[Candidate]) -> list[str]:
    sizes = sorted({candidate.size for candidate in candidates})
    return [f"the processes expect different numbers of ranks: {', '.join(map(str, sizes))}"] if len(sizes) > 1 else []


def _and(names: Sequence[object]) -> str:
    if len(names) > _NAMED:
        return named(map(str, names), _NAMED)
    *first_words, last = map(str, names)
    return f"{', '.join(first_words)} and {last}"
