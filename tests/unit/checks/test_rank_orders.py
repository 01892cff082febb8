# SPDX-License-Identifier: Apache-2.0
"""Each order of two claims is tried until one is wrong, with claimants in memory."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from helpers.doubled_claims import (
    COUNTED,
    LISTED_EARLY,
    READ_EARLY,
    Case,
    DoubledPath,
    DoubledStore,
    DoubledSubject,
    after_a_read,
    announces,
    by_age,
    by_count,
    by_order,
    creates,
    creates_slowly,
    ends,
    follows,
    keeps_a_lease,
    locked,
    only_reads,
    paused,
    polls,
    polls_for_rank_0,
    read_modify_write,
    reads_much,
    shared,
    short,
    silent,
    takes_zero,
)
from helpers.doubled_nixl import DoubledClock

from pytest_nixl.checks.rank_race import orders
from pytest_nixl.checks.rank_race.orders import try_orders

ENDED = "claimant 1 (h, pid 71): its process ended without a message"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> DoubledPath:
    """A proxy in memory, whose clock is that of the claims."""
    clock = DoubledClock()
    monkeypatch.setattr(orders, "time", clock)
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)
    return DoubledPath(clock, DoubledStore())


def tried(
    count: int, ranks: tuple[Any, ...], *, complete: bool = True, faults: Any = (), cause: str = "", seconds: int = 0
) -> tuple[Any, ...]:
    """Return the result of the orders of two claims: their number, whether none is left, and what is wrong."""
    return count, ranks, complete, faults, cause, seconds


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
    "both read much": (
        DoubledSubject(reads_much),
        {},
        tried(10, (0, 1), seconds=2),
        "0:Range(a) 0:Range(b) 0:Range(b) 0:Range(b) 0:Range(b) 0:Range(a) 0:Range(a) 0:Range(c) 0:Range(d) "
        "0:Txn(rank/0) 1:Range(a) 1:Range(b) 1:Range(b) 1:Range(b) 1:Range(b) 1:Range(a) 1:Range(a) "
        "1:Range(c) 1:Range(d) 1:Txn(rank/0) 1:Txn(rank/1)",
    ),
    "both pause before their rank": (
        DoubledSubject(creates_slowly),
        {},
        tried(1, (0, 1), seconds=1),
        "0:Txn(rank/0) 1:Txn(rank/0)",
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
    assert path.is_clean
