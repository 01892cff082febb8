# SPDX-License-Identifier: Apache-2.0
"""Check the invariants of assigned ranks: 0 to n-1, each once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_nixl.checks.rank_race.system_under_test import ClaimOutcome


def faults(outcomes: Sequence[ClaimOutcome], size: int, keys: Iterable[str] = ()) -> list[str]:
    """Return one sentence per fault, with ranks, hosts and keys; empty if the ranks are right.

    :param outcomes: outcomes of all claimants that were not killed.
    :param size: size of the group.
    :param keys: keys of the group in etcd.
    """
    found = given_twice(outcomes)
    for rank in sorted({outcome.rank for outcome in outcomes if outcome.rank is not None}):
        if not 0 <= rank < size:
            owner = next(outcome for outcome in outcomes if outcome.rank == rank)
            found.append(f"rank {rank} is outside a group of {size}: {owner}")
    missing = sorted(set(range(size)) - {outcome.rank for outcome in outcomes if outcome.rank is not None})
    if missing:
        found.append(f"nobody has rank {', '.join(map(str, missing))} of {size}")
    found += [str(outcome) for outcome in outcomes if outcome.rank is None]
    found += [
        f"{outcome.name} said: {outcome.error}" for outcome in outcomes if outcome.rank is not None and outcome.error
    ]
    named = sorted({*keys, *(key for outcome in outcomes for key in outcome.keys)})
    if found and named:
        found.append(f"keys in etcd: {', '.join(named)}")
    return found


def given_twice(outcomes: Sequence[ClaimOutcome]) -> list[str]:
    """Return one sentence for each rank that several claimants got."""
    found = []
    for rank in sorted({outcome.rank for outcome in outcomes if outcome.rank is not None}):
        owners = [outcome for outcome in outcomes if outcome.rank == rank]
        if len(owners) > 1:
            who = " and ".join(str(owner).removesuffix(f": rank {rank}") for owner in owners)
            found.append(f"rank {rank} was given {len(owners)} times: to {who}")
    return found


def owners_of_one_rank(outcomes: Sequence[ClaimOutcome]) -> frozenset[str]:
    """Return the names of the claimants that share a rank with another claimant."""
    ranks = [outcome.rank for outcome in outcomes if outcome.rank is not None]
    return frozenset(outcome.name for outcome in outcomes if outcome.rank is not None and ranks.count(outcome.rank) > 1)
