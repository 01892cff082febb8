# SPDX-License-Identifier: Apache-2.0
"""Find the rank whose flows are slow with each of several partners, from flows that were each measured alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_nixl.checks.pattern.samples import ALONE, PatternSamples
from pytest_nixl.core.units import gigabytes
from pytest_nixl.judge.culprit import ACTION
from pytest_nixl.model.samples import DISTURBED_CORES, percentile
from pytest_nixl.model.traffic_pattern import Flow, TrafficPattern
from pytest_nixl.model.verdicts import Judgement, Verdict

#: A flow is slow if it has less than this share of what a quarter of all flows exceed, in every repetition. Of three
#: ranks one may be slow in both acts, and with it two thirds of all flows: the median would be slow as well.
SLOW, OF_FLOWS = 0.75, 75
#: The number of partners with which all flows of a rank must be slow.
PARTNERS = 2


def paired_again(hosts: Sequence[str], size: int) -> TrafficPattern:
    """Return flows from each rank to the next ranks on other hosts: each sends to several, and receives from several.

    :param hosts: the host of each rank.
    :param size: the bytes of one transfer, the same for each flow, so that flows can be compared.
    """
    ranks = len(hosts)
    flows = []
    for source in range(ranks):
        partners = [(source + step) % ranks for step in range(1, ranks)]
        remote = [rank for rank in partners if hosts[rank] != hosts[source]]
        flows += [Flow(source, target, size) for target in remote[:PARTNERS]]
    return TrafficPattern("paired-again", ranks, tuple(flows))


def judge_pattern_culprit(samples: PatternSamples) -> Judgement:
    """Name the ranks whose flows are slow with each partner, if no flow between other ranks is slow.

    FAIL names a rank; WARN names slow flows that no rank explains; INCONCLUSIVE in place of both if other processes
    took processor time; else PASS.

    :param samples: flows of one size between hosts. Only what was measured alone counts.
    """
    rows = f"{samples.kind.backend} {samples.kind.op} {samples.kind.memory}"
    wrong = next((flow for flow in samples.flows if flow.corruption is not None), None)
    if wrong is not None:
        remedy = "run that pair of ranks alone; check the memory and NICs of both hosts"
        return Judgement(Verdict.CORRUPT, f"{rows}: flow {wrong.flow}: {wrong.corruption}", remedy)
    usual = percentile(list(samples.rates(ALONE).values()), OF_FLOWS)
    slow = slow_flows(samples)
    if not slow:
        least = min(samples.flows, key=lambda each: each.rate(ALONE))
        description = (
            f"the slowest of {len(samples.flows)} flows is {least.flow} with {gigabytes(least.rate(ALONE))} GB/s"
        )
        return Judgement(Verdict.PASS, f"{rows}: {description}, a quarter of all has {gigabytes(usual)} GB/s or more")
    culprits = list(_culprits(samples, slow))
    unexplained = [flow for flow in slow if not any(flow in flows for _, _, flows in culprits)]
    told = ", ".join(f"{flow} with {gigabytes(samples.of(flow).rate(ALONE))} GB/s" for flow in slow[:6])
    told += f" and {len(slow) - 6} more" if len(slow) > 6 else ""
    figures = f"{told}; a quarter of all has {gigabytes(usual)} GB/s or more"
    if samples.disturbed > DISTURBED_CORES:
        took = f"other processes used up to {samples.disturbed:.1f} of the cores that the ranks need"
        remedy = "stop other processes on the hosts and run it again"
        return Judgement(Verdict.INCONCLUSIVE, f"{rows}: slow flows ({figures}), but {took}", remedy)
    if not culprits or unexplained:
        return Judgement(
            Verdict.WARN,
            f"{rows}: slow flows ({figures}), but no rank is slow with each partner: the network between them is slow",
            "check the cables and uplinks between these hosts, and run it again",
        )
    acts: dict[int, list[str]] = {}
    for rank, does, _ in culprits:
        acts.setdefault(rank, []).append(does)
    named = " and ".join(f"{samples.names[rank]} ({' and '.join(does)})" for rank, does in acts.items())
    return Judgement(
        Verdict.FAIL,
        f"{rows}: {named} {'are the culprits' if len(acts) > 1 else 'is the culprit'}: each of these flows is slow "
        f"({figures}), and no flow between other ranks is",
        ACTION,
    )


def slow_flows(samples: PatternSamples) -> list[Flow]:
    """Return the flows that are slow in every repetition."""
    repeats = list(zip(*(flow.rates(ALONE) for flow in samples.flows), strict=True))
    usual = [percentile(rates, OF_FLOWS) for rates in repeats]
    return [
        flow.flow
        for flow in samples.flows
        if all(rate < SLOW * reference for rate, reference in zip(flow.rates(ALONE), usual, strict=True))
    ]


def _culprits(samples: PatternSamples, slow: Sequence[Flow]) -> Iterator[tuple[int, str, list[Flow]]]:
    """Yield each rank whose flows in one direction are all slow, with the direction in words and these flows."""
    for rank in range(samples.kind.pattern.ranks):
        sent = [flow.flow for flow in samples.flows if flow.flow.source == rank]
        received = [flow.flow for flow in samples.flows if flow.flow.target == rank]
        for does, mine in (("what it sends", sent), ("what it receives", received)):
            if len(mine) >= PARTNERS and set(mine) <= set(slow):
                yield rank, does, mine
