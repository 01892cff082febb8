# SPDX-License-Identifier: Apache-2.0
"""Judge the flows of a traffic pattern: what they reach together, how fairly, and which of them slow each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from pytest_nixl.checks.pattern.samples import ALONE, TOGETHER, FlowSamples, PatternSamples, jain
from pytest_nixl.core.units import gigabytes
from pytest_nixl.judge.concurrent import STARVED
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.traffic_pattern import Flow
from pytest_nixl.model.verdicts import Judgement, Verdict


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
