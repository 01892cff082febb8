# SPDX-License-Identifier: Apache-2.0
"""The processes that registered with a group: which rank each gets, which requests conflict, and who is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_nixl.cluster.group import HOST, PID, SIZE, MembershipError
from pytest_nixl.core.strict import Number, OneOf, StrictError, check, loads

#: The largest number of names or ranks, and of conflicts, that one sentence lists.
_NAMED, _QUARRELS = 8, 4
_CLAIMANT = {"host": HOST, "pid": PID, "size": SIZE, "wanted?": OneOf((None, Number(0, 1_000_000, whole=True)))}


@dataclass(frozen=True)
class Candidate:
    """A process that registered with a group.

    :param token: its random name in this run.
    :param host: its host name.
    :param pid: its process id.
    :param size: the number of ranks that it expects.
    :param wanted: the rank that its launcher or its user gave it; None for any.
    """

    token: str
    host: str
    pid: int
    size: int
    wanted: int | None = None

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
        return json.dumps({"host": self.host, "pid": self.pid, "size": self.size, "wanted": self.wanted}).encode()

    def __str__(self) -> str:
        return f"{self.host} (pid {self.pid})"


def not_of_a_rank(key: str, why: StrictError) -> MembershipError:
    """Return the error for a key whose value no rank of this version writes."""
    return MembershipError(
        f"the key {key!r} has a value that no rank of this version writes: {why}",
        "remove that key; or give every rank a --nixl-group-token, or a --nixl-group that nothing else writes to",
    )


def seat(candidates: Sequence[Candidate], size: int) -> list[Candidate]:
    """Return the processes in the order of their ranks. Requested ranks are given out first, then the free ones.

    :param candidates: as many as there are ranks, in order of arrival, without a conflict: see :func:`quarrel`.
    """
    wanted = {candidate.wanted: candidate for candidate in candidates}
    others = (candidate for candidate in candidates if candidate.wanted is None)
    return [wanted[rank] if rank in wanted else next(others) for rank in range(size)]


def quarrel(candidates: Sequence[Candidate], size: int) -> str:
    """Say why the processes cannot all have the ranks that they request; empty if they can."""
    found = [
        f"rank {rank} is requested {_times(len(owners))}, by {_and(owners)}"
        for rank, owners in _rivals(candidates).items()
    ]
    found += [
        f"rank {candidate.wanted}, requested by {candidate}, is not among 0 to {size - 1}"
        for candidate in _out_of_range(candidates, size)
    ]
    if not found:
        return ""
    more = [f"{len(found) - _QUARRELS} more conflicts"] if len(found) > _QUARRELS else []
    return "; ".join([*found[:_QUARRELS], *more, *_sizes(candidates)])


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
    missing = sorted(set(range(size)) - {candidate.wanted for candidate in candidates if candidate.wanted is not None})
    if candidates and missing and all(candidate.wanted is not None for candidate in candidates):
        text = f"rank{'s' * (len(missing) > 1)} {shorten(missing)} of group {group!r} ({count})"
    elif len(candidates) < size:
        arrived = shorten(candidates) or "none"
        text = f"{size - len(candidates)} of {size} ranks of group {group!r}; arrived: {arrived}"
    else:
        text = f"the start of group {group!r} ({count})"
    problem = quarrel(candidates, size)
    return "; ".join([text, *([problem] if problem else _sizes(candidates))])


def shorten(words: Sequence[object]) -> str:
    """Return the first words as a list, and the number of the remaining ones."""
    text = ", ".join(map(str, words[:_NAMED]))
    return f"{text}, … and {len(words) - _NAMED} more" if len(words) > _NAMED else text


def _rivals(candidates: Iterable[Candidate]) -> dict[int, list[Candidate]]:
    """Return the ranks that more than one process requests, with these processes."""
    found: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        if candidate.wanted is not None:
            found.setdefault(candidate.wanted, []).append(candidate)
    return {rank: found[rank] for rank in sorted(found) if len(found[rank]) > 1}


def _out_of_range(candidates: Iterable[Candidate], size: int) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.wanted is not None and candidate.wanted >= size]


def _sizes(candidates: Iterable[Candidate]) -> list[str]:
    sizes = sorted({candidate.size for candidate in candidates})
    return [f"the processes expect different numbers of ranks: {', '.join(map(str, sizes))}"] if len(sizes) > 1 else []


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _and(words: Sequence[object]) -> str:
    if len(words) > _NAMED:
        return shorten(words)
    *others, last = map(str, words)
    return f"{', '.join(others)} and {last}"
