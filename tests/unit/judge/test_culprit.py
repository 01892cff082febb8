# SPDX-License-Identifier: Apache-2.0
"""The culprit of failed pairs: the two trials that follow from failed rows, and the sentence that follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.judge.culprit import (
    ACTION,
    FailedPair,
    RetestResult,
    SlowerRank,
    blame,
    by_direction,
    compare,
    failed_pairs,
    remedy_of_two,
    slower_ranks,
    trials,
)
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
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


SENT = "bytes from rank 0 on node-0 to rank 1 on node-1 are slow"
RECEIVED = "bytes from rank 1 on node-1 to rank 0 on node-0 are slow"
CHECK = "check what {0} sends through first, then what {1} receives through"
SOURCE = CHECK.format("rank 0 on node-0", "rank 1 on node-1")
DESTINATION = CHECK.format("rank 1 on node-1", "rank 0 on node-0")
NOBODY = "with only two ranks nothing shows which one is the culprit"


@pytest.mark.parametrize(
    ("write", "read", "sentence"),
    [
        (Verdict.PASS, Verdict.FAIL, f"{RECEIVED}, and bytes in the other direction are not: {DESTINATION}"),
        (Verdict.FAIL, Verdict.PASS, f"{SENT}, and bytes in the other direction are not: {SOURCE}"),
        # The other direction lost packets, and is not slow.
        (Verdict.FAIL, Verdict.WARN, f"{SENT}, and bytes in the other direction are not: {SOURCE}"),
        (Verdict.FAIL, Verdict.FAIL, f"rank 0 on node-0 and rank 1 on node-1 are slow in both directions: {NOBODY}"),
        (Verdict.FAIL, Verdict.INCONCLUSIVE, f"{SENT}; no row of the other direction was judged, and {NOBODY}"),
        (Verdict.FAIL, None, f"{SENT}; no row of the other direction was judged, and {NOBODY}"),
        (None, Verdict.FAIL, f"{RECEIVED}; no row of the other direction was judged, and {NOBODY}"),
    ],
)
def test_the_slow_direction_of_two_ranks_is_named(write: Verdict | None, read: Verdict | None, sentence: str) -> None:
    pair_results = results(*((key, verdict) for key, verdict in ((WRITE, write), (READ, read)) if verdict is not None))
    assert list(by_direction(failed_pairs(pair_results), pair_results, NAMES)) == [sentence]


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
    assert [sentence.partition(": ")[0] for sentence in sentences] == [
        f"{SENT}, and bytes in the other direction are not",
        f"{RECEIVED}; no row of the other direction was judged, and {NOBODY}",
    ]
    pair_results = results((WRITE, Verdict.FAIL), (of_libfabric(READ), Verdict.PASS))
    [of_ucx] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
    assert of_ucx == f"{SENT}; no row of the other direction was judged, and {NOBODY}"


def test_rows_of_requests_and_patterns_say_nothing_of_a_direction() -> None:
    other = [replace(READ, variant=((name, "x"),)) for name in ("kv", "pattern")]
    assert [bool(key.kv or key.pattern) for key in other] == [True, True]
    for key in other:
        pair_results = results((WRITE, Verdict.FAIL), (READ, Verdict.PASS), (key, Verdict.FAIL))
        [sentence] = by_direction(failed_pairs(pair_results), pair_results, NAMES)
        assert sentence.startswith(SENT)


def test_of_failed_blocks_the_largest_that_are_quick_to_move_are_measured_again() -> None:
    slow = replace(SUMMARY, bandwidth=12e6)
    rows = [
        Result("bandwidth", "test", Verdict.FAIL, row=replace(pair(WRITE, 1, 2), block=block), summary=slow)
        for block in (4096, 1 << 20, 2 << 20, 64 << 20)
    ]
    assert [failed.key.block for failed in failed_pairs(rows)] == [1 << 20]
    assert [failed.key.block for failed in failed_pairs(rows[2:])] == [2 << 20], "none is quick"


def three_ranks(
    rates: dict[str, float], verdict: Verdict = Verdict.NO_EXPECTATION, *, ops: str = "WR", floor: float = 0.0
) -> list[Result]:
    """Return the rows of three ranks in a ring.

    :param rates: GB/s of the bytes from a rank to another one, such as ``2-0``; of the others 1.
    """
    rows = []
    for initiator in range(3):
        target = (initiator + 1) % 3
        for key, way in ((WRITE, f"{initiator}-{target}"), (READ, f"{target}-{initiator}")):
            if key.op[0] in ops:
                summary = replace(SUMMARY, bandwidth=1e9 * rates.get(way, 1.0), floor=floor)
                rows.append(Result("bandwidth", "test", verdict, row=pair(key, initiator, target), summary=summary))
    return rows


def directions(results: list[Result]) -> list[tuple[int, bool]]:
    return [(slower.rank, slower.sends) for slower in slower_ranks(results)]


def test_a_rank_is_slower_if_all_its_rows_in_a_direction_are() -> None:
    assert directions(three_ranks({"2-0": 0.2, "2-1": 0.2})) == [(2, True)]
    assert directions(three_ranks({"0-2": 0.2, "1-2": 0.2}, Verdict.INCONCLUSIVE, floor=1e9)) == [(2, False)]
    assert directions(three_ranks({"2-0": 0.2})) == [], "the link to one other rank"
    assert directions(three_ranks({"2-0": 0.6, "2-1": 0.6})) == [], "more than half as fast"
    assert directions(three_ranks({"2-0": 0.2, "2-1": 0.2}, Verdict.PASS, floor=1e8)) == [], "fast enough"
    assert directions(three_ranks({"2-0": 0.2, "2-1": 0.2}, Verdict.PASS)) == [(2, True)], "by its transport alone"
    both = dict.fromkeys(("0-2", "1-2", "2-0", "2-1"), 0.4)
    assert directions(three_ranks(both)) == [(2, False), (2, True)]
    assert directions(three_ranks({"2-0": 0.2, "2-1": 0.2}, ops="W")) == [(2, True), (0, False)], "to be compared"


def test_larger_blocks_decide_whether_a_rank_is_slower() -> None:
    def rows(*shares: float) -> list[Result]:
        return [
            replace(result, row=replace(result.row, block=4096 << number))
            for number, share in enumerate(shares)
            for result in three_ranks({"2-0": share, "2-1": share})
            if isinstance(result.row, RowKey)
        ]

    assert directions(rows(1.0, 1.0, 0.2, 0.2)) == [(2, True)]
    assert directions(rows(0.2, 0.2, 1.0, 1.0)) == []
    assert slower_ranks(rows(1.0, 0.2, 0.2, 0.2))[0].key.block == 32 << 10
    assert slower_ranks(rows(0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 1.0))[0].key.block == 128 << 10, "a slow one"


def test_a_row_that_the_slower_rank_initiates_is_repeated() -> None:
    assert [slower.key for slower in slower_ranks(three_ranks({"0-1": 0.2, "0-2": 0.2}))] == [pair(WRITE, 0, 1)]


def test_rows_over_another_transport_are_not_compared() -> None:
    rows = three_ranks({"0-1": 5.0, "1-0": 5.0})
    assert directions(rows) == [(2, False), (2, True)]
    for number, row in enumerate(rows):
        if row.row in (WRITE, READ) and row.summary is not None:
            rows[number] = replace(row, summary=replace(row.summary, transports=("cma",)))
    assert directions(rows) == []


@pytest.mark.parametrize(("sends", "op"), [(True, "WRITE"), (False, "READ")])
def test_a_slower_rank_and_another_are_compared_with_a_third_that_is_good(sends: bool, op: str) -> None:
    slower = SlowerRank(2, sends, pair(WRITE, 2, 0))
    first, second = slower.comparison([slower, SlowerRank(0, False, slower.key)], 4)
    assert [(key.op, key.pair) for key in (first, second)] == [(op, (2, 1)), (op, (3, 1))]


def measured(rate: float, *ranks: int, cores: float = 0.0, hosts: str = "ab", over: str = "tcp/eth0") -> Samples:
    return Samples(
        pair(WRITE, *ranks), (1.0,), (int(rate * 1000),), (1e-3,), (over,), contention=(cores,), hosts=tuple(hosts)
    )


@pytest.mark.parametrize(
    ("one", "two", "verdict"),
    [
        ([0.2, 0.2, 0.2], [1.0, 0.9, 0.5], Verdict.FAIL),
        ([0.2, 0.2, 0.3], [1.0, 0.9, 0.5], Verdict.PASS),
        ([0.2], [1.0], Verdict.FAIL),
    ],
)
def test_a_rank_is_the_culprit_if_it_is_slower_each_time(one: list[float], two: list[float], verdict: Verdict) -> None:
    slower = SlowerRank(2, True, pair(WRITE, 2, 0))
    in_turn = [(measured(a, 2, 1), measured(b, 0, 1)) for a, b in zip(one, two, strict=True)]
    judged, sentence = compare(slower, in_turn, NAMES)
    assert judged is verdict
    assert "rank 2 on node-2 (what it sends" in sentence
    assert f"in turn with rank 0 on node-0, both with rank 1: 0.21 and {1.0486 * two[0]:.3g} GB/s" in sentence


@pytest.mark.parametrize(
    ("one", "two", "reason"),
    [
        (measured(0.2, 2, 1, cores=0.7), measured(1, 0, 1), "and only its host is busy"),
        # What is left of its core is worth more than what it does.
        (
            measured(0.2, 2, 1, cores=0.5),
            measured(1, 0, 1),
            "0.21 and 1.05 GB/s; other processes took 0.5 and 0.0 cores)",
        ),
        (measured(0.2, 2, 1, cores=0.5), measured(1, 0, 1), "is the culprit"),
        (measured(0.2, 2, 1, cores=0.6), measured(1, 0, 1, cores=0.4), "is the culprit"),
        (measured(0.45, 2, 1, cores=0.3), measured(1, 0, 1, cores=0.1), "is the culprit"),
        (measured(0.2, 2, 1), measured(1, 0, 1, hosts="aa"), "take another way"),
        (measured(0.2, 2, 1), measured(1, 0, 1, over="rc_mlx5/mlx5_0:1"), "take another way"),
        (measured(0.2, 2, 1), measured(1, 0, 1, over="tcp/eth1"), "is the culprit"),
    ],
)
def test_what_else_makes_a_rank_slower_is_said_of_it(one: Samples, two: Samples, reason: str) -> None:
    assert reason in compare(SlowerRank(2, True, one.key), [(one, two)], NAMES)[1]


def test_one_launch_that_load_explains_excuses_no_rank() -> None:
    in_turn = [(measured(rate, 2, 1, cores=0.7), measured(1, 0, 1)) for rate in (0.1, 0.1, 0.45)]
    assert "is the culprit" in compare(SlowerRank(2, True, pair(WRITE, 2, 0)), in_turn, NAMES)[1]
