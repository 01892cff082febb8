# SPDX-License-Identifier: Apache-2.0
"""The check ``rank-to-blame`` of several ranks: which rows are measured again, and what is said of their ranks.

Its links are doubles. The real ones between any two of several ranks are in ``tests/unit/cluster/test_driver.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, call

import pytest

from pytest_nixl.checks.bandwidth import ranks_together
from pytest_nixl.checks.bandwidth.ranks_together import judge_culprit
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.judge.culprit import ACTION
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run

ROW = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1 << 20, batch=3, depth=2)
SUMMARY = RowSummary(1e9, 1e-6, 1e-6, 10, 0.0, 0.0, ("tcp/eth0",))


class Links:
    """A double of the pairs of four ranks, one of which is slow.

    :param slow: that rank; None: all of them are fast.
    """

    def __init__(self, slow: int | None) -> None:
        self.slow = slow
        self.measured: list[tuple[str, tuple[int, int], tuple[object, ...]]] = []

    def link_of(self, key: RowKey, ranks: tuple[int, int]) -> Any:
        def measure_launches(block: int, *, batch: int, depth: int, another: Callable[[Samples], bool]) -> Any:
            self.measured.append((key.op, ranks, (block, batch, depth)))
            return SimpleNamespace(ranks=ranks, transports=(f"tcp/of-{ranks[0]}",), more=another(cast(Samples, None)))

        return SimpleNamespace(measure_launches=measure_launches)

    def judge(self, samples: Any) -> Judgement:
        assert samples.more == "as the run decides"
        verdict = Verdict.FAIL if self.slow in samples.ranks else Verdict.PASS
        return Judgement(verdict, f"{verdict} of {samples.ranks}")


def judged_results(results: list[Result], links: Links, ranks: int) -> Judgement:
    """Judge a run of so many ranks with these results."""
    names = [f"rank {rank} on node-{rank}" for rank in range(ranks)]
    return judge_culprit(
        cast(Run, SimpleNamespace(record=SimpleNamespace(results=results))),
        cast(Cluster, SimpleNamespace(several=ranks > 1, ranks=ranks, names=names)),
        cast(Launches, links), cast(Callable[[Samples], bool], lambda _: "as the run decides"), links.judge,
    )  # fmt: skip


def judged(links: Links, *failed: tuple[int, int], ranks: int = 4, passed: tuple[int, int] = (0, 1)) -> Judgement:
    """Judge a run in which the rows of some pairs failed, and that of another pair passed."""
    rows = [(passed, Verdict.PASS), *((pair, Verdict.FAIL) for pair in failed)]
    results = [
        Result("bandwidth", f"test[{pair}]", verdict, "a reason", row=replace(ROW, pair=pair), summary=SUMMARY)
        for pair, verdict in rows
    ]
    return judged_results(results, links, ranks)


@pytest.mark.parametrize(("slow", "verdict"), [(2, Verdict.FAIL), (3, Verdict.FAIL), (None, Verdict.WARN)])
def test_each_end_of_a_failed_pair_is_measured_again_with_a_rank_of_no_failed_pair(
    slow: int | None, verdict: Verdict
) -> None:
    links = Links(slow)
    judgement = judged(links, (2, 3))
    again = (ROW.block, ROW.batch, ROW.depth)
    assert links.measured == [("WRITE", (2, 0), again), ("READ", (3, 0), again)]
    assert (judgement.verdict, judgement.remedy) == (verdict, ACTION)
    culprit = f"rank {slow} on node-{slow} (its tcp/of-{slow}) is the culprit in the pair 2-3 (rank 2 with rank 0: "
    assert judgement.reason.startswith(culprit if slow else "rank 2 on node-2 and rank 3 on node-3 are each good")


def test_all_culprits_are_named_and_no_more_than_four_pairs_are_measured_again() -> None:
    links = Links(5)
    judgement = judged(links, *((5, other) for other in (0, 1, 2, 3, 4)), ranks=8, passed=(6, 7))
    assert judgement.reason.count("rank 5 on node-5 (its tcp/of-5) is the culprit in the pair") == 4
    assert [ranks[1] for _, ranks, _ in links.measured] == [6] * 8


def test_runs_without_a_failed_pair_or_a_second_rank_have_nothing_to_measure() -> None:
    links = Links(None)
    assert judged(links).verdict is Verdict.PASS
    with pytest.raises(NotApplicableError, match="only one rank"):
        judged(links, (0, 0), ranks=1)
    assert links.measured == []


@pytest.mark.parametrize(
    ("verdicts", "worst"), [("PASS WARN", "WARN"), ("WARN CORRUPT", "CORRUPT"), ("CORRUPT PASS", "CORRUPT")]
)
def test_pairs_without_a_common_rank_transfer_at_once_for_each_backend_operation_and_memory(
    verdicts: str, worst: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong bytes win over a pair that starves; storage has no pairs."""
    judgements = [Judgement(Verdict(name), f"{name} it is", f"remedy of {name}") for name in verdicts.split()]
    judged, pairs = MagicMock(side_effect=judgements), MagicMock()
    monkeypatch.setattr(ranks_together, "at_once", judged)
    stored = replace(ROW, backend="POSIX", memory=MemoryPair("DRAM", "FILE"))
    run = cast(Run, SimpleNamespace(links=[ROW, stored, replace(ROW, op="READ"), replace(ROW, pair=(2, 3))]))
    settings = cast(Settings, SimpleNamespace(blocks=[4096, 64], depth=[1, 8]))
    judgement = ranks_together.judge_pairs_together(run, settings, cast(Cluster, SimpleNamespace(ranks=5)), pairs)
    assert judgement == Judgement(
        Verdict(worst), "; ".join(judgement.reason for judgement in judgements), f"remedy of {worst}",
    )  # fmt: skip
    apart = [(0, 2), (1, 3)]
    assert pairs.together.mock_calls == [call("UCX", op, ROW.memory, apart) for op in ("WRITE", "READ")]
    links = pairs.together.return_value
    assert judged.mock_calls == [call(f"UCX {op}", links, 4096, 8) for op in ("WRITE", "READ")]
    with pytest.raises(NotApplicableError, match=r"^this check needs two pairs without a common rank, and so at least"):
        ranks_together.judge_pairs_together(run, settings, cast(Cluster, SimpleNamespace(ranks=3)), pairs)


