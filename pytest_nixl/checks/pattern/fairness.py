# SPDX-License-Identifier: Apache-2.0
"""The flows of a traffic pattern: what was measured of them alone and together, and how fair that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from pytest_nixl.core.units import gigabytes
from pytest_nixl.judge.concurrent import STARVED
from pytest_nixl.model.device_counters import LossyDevice
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import LOAD, PATTERN, RowKey, Variant
from pytest_nixl.model.samples import DISTURBED_CORES, Corruption, Samples
from pytest_nixl.model.traffic_pattern import Flow, TrafficPattern
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.gpus import LinkGpu

#: How the flows of a row are measured: each alone, or all at the same time.
ALONE, TOGETHER = "alone", "together"
LOADS = (ALONE, TOGETHER)
#: Transfers and seconds of one window.
Window = tuple[int, float]

#: A flow is slowed if it has less than this share of its bandwidth alone.
SLOWED = 0.8
#: An end is full if its flows together reach at least this share of its fastest flow alone.
FULL = 0.7
#: The most groups of flows that a sentence names.
_MOST_GROUPS = 3
_STARVES = "check what this flow shares with the others: the receiver's NIC, its switch port, the queue of an uplink"
_COLLAPSES = (
    "check the flow control of the network (pause frames or ECN and the counters of discarded packets: ethtool -S "
    "DEVICE) and the receive buffers of that host"
)
OWN_GPU = "give each rank a GPU of its own"
BUSY = "stop other processes on the hosts and run it again"


@dataclass(frozen=True)
class PatternKind:
    """What is measured of a pattern: the flows, and how their bytes move.

    :param op: ``WRITE``: the source of a flow posts; ``READ``: its target does.
    :param memory: the memory types of initiator and target.
    :param depth: transfers in flight of each flow.
    :param agent: what differs from the default in how the agents are created.
    """

    pattern: TrafficPattern
    backend: str
    op: str
    memory: MemoryPair
    depth: int = 1
    agent: Variant = ()

    @property
    def pattern_text(self) -> str:
        """The name of the pattern with its number of ranks, such as ``incast:4``."""
        return f"{self.pattern.name}:{self.pattern.ranks}"

    @property
    def words(self) -> str:
        """What is measured, for messages."""
        return f"{self.backend} {self.op} {self.memory}, {self.pattern}"

    def initiator(self, flow: Flow) -> int:
        """Return the rank that posts the transfers of a flow."""
        return flow.source if self.op == "WRITE" else flow.target

    def pair(self, flow: Flow) -> tuple[int, int]:
        """Return initiator and target of a flow's transfers."""
        return flow.ranks if self.op == "WRITE" else (flow.target, flow.source)

    def key(self, flow: Flow, load: str) -> RowKey:
        """Return the key of a row.

        :param load: ``alone`` or ``together``.
        """
        named = {LOAD: load, PATTERN: self.pattern_text}
        variant = tuple(sorted((*self.agent, *named.items())))
        return RowKey(self.backend, self.op, self.memory, flow.size, 1, self.depth, self.pair(flow), None, variant)

    def __str__(self) -> str:
        variant = "".join(f"-{name}={value}" for name, value in self.agent)
        return f"{self.backend}-{self.op}-{self.memory}-{self.pattern.name}{variant}"


@dataclass(frozen=True)
class FlowRow:
    """One row of a pattern, as a parameter of a test.

    :param load: ``alone`` or ``together``.
    """

    kind: PatternKind
    flow: Flow
    load: str

    @cached_property
    def key(self) -> RowKey:
        """The key of the row."""
        return self.kind.key(self.flow, self.load)

    def __str__(self) -> str:
        return f"{self.kind}-{self.flow.source}to{self.flow.target}-{self.load}"


