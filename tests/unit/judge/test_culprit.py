# SPDX-License-Identifier: Apache-2.0
"""Which rank is to blame: from the rows that failed to two trials, and from what these came to to a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.judge.culprit import FailedPair, RetestResult, blame, by_direction, failed_pairs, trials
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Judgement, Verdict

NAMES = [f"rank {rank} on node-{rank}" for rank in range(4)]
WRITE = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1 << 20)
READ = replace(WRITE, op="READ")
PASS, FAIL = Judgement(Verdict.PASS, "0.11 GB/s"), Judgement(Verdict.FAIL, "0.02 GB/s")


def results(*rows: tuple[RowKey, Verdict]) -> tuple[list[Result], dict[str, RowKey]]:
    return (
        [Result("bandwidth", f"test[{key}]", verdict, "so it is", row=str(key)) for key, verdict in rows],
        {str(key): key for key, _ in rows},
    )


def pair(key: RowKey, *ranks: int) -> RowKey:
    return replace(key, pair=(ranks[0], ranks[1]))


def ring(*slow: int) -> tuple[list[Result], dict[str, RowKey]]:
    """Rows of four ranks in a ring, of which those that have a slow rank failed."""
    rows = []
    for rank in range(4):
        ranks = rank, (rank + 1) % 4
        rows.append((pair(WRITE, *ranks), Verdict.FAIL if set(ranks) & set(slow) else Verdict.PASS))
    return results(*rows)


def test_the_largest_block_of_each_pair_that_failed_is_tried_again() -> None:
    small = replace(pair(WRITE, 1, 2), block=4096)
    found, keys = results((small, Verdict.FAIL), (pair(WRITE, 1, 2), Verdict.FAIL), (pair(WRITE, 0, 1), Verdict.PASS))
    assert [each.key for each in failed_pairs(found, keys)] == [pair(WRITE, 1, 2)]


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.NOT_APPLICABLE])
def test_a_row_that_did_not_fail_blames_nobody(verdict: Verdict) -> None:
    assert failed_pairs(*results((pair(WRITE, 0, 1), verdict))) == []


def test_files_of_one_rank_are_no_pair() -> None:
    assert failed_pairs(*results((pair(WRITE, 2, 2), Verdict.FAIL))) == []


def test_each_end_is_tried_with_a_rank_that_is_in_no_failed_pair() -> None:
    failed = failed_pairs(*ring(2))
    assert {each.ranks for each in failed} == {(1, 2), (2, 3)}
    one, other = trials(next(each for each in failed if each.ranks == (1, 2)), failed, 4)
    # Bytes flow through each end the way they did: out of the initiator of a WRITE, into its target.
    assert (one.key.op, one.ranks) == ("WRITE", (1, 0))
    assert (other.key.op, other.ranks) == ("READ", (2, 0))


def test_two_ranks_have_no_third_to_be_tried_with() -> None:
    failed = FailedPair(pair(WRITE, 0, 1), FAIL)
    assert trials(failed, [failed], 2) == []


@pytest.mark.parametrize(
    ("first", "second", "guilty", "said"),
    [
        (
            FAIL,
            PASS,
            [1],
            "rank 1 on node-1 (its tcp/eth0) is to blame for the pair 1-2 (rank 1 with rank 0: 0.02 GB/s",
        ),
        (PASS, FAIL, [2], "rank 2 on node-2 (its tcp/eth0) is to blame for the pair 1-2"),
        (
            FAIL,
            FAIL,
            [1, 2],
            "rank 1 on node-1 (its tcp/eth0) and rank 2 on node-2 (its tcp/eth0), or rank 0 on node-0",
        ),
        (
            PASS,
            PASS,
            [],
            "rank 1 on node-1 and rank 2 on node-2 are each good with another rank: it is the path between",
        ),
        (PASS, Judgement(Verdict.INCONCLUSIVE, "?"), [], "rank 1 on node-1 and rank 2 on node-2 cannot be told apart"),
    ],
)
def test_whom_two_trials_blame(first: Judgement, second: Judgement, guilty: list[int], said: str) -> None:
    failed = FailedPair(pair(WRITE, 1, 2), FAIL)
    tried = [
        RetestResult(trial, judgement, ("tcp/eth0",))
        for trial, judgement in zip(trials(failed, [failed], 4), (first, second), strict=True)
    ]
    ranks, words = blame(failed, tried, NAMES)
    assert ranks == guilty
    assert words.startswith(said)


def test_of_two_ranks_the_direction_tells() -> None:
    found, keys = results((WRITE, Verdict.PASS), (READ, Verdict.FAIL))
    [said] = by_direction(failed_pairs(found, keys), found, keys, NAMES)
    assert said.startswith(
        "bytes that leave rank 1 on node-1 for rank 0 on node-0 are slow, and the other way they are"
    )
    found, keys = results((WRITE, Verdict.FAIL), (READ, Verdict.PASS))
    [said] = by_direction(failed_pairs(found, keys), found, keys, NAMES)
    assert said.startswith("bytes that leave rank 0 on node-0 for rank 1 on node-1 are slow")


def test_two_ranks_that_are_slow_both_ways_cannot_be_told_apart() -> None:
    found, keys = results((WRITE, Verdict.FAIL), (READ, Verdict.FAIL))
    [said] = by_direction(failed_pairs(found, keys), found, keys, NAMES)
    assert "slow both ways, and two ranks cannot be told apart" in said
