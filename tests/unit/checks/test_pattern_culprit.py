# SPDX-License-Identifier: Apache-2.0
"""The culprit among the ranks of a pattern: named if slow with each partner, and never if the evidence is mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


MANY = [f"node-{rank}" for rank in range(8)]
QUARTER = "a quarter of all has 0.1 GB/s or more"
NETWORK = "but no rank is slow with each partner: the network between them is slow"


def slow_if(condition: Callable[[Flow], bool], *rates: float) -> Callable[[Flow], Sequence[float]]:
    """Return the rates of flows: of those with a condition these, of others 100 MB/s."""
    return lambda flow: (rates or (25,) * 5) if condition(flow) else (100,) * 5


def guilty(culprit: str, slow: str) -> str:
    return f"{culprit}: each of these flows is slow ({slow}; {QUARTER}), and no flow between other ranks is"


def with_rates(*flows: str) -> str:
    return ", ".join(f"{flow} with 0.025 GB/s" for flow in flows)


@pytest.mark.parametrize(
    ("measured", "verdict", "reason"),
    [
        (samples(lambda flow: 100 + flow.source), "PASS",
         "the slowest of 8 flows is 0->1 with 0.1 GB/s, a quarter of all has 0.102 GB/s or more"),
        (samples(slow_if(lambda flow: flow.source == 2), others=DISTURBED_CORES), "FAIL",
         guilty("rank 2 on node-2 (what it sends) is the culprit", with_rates("2->3", "2->0"))),
        (samples(slow_if(lambda flow: flow.target == 1)), "FAIL",
         guilty("rank 1 on node-1 (what it receives) is the culprit", with_rates("0->1", "3->1"))),
        (samples(slow_if(lambda flow: flow.source in (2, 6)), hosts=MANY), "FAIL",
         guilty("rank 2 on node-2 (what it sends) and rank 6 on node-6 (what it sends) are the culprits",
                with_rates("2->3", "2->4", "6->7", "6->0"))),
        *[
            (samples(slow_if(lambda flow: 2 in flow.ranks), hosts=MANY[:ranks]), "FAIL",
             guilty("rank 2 on node-2 (what it sends and what it receives) is the culprit", with_rates(*flows)))
            for ranks, flows in (
                (3, ["0->2", "1->2", "2->0", "2->1"]), (4, ["0->2", "1->2", "2->3", "2->0"]),
                (8, ["0->2", "1->2", "2->3", "2->4"]),
            )
        ],
        (samples(slow_if(lambda flow: flow.ranks == (2, 3))), "WARN",
         f"slow flows ({with_rates('2->3')}; {QUARTER}), {NETWORK}"),
        # A flow of other ranks is slow, too.
        (samples(slow_if(lambda flow: flow.source == 2 or flow.ranks == (5, 6)), hosts=MANY), "WARN",
         f"slow flows ({with_rates('2->3', '2->4', '5->6')}; {QUARTER}), {NETWORK}"),
        *[
            (samples(slow_if(lambda flow: flow.source == 2, *[25] * once, 90, *[25] * (4 - once))), "PASS",
             "the slowest of 8 flows is 2->3 with 0.025 GB/s, " + QUARTER)
            for once in (0, 2, 4)
        ],
        (samples(slow_if(lambda flow: flow.source == 2), others=DISTURBED_CORES + 0.06), "INCONCLUSIVE",
         f"slow flows ({with_rates('2->3', '2->0')}; {QUARTER}), but other processes used up to "
         f"{DISTURBED_CORES + 0.06:.1f} of the cores that the ranks need"),
        (samples(lambda _: 100, others=0.8), "PASS",
         "the slowest of 8 flows is 0->1 with 0.1 GB/s, " + QUARTER),
    ],
)  # fmt: skip
def test_a_rank_is_named_only_if_it_is_slow_with_each_partner_in_each_repetition(
    measured: PatternSamples, verdict: str, reason: str
) -> None:
    judged = judge_pattern_culprit(measured)
    assert (judged.verdict.value, judged.reason) == (verdict, f"UCX WRITE DRAM:DRAM: {reason}")
    remedy = {"FAIL": "cordon", "WARN": "check the cables", "INCONCLUSIVE": "stop other processes"}.get(verdict, "")
    assert remedy in judged.remedy
    assert bool(judged.remedy) is (verdict != "PASS")


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