@dataclass(frozen=True)
class FlowSamples:
    """What was measured of one flow.

    :param alone: its windows without the other flows, one for each repetition.
    :param together: its windows with all flows.
    :param contention: the largest at its two ends, in cores, by load; empty: not known.
    :param transports: the transports as the backend reports them; empty: not known.
    :param protocol: UCX's word for how it moved the bytes; empty: not known.
    :param lossy: the devices of its two hosts whose counters of lost or repeated packets grew while flows were timed.
    """

    flow: Flow
    alone: tuple[Window, ...]
    together: tuple[Window, ...]
    contention: tuple[tuple[str, float], ...] = ()
    transports: tuple[str, ...] = ()
    corruption: Corruption | None = None
    obstacle: str = ""
    protocol: str = ""
    lossy: tuple[LossyDevice, ...] = ()

    def windows(self, load: str) -> tuple[Window, ...]:
        """Return the windows of a load."""
        return self.alone if load == ALONE else self.together

    def rates(self, load: str) -> tuple[float, ...]:
        """Return the bytes per second of each window of a load."""
        return tuple(count * self.flow.size / seconds for count, seconds in self.windows(load))

    def rate(self, load: str) -> float:
        """Return the median of the bytes per second of a load."""
        return median(self.rates(load))

    @property
    def ratio(self) -> float:
        """The bandwidth together as a share of that alone."""
        return self.rate(TOGETHER) / self.rate(ALONE)

    def samples(self, key: RowKey, load: str) -> Samples:
        """Return the samples of a row, which are those of one launch."""
        windows = self.windows(load)
        cores = dict(self.contention)
        return Samples(
            key,
            tuple(seconds for _, seconds in windows),
            tuple(count for count, _ in windows),
            (),
            transports=self.transports,
            corruption=self.corruption,
            contention=(cores[load],) if load in cores else (),
            obstacle=self.obstacle,
            protocol=self.protocol,
            lossy=self.lossy,
        )


