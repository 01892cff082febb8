# SPDX-License-Identifier: Apache-2.0
"""What was measured of the flows of a traffic pattern, each alone and all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from pytest_nixl.model.device_counters import LossyDevice
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import LOAD, PATTERN, RowKey, Variant
from pytest_nixl.model.samples import Corruption, Samples
from pytest_nixl.model.traffic_pattern import Flow, TrafficPattern
from pytest_nixl.nixl.gpus import LinkGpu

#: How the flows of a row are measured: each alone, or all at the same time.
ALONE, TOGETHER = "alone", "together"
LOADS = (ALONE, TOGETHER)
#: Transfers and seconds of one window.
Window = tuple[int, float]


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
