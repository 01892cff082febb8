# SPDX-License-Identifier: Apache-2.0
"""The checks of the suite ``pattern``: the flows of a traffic pattern are right, fair, and slow at no rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from pytest_nixl.checks.pattern.fairness import (
    ALONE,
    LOADS,
    FlowRow,
    PatternKind,
    PatternSamples,
    collapsing,
    describe,
    judge_fairness,
    judge_pattern_figures,
    starving,
)
from pytest_nixl.checks.pattern.rank_flows import LEAST_SECONDS, RankFlows
from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.units import MIB, gigabytes
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import available_memory, in_bytes
from pytest_nixl.judge.culprit import ACTION
from pytest_nixl.model.figure import Bound
from pytest_nixl.model.samples import DISTURBED_CORES, Samples, percentile
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.model.traffic_pattern import Flow, TrafficPattern
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.backends import BACKENDS, between_agents
from pytest_nixl.processes.hosts import Host, LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.session.benchmark import worker_versions
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run

#: A flow is slow if it has less than this share of what a quarter of all flows exceed, in every repetition. Of three
#: ranks one may be slow in both acts, and with it two thirds of all flows: the median would be slow as well.
SLOW, OF_FLOWS = 0.75, 75
#: If the sums of all flows in two successive repetitions differ by at most this share, alone and together, more
#: repetitions hardly change them.
CLEAR_SPREAD = 0.1
#: Of more flows than these some are slow by chance in each of several repetitions, if other processes use the cores.
MANY_FLOWS = 500
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


def is_clear(samples: PatternSamples) -> bool:
    """Whether more repetitions would change no verdict, and hardly any rate.

    A flow starves, is slow, or collapses with others only if it does so in each repetition. While other processes use
    the cores, no rank is named for it, and many flows are not measured until none is slow by chance.
    """
    for load in LOADS:
        totals = [sum(rates) for rates in zip(*(flow.rates(load) for flow in samples.flows), strict=True)][-2:]
        if len(totals) < 2 or max(totals) > (1 + CLEAR_SPREAD) * min(totals):
            return False
    if samples.disturbed > DISTURBED_CORES and len(samples.flows) > MANY_FLOWS:
        return True
    again = samples.only(paired_again(samples.hosts, max(flow.flow.size for flow in samples.flows)))
    faults = starving(samples.flows), collapsing(samples)
    return faults == (None, None) and not (again and slow_flows(again))


def _culprits(samples: PatternSamples, slow: Sequence[Flow]) -> Iterator[tuple[int, str, list[Flow]]]:
    """Yield each rank whose flows in one direction are all slow, with the direction in words and these flows."""
    for rank in range(samples.kind.pattern.ranks):
        sent = [flow.flow for flow in samples.flows if flow.flow.source == rank]
        received = [flow.flow for flow in samples.flows if flow.flow.target == rank]
        for does, mine in (("what it sends", sent), ("what it receives", received)):
            if len(mine) >= PARTNERS and set(mine) <= set(slow):
                yield rank, does, mine


__all__ = [
    "NOTHING",
    "REMEDY",
    "FlowRow",
    "PatternKind",
    "PatternLaunches",
    "PatternSamples",
    "flow_rows",
    "judge_culprit_of_pattern",
    "judge_fairness",
    "judge_pattern_figures",
    "line_of",
    "measured_row",
    "pattern_kinds",
]

NOTHING = "no --nixl-pattern is given, or no requested backend moves bytes between two agents"
REMEDY = "give --nixl-pattern=incast, and --nixl-backend=UCX or LIBFABRIC"
#: The bytes of one transfer of a named pattern if --nixl-blocks is not given.
DEFAULT_SIZE = MIB
#: The least number of hosts among which a rank can be slow with two partners while others are not.
LEAST_HOSTS = 3


def pattern_kinds(run: Run) -> list[PatternKind]:
    """Return what to measure of the pattern of a run: each backend, memory and operation; none without a pattern."""
    settings = run.settings
    if settings.pattern is None:
        return []
    blocks_given = not settings.sources.get("blocks", "").startswith("default")
    size = max(settings.blocks) if blocks_given else DEFAULT_SIZE
    pattern = settings.pattern.of(run.placement.ranks, size)
    memories = dict.fromkeys(each for each in settings.memory if not each.stored)
    return [
        PatternKind(pattern, name, op, memory, max(settings.depth), agent.variant(name, BACKENDS[name].PLUGIN))
        for name, memory, agent, op in product(between_agents(settings.backend), memories, settings.agents, settings.op)
    ]


def flow_rows(run: Run) -> list[FlowRow]:
    """Return the rows of each flow, alone and together."""
    return [FlowRow(kind, flow, load) for kind in pattern_kinds(run) for flow in kind.pattern.flows for load in LOADS]


class PatternLaunches:
    """What was measured of each kind, when it was first needed. The workers of a kind end when it is measured.

    :param bounds: those of the profile. If one is for a figure of a pattern, no kind ends before all repetitions. Nor
        does one if the run compares rows, or if ``--nixl-duration`` asks for longer windows.
    """

    def __init__(self, cluster: Cluster, settings: Settings, bounds: Sequence[Bound] = ()) -> None:
        self._cluster, self._settings = cluster, settings
        bounded = any(bound.figure.startswith("pattern-") for bound in bounds)
        self._ends_early = not bounded and settings.fewest_launches == 1 and settings.duration <= LEAST_SECONDS
        self._found: dict[PatternKind, PatternSamples | NixlPluginError] = {}
        self._versions: dict[PatternKind, dict[str, str]] = {}

    def samples(self, kind: PatternKind) -> PatternSamples:
        """Return what was measured of a kind.

        :raises NixlPluginError: the buffers do not fit into the memory of this host.
        :raises NotApplicableError: a rank does not have this memory.
        :raises WorkerError: a worker fails; the next call raises the same.
        """
        if kind not in self._found:
            try:
                self._found[kind] = self._measure(kind)
            except NixlPluginError as error:
                self._found[kind] = error
        samples = self._found[kind]
        if isinstance(samples, NixlPluginError):
            raise samples
        return samples

    def versions(self, kind: PatternKind) -> Mapping[str, str]:
        """Return the versions that the workers of a kind reported."""
        return self._versions.get(kind, {})

    def _measure(self, kind: PatternKind) -> PatternSamples:
        ranks = kind.pattern.ranks
        if not self._cluster.several:
            _require_room(kind)
        same = [
            agent
            for agent in self._settings.agents
            if agent.variant(kind.backend, BACKENDS[kind.backend].PLUGIN) == kind.agent
        ]
        flows = RankFlows(self._hosts(ranks), self._names(ranks), kind, self._settings, same[0])
        try:
            self._versions[kind] = worker_versions(flows.agents)
            return flows.measure(clear=is_clear) if self._ends_early else flows.measure()
        finally:
            flows.close()

    def _hosts(self, ranks: int) -> list[Host]:
        if self._cluster.several:
            return list(self._cluster.hosts[:ranks])
        variables = own_variables(self._settings.programs, memory=self._settings.memory)
        return [LocalHost(supervisor(), rank, own=variables) for rank in range(ranks)]

    def _names(self, ranks: int) -> list[str]:
        return self._cluster.names[:ranks] if self._cluster.several else [f"rank {rank}" for rank in range(ranks)]


def _require_room(kind: PatternKind) -> None:
    ends = (kind.memory.initiator, kind.memory.target).count("DRAM")
    needed = ends * kind.depth * sum(flow.size for flow in kind.pattern.flows)
    free = available_memory(FactsRoot())
    if free is not None and free.size < needed:
        raise NixlPluginError(
            f"the buffers of {kind.pattern} need {in_bytes(needed)}, but {free} are available on this host",
            "give a smaller --nixl-blocks, fewer ranks, or a matrix of smaller sizes",
        )


def measured_row(row: FlowRow, launches: PatternLaunches) -> tuple[Samples, Mapping[str, str], dict[str, object]]:
    """Return what is recorded of a row: samples, the versions of its workers, and what else is known.

    :raises NixlPluginError: as :meth:`PatternLaunches.samples`.
    """
    flow = launches.samples(row.kind).of(row.flow)
    samples = flow.samples(row.key, row.load)
    more: dict[str, object] = {"source": row.flow.source, "target": row.flow.target, "share_of_alone": flow.ratio}
    return samples, launches.versions(row.kind), more


def line_of(samples: PatternSamples) -> str:
    """Return a pattern in one line for the report: the sum, the ratio, the slowest flow, fairness, who slows whom."""
    return f"{samples.kind.backend} {samples.kind.op} {samples.kind.memory} {samples.kind.pattern}: {describe(samples)}"


def judge_culprit_of_pattern(kind: PatternKind, launches: PatternLaunches, cluster: Cluster) -> Judgement:
    """Measure flows from each rank to several others alone, and name the rank that is slow with each partner.

    Flows that the pattern has, such as those of ``alltoall``, are not measured again.

    :raises NotApplicableError: the ranks are on fewer than three hosts.
    """
    if not cluster.several:
        raise NotApplicableError("this run has only one rank", f"start ranks on at least {LEAST_HOSTS} hosts")
    samples = launches.samples(kind)
    count = len(set(samples.hosts))
    if count < LEAST_HOSTS:
        raise NotApplicableError(
            f"the ranks are on {count} host{'' if count == 1 else 's'}, and a rank is compared with two others",
            f"start ranks on at least {LEAST_HOSTS} hosts",
        )
    size = max(flow.size for flow in kind.pattern.flows)
    again = paired_again(samples.hosts, size)
    return judge_pattern_culprit(samples.only(again) or launches.samples(replace(kind, pattern=again)))