@dataclass(frozen=True)
class PatternSamples:
    """What was measured of a pattern.

    :param flows: its flows, in the order of the pattern.
    :param names: a name for each rank, with its host.
    :param hosts: the host of each rank.
    :param gpus: the GPU of each rank; empty: the flows use host memory only.
    """

    kind: PatternKind
    flows: tuple[FlowSamples, ...]
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    gpus: tuple[LinkGpu, ...] = ()

    def of(self, flow: Flow) -> FlowSamples:
        """Return what was measured of a flow."""
        return self._by_flow[flow]

    def only(self, pattern: TrafficPattern) -> PatternSamples | None:
        """Return what was measured of the flows of another pattern; None if not all of them were measured."""
        if not self._by_flow.keys() >= set(pattern.flows):
            return None
        return replace(self, kind=replace(self.kind, pattern=pattern), flows=tuple(map(self.of, pattern.flows)))

    @cached_property
    def _by_flow(self) -> dict[Flow, FlowSamples]:
        return {flow.flow: flow for flow in self.flows}

    def rates(self, load: str) -> dict[Flow, float]:
        """Return the bytes per second of each flow."""
        return {flow.flow: flow.rate(load) for flow in self.flows}

    @property
    def total(self) -> float:
        """The sum of the bandwidth of all flows together, in bytes per second."""
        return sum(self.rates(TOGETHER).values())

    @property
    def disturbed(self) -> float:
        """The largest contention of any flow, in cores."""
        return max((cores for flow in self.flows for _, cores in flow.contention), default=0.0)


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all values are equal, 1/n if one of n has everything.

    It is the square of the sum, divided by n times the sum of the squares.

    :param values: at least one number above zero.
    """
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def pattern_figures(samples: PatternSamples) -> list[Figure]:
    """Return the bandwidth of all flows together in bytes per second, the least share, and Jain's index.

    A share is the bandwidth of a flow while all others run divided by its bandwidth alone.
    """
    kind = samples.kind
    labels = {"backend": kind.backend, "op": kind.op, "memory": kind.memory, "pattern": kind.pattern_text}
    values = {
        "pattern-bandwidth": samples.total,
        "pattern-share": min(flow.ratio for flow in samples.flows),
        "pattern-jain": jain(list(samples.rates(TOGETHER).values())),
    }
    return [Figure.of(name, value, labels) for name, value in values.items()]


def judge_pattern_figures(samples: PatternSamples, record: Callable[[Sequence[Figure]], Judgement]) -> Judgement:
    """Judge the figures of a pattern by a profile's bounds.

    CORRUPT if a byte is wrong: nothing is recorded then. INCONCLUSIVE in place of FAIL if other processes used more
    than :data:`DISTURBED_CORES`.

    :param record: writes figures to the report, and returns their verdict by the bounds.
    """
    if (corrupt := corrupt_flow(samples)) is not None:
        return corrupt
    judged = record(pattern_figures(samples))
    if judged.verdict is not Verdict.FAIL or samples.disturbed <= DISTURBED_CORES:
        return judged
    return Judgement(
        Verdict.INCONCLUSIVE,
        f"{judged.reason}, but other processes used up to {samples.disturbed:.1f} of the cores that the ranks need",
        BUSY,
    )


def judge_fairness(samples: PatternSamples) -> Judgement:
    """Judge all flows of a pattern that were measured together.

    CORRUPT if a byte is wrong; WARN if in every repetition the same flow has less than half of what the others keep of
    their bandwidth alone, or if the flows that share an end reach less than :data:`FULL` of one of them alone;
    INCONCLUSIVE in place of WARN if other processes took processor time; else PASS.
    """
    if (corrupt := corrupt_flow(samples)) is not None:
        return corrupt
    description = f"{samples.kind.words}: {describe(samples)}"
    starved = starving(samples.flows)
    collapsed = collapsing(samples)
    if starved is None and collapsed is None:
        return Judgement(Verdict.PASS, description)
    if starved is not None:
        fault = f"the flow {starved} starves in each of {len(samples.flows[0].together)} repetitions"
    else:
        fault = f"the flows that rank {collapsed} receives are slower together than one of them alone"
    if samples.disturbed > DISTURBED_CORES:
        took = f"other processes used up to {samples.disturbed:.1f} of the cores that the ranks need"
        return Judgement(Verdict.INCONCLUSIVE, f"{description}; {fault}, but {took}", BUSY)
    if starved is None:
        return Judgement(Verdict.WARN, f"{description}; {fault}", _COLLAPSES)
    return Judgement(
        Verdict.WARN, f"{description}; {fault}", OWN_GPU if gpus_shared_by(samples, [starved]) else _STARVES
    )


def corrupt_flow(samples: PatternSamples) -> Judgement | None:
    """Return CORRUPT if a byte of a flow is wrong; None: all are right."""
    wrong = next((flow for flow in samples.flows if flow.corruption is not None), None)
    if wrong is None:
        return None
    return Judgement(
        Verdict.CORRUPT,
        f"{samples.kind.words}: flow {wrong.flow}: {wrong.corruption}",
        "run that pair of ranks alone; check the memory and NICs of both hosts",
    )


def describe(samples: PatternSamples) -> str:
    """Return the sum, its ratio to the fastest flow alone, the slowest flow, the fairness, and who slows whom."""
    alone, together = samples.rates(ALONE), samples.rates(TOGETHER)
    least, most = min(together, key=lambda flow: together[flow]), max(together.values())
    fastest = max(alone.values())
    shares = [flow.ratio for flow in samples.flows]
    return (
        f"{gigabytes(samples.total)} GB/s together, {samples.total / fastest:.2f} of the fastest flow alone "
        f"({gigabytes(fastest)} GB/s); from {gigabytes(together[least])} ({least}) to {gigabytes(most)} GB/s, Jain's "
        f"fairness index {jain(list(together.values())):.2f}; each flow keeps {100 * min(shares):.0f} to "
        f"{100 * max(shares):.0f} % of its bandwidth alone{slowed_by(samples)}"
    )


def slowed_by(samples: PatternSamples) -> str:
    """Return which slowed flows share a full end, as the end of a sentence; empty: no flow is slowed."""
    slowed = dict.fromkeys(flow.flow for flow in samples.flows if flow.ratio < SLOWED)
    if not slowed:
        return ""
    alone, together = samples.rates(ALONE), samples.rates(TOGETHER)
    groups: dict[str, list[Flow]] = {}
    for rank in range(samples.kind.pattern.ranks):
        for does, mine in (
            ("receives", [flow for flow in alone if flow.target == rank]),
            ("sends", [flow for flow in alone if flow.source == rank]),
        ):
            full = len(mine) > 1 and sum(together[flow] for flow in mine) >= FULL * max(alone[flow] for flow in mine)
            if full and (shared := [flow for flow in mine if flow in slowed]):
                groups[f"share what rank {rank} {does} through"] = shared
    causes = [f"{_listed(flows)} {cause}" for cause, flows in groups.items()]
    explained = {flow for flows in groups.values() for flow in flows}
    unexplained = [flow for flow in slowed if flow not in explained]
    shown = causes[:_MOST_GROUPS] + ([f"and {len(causes) - _MOST_GROUPS} more"] if len(causes) > _MOST_GROUPS else [])
    if unexplained:
        reason = gpus_shared_by(samples, unexplained) or "they share the network between, or processors"
        shown.append(f"no end of {_listed(unexplained)} is full: {reason}")
    return f"; {', '.join(shown)}"


def gpus_shared_by(samples: PatternSamples, flows: Sequence[Flow]) -> str:
    """Return which ranks share a GPU, if each of these flows shares one with another flow; else an empty text."""
    users: dict[str, list[Flow]] = {}
    for each in samples.flows:
        for uuid in _gpus(samples, each.flow):
            users.setdefault(uuid, []).append(each.flow)
    ranks = {uuid: sorted({rank for flow in on for rank in _gpus(samples, flow)[uuid]}) for uuid, on in users.items()}
    shared = [uuid for uuid, on in users.items() if len(on) > 1 and len(ranks[uuid]) > 1]
    used = [[uuid for uuid in shared if uuid in _gpus(samples, flow)] for flow in flows]
    if not all(used):
        return ""
    sentences = [
        f"ranks {_listed(ranks[uuid])} share {samples.gpus[ranks[uuid][0]]}"
        for uuid in shared
        if any(uuid in each for each in used)
    ]
    return f"{_listed(sentences)}, and processes on one GPU take turns unless NVIDIA MPS runs: {OWN_GPU}"


def _gpus(samples: PatternSamples, flow: Flow) -> dict[str, list[int]]:
    """Return the GPUs that a flow uses, by UUID, and the ranks that use them for it."""
    ends = zip(samples.kind.pair(flow), (samples.kind.memory.initiator, samples.kind.memory.target), strict=True)
    ranks_of_gpu: dict[str, list[int]] = {}
    for rank, memory in ends:
        if memory == "VRAM":
            ranks_of_gpu.setdefault(samples.gpus[rank].uuid, []).append(rank)
    return ranks_of_gpu


def starving(flows: Sequence[FlowSamples]) -> Flow | None:
    """Return the flow that starves in every repetition; None: there is none.

    It starves if the share of its bandwidth alone that it keeps is less than half of the median share.
    """
    found: set[Flow] = set()
    for number in range(len(flows[0].together)):
        shares = {flow.flow: flow.rates(TOGETHER)[number] / flow.rate(ALONE) for flow in flows}
        least = min(shares, key=lambda flow: shares[flow])
        if shares[least] >= STARVED * median(shares.values()):
            return None
        found.add(least)
    return found.pop() if len(found) == 1 else None


def collapsing(samples: PatternSamples) -> int | None:
    """Return the rank whose incoming flows are together slower than one of them alone; None: there is none.

    Ranks on one host share its processors, so that only a receiver with flows from other hosts counts.
    """
    for rank in range(samples.kind.pattern.ranks):
        mine = [
            flow
            for flow in samples.flows
            if flow.flow.target == rank and samples.hosts[flow.flow.source] != samples.hosts[rank]
        ]
        sources = {samples.hosts[each.flow.source] for each in mine}
        if len(sources) < 2:
            continue
        best = max(each.rate(ALONE) for each in mine)
        sums = [sum(rates) for rates in zip(*(each.rates(TOGETHER) for each in mine), strict=True)]
        if all(total < FULL * best for total in sums):
            return rank
    return None


def _listed(items: Sequence[object]) -> str:
    names = [str(item) for item in items[:4]]
    if len(items) > 4:
        names.append(f"{len(items) - 4} more")
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
