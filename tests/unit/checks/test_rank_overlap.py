# SPDX-License-Identifier: Apache-2.0
"""Claims that overlap, with claimants in memory: how they met, what is wrong, why, and in what order."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from helpers.doubled_claims import (
    COUNTED,
    READ_EARLY,
    Case,
    DoubledPath,
    DoubledStore,
    DoubledSubject,
    announces,
    by_count,
    by_order,
    creates,
    deletes,
    ends,
    ends_after_a_read,
    follows,
    keeps_a_lease,
    locked,
    only_reads,
    outside,
    paused,
    read_modify_write,
    shared,
    short,
    silent,
    takes_zero,
)
from helpers.doubled_nixl import DoubledClock

from pytest_nixl.checks.rank_race import race
from pytest_nixl.checks.rank_race.race import amplify

ENDED = "claimant 1 (h, pid 71): its process ended without a message"
CUT_OFF = "claimant 0 ended before the other one wrote: claimant 0 (h, pid 70): ConnectionError: it was cut off"
STUCK = "claimant {} neither wrote nor waited in a lock within 3 s; its last request: Range(<group>/size)"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> DoubledPath:
    """A proxy in memory, whose clock is that of the claims."""
    clock = DoubledClock()
    monkeypatch.setattr(race, "time", clock)
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)
    return DoubledPath(clock, DoubledStore())


def overlap(
    ranks: tuple[Any, ...], *, faults: Any = (), flags: str = "met", unmet: str = "", cause: str = "", seconds: int = 0
) -> tuple[Any, ...]:
    """Return the result of claims at once.

    :param ranks: of each claimant that ended, its rank, or its error.
    :param flags: whether the claims ``met``, were ``locked`` and an answer was ``lost``.
    :param seconds: the seconds that the claims took.
    """
    return ranks, faults, flags, unmet, cause, seconds


THIRD_LOCKS = paused((0, 0, 1), locked, present=True)
WAITS = paused((0, 70, 0), read_modify_write, present=True)

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
    "one is silent and one ends": (
        DoubledSubject(silent, ends),
        {"seconds": 3.0},
        overlap(
            ("its process ended without a message",),
            flags="",
            unmet="claimant 0 sent no request to etcd within 3 s",
            seconds=6,
        ),
        "",
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
    "both delete a key": (
        DoubledSubject(deletes),
        {},
        overlap((0, 0), faults=shared(0)[:2], seconds=5),
        "0:Range(size) 1:Range(size) 0:DeleteRange(old/0) 1:DeleteRange(old/1) 0:Range(there/) 1:Range(there/)",
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
    assert path.is_clean
