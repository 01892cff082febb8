# SPDX-License-Identifier: Apache-2.0
"""Claims overlap, and each order of two claims is tried, with claimants in memory."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from helpers.doubled_claims import (
    DoubledPath,
    DoubledStore,
    DoubledSubject,
    after_a_read,
    announces,
    creates,
    ends,
    ends_after_a_read,
    follows,
    keeps_a_lease,
    locked,
    only_reads,
    outside,
    paused,
    polls,
    polls_for_rank_0,
    read_modify_write,
    silent,
    takes_zero,
)
from helpers.doubled_nixl import DoubledClock

from pytest_nixl.checks.rank_race import orders, race
from pytest_nixl.checks.rank_race.orders import try_orders
from pytest_nixl.checks.rank_race.race import amplify

READ_EARLY = (
    "claimant 0 and claimant 1 read '<group>/size' before any of them wrote it, and none of them took etcd's lock"
)
COUNTED = (
    "claimant 0 and claimant 1 listed the keys under '<group>/tokens/' after each of them had written one there, and "
    "took the same rank by their number"
)
LISTED_EARLY = (
    "claimant {} listed the keys under '<group>/tokens/' before claimant {} wrote one there, and took its rank by "
    "them, without etcd's lock"
)
ENDED = "claimant 1 (h, pid 71): its process ended without a message"
CUT_OFF = "claimant 0 ended before the other one wrote: claimant 0 (h, pid 70): ConnectionError: it was cut off"
STUCK = "claimant {} neither wrote nor waited in a lock within 3 s; its last request: Range(<group>/size)"


def by_count(keys: list[str], key: str) -> int:
    return len(keys) - 1


def by_order(keys: list[str], key: str) -> int:
    return sorted(keys).index(key)


def by_age(keys: list[str], key: str) -> int:
    return keys.index(key)


def shared(rank: int, *keys: str, prefix: str = "") -> tuple[str, ...]:
    """Return the faults of two claimants that got the same rank."""
    return (
        f"rank {rank} was given 2 times: to claimant 0 (h, pid 70) and claimant 1 (h, pid 71)",
        f"nobody has rank {1 - rank} of 2",
        f"keys in etcd: {', '.join(f'{prefix}/r/abababab/{key}' for key in keys)}",
    )


def short(order: str) -> str:
    """Return the order of requests in one line: ``CLAIMANT:METHOD(KEY)``."""
    title, *lines = order.splitlines()
    assert title == "the order of requests:"
    assert [line.partition(".")[0] for line in lines] == [f"  {number}" for number in range(1, len(lines) + 1)]
    text = " ".join(line.partition("claimant ")[2].replace(": ", ":").replace("<group>/", "") for line in lines)
    return text.replace(", its answer lost", "-lost")


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> DoubledPath:
    """A proxy in memory, whose clock is that of the claims."""
    clock = DoubledClock()
    monkeypatch.setattr(race, "time", clock)
    monkeypatch.setattr(orders, "time", clock)
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)
    return DoubledPath(clock, DoubledStore())


def is_clean(path: DoubledPath) -> bool:
    """Whether no process, no path, no lease and no key is there any more."""
    ended = all(claim.killed for claim in path.claims) and all(client.closed for client in path.clients)
    granted = list(range(17, path.store.leases + 1))
    return ended and sorted(path.store.revoked) == granted and path.store.keys == {}


def overlap(
    ranks: tuple[Any, ...], *, faults: Any = (), flags: str = "met", unmet: str = "", cause: str = "", seconds: int = 0
) -> tuple[Any, ...]:
    """Return the result of claims at once.

    :param ranks: of each claimant that ended, its rank, or its error.
    :param flags: whether the claims ``met``, were ``locked`` and an answer was ``lost``.
    :param seconds: the seconds that the claims took.
    """
    return ranks, faults, flags, unmet, cause, seconds


def tried(
    count: int, ranks: tuple[Any, ...], *, complete: bool = True, faults: Any = (), cause: str = "", seconds: int = 0
) -> tuple[Any, ...]:
    """Return the result of the orders of two claims: their number, whether none is left, and as for :func:`overlap`."""
    return count, ranks, complete, faults, cause, seconds


THIRD_LOCKS = paused((0, 0, 1), locked, present=True)
WAITS = paused((0, 70, 0), read_modify_write, present=True)
#: A program, the options of the claims, their result, and the requests in the order in which they reached etcd.
Case = tuple[DoubledSubject, dict[str, Any], tuple[Any, ...], str]
OVERLAPS: dict[str, Case] = {
    "the known race": (
        DoubledSubject(read_modify_write),
        {},
        overlap((0, 0), faults=shared(0, "rank/0", "size"), cause=READ_EARLY),
        "0:Range(size) 1:Range(size) 0:LeaseGrant() 1:LeaseGrant() 0:Put(rank/0) 1:Put(rank/0) 0:Put(size) 1:Put(size)",
    ),
    "keys under a prefix": (
        DoubledSubject(read_modify_write, prefix="x"),
        {},
        overlap(
            (0, 0), faults=shared(0, "rank/0", "size", prefix="x"), cause=READ_EARLY.replace("<group>", "x<group>")
        ),
        "0:Range(xsize) 1:Range(xsize) 0:LeaseGrant() 1:LeaseGrant() 0:Put(xrank/0) 1:Put(xrank/0) "
        "0:Put(xsize) 1:Put(xsize)",
    ),
    "a lease that is kept": (
        DoubledSubject(keeps_a_lease),
        {},
        overlap((0, 0), faults=shared(0, "rank/0", "size"), cause=READ_EARLY),
        "0:LeaseGrant() 1:LeaseGrant() 0:LeaseKeepAliveOnce() 1:LeaseKeepAliveOnce() 0:Range(size) "
        "1:Range(size) 0:LeaseGrant() 1:LeaseGrant() 0:Put(rank/0) 1:Put(rank/0) 0:Put(size) 1:Put(size)",
    ),
    "a lock": (
        DoubledSubject(locked),
        {},
        overlap((0, 1), flags="locked"),
        "0:LeaseGrant() 1:LeaseGrant() 0:Lock(lock) 1:Lock(lock) 0:Range(size) 0:LeaseGrant() 0:Put(rank/0) "
        "0:Put(size) 0:Unlock(lock/11) 1:Range(size) 1:LeaseGrant() 1:Put(rank/1) 1:Put(size)",
    ),
    "a lock of three": (
        DoubledSubject(locked),
        {"clients": 3},
        overlap((0, 1, 2), flags="locked"),
        "0:LeaseGrant() 1:LeaseGrant() 2:LeaseGrant() 0:Lock(lock) 1:Lock(lock) 2:Lock(lock) 0:Range(size) "
        "0:LeaseGrant() 0:Put(rank/0) 0:Put(size) 0:Unlock(lock/11) 1:Range(size) 1:LeaseGrant() "
        "1:Put(rank/1) 1:Put(size) 1:Unlock(lock/12) 2:Range(size) 2:LeaseGrant() 2:Put(rank/2) 2:Put(size)",
    ),
    "one starts late": (
        DoubledSubject(paused((9, 0), read_modify_write)),
        {},
        overlap((0, 0), faults=shared(0, "rank/0", "size"), cause=READ_EARLY, seconds=9),
        "0:Range(size) 1:Range(size) 0:LeaseGrant() 1:LeaseGrant() 0:Put(rank/0) 1:Put(rank/0) 0:Put(size) 1:Put(size)",
    ),
    "a pause before the rank": (
        DoubledSubject(paused((1, 9), read_modify_write, present=True)),
        {},
        overlap((0, 0), faults=shared(0, "present/0", "present/1", "rank/0", "size"), cause=READ_EARLY, seconds=9),
        "0:Put(present/0) 1:Put(present/1) 0:Range(size) 0:LeaseGrant() 1:Range(size) 1:LeaseGrant() "
        "0:Put(rank/0) 1:Put(rank/0) 0:Put(size) 1:Put(size)",
    ),
    "a pause that is too long": (
        DoubledSubject(paused((1, 30), read_modify_write, present=True)),
        {},
        overlap((0, 1), unmet="claimant 1 read '<group>/size' only after claimant 0 had written it", seconds=30),
        "0:Put(present/0) 1:Put(present/1) 0:Range(size) 0:LeaseGrant() 0:Put(rank/0) 0:Put(size) "
        "1:Range(size) 1:LeaseGrant() 1:Put(rank/1) 1:Put(size)",
    ),
    "a lock behind a pause": (
        DoubledSubject(paused((0, 1), locked, present=True)),
        {},
        overlap((0, 1), flags="met locked", seconds=1),
        "0:Put(present/0) 1:Put(present/1) 0:LeaseGrant() 0:Lock(lock) 0:Range(size) 0:LeaseGrant() "
        "1:LeaseGrant() 1:Lock(lock) 0:Put(rank/0) 0:Put(size) 0:Unlock(lock/11) 1:Range(size) "
        "1:LeaseGrant() 1:Put(rank/1) 1:Put(size)",
    ),
    "ranks by number": (
        DoubledSubject(announces(by_count)),
        {},
        overlap((1, 1), faults=shared(1, "tokens/0", "tokens/1"), cause=COUNTED),
        "0:Put(tokens/0) 1:Put(tokens/1) 0:Range(tokens/) 1:Range(tokens/)",
    ),
    "ranks by order": (
        DoubledSubject(announces(by_order)),
        {},
        overlap((0, 1)),
        "0:Put(tokens/0) 1:Put(tokens/1) 0:Range(tokens/) 1:Range(tokens/)",
    ),
    "ranks by creation": (DoubledSubject(creates), {}, overlap((0, 1)), "0:Txn(rank/0) 1:Txn(rank/0) 1:Txn(rank/1)"),
    "ranks by creation with a lost answer": (
        DoubledSubject(creates),
        {"loses": (0, 1)},
        overlap(
            (1, "RuntimeError: no rank is free"),
            flags="met lost",
            faults=(
                "nobody has rank 0 of 2",
                "claimant 1 (h, pid 71): RuntimeError: no rank is free",
                "keys in etcd: /r/abababab/rank/0, /r/abababab/rank/1",
            ),
        ),
        "0:Txn(rank/0)-lost 1:Txn(rank/0) 0:Txn(rank/1) 1:Txn(rank/1)",
    ),
    "a lock with a lost answer": (
        DoubledSubject(locked),
        {"loses": (0, 3)},
        overlap(("ConnectionError: it was cut off",), flags="lost", unmet=CUT_OFF, seconds=10),
        "0:LeaseGrant() 0:Lock(lock) 0:Range(size)-lost 1:LeaseGrant() 1:Lock(lock)",
    ),
    "the second one loses an answer": (
        DoubledSubject(locked),
        {"loses": (1, 3)},
        overlap(
            (0, "ConnectionError: it was cut off"),
            flags="locked lost",
            faults=(
                "nobody has rank 1 of 2",
                "claimant 1 (h, pid 71): ConnectionError: it was cut off",
                "keys in etcd: /r/abababab/lock/13, /r/abababab/rank/0, /r/abababab/size",
            ),
        ),
        "0:LeaseGrant() 0:Lock(lock) 0:Range(size) 0:LeaseGrant() 1:LeaseGrant() 1:Lock(lock) 0:Put(rank/0) "
        "0:Put(size) 0:Unlock(lock/11) 1:Range(size)-lost",
    ),
    "both only read": (
        DoubledSubject(only_reads),
        {"seconds": 3.0},
        overlap((), flags="", unmet=f"{STUCK.format(0)}; {STUCK.format(1)}", seconds=6),
        "0:Range(first) 1:Range(first) 0:Range(size) 1:Range(size)",
    ),
    "one only reads": (
        DoubledSubject(only_reads, read_modify_write),
        {"seconds": 3.0},
        overlap((0,), flags="", unmet=STUCK.format(0), seconds=6),
        "0:Range(first) 1:Range(size) 0:Range(size) 1:LeaseGrant() 1:Put(rank/0) 1:Put(size)",
    ),
    "both are silent": (
        DoubledSubject(silent),
        {"seconds": 3.0},
        overlap((), flags="", unmet="claimant 0 and claimant 1 sent no request to etcd within 3 s", seconds=6),
        "",
    ),
    "one is silent": (
        DoubledSubject(silent, read_modify_write),
        {"seconds": 30.0},
        overlap((0,), flags="", unmet="claimant 0 sent no request to etcd within 30 s", seconds=40),
        "1:Range(size) 1:LeaseGrant() 1:Put(rank/0) 1:Put(size)",
    ),
    "one ends at once": (
        DoubledSubject(read_modify_write, ends),
        {},
        overlap(
            (0, "its process ended without a message"),
            flags="",
            faults=("nobody has rank 1 of 2", ENDED, "keys in etcd: /r/abababab/rank/0, /r/abababab/size"),
            unmet=f"claimant 1 ended before the claims could overlap: {ENDED}",
        ),
        "0:Range(size) 0:LeaseGrant() 0:Put(rank/0) 0:Put(size)",
    ),
    "one ends after a read": (
        DoubledSubject(read_modify_write, ends_after_a_read),
        {},
        overlap(
            (0, "its process ended without a message"),
            flags="",
            faults=("nobody has rank 1 of 2", ENDED, "keys in etcd: /r/abababab/rank/0, /r/abababab/size"),
            unmet=f"claimant 1 ended before the other one wrote: {ENDED}",
        ),
        "0:Range(size) 1:Range(size) 0:LeaseGrant() 0:Put(rank/0) 0:Put(size)",
    ),
    "no read at all": (
        DoubledSubject(takes_zero),
        {},
        overlap((0, 0), faults=shared(0, "of/0", "of/1")),
        "0:Put(of/0) 1:Put(of/1)",
    ),
    "a rank outside": (
        DoubledSubject(outside),
        {},
        overlap(
            (1, 2),
            faults=(
                "rank 2 is outside a group of 2: claimant 1 (h, pid 71): rank 2",
                "nobody has rank 0 of 2",
                "keys in etcd: /r/abababab/of/0, /r/abababab/of/1",
            ),
        ),
        "0:Put(of/0) 1:Put(of/1)",
    ),
    "one waits for the other": (
        DoubledSubject(follows, awaits=1),
        {},
        overlap((0, 1), seconds=70),
        "0:Put(there/0) 1:Put(there/1) 0:Put(second/0) 0:Put(rank/0) 1:Range(rank/0)",
    ),
    "a wait that nobody knows": (
        DoubledSubject(follows),
        {},
        overlap((0, 1), seconds=80),
        "0:Put(there/0) 1:Put(there/1) 0:Put(second/0) 1:Range(rank/0) 0:Put(rank/0)",
    ),
    "no rank in time": (
        DoubledSubject(follows),
        {"seconds": 40.0},
        overlap((), unmet="claimant 0 and claimant 1 had no rank 40 s after the first writes", seconds=60),
        "0:Put(there/0) 1:Put(there/1) 0:Put(second/0)",
    ),
    "one waits in a lock and one elsewhere": (
        DoubledSubject(THIRD_LOCKS, WAITS, THIRD_LOCKS, awaits=1),
        {"clients": 3},
        overlap(
            (0, 2, 1),
            unmet="claimant 2 and claimant 1 read '<group>/size' only after claimant 0 had written it",
            seconds=70,
        ),
        "0:Put(present/0) 1:Put(present/1) 2:Put(present/2) 0:LeaseGrant() 0:Lock(lock) 0:Range(size) "
        "0:LeaseGrant() 2:LeaseGrant() 2:Lock(lock) 0:Put(rank/0) 0:Put(size) 0:Unlock(lock/11) "
        "2:Range(size) 2:LeaseGrant() 2:Put(rank/1) 2:Put(size) 2:Unlock(lock/13) 1:Range(size) "
        "1:LeaseGrant() 1:Put(rank/2) 1:Put(size)",
    ),
}


@pytest.mark.parametrize("slow", [False, True], ids=["quick", "slow"])
@pytest.mark.parametrize("program", OVERLAPS)
def test_claims_overlap_and_their_faults_are_explained(path: Any, program: str, slow: bool) -> None:
    subject, options, expected, requests = OVERLAPS[program]
    count = options.get("clients", 2)
    path.slow = slow
    subject.started.clear()
    done = amplify(path, path.store, subject, **{"group": "/r/", "clients": 2, **options})
    ranks = tuple(outcome.error if outcome.rank is None else outcome.rank for outcome in done.outcomes)
    flags = " ".join(name for name in ("met", "locked", "lost") if getattr(done, name))
    if slow:  # claimants write more before the end
        result = (ranks, done.faults[:2], flags, done.unmet, done.cause)
        assert result == (expected[0], expected[1][:2], *expected[2:-1])
    else:
        assert (ranks, done.faults, flags, done.unmet, done.cause, round(done.seconds)) == expected
        assert short(done.order) == requests
    assert done.twice == (len(set(ranks)) < len(ranks))
    assert subject.started == [("/r/abababab/", count)] * count
    assert is_clean(path)


ORDERS: dict[str, Case] = {
    "the known race": (
        DoubledSubject(read_modify_write),
        {},
        tried(1, (0, 0), complete=False, faults=shared(0, "rank/0", "size"), cause=READ_EARLY),
        "0:Range(size) 1:Range(size) 1:LeaseGrant() 1:Put(rank/0) 1:Put(size) 0:LeaseGrant() 0:Put(rank/0) 0:Put(size)",
    ),
    "keys under a prefix": (
        DoubledSubject(read_modify_write, prefix="x"),
        {},
        tried(
            1,
            (0, 0),
            complete=False,
            faults=shared(0, "rank/0", "size", prefix="x"),
            cause=READ_EARLY.replace("<group>", "x<group>"),
        ),
        "0:Range(xsize) 1:Range(xsize) 1:LeaseGrant() 1:Put(xrank/0) 1:Put(xsize) 0:LeaseGrant() "
        "0:Put(xrank/0) 0:Put(xsize)",
    ),
    "a lock": (
        DoubledSubject(locked),
        {},
        tried(5, (0, 1), seconds=1),
        "0:LeaseGrant() 1:LeaseGrant() 0:Lock(lock) 0:Range(size) 0:LeaseGrant() 0:Put(rank/0) 0:Put(size) "
        "1:Lock(lock) 0:Unlock(lock/21) 1:Range(size) 1:LeaseGrant() 1:Put(rank/1) 1:Put(size)",
    ),
    "ranks by number": (
        DoubledSubject(announces(by_count)),
        {},
        tried(1, (1, 1), complete=False, faults=shared(1, "tokens/0", "tokens/1"), cause=COUNTED),
        "1:Put(tokens/1) 0:Put(tokens/0) 0:Range(tokens/) 1:Range(tokens/)",
    ),
    "ranks by order": (
        DoubledSubject(announces(by_order)),
        {},
        tried(3, (0, 0), faults=shared(0, "tokens/0", "tokens/1"), cause=LISTED_EARLY.format(1, 0)),
        "1:Put(tokens/1) 1:Range(tokens/) 0:Put(tokens/0) 0:Range(tokens/)",
    ),
    "ranks by another order": (
        DoubledSubject(announces(by_order, order=(1, 0))),
        {},
        tried(3, (0, 0), faults=shared(0, "tokens/0", "tokens/1"), cause=LISTED_EARLY.format(0, 1)),
        "0:Put(tokens/1) 0:Range(tokens/) 1:Put(tokens/0) 1:Range(tokens/)",
    ),
    "ranks by age": (
        DoubledSubject(announces(by_age)),
        {},
        tried(4, (0, 1)),
        "0:Put(tokens/0) 0:Range(tokens/) 1:Put(tokens/1) 1:Range(tokens/)",
    ),
    "ranks by creation": (DoubledSubject(creates), {}, tried(1, (0, 1)), "0:Txn(rank/0) 1:Txn(rank/0) 1:Txn(rank/1)"),
    "a lease that is kept": (
        DoubledSubject(keeps_a_lease),
        {},
        tried(1, (0, 0), complete=False, faults=shared(0, "rank/0", "size"), cause=READ_EARLY),
        "0:LeaseGrant() 0:LeaseKeepAliveOnce() 1:LeaseGrant() 1:LeaseKeepAliveOnce() 0:Range(size) "
        "1:Range(size) 1:LeaseGrant() 1:Put(rank/0) 1:Put(size) 0:LeaseGrant() 0:Put(rank/0) 0:Put(size)",
    ),
    "both only read": (
        DoubledSubject(only_reads),
        {"seconds": 2.0},
        tried(1, (), complete=False, faults=("claimant 0 and claimant 1 had no rank after 2 s",), seconds=4),
        "0:Range(first) 1:Range(first) 1:Range(size) 0:Range(size)",
    ),
    "one only reads": (
        DoubledSubject(only_reads, creates),
        {"seconds": 2.0},
        tried(1, (0,), complete=False, faults=("claimant 0 had no rank after 2 s",), seconds=2),
        "0:Range(first) 1:Txn(rank/0) 0:Range(size)",
    ),
    "the other only reads": (
        DoubledSubject(creates, only_reads),
        {"seconds": 2.0},
        tried(1, (0,), faults=("claimant 1 had no rank after 2 s",), seconds=4),
        "0:Txn(rank/0) 1:Range(first) 1:Range(size)",
    ),
    "both are silent": (
        DoubledSubject(silent),
        {"seconds": 2.0},
        tried(1, (), faults=("claimant 0 and claimant 1 had no rank after 2 s",), seconds=12),
        "",
    ),
    "one polls": (
        DoubledSubject(polls),
        {},
        tried(12, (0, 1), seconds=1),
        "0:Put(there/0) 0:Range(there/) 0:Range(there/) 0:Range(there/) 0:Range(there/) 0:Range(there/) "
        "1:Put(there/1) 1:Range(there/) 0:Range(there/)",
    ),
    "the other polls": (
        DoubledSubject(polls_for_rank_0),
        {},
        tried(4, (0, 1)),
        "0:Put(there/0) 0:Put(rank/0) 1:Put(there/1) 1:Range(rank/0)",
    ),
    "no read at all": (
        DoubledSubject(takes_zero),
        {},
        tried(1, (0, 0), faults=shared(0, "after/1", "of/0", "of/1")),
        "1:Put(of/1) 0:Put(of/0) 1:Put(after/1)",
    ),
    "one order in no time": (DoubledSubject(locked), {"budget": 0.0}, tried(1, (), complete=False), ""),
    "no time for all orders": (DoubledSubject(locked), {"budget": 0.3}, tried(2, (), complete=False), ""),
    "no time for the second of two orders": (
        DoubledSubject(announces(by_age)),
        {"budget": 0.0},
        tried(1, (), complete=False),
        "",
    ),
    "one ends at once": (
        DoubledSubject(ends, locked),
        {},
        tried(
            1,
            ("its process ended without a message", 0),
            faults=(
                "nobody has rank 1 of 2",
                "claimant 0 (h, pid 70): its process ended without a message",
                "keys in etcd: /r/abababab/lock/11, /r/abababab/rank/0, /r/abababab/size",
            ),
        ),
        "1:LeaseGrant() 1:Lock(lock) 1:Range(size) 1:LeaseGrant() 1:Put(rank/0) 1:Put(size)",
    ),
    "one starts late": (
        DoubledSubject(paused((5, 0), creates)),
        {},
        tried(1, (0, 1), seconds=5),
        "0:Txn(rank/0) 1:Txn(rank/0) 1:Txn(rank/1)",
    ),
    "the other starts late": (
        DoubledSubject(paused((0, 5), creates)),
        {},
        tried(1, (0, 1), seconds=5),
        "0:Txn(rank/0) 1:Txn(rank/0) 1:Txn(rank/1)",
    ),
    "one writes and pauses": (
        DoubledSubject(paused((5, 0), read_modify_write, present=True)),
        {},
        tried(
            3,
            (0, 0),
            complete=False,
            faults=shared(0, "present/0", "present/1", "rank/0", "size"),
            cause=READ_EARLY,
            seconds=15,
        ),
        "1:Put(present/1) 1:Range(size) 0:Put(present/0) 0:Range(size) 0:LeaseGrant() 0:Put(rank/0) "
        "0:Put(size) 1:LeaseGrant() 1:Put(rank/0) 1:Put(size)",
    ),
    "one begins with a read": (
        DoubledSubject(announces(by_order), after_a_read(announces(by_order))),
        {},
        tried(2, (0, 1)),
        "0:Put(tokens/0) 0:Range(tokens/) 1:Range(size) 1:Put(tokens/1) 1:Range(tokens/)",
    ),
    "the other begins with a read": (
        DoubledSubject(after_a_read(announces(by_order)), announces(by_order)),
        {},
        tried(1, (0, 0), complete=False, faults=shared(0, "tokens/0", "tokens/1"), cause=LISTED_EARLY.format(1, 0)),
        "0:Range(size) 1:Put(tokens/1) 1:Range(tokens/) 0:Put(tokens/0) 0:Range(tokens/)",
    ),
    "the other waits": (DoubledSubject(follows, awaits=1), {}, tried(2, (), complete=False, seconds=140), ""),
}


@pytest.mark.parametrize("program", ORDERS)
def test_each_order_of_two_claims_is_tried_until_the_ranks_are_wrong(path: Any, program: str) -> None:
    subject, options, result, requests = ORDERS[program]
    start = path.clock.now
    done = try_orders(path, path.store, subject, group="/r/", **options)
    ranks = tuple(outcome.error if outcome.rank is None else outcome.rank for outcome in done.outcomes)
    seconds = round(path.clock.now - start)
    assert (done.count, ranks, done.complete, done.faults, done.cause, seconds) == result
    assert (short(done.order) if done.order else "") == requests
    assert done.twice == (len(set(ranks)) < len(ranks))
    assert subject.started == [("/r/abababab/", 2)] * 2 * done.count
    assert is_clean(path)
