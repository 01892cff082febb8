# SPDX-License-Identifier: Apache-2.0
"""Which rank is slower than the others, and whether rows measured in turn prove it: tables of rates and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_nixl.judge.culprit import FailedPair, RetestResult, SlowerRank, blame, compare, failed_pairs, slower_ranks
from pytest_nixl.judge.culprit import trials as trials_of
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import BUSY_GPU, DISTURBED_CORES, Samples
from pytest_nixl.model.verdicts import Judgement, Verdict

WRITE = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1 << 20)
NAMES = [f"rank {rank} on node-{rank}" for rank in range(4)]


def row(ranks: tuple[int, int], rate: float, over: str = "tcp/eth0", **changes: int) -> Result:
    summary = RowSummary(rate * 1e9, 1e-6, 1e-6, 10, 0.0, 0.0, (over,))
    key = replace(WRITE, pair=ranks, **changes)  # type: ignore[arg-type]
    return Result("bandwidth", "test", Verdict.NO_EXPECTATION, "the reason", "the remedy", row=key, summary=summary)


@pytest.mark.parametrize(
    ("rows", "slow"),
    [
        # Each pair has devices of its own, and the same transport.
        ([row((0, 1), 0.2, "rc/a"), row((0, 2), 0.2, "rc/b"), row((1, 2), 1.0, "rc/c")], {0}),
        ([row((0, 1), 0.2, "cma"), row((0, 2), 0.2, "cma"), row((1, 2), 1.0, "tcp")], set()),
        # One pair of the others is far faster than the rest: that makes no rank slow.
        ([row((0, 1), 1.0), row((0, 2), 1.0), row((0, 3), 1.0), row((1, 2), 1.0), row((1, 3), 1.0),
          row((2, 3), 9.0)], set()),
        # The larger half of the sizes decides, in whatever order they were measured.
        ([row(ranks, rate if 0 in ranks else 1.0, block=block << 20) for ranks in ((0, 1), (0, 2), (1, 2))
          for block, rate in ((8, 0.6), (4, 0.3), (2, 1.0), (1, 1.0))], {0}),
        ([row(ranks, rate if 0 in ranks else 1.0, block=block << 20) for ranks in ((0, 1), (0, 2), (1, 2))
          for block, rate in ((8, 1.0), (4, 1.0), (2, 0.3), (1, 0.3))], set()),
    ],
)  # fmt: skip
def test_a_rank_is_slower_than_the_median_of_like_rows_without_it(rows: list[Result], slow: set[int]) -> None:
    assert {candidate.rank for candidate in slower_ranks(rows) if candidate.sends} == slow


def launches(
    cores: Sequence[Sequence[float]] = ((), (), ()), over: str = "rc/mlx5_0", overs: Sequence[str] = (),
    waits: Sequence[float] = (0.0, 0.0, 0.0), ranks: tuple[int, int] = (2, 1), rate: float = 1.0,
) -> list[Samples]:  # fmt: skip
    return [
        Samples(replace(WRITE, pair=ranks, batch=batch), (1.0,), (int(rate * 1000),), (1e-3,), (name,),
                contention=tuple(used), hosts=("a", "b"), gpu_waits=(wait,))
        for batch, used, name, wait in zip((4, 8, 8), cores, overs or [over] * 3, waits, strict=True)
    ]  # fmt: skip


BUSY = 2 * BUSY_GPU


@pytest.mark.parametrize(
    ("one", "two", "verdict", "text"),
    [
        ({"overs": ("rc/x", "rc/y", "rc/z")}, {}, Verdict.FAIL, "over rc/x) is the culprit"),
        ({"overs": ("rc/x", "tcp/y", "rc/z")}, {}, Verdict.INCONCLUSIVE, "take another way"),
        # The median of the launches is what the other processes took, and of a launch the most.
        ({"cores": ((5,), (5,), (5,))}, {"cores": ((0,), (0,), (5,))}, Verdict.INCONCLUSIVE, "took 5.0 and 0.0 cores"),
        ({"cores": ((5, 0), (5, 0), (5, 0))}, {}, Verdict.INCONCLUSIVE, "took 5.0 and 0.0 cores"),
        ({"cores": ((DISTURBED_CORES,),) * 3}, {}, Verdict.FAIL, "is the culprit"),
        ({"waits": (BUSY, BUSY, 0.0)}, {}, Verdict.INCONCLUSIVE, "only its host is busy"),
        ({"waits": (0.0, BUSY, BUSY)}, {}, Verdict.INCONCLUSIVE, "only its host is busy"),
        ({"waits": (0.0, BUSY, 0.0)}, {}, Verdict.FAIL, "is the culprit"),
        ({"waits": (BUSY, BUSY, BUSY)}, {"waits": (BUSY, BUSY, BUSY)}, Verdict.FAIL, "is the culprit"),
    ],
)
def test_a_busy_host_or_another_way_is_said_of_most_launches(
    one: dict[str, object], two: dict[str, object], verdict: Verdict, text: str
) -> None:
    in_turn = zip(launches(rate=0.1, **one), launches(ranks=(0, 1), **two), strict=True)  # type: ignore[arg-type]
    judged, sentence = compare(SlowerRank(2, True, WRITE), list(in_turn), NAMES)
    assert (judged, text in sentence) == (verdict, True), sentence
    assert ("other processes took" in sentence) is ("took" in text)
    assert "(UCX WRITE DRAM:DRAM of 1MiB (batch 4), in turn with rank 0 on node-0, both with rank 1: " in sentence


def test_what_a_slower_rank_receives_is_named() -> None:
    in_turn = list(zip(launches(), launches(ranks=(0, 1)), strict=True))
    judged, sentence = compare(SlowerRank(2, False, WRITE), in_turn, NAMES)
    assert judged is Verdict.PASS
    assert sentence.startswith("rank 2 on node-2 (what it receives) is not slower")


def test_a_failed_pair_has_the_judgement_of_its_row_and_the_last_rank_may_be_its_partner() -> None:
    [failed] = failed_pairs([replace(row((0, 1), 1.0), verdict=Verdict.FAIL)])
    assert failed == FailedPair(replace(WRITE, pair=(0, 1)), Judgement(Verdict.FAIL, "the reason", "the remedy"))
    trials = trials_of(failed, [failed], 3)
    assert [key.pair for key in trials] == [(0, 2), (1, 2)]
    tried = [RetestResult(key, Judgement(Verdict.FAIL, f"{key.pair}")) for key in trials]
    assert blame(failed, tried, NAMES)[1] == (
        "the culprits are rank 0 on node-0 (its interface) and rank 1 on node-1 (its interface), or rank 2 on node-2, "
        "because both were measured with it (rank 0 with rank 2: (0, 2); rank 1 with rank 2: (1, 2))"
    )


@pytest.mark.parametrize("changes", [{"batch": 64}, {"depth": 64}])
def test_a_block_is_quick_by_all_bytes_of_its_transfers(changes: dict[str, int]) -> None:
    # 64 times 1 MiB take a third of the 0.1 s at 2 GB/s, 64 times 4 MiB more.
    rows = [row((1, 2), 2.0, "tcp/eth0", block=block, **changes) for block in (1 << 20, 4 << 20)]
    failed = failed_pairs([replace(result, verdict=Verdict.FAIL) for result in rows])
    assert [pair.key.block for pair in failed] == [1 << 20]