class BusyLinks(Links):
    """A double of the pairs of ranks while other processes use the cores, which leaves every row undecided."""

    def judge(self, samples: Any) -> Judgement:
        return Judgement(Verdict.INCONCLUSIVE, "busy")

    def link_of(self, key: RowKey, ranks: tuple[int, int]) -> Any:
        def measure(block: int, *, batch: int, depth: int) -> Samples:
            self.measured.append((key.op, ranks, (block, batch, depth)))
            return Samples(replace(key, pair=ranks), (1.0,), (20 if self.slow in ranks else 100,), (), ("tcp/eth0",))

        link = super().link_of(key, ranks)
        return SimpleNamespace(measure_launches=link.measure_launches, measure=measure)


def judged_ring(
    links: Links, verdict: Verdict, *, contention: float = 0.0, rate: float = 1e9, ranks: int = 3
) -> Judgement:
    """Judge the rows of three ranks, in which the bytes that rank 2 sends have this rate."""
    results = [
        Result(
            "bandwidth", "test", verdict, "a reason", row=replace(ROW, op=op, pair=pair),
            summary=replace(
                SUMMARY, bandwidth=rate if (op, pair) in (("WRITE", (2, 0)), ("READ", (1, 2))) else 1e9,
                values=(1e9,), contention=(contention,),
            ),
        )
        for op in ("WRITE", "READ")
        for pair in ((0, 1), (1, 2), (2, 0))
    ]  # fmt: skip
    return judged_results(results, links, ranks)


@pytest.mark.parametrize("verdict", [Verdict.INCONCLUSIVE, Verdict.NO_EXPECTATION])
def test_a_slower_rank_without_a_failed_row_is_compared_in_turn_and_named(verdict: Verdict) -> None:
    links = BusyLinks(2)
    judgement = judged_ring(links, verdict, rate=0.2e9)
    assert [ranks for _, ranks, _ in links.measured] == [(2, 0), (1, 0), (1, 0), (2, 0), (2, 0), (1, 0)]
    assert {row for *_, row in links.measured} == {(ROW.block, ROW.batch, ROW.depth)}
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.startswith("rank 2 on node-2 (what it sends, over tcp/eth0) is the culprit")


