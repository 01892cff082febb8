# SPDX-License-Identifier: Apache-2.0
"""The culprit of failed pairs: the two trials that follow from failed rows, and the sentence that follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.judge.culprit import (
    ACTION,
    FailedPair,
    RetestResult,
    blame,
    by_direction,
    failed_pairs,
    remedy_of_two,
    trials,
)
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Judgement, Verdict

NAMES = [f"rank {rank} on node-{rank}" for rank in range(4)]
WRITE = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1 << 20)
READ = replace(WRITE, op="READ")
PASS, FAIL = Judgement(Verdict.PASS, "0.11 GB/s"), Judgement(Verdict.FAIL, "0.02 GB/s")


SUMMARY = RowSummary(1e9, 1e-6, 1e-6, 10, 0.0, 0.0, ("tcp/eth0",))


def results(*rows: tuple[RowKey, Verdict]) -> list[Result]:
    return [Result("bandwidth", f"test[{key}]", verdict, "a reason", row=key, summary=SUMMARY) for key, verdict in rows]


def pair(key: RowKey, *ranks: int) -> RowKey:
    return replace(key, pair=(ranks[0], ranks[1]))


def ring(*slow: int) -> list[Result]:
    """Return the rows of four ranks in a ring. Those with a slow rank failed."""
    rows = []
    for rank in range(4):
        ranks = rank, (rank + 1) % 4
        rows.append((pair(WRITE, *ranks), Verdict.FAIL if set(ranks) & set(slow) else Verdict.PASS))
    return results(*rows)


def test_the_largest_block_of_each_failed_pair_is_measured_again() -> None:
    small = replace(pair(WRITE, 1, 2), block=4096)
    pair_results = results((small, Verdict.FAIL), (pair(WRITE, 1, 2), Verdict.FAIL), (pair(WRITE, 0, 1), Verdict.PASS))
    assert [failed_pair.key for failed_pair in failed_pairs(pair_results)] == [pair(WRITE, 1, 2)]
    pair_results += results((pair(READ, 1, 2), Verdict.FAIL))
    assert [failed_pair.key for failed_pair in failed_pairs(pair_results)] == [pair(READ, 1, 2)], (
        "of equal blocks the last"
    )


def test_pairs_of_the_ranks_that_failed_most_come_first() -> None:
    pair_results = results(*((pair(WRITE, *ranks), Verdict.FAIL) for ranks in ((0, 1), (2, 3), (4, 3))))
    assert [failed_pair.ranks for failed_pair in failed_pairs(pair_results)] == [(2, 3), (4, 3), (0, 1)]


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.NOT_APPLICABLE])
def test_a_row_that_did_not_fail_gives_no_failed_pair(verdict: Verdict) -> None:
    assert failed_pairs(results((pair(WRITE, 0, 1), verdict))) == []


def test_a_row_that_was_not_measured_or_is_not_of_blocks_moved_by_nixl_gives_no_failed_pair() -> None:
    key = pair(WRITE, 0, 1)
    other_keys = [replace(key, variant=((name, "x"),)) for name in ("kv", "pattern")]
    for other in (key.measured_by("nixlbench"), *other_keys):
        assert failed_pairs(results((other, Verdict.FAIL))) == []
    assert failed_pairs([Result("bandwidth", "test", Verdict.FAIL, "a reason", row=key)]) == []


def test_a_storage_row_of_one_rank_is_not_a_pair() -> None:
    assert failed_pairs(results((pair(WRITE, 2, 2), Verdict.FAIL))) == []


def test_each_rank_is_measured_with_a_rank_that_is_in_no_failed_pair() -> None:
    failed = failed_pairs(ring(2))
    assert {result.ranks for result in failed} == {(1, 2), (2, 3)}
    first, other = trials(next(result for result in failed if result.ranks == (1, 2)), failed, 4)
    # Bytes flow in the same direction as in the failed row: out of the initiator of a WRITE, into its target.
    assert (first.op, first.pair) == ("WRITE", (1, 0))
    assert (other.op, other.pair) == ("READ", (2, 0))


def of_libfabric(key: RowKey) -> RowKey:
    return replace(key, backend="LIBFABRIC")


def test_a_partner_is_good_if_its_pairs_of_the_same_backend_are() -> None:
    pair_results = results(
        (pair(WRITE, 1, 2), Verdict.FAIL),
        (of_libfabric(pair(WRITE, 0, 1)), Verdict.FAIL), (of_libfabric(pair(WRITE, 0, 2)), Verdict.FAIL),
        (pair(WRITE, 3, 2), Verdict.FAIL),
    )  # fmt: skip
    failed = failed_pairs(pair_results)
    first, other = trials(next(result for result in failed if result.ranks == (1, 2)), failed, 4)
    assert (first.pair[1], other.pair[1]) == (0, 0), "only pairs of LIBFABRIC failed with rank 0"
    assert {first.backend, other.backend} == {"UCX"}


def test_two_ranks_give_no_trial() -> None:
    failed = FailedPair(pair(WRITE, 0, 1), FAIL)
    assert trials(failed, [failed], 2) == []


@pytest.mark.parametrize(
    ("first", "second", "guilty", "sentence"),
    [
        (
            FAIL,
            PASS,
            [1],
            "rank 1 on node-1 (its tcp/eth0) is the culprit in the pair 1-2 (rank 1 with rank 0: 0.02 GB/s",
        ),
        (PASS, FAIL, [2], "rank 2 on node-2 (its tcp/eth0) is the culprit in the pair 1-2"),
        (
            FAIL,
            FAIL,
            [1, 2],
            "the culprits are rank 1 on node-1 (its tcp/eth0) and rank 2 on node-2 (its tcp/eth0), or rank 0 on node-0",
        ),
        (
            PASS,
            PASS,
            [],
            "rank 1 on node-1 and rank 2 on node-2 are each good with another rank",
        ),
        (PASS, Judgement(Verdict.INCONCLUSIVE, "?"), [], "which of rank 1 on node-1 and rank 2 on node-2"),
    ],
)
def test_two_trials_name_the_culprits(first: Judgement, second: Judgement, guilty: list[int], sentence: str) -> None:
    failed = FailedPair(pair(WRITE, 1, 2), FAIL)
    tried = [
        RetestResult(trial, judgement, ("tcp/eth0",))
        for trial, judgement in zip(trials(failed, [failed], 4), (first, second), strict=True)
    ]
    ranks, description = blame(failed, tried, NAMES)
    assert ranks == guilty
    assert description.startswith(sentence)


def test_the_slow_direction_of_two_ranks_is_named() -> None:
    pair_results = results((WRITE, Verdict.PASS), (READ, Verdict.FAIL))
    [sentence] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
    assert sentence.startswith("bytes from rank 1 on node-1 to rank 0 on node-0 are slow")
    pair_results = results((WRITE, Verdict.FAIL), (READ, Verdict.PASS))
    [sentence] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
    assert sentence.startswith("bytes from rank 0 on node-0 to rank 1 on node-1 are slow")
    # The other direction lost packets, and is not slow.
    pair_results = results((WRITE, Verdict.FAIL), (READ, Verdict.WARN))
    [sentence] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
    assert sentence.startswith("bytes from rank 0 on node-0 to rank 1 on node-1 are slow")


def test_two_ranks_that_are_slow_in_both_directions_have_no_culprit() -> None:
    pair_results = results((WRITE, Verdict.FAIL), (READ, Verdict.FAIL))
    [sentence] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
    assert sentence.startswith("rank 0 on node-0 and rank 1 on node-1 are slow in both directions")


@pytest.mark.parametrize("read", [Verdict.PASS, Verdict.WRONG_TRANSPORT])
def test_two_ranks_with_a_wrong_transport_are_not_called_slow(read: Verdict) -> None:
    pair_results = results((WRITE, Verdict.WRONG_TRANSPORT), (READ, read))
    [sentence] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
    assert sentence.startswith(
        "bytes between rank 0 on node-0 and rank 1 on node-1 took a transport that the profile does"
    )
    assert "slow" not in sentence


def test_the_remedy_of_two_ranks_with_a_wrong_transport_is_that_of_the_row() -> None:
    wrong = Judgement(Verdict.WRONG_TRANSPORT, "went over tcp", "Unset UCX_TLS.")
    slow = FailedPair(WRITE, replace(FAIL, remedy="Check that the machine is idle."))
    assert remedy_of_two([slow, FailedPair(READ, wrong)]) == "Unset UCX_TLS."
    for failed in ([slow], [FailedPair(READ, replace(wrong, remedy=""))]):
        assert remedy_of_two(failed) == f"start a third rank, or {ACTION}"


def test_the_slow_direction_of_a_backend_is_named_by_its_own_rows() -> None:
    # LIBFABRIC is slow in the other direction, and good in both: neither says anything of UCX.
    pair_results = results((WRITE, Verdict.FAIL), (READ, Verdict.PASS), (of_libfabric(READ), Verdict.FAIL))
    sentences = list(by_direction(failed_pairs(pair_results), pair_results, NAMES))
    assert sentences[0].startswith("bytes from rank 0 on node-0 to rank 1 on node-1 are slow")
    assert sentences[1].startswith("rank 0 on node-0 and rank 1 on node-1 are slow in both directions")
    pair_results = results((WRITE, Verdict.FAIL), (of_libfabric(READ), Verdict.PASS))
    [said_of_ucx] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
    assert said_of_ucx.startswith("rank 0 on node-0 and rank 1 on node-1 are slow in both directions")


def test_rows_of_requests_and_patterns_say_nothing_of_a_direction() -> None:
    other = [replace(READ, variant=((name, "x"),)) for name in ("kv", "pattern")]
    assert [bool(key.kv or key.pattern) for key in other] == [True, True]
    for key in other:
        pair_results = results((WRITE, Verdict.FAIL), (READ, Verdict.PASS), (key, Verdict.FAIL))
        [sentence] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
        assert sentence.startswith("bytes from rank 0 on node-0 to rank 1 on node-1 are slow")
