# SPDX-License-Identifier: Apache-2.0
"""Who has come to a group: which rank each of them gets, why not all can have what they want, and who is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_nixl.cluster.group import HOST, PID, SIZE, MembershipError
from pytest_nixl.core.strict import Number, OneOf, StrictError, check, loads

#: Names, ranks and quarrels of which a sentence tells no more than this many.
_NAMED, _QUARRELS = 8, 4
_CLAIMANT = {"host": HOST, "pid": PID, "size": SIZE, "wanted?": OneOf((None, Number(0, 1_000_000, whole=True)))}


@dataclass(frozen=True)
class Candidate:
    """One that has come.

    :param size: how many ranks it was told that there are.
    :param wanted: the rank that its launcher or its user gave it; None: any.
    """

    token: str
    host: str
    pid: int
    size: int
    wanted: int | None = None

    @classmethod
    def of(cls, key: str, value: bytes) -> Candidate:
        """Read it from its key in etcd. :raises MembershipError: where no rank has written it."""
        try:
            plain = loads(value)
            check(_CLAIMANT, plain)
        except StrictError as error:
            raise not_of_a_rank(key, error) from None
        return cls(key.rsplit("/", 1)[1], **plain)

    @property
    def value(self) -> bytes:
        """What its key holds."""
        return json.dumps({"host": self.host, "pid": self.pid, "size": self.size, "wanted": self.wanted}).encode()

    def __str__(self) -> str:
        return f"{self.host} (pid {self.pid})"


def not_of_a_rank(key: str, why: StrictError) -> MembershipError:
    """Return the error of a key whose value no rank writes."""
    return MembershipError(
        f"the key {key!r} has a value that no rank of this version writes: {why}",
        "remove that key; or give all ranks a --nixl-group-token or a --nixl-group that nobody else writes to",
    )


def seat(claimants: Sequence[Candidate], size: int) -> list[Candidate]:
    """Return who has which rank: who wants one has it, the others have those that are left, in the order given.

    :param claimants: as many as there are ranks, and none of them in the way of another one: see :func:`quarrel`.
    """
    wanted = {claimant.wanted: claimant for claimant in claimants}
    others = (claimant for claimant in claimants if claimant.wanted is None)
    return [wanted[rank] if rank in wanted else next(others) for rank in range(size)]


def quarrel(claimants: Sequence[Candidate], size: int) -> str:
    """Say why they cannot all have the ranks that they want; empty where they can."""
    found = [
        f"rank {rank} is claimed {_times(len(owners))}, by {_and(owners)}"
        for rank, owners in _rivals(claimants).items()
    ]
    found += [
        f"rank {claimant.wanted}, which {claimant} was given, is none of 0 to {size - 1}"
        for claimant in _out_of_range(claimants, size)
    ]
    if not found:
        return ""
    more = [f"{len(found) - _QUARRELS} more like it"] if len(found) > _QUARRELS else []
    return "; ".join([*found[:_QUARRELS], *more, *_sizes(claimants)])


def may_settle(claimants: Sequence[Candidate], size: int) -> bool:
    """Whether they are in each other's way only until a lease ends: one host's process may have been started again."""
    rivals = _rivals(claimants).values()
    return (
        bool(rivals)
        and not _out_of_range(claimants, size)
        and all(len({owner.host for owner in owners}) == 1 for owners in rivals)
    )


def who_is_missing(claimants: Sequence[Candidate], group: str, size: int) -> str:
    """Complete "waiting for …" with who has not come, and with what is in the way of those who have."""
    count = f"{len(claimants)} of {size} {'is' if len(claimants) == 1 else 'are'} here"
    missing = sorted(set(range(size)) - {claimant.wanted for claimant in claimants if claimant.wanted is not None})
    if claimants and missing and all(claimant.wanted is not None for claimant in claimants):
        text = f"rank{'s' * (len(missing) > 1)} {shorten(missing)} of group {group!r} ({count})"
    elif len(claimants) < size:
        here = shorten(claimants) or "nobody"
        text = f"{size - len(claimants)} of {size} ranks of group {group!r}; here: {here}"
    else:
        text = f"the start of group {group!r} ({count})"
    problem = quarrel(claimants, size)
    return "; ".join([text, *([problem] if problem else _sizes(claimants))])


def shorten(words: Sequence[object]) -> str:
    """Return the first of them, and how many there are beside."""
    text = ", ".join(map(str, words[:_NAMED]))
    return f"{text}, … and {len(words) - _NAMED} more" if len(words) > _NAMED else text


def _rivals(claimants: Iterable[Candidate]) -> dict[int, list[Candidate]]:
    """Return who wants a rank that others want too, by rank."""
    found: dict[int, list[Candidate]] = {}
    for claimant in claimants:
        if claimant.wanted is not None:
            found.setdefault(claimant.wanted, []).append(claimant)
    return {rank: found[rank] for rank in sorted(found) if len(found[rank]) > 1}


def _out_of_range(claimants: Iterable[Candidate], size: int) -> list[Candidate]:
    return [claimant for claimant in claimants if claimant.wanted is not None and claimant.wanted >= size]


def _sizes(claimants: Iterable[Candidate]) -> list[str]:
    sizes = sorted({claimant.size for claimant in claimants})
    return [f"they expect different numbers of ranks: {', '.join(map(str, sizes))}"] if len(sizes) > 1 else []


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _and(words: Sequence[object]) -> str:
    if len(words) > _NAMED:
        return shorten(words)
    *others, last = map(str, words)
    return f"{', '.join(others)} and {last}"