@pytest.mark.parametrize(
    ("cores", "verdict"), [((0.9, 0.0, 0.0), Verdict.FAIL), ((0.9, 0.0, 0.8), Verdict.INCONCLUSIVE)]
)
def test_a_busy_moment_of_its_host_hides_no_slow_rank(cores: tuple[float, ...], verdict: Verdict) -> None:
    remaining = list(cores)

    class BusyMoments(BusyLinks):
        def link_of(self, key: RowKey, ranks: tuple[int, int]) -> Any:
            measure = super().link_of(key, ranks).measure
            contention = (remaining.pop(0),) if 2 in ranks else (0.0,)
            return SimpleNamespace(measure=lambda *row, **form: replace(measure(*row, **form), contention=contention))

    judgement = judged_ring(BusyMoments(2), Verdict.NO_EXPECTATION, rate=0.2e9)
    assert judgement.verdict is verdict
    assert ("only its host is busy (" in judgement.reason) == bool(cores[2])
    assert ("; other processes took 0.8 and 0.0 cores)" in judgement.reason) == bool(cores[2])
    assert ("Stop other processes" in judgement.remedy) == bool(cores[2])


def test_a_rank_that_is_as_fast_as_others_in_turn_is_measured_once_and_not_accused() -> None:
    links = BusyLinks(None)
    judgement = judged_ring(links, Verdict.NO_EXPECTATION, rate=0.2e9)
    assert len(links.measured) == 2
    assert judgement.verdict is Verdict.PASS
    assert "rank 2 on node-2 (what it sends) is not slower than half of the others" in judgement.reason


@pytest.mark.parametrize(
    ("verdict", "contention", "expected"),
    [
        (Verdict.NO_EXPECTATION, 0.0, "no pair of ranks has failed"),
        (
            Verdict.NO_EXPECTATION,
            0.6,
            "no pair of ranks has failed, but other processes took cores from 6 of 6 rows, which",
        ),
        (Verdict.INCONCLUSIVE, 0.0, "no pair of ranks has failed, but 6 of 6 rows are undecided, which"),
    ],
)
def test_a_run_says_what_it_needs_to_name_a_slow_rank(verdict: Verdict, contention: float, expected: str) -> None:
    judgement = judged_ring(BusyLinks(None), verdict, contention=contention)
    assert judgement.reason.startswith(expected)
    assert judgement.verdict is (Verdict.INCONCLUSIVE if "which" in expected else Verdict.PASS)
    assert ("Stop other processes" in judgement.remedy) == ("which" in expected)


def test_a_direction_of_two_ranks_that_is_slow_with_each_backend_is_named_once() -> None:
    results = [
        Result("bandwidth", "test", verdict, "a reason", row=replace(ROW, backend=backend, op=op), summary=SUMMARY)
        for backend in ("UCX", "LIBFABRIC")
        for op, verdict in (("WRITE", Verdict.FAIL), ("READ", Verdict.PASS))
    ]
    assert judged_results(results, Links(None), 2) == Judgement(
        Verdict.FAIL,
        "bytes from rank 0 on node-0 to rank 1 on node-1 are slow, and bytes in the other direction are not: check "
        "what rank 0 on node-0 sends through first, then what rank 1 on node-1 receives through",
        f"start a third rank, or {ACTION}",
    )


def test_one_undecided_end_of_a_failed_pair_is_enough_to_compare_both_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    links = BusyLinks(3)
    monkeypatch.setattr(links, "judge", lambda judgements: Judgement(
        Verdict.PASS if 2 in judgements.ranks else Verdict.INCONCLUSIVE, "again"))  # fmt: skip
    judgement = judged(links, (2, 3))
    assert judgement.verdict is Verdict.FAIL
    assert "rank 3 on node-3 (what it receives, over tcp/eth0) is the culprit" in judgement.reason


def test_two_ranks_without_floors_are_not_compared() -> None:
    assert judged_ring(BusyLinks(2), Verdict.NO_EXPECTATION, contention=0.6, ranks=2).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("slow", "does", "healthy"), [(2, "sends", "rank 3 on node-3"), (3, "receives", "rank 2 on node-2")]
)
def test_a_failed_pair_whose_ends_load_leaves_undecided_is_compared_in_turn(slow: int, does: str, healthy: str) -> None:
    judgement = judged(BusyLinks(slow), (2, 3))
    assert judgement.verdict is Verdict.FAIL
    assert "is undecided" in judgement.reason
    assert f"rank {slow} on node-{slow} (what it {does}, over tcp/eth0) is the culprit" in judgement.reason
    assert f"{healthy} (what it" not in judgement.reason


def test_a_rank_that_failed_again_is_named_though_the_other_end_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    links = BusyLinks(2)
    monkeypatch.setattr(links, "judge", lambda judgements: Judgement(
        Verdict.FAIL if 2 in judgements.ranks else Verdict.INCONCLUSIVE, "again"))  # fmt: skip
    assert judged(links, (2, 3)).verdict is Verdict.FAIL
    assert len(links.measured) == 2
