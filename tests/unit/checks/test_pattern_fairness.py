# SPDX-License-Identifier: Apache-2.0
"""Fairness of a pattern's flows: who starves, what collapses, who slows whom, and what is left open on a busy host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.pattern.check import judge_pattern_culprit
from pytest_nixl.checks.pattern.fairness import (
    ALONE,
    TOGETHER,
    FlowSamples,
    PatternKind,
    PatternSamples,
    _listed,
    jain,
    judge_fairness,
    judge_pattern_figures,
    slowed_by,
)
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.samples import DISTURBED_CORES, Corruption
from pytest_nixl.model.traffic_pattern import Flow, PatternChoice
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.gpus import LinkGpu

SIZE = 1 << 20
REPEATS = 5
#: By source and target: megabytes per second alone, and together, in each repetition or in all.
Rates = Mapping[tuple[int, int], tuple[float, float | Sequence[float]]]


def samples(text: str, rates: Rates, *, others: float = 0.0, hosts: Sequence[str] = ()) -> PatternSamples:
    pattern = PatternChoice.parse(text).of(1, SIZE)
    flows = []
    for flow in pattern.flows:
        alone, together = rates[flow.ranks]
        each = [together] * REPEATS if isinstance(together, (int, float)) else list(together)
        flows.append(
            FlowSamples(
                flow,
                ((10, 10 * SIZE / alone / 1e6),) * REPEATS,
                tuple((10, 10 * SIZE / rate / 1e6) for rate in each),
                ((ALONE, 0.0), (TOGETHER, others)),
            )
        )
    kind = PatternKind(pattern, "UCX", "WRITE", MemoryPair("DRAM", "DRAM"))
    names = [f"rank {rank} on node-{rank}" for rank in range(pattern.ranks)]
    return PatternSamples(kind, tuple(flows), tuple(names), tuple(hosts or names))


FAIR: Rates = {(1, 0): (100, 33), (2, 0): (100, 32), (3, 0): (100, 31)}


def test_a_fair_incast_passes_and_says_who_slows_whom() -> None:
    judged = judge_fairness(samples("incast", FAIR))
    assert judged.verdict is Verdict.PASS
    assert judged.reason == (
        "UCX WRITE DRAM:DRAM, incast of 4 ranks: 0.096 GB/s together, 0.96 of the fastest flow alone (0.1 GB/s); from "
        "0.031 (3->0) to 0.033 GB/s, Jain's fairness index 1.00; each flow keeps 31 to 33 % of its bandwidth alone; "
        "1->0, 2->0 and 3->0 share what rank 0 receives through"
    )


def test_flows_that_share_nothing_are_not_slowed() -> None:
    assert slowed_by(samples("pairs", {(0, 2): (100, 99), (1, 3): (100, 90)})) == ""


#: The flows of an incast reach less together than one of them alone.
COLLAPSED: Rates = {(1, 0): (100, 20), (2, 0): (30, 20), (3, 0): (100, 20)}


@pytest.mark.parametrize(
    ("pattern", "rates", "flows"),
    [
        ("pairs", {(0, 2): (100, 75), (1, 3): (100, 75)}, "0->2 and 1->3"),
        ("incast", COLLAPSED, "1->0, 2->0 and 3->0"),
    ],
)
def test_flows_without_a_full_end_share_the_network_between(pattern: str, rates: Rates, flows: str) -> None:
    said = slowed_by(samples(pattern, rates))
    assert said == f"; no end of {flows} is full: they share the network between, or processors"


@pytest.mark.parametrize(("slowed", "more"), [({(0, 1), (0, 2)}, ""), ({(0, 1), (0, 2), (1, 0)}, ", and 2 more")])
def test_at_most_three_full_ends_are_named(slowed: set[tuple[int, int]], more: str) -> None:
    pairs = [(number, other) for number in range(3) for other in range(3) if number != other]
    said = slowed_by(samples("alltoall:3", {pair: (100, 50 if pair in slowed else 100) for pair in pairs}))
    assert said.count("share what rank") == 3
    assert said.endswith(f"through{more}")


@pytest.mark.parametrize(
    ("memory", "on", "why"),
    [
        ("VRAM:VRAM", "AAAA", "ranks 0, 1, 2 and 3 share GPU 7, H100 (A), and processes on one GPU take turns unless "
                              "NVIDIA MPS runs: give each rank a GPU of its own"),
        ("VRAM:VRAM", "ABBA", "ranks 0 and 3 share GPU 7, H100 (A) and ranks 1 and 2 share GPU 7, H100 (B), and "),
        ("VRAM:DRAM", "AACD", "ranks 0 and 1 share GPU 7, H100 (A), and "),
        ("DRAM:VRAM", "AACD", "they share the network between, or processors"),
        ("VRAM:VRAM", "ABAB", "they share the network between, or processors"),
        ("VRAM:VRAM", "ABCD", "they share the network between, or processors"),
        ("VRAM:DRAM", "AABBCCCC", "ranks 0 and 1 share GPU 7, H100 (A) and ranks 2 and 3 share GPU 7, H100 (B), and "),
    ],
)  # fmt: skip
def test_processes_that_share_a_gpu_take_turns(memory: str, on: str, why: str) -> None:
    half = len(on) // 2
    found = samples(f"pairs:{len(on)}", {(rank, rank + half): (100, 20) for rank in range(half)})
    said = slowed_by(on_gpus(found, memory, on))
    flows = {2: "0->2 and 1->3", 4: "0->4, 1->5, 2->6 and 3->7"}[half]
    assert said.startswith(f"; no end of {flows} is full: {why}")


def on_gpus(found: PatternSamples, memory: str, on: str) -> PatternSamples:
    """The same flows with the GPU of each rank."""
    kind = replace(found.kind, memory=MemoryPair.parse(memory))
    return replace(found, kind=kind, gpus=tuple(LinkGpu(7, "H100", uuid, uuid) for uuid in on))


def test_the_remedy_of_a_flow_that_starves_on_a_shared_gpu_is_another_gpu() -> None:
    found = samples("incast", {**FAIR, (2, 0): (100, 5)})
    assert judge_fairness(on_gpus(found, "VRAM:VRAM", "AAAA")).remedy == "give each rank a GPU of its own"
    assert "the receiver's NIC" in judge_fairness(on_gpus(found, "VRAM:VRAM", "ABCD")).remedy


def test_an_outcast_shares_what_its_source_sends_through() -> None:
    said = slowed_by(samples("outcast", {(0, 1): (100, 33), (0, 2): (100, 33), (0, 3): (100, 33)}))
    assert said == "; 0->1, 0->2 and 0->3 share what rank 0 sends through"


@pytest.mark.parametrize(
    ("pattern", "rates", "flow"),
    [("incast", {**FAIR, (2, 0): (100, 5)}, "2->0"), ("pairs", {(0, 2): (100, 90), (1, 3): (100, 5)}, "1->3")],
)
def test_a_flow_that_starves_in_every_repetition_warns(pattern: str, rates: Rates, flow: str) -> None:
    judged = judge_fairness(samples(pattern, rates))
    assert judged.verdict is Verdict.WARN
    assert judged.reason.endswith(f"; the flow {flow} starves in each of 5 repetitions")


def test_a_flow_that_starves_once_does_not_warn() -> None:
    judged = judge_fairness(samples("incast", {**FAIR, (2, 0): (100, [5, 30, 5, 5, 5])}))
    assert judged.verdict is Verdict.PASS


def test_a_flow_that_is_slow_alone_too_does_not_starve() -> None:
    judged = judge_fairness(samples("incast", {(1, 0): (100, 40), (2, 0): (10, 9), (3, 0): (100, 41)}))
    assert judged.verdict is Verdict.PASS


def test_on_a_busy_host_a_starving_flow_is_inconclusive() -> None:
    judged = judge_fairness(samples("incast", {**FAIR, (2, 0): (100, 5)}, others=1.2))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert "other processes used up to 1.2 of the cores that the ranks need" in judged.reason
    assert judge_fairness(samples("incast", FAIR, others=1.2)).verdict is Verdict.PASS


def test_a_slowed_flow_on_a_gpu_of_its_own_leaves_the_cause_open() -> None:
    assert slowed_by(on_gpus(samples("incast", COLLAPSED), "VRAM:VRAM", "ABBC")).endswith("between, or processors")


def test_an_incast_that_collapses_warns_if_it_comes_from_two_other_hosts() -> None:
    judged = judge_fairness(samples("incast", COLLAPSED, others=DISTURBED_CORES))
    assert judged.verdict is Verdict.WARN
    assert "the flows that rank 0 receives are slower together than one of them alone" in judged.reason
    assert "ethtool -S" in judged.remedy
    two = samples("incast:3", {(1, 0): (100, 20), (2, 0): (100, 20)})
    assert judge_fairness(two).verdict is Verdict.WARN
    for hosts in ("aaaa", "abbb", "aabb"):
        assert judge_fairness(samples("incast", COLLAPSED, hosts=hosts)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("judge", "of"),
    [
        (judge_fairness, ", incast of 4 ranks"),
        (lambda found: judge_pattern_figures(found, MagicMock(side_effect=AssertionError)), ", incast of 4 ranks"),
        (judge_pattern_culprit, ""),
    ],
)
def test_a_wrong_byte_is_corrupt_whatever_the_speed(judge: Callable[[PatternSamples], Judgement], of: str) -> None:
    """One flow starves beside the others, and another is slow alone."""
    found = samples("incast", {(1, 0): (100, 5), (2, 0): (10, 9), (3, 0): (100, 41)})
    broken = Corruption("after the timed transfers", 1, SIZE, 7, 1, 2)
    wrong = [replace(flow, corruption=broken) for flow in found.flows[1:]]
    assert judge(replace(found, flows=(found.flows[0], *wrong))) == Judgement(
        Verdict.CORRUPT,
        f"UCX WRITE DRAM:DRAM{of}: flow 2->0: {broken}",
        "run that pair of ranks alone; check the memory and NICs of both hosts",
    )


@pytest.mark.parametrize(("values", "index"), [([5.0, 5.0, 5.0, 5.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25)])
def test_jains_index(values: list[float], index: float) -> None:
    assert jain(values) == pytest.approx(index)


def test_flows_are_named_up_to_four() -> None:
    flows = [Flow(source, 0, SIZE) for source in range(1, 8)]
    assert [_listed(flows[:count]) for count in (1, 2, 4, 5, 7)] == [
        "1->0",
        "1->0 and 2->0",
        "1->0, 2->0, 3->0 and 4->0",
        "1->0, 2->0, 3->0, 4->0 and 1 more",
        "1->0, 2->0, 3->0, 4->0 and 3 more",
    ]
