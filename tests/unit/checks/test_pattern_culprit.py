# SPDX-License-Identifier: Apache-2.0
"""The culprit among the ranks of a pattern: named if slow with each partner, and never if the evidence is mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from pytest_nixl.checks.pattern.check import (
    CLEAR_SPREAD,
    MANY_FLOWS,
    PARTNERS,
    is_clear,
    judge_pattern_culprit,
    paired_again,
)
from pytest_nixl.checks.pattern.fairness import ALONE, TOGETHER, FlowSamples, PatternKind, PatternSamples
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.traffic_pattern import Flow, TrafficPattern
from pytest_nixl.model.verdicts import Verdict

SIZE = 1 << 20
NODES = ["node-0", "node-1", "node-2", "node-3"]


def samples(
    rate: Callable[[Flow], float | Sequence[float]], *, others: float = 0.0, hosts: Sequence[str] = NODES
) -> PatternSamples:
    """Return flows between ranks; ``rate`` gives MB/s of each, in each repetition or in all."""
    pattern = paired_again(hosts, SIZE)
    flows = []
    for flow in pattern.flows:
        found = rate(flow)
        rates = [found] * 5 if isinstance(found, (int, float)) else list(found)
        windows = tuple((10, 10 * SIZE / rate / 1e6) for rate in rates)
        flows.append(FlowSamples(flow, windows, windows, ((ALONE, others), (TOGETHER, others))))
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    kind = PatternKind(pattern, "UCX", "WRITE", MemoryPair("DRAM", "DRAM"))
    return PatternSamples(kind, tuple(flows), tuple(names), tuple(hosts))


@pytest.mark.parametrize("ranks", range(3, 12))
def test_each_rank_sends_to_two_others_and_receives_from_two(ranks: int) -> None:
    flows = paired_again([f"node-{rank}" for rank in range(ranks)], SIZE).flows
    for rank in range(ranks):
        assert sum(flow.source == rank for flow in flows) == PARTNERS
        assert sum(flow.target == rank for flow in flows) == PARTNERS


def test_flows_are_between_hosts_only() -> None:
    hosts = ["a", "a", "b", "b", "c", "c"]
    flows = paired_again(hosts, SIZE).flows
    assert len(flows) == 12
    assert all(hosts[flow.source] != hosts[flow.target] for flow in flows)


def test_flows_of_a_larger_pattern_are_those_of_a_smaller_one_if_it_has_them_all() -> None:
    measured = samples(lambda flow: 100 + flow.source)
    some = TrafficPattern("some", len(NODES), (Flow(3, 0, SIZE), Flow(0, 1, SIZE)))
    found = measured.only(some)
    assert found is not None
    assert (found.kind.pattern, found.flows) == (some, tuple(map(measured.of, some.flows)))
    assert (found.names, found.hosts) == (measured.names, measured.hosts)
    assert measured.only(TrafficPattern("other", len(NODES), (*some.flows, Flow(0, 1, 2 * SIZE)))) is None


def test_a_healthy_network_passes() -> None:
    judged = judge_pattern_culprit(samples(lambda flow: 100 + flow.source))
    assert judged.verdict is Verdict.PASS
    assert judged.reason.startswith("UCX WRITE DRAM:DRAM: the slowest of 8 flows is 0->1 with 0.1 GB/s")


def test_a_slow_uplink_is_named() -> None:
    judged = judge_pattern_culprit(samples(lambda flow: 25 if flow.source == 2 else 100, others=DISTURBED_CORES))
    assert judged.verdict is Verdict.FAIL
    assert "rank 2 on node-2 (what it sends) is the culprit" in judged.reason
    assert "2->3 with 0.025 GB/s" in judged.reason
    assert "cordon" in judged.remedy


def test_a_slow_downlink_is_named() -> None:
    judged = judge_pattern_culprit(samples(lambda flow: 25 if flow.target == 1 else 100))
    assert judged.verdict is Verdict.FAIL
    assert "rank 1 on node-1 (what it receives) is the culprit" in judged.reason


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_cable_that_is_slow_both_ways_names_its_rank_once(ranks: int) -> None:
    hosts = [f"node-{rank}" for rank in range(ranks)]
    judged = judge_pattern_culprit(samples(lambda flow: 25 if 2 in flow.ranks else 100, hosts=hosts))
    assert judged.verdict is Verdict.FAIL
    assert "rank 2 on node-2 (what it sends and what it receives) is the culprit" in judged.reason


def test_two_slow_ranks_are_both_named() -> None:
    hosts = [f"node-{rank}" for rank in range(8)]
    judged = judge_pattern_culprit(samples(lambda flow: 25 if flow.source in (2, 6) else 100, hosts=hosts))
    assert judged.verdict is Verdict.FAIL
    assert "rank 2 on node-2 (what it sends) and rank 6 on node-6 (what it sends) are the culprits" in judged.reason


def test_one_slow_flow_names_no_rank() -> None:
    judged = judge_pattern_culprit(samples(lambda flow: 25 if flow.ranks == (2, 3) else 100))
    assert judged.verdict is Verdict.WARN
    assert "no rank is slow with each partner" in judged.reason


def test_a_slow_rank_is_not_named_if_a_flow_of_others_is_slow_too() -> None:
    hosts = [f"node-{rank}" for rank in range(8)]
    judged = judge_pattern_culprit(samples(lambda f: 25 if f.source == 2 or f.ranks == (5, 6) else 100, hosts=hosts))
    assert judged.verdict is Verdict.WARN


def test_a_rank_that_is_slow_in_four_of_five_repetitions_is_not_named() -> None:
    rates: Mapping[bool, Sequence[float]] = {True: (25, 25, 90, 25, 25), False: (100,) * 5}
    assert judge_pattern_culprit(samples(lambda flow: rates[flow.source == 2])).verdict is Verdict.PASS


def test_on_a_busy_host_nobody_is_named() -> None:
    judged = judge_pattern_culprit(samples(lambda flow: 25 if flow.source == 2 else 100, others=DISTURBED_CORES + 0.01))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert "culprit" not in judged.reason
    assert judge_pattern_culprit(samples(lambda _: 100, others=0.8)).verdict is Verdict.PASS


@pytest.mark.parametrize(("slow", "words"), [(6, "; a quarter"), (7, " and 1 more; a quarter"), (9, " and 3 more; ")])
def test_at_most_six_slow_flows_are_listed(slow: int, words: str) -> None:
    hosts = [f"node-{rank}" for rank in range(24)]
    chosen = paired_again(hosts, SIZE).flows[::5][:slow]
    judged = judge_pattern_culprit(samples(lambda flow: 25 if flow in chosen else 100, hosts=hosts))
    assert judged.reason.count(" with 0.025 GB/s") == 6
    assert f"{chosen[5]} with 0.025 GB/s{words}" in judged.reason


@pytest.mark.parametrize(
    ("alone", "together", "clear"),
    [
        ({}, {}, True),
        ({(0, 1): [100]}, {(0, 1): [100]}, False),
        ({(0, 1): [100, 100 + 790 * CLEAR_SPREAD]}, {}, True),
        ({(0, 1): [100, 100 + 810 * CLEAR_SPREAD]}, {}, False),
        ({}, {(0, 1): [100, 100 + 810 * CLEAR_SPREAD]}, False),
        ({(0, 1): [500, 100, 100]}, {}, True),
        ({(0, 1): [60, 60]}, {(0, 1): [60, 60]}, False),
        ({(0, 1): [60, 80]}, {(0, 1): [60, 80]}, True),
        ({}, {(0, 1): [40, 40]}, False),
        ({}, {(0, 1): [40, 60]}, True),
        ({}, {(flow.source, flow.target): [30, 30] for flow in paired_again(NODES, SIZE).flows}, False),
    ],
    ids=["healthy", "once", "hardly different", "different alone", "different together", "the last two", "slow",
         "slow once", "starving", "starving once", "collapsing"],
)  # fmt: skip
def test_a_pattern_is_clear_if_its_sums_agree_and_no_verdict_can_become_worse(
    alone: dict[tuple[int, int], list[float]], together: dict[tuple[int, int], list[float]], clear: bool
) -> None:
    """Eight flows have 100 MB/s in each of two or three repetitions, but for those that a parameter names."""
    count = max(map(len, [*alone.values(), *together.values()]), default=2)

    def load(rates: dict[tuple[int, int], list[float]]) -> PatternSamples:
        return samples(lambda flow: rates.get(flow.ranks, [100.0] * count))

    pairs = zip(load(alone).flows, load(together).flows, strict=True)
    flows = [replace(one, together=other.together) for one, other in pairs]
    assert is_clear(replace(samples(lambda _: 100), flows=tuple(flows))) is clear


@pytest.mark.parametrize(
    ("ranks", "others", "clear"),
    [(MANY_FLOWS // 2 + 1, 0.4, True), (MANY_FLOWS // 2, 0.4, False), (MANY_FLOWS // 2 + 1, 0.2, False)],
)
def test_many_flows_on_busy_cores_are_clear_although_some_are_slow(ranks: int, others: float, clear: bool) -> None:
    hosts = [f"node-{rank}" for rank in range(ranks)]
    rates = [100.0] * 2
    measured = samples(lambda flow: [25.0] * 2 if flow.ranks == (2, 3) else rates, others=others, hosts=hosts)
    assert is_clear(measured) is clear
    assert judge_pattern_culprit(measured).verdict is (
        Verdict.INCONCLUSIVE if others > DISTURBED_CORES else Verdict.WARN
    )
