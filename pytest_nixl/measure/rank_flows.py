# SPDX-License-Identifier: Apache-2.0
"""The workers of a traffic pattern, one for each rank, and the measurement of its flows alone and together."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.wire import Ref
from pytest_nixl.measure.link import obstacle_between
from pytest_nixl.measure.worker_pair import connect_pairs
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.flow_samples import ALONE, TOGETHER, FlowSamples, PatternKind, PatternSamples, Window
from pytest_nixl.model.samples import Corruption
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import Flow, factors, rounds
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.nixl.gpus import gpus
from pytest_nixl.nixl.version_mismatch import versions_named
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.processes.worker_process import Worker, results

#: How often each flow is measured alone, and all together, in turn.
REPEATS = 5
#: The least seconds of a window, and the least number of times that every transfer in flight fits into it.
LEAST_SECONDS, LEAST_TURNS = 0.1, 10
#: The share of a window that precedes it and is not counted.
_WARM_UP = 0.2


@dataclass
class _PatternRank:
    """One rank: its agent, and the buffers from which its flows leave and at which others arrive."""

    agent: NixlAgent
    outgoing: Buffer | None = None
    incoming: Buffer | None = None
    endpoint: Ref | None = None

    @property
    def worker(self) -> Worker:
        return self.agent.worker


@dataclass(frozen=True)
class _FlowPlace:
    """Where the bytes of a flow lie: offsets in the buffers of its source and its target."""

    source: int
    target: int


class RankFlows:
    """The workers of a traffic pattern, one for each rank, connected where a flow needs it.

    The flows start and stop on the data path (:mod:`pytest_nixl.nixl.worker.flows`): this process sends one command to
    each rank and then waits.

    :param hosts: the host of each rank.
    :param names: a name for each rank, with its host.
    :param agent_options: how the agents are created.
    :raises NotApplicableError: a rank does not have this memory.
    :raises WorkerError: a worker or an agent cannot be started, or the agents cannot connect.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        names: Sequence[str],
        kind: PatternKind,
        settings: Settings,
        agent_options: AgentOptions,
    ) -> None:
        self._kind, self._settings, self._names = kind, settings, tuple(names)
        self._backend = BACKENDS[kind.backend]
        self._flows = list(kind.pattern.flows)
        self._runs = itertools.count(random.getrandbits(48))
        self._places = self._placed()
        environment: dict[str, str | None] = {"NIXL_ETCD_ENDPOINTS": None}
        wanted = self._backend.environment(os.environ)
        environment |= {name: value for name, value in wanted.items() if name not in os.environ}
        self._workers: list[Worker] = []
        try:
            for host in hosts[: kind.pattern.ranks]:
                limits = settings.timeout, settings.start_timeout
                self._workers.append(host.start("flows", environment, *limits))
            self._ranks = self._prepared(agent_options)
            with versions_named(self._workers):
                partners = self._partners()
                for met in factors(kind.pattern.ranks):  # the pairs of a round share no rank: they connect at once
                    connect_pairs([(self.agents[one], self.agents[other]) for one, other in met
                                   if (one, other) in partners])  # fmt: skip
            for rank in self._used():
                self._prepare(rank)
        except BaseException:
            self.kill()
            raise

    @property
    def agents(self) -> tuple[NixlAgent, ...]:
        """The agent of each rank."""
        return tuple(rank.agent for rank in self._ranks)

    @property
    def buffers(self) -> dict[int, Buffer]:
        """The buffer at which flows arrive, of each rank that receives."""
        return {number: rank.incoming for number, rank in enumerate(self._ranks) if rank.incoming is not None}

    def measure(self, repeats: int = REPEATS) -> PatternSamples:
        """Measure each flow alone and all together, in turn, and compare every byte before, after and in between.

        :param repeats: how often.
        :raises WorkerError: a worker dies or hangs, or NIXL reports an error; all workers are then ended.
        """
        try:
            corruption: dict[Flow, Corruption] = {}
            self._verify("before the timed transfers", corruption)
            seeds = self._fill(poison=False)
            windows: dict[str, dict[Flow, list[Window]]] = {load: {} for load in (ALONE, TOGETHER)}
            others: dict[str, dict[Flow, float]] = {load: {} for load in (ALONE, TOGETHER)}
            alone = [[[flow] for flow in each] for each in rounds(self._kind.pattern, self._hosts())]
            timed = [(load, groups, self._duration(groups)) for load, groups in
                     (*((ALONE, groups) for groups in alone), (TOGETHER, [self._flows]))]  # fmt: skip
            for _ in range(repeats):
                for load, groups, duration in timed:
                    self._timed(groups, duration, windows[load], others[load])
            self._compare("after the timed transfers", seeds, corruption)
            self._verify("in the transfers after the timed ones", corruption)
        except BaseException:
            self.kill()
            raise
        flows = [
            FlowSamples(
                flow,
                tuple(windows[ALONE][flow]),
                tuple(windows[TOGETHER][flow]),
                tuple((load, others[load][flow]) for load in (ALONE, TOGETHER)),
                self._transports(flow),
                corruption.get(flow),
                obstacle_between(self._ranks[flow.source].worker, self._ranks[flow.target].worker),
            )
            for flow in self._flows
        ]
        return PatternSamples(self._kind, tuple(flows), self._names, tuple(self._hosts()))

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.close()

    def kill(self) -> None:
        """End all workers immediately."""
        for worker in self._workers:
            worker.kill()

    def _used(self) -> list[int]:
        return sorted({rank for flow in self._flows for rank in flow.ranks})

    @property
    def _coordinator(self) -> int:
        """The rank that most flows touch, which starts the windows of all."""
        touched = [rank for flow in self._flows for rank in flow.ranks]
        return max(self._used(), key=touched.count)

    def _partners(self) -> set[tuple[int, int]]:
        """Return the pairs of ranks that must be connected: those of flows, and the coordinator with each."""
        pairs = [flow.ranks for flow in self._flows]
        pairs += [(self._coordinator, rank) for rank in self._used() if rank != self._coordinator]
        return {(min(pair), max(pair)) for pair in pairs}

    def _hosts(self) -> list[str]:
        """Return the host of each rank."""
        return [str(worker.versions["host"]) for worker in self._workers]

    def _placed(self) -> dict[Flow, _FlowPlace]:
        """Return where the bytes of each flow lie: behind those of the flows before it."""
        used: dict[tuple[str, int], int] = {}
        found = {}
        for flow in self._flows:
            source, target = used.get(("out", flow.source), 0), used.get(("in", flow.target), 0)
            found[flow] = _FlowPlace(source, target)
            used["out", flow.source] = source + flow.size * self._kind.depth
            used["in", flow.target] = target + flow.size * self._kind.depth
        return found

    def _prepared(self, agent_options: AgentOptions) -> list[_PatternRank]:
        """Create an agent for each rank, and its buffers."""
        kind = self._kind
        local = len(set(self._hosts())) == 1
        devices = [0] * len(self._workers)
        if "VRAM" in (kind.memory.initiator, kind.memory.target):
            for number, worker in enumerate(self._workers):
                seen = gpus(worker, kind.memory)
                devices[number] = seen[number % len(seen) if local else 0].number
                worker.call("activate", device=devices[number])
        agents = NixlAgent.within_each(
            self._workers,
            backends=[kind.backend],
            progress_thread=agent_options.progress_thread or False,
            agent_options=agent_options,
        )
        ends = (kind.memory.initiator, kind.memory.target)
        source, target = ends if kind.op == "WRITE" else ends[::-1]
        ranks = []
        for number, agent in enumerate(agents):
            rank = _PatternRank(agent)
            sent = sum(flow.size for flow in self._flows if flow.source == number) * kind.depth
            received = sum(flow.size for flow in self._flows if flow.target == number) * kind.depth
            if sent:
                rank.outgoing = self._buffer(agent, sent, source, devices[number])
            if received:
                rank.incoming = self._buffer(agent, received, target, devices[number])
            ranks.append(rank)
        return ranks

    def _buffer(self, agent: NixlAgent, size: int, memory: str, device: int) -> Buffer:
        if memory == "VRAM" and "VRAM_SEG" not in agent.get_backend_mem_types(self._kind.backend):
            raise NotApplicableError(
                f"{self._kind.memory} needs a backend that supports GPU memory, but {self._kind.backend} does not",
                "use --nixl-backend=UCX or LIBFABRIC, or remove VRAM from --nixl-memory",
            )
        buffer = agent.allocate(size, memory, device=device)
        agent.register(buffer)
        return buffer

    def _prepare(self, number: int) -> None:
        """Prepare the transfers that a rank posts."""
        kind, rank = self._kind, self._ranks[number]
        flows = []
        for place, flow in enumerate(self._flows):
            if kind.initiator(flow) != number:
                continue
            partner = self._ranks[flow.target if number == flow.source else flow.source]
            slots = []
            for slot in range(kind.depth):
                source, target = self._ends(flow, slot)
                slots.append([list(source), list(target)] if number == flow.source else [list(target), list(source)])
            flows.append({"number": place, "partner": partner.agent.name, "slots": slots})
        rank.endpoint = rank.worker.call(
            "flows_prepare",
            agent=rank.agent.ref,
            op=kind.op,
            plugin=self._backend.PLUGIN,
            memory=[kind.memory.initiator, kind.memory.target],
            flows=flows,
        )

    def _ends(self, flow: Flow, slot: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        outgoing, incoming = self._ranks[flow.source].outgoing, self._ranks[flow.target].incoming
        assert outgoing is not None
        assert incoming is not None
        place, behind = self._places[flow], slot * flow.size
        return (
            outgoing.descriptor(place.source + behind, flow.size),
            incoming.descriptor(place.target + behind, flow.size),
        )

    def _fill(self, *, poison: bool) -> dict[Flow, int]:
        """Write a new pattern to the source of each flow and, with ``poison``, its complement to the target."""
        seeds = {flow: random.getrandbits(63) for flow in self._flows}
        filling = []
        for flow, seed in seeds.items():
            outgoing, incoming = self._ranks[flow.source].outgoing, self._ranks[flow.target].incoming
            assert outgoing is not None
            assert incoming is not None
            size, place = flow.size * self._kind.depth, self._places[flow]
            filling.append(outgoing.fill(seed, offset=place.source, size=size))
            if poison:
                filling.append(incoming.fill(seed, offset=place.target, size=size, inverted=True))
        results(filling)
        return seeds

    def _compare(self, phase: str, seeds: dict[Flow, int], corruption: dict[Flow, Corruption]) -> None:
        """Compare every byte at the target of each flow, and keep the first corruption of each."""
        pending = []
        for flow, seed in seeds.items():
            incoming = self._ranks[flow.target].incoming
            assert incoming is not None
            arguments: dict[str, Any] = {"buffer": incoming.ref, "seed": seed, "offset": self._places[flow].target}
            pending.append(incoming.worker.request("compare", size=flow.size * self._kind.depth, **arguments))
        for flow, found in zip(seeds, results(pending), strict=True):
            if found is not None:
                corruption.setdefault(flow, Corruption(phase=phase, **found))

    def _verify(self, phase: str, corruption: dict[Flow, Corruption]) -> None:
        """Post each transfer once with new patterns, and compare every byte."""
        seeds = self._fill(poison=True)
        self._run([self._flows], [0.0])
        self._compare(phase, seeds, corruption)

    def _duration(self, groups: Sequence[Sequence[Flow]]) -> float:
        """Return the seconds of a window of these groups, by the time that their transfers in flight take."""
        found = self._run(groups, [0.0, 0.0])  # the very first transfers also connect
        slowest = max(windows[-1][1] for windows in found.values())
        return min(max(self._settings.duration, LEAST_SECONDS, LEAST_TURNS * slowest), self._settings.timeout / 4)

    def _timed(
        self,
        groups: Sequence[Sequence[Flow]],
        duration: float,
        windows: dict[Flow, list[Window]],
        others: dict[Flow, float],
    ) -> None:
        contention: dict[int, float] = {}
        found = self._run(groups, [_WARM_UP * duration, duration], contention)
        for flow, measured in found.items():
            windows.setdefault(flow, []).append(measured[-1])
            others[flow] = max(others.get(flow, 0.0), *(contention[rank] for rank in flow.ranks))

    def _run(
        self,
        groups: Sequence[Sequence[Flow]],
        durations: Sequence[float],
        contention: dict[int, float] | None = None,
    ) -> dict[Flow, list[Window]]:
        """Run the flows of several groups at the same time. The flows of a group start together.

        :param groups: the flows of each group; no rank is in two groups.
        :param durations: the seconds of each window; 0: each prepared transfer is posted once.
        :param contention: receives the cores that others took, by rank.
        :returns: the windows of each flow.
        """
        run, patience = next(self._runs), self._settings.timeout + 3 * sum(durations)
        pending, serving = [], []
        used = [sorted({rank for flow in group for rank in flow.ranks}) for group in groups]
        everyone = sorted(set(itertools.chain(*used)))
        for group, ranks in zip(groups, used, strict=True):
            first = self._first(group, ranks)
            members = [self._ranks[rank].agent.name for rank in ranks if rank != first]
            # Those that post first answer first; the coordinator polls until it is cancelled.
            requests = []
            for rank in [first, *(rank for rank in ranks if rank != first)]:
                one = self._ranks[rank]
                requests.append(
                    one.worker.request(
                        "flows_run",
                        seconds=patience + 5,
                        endpoint=one.endpoint,
                        patience=patience,
                        own=self._own(rank, everyone),
                        run=run,
                        coordinator="" if rank == first else self._ranks[first].agent.name,
                        members=members if rank == first else [],
                        flows=[self._flows.index(flow) for flow in group if self._kind.initiator(flow) == rank],
                        durations=list(durations),
                    )
                )
            serving.append(requests[0])
            pending.append(requests[1:])
        for asked, coordinator in zip(pending, serving, strict=True):
            results(asked, serving=coordinator)
        reports = results([self._ranks[rank].worker.request("flows_report", endpoint=self._ranks[rank].endpoint)
                           for rank in everyone])  # fmt: skip
        if contention is not None:
            contention |= {rank: report["others"] for rank, report in zip(everyone, reports, strict=True)}
        return self._windows(itertools.chain(*groups), reports, len(durations))

    def _windows(self, flows: Iterable[Flow], reports: Sequence[Any], count: int) -> dict[Flow, list[Window]]:
        told = {
            number: list(zip(transfers, seconds, strict=False))
            for report in reports
            for number, transfers, seconds in report["windows"]
        }
        found = {flow: told.get(self._flows.index(flow), []) for flow in flows}
        for flow, windows in found.items():
            if len(windows) != count:
                raise WorkerError(
                    f"rank {self._kind.initiator(flow)} did not report {count} windows of the flow {flow}",
                    "install the same pytest-nixl on every rank",
                )
        return found

    def _first(self, group: Sequence[Flow], ranks: Sequence[int]) -> int:
        """Return the coordinator of a group: of one flow the rank that does not post, else that of all."""
        if len(group) == 1:
            return next(rank for rank in ranks if rank != self._kind.initiator(group[0]))
        return self._coordinator

    def _own(self, rank: int, ranks: Iterable[int]) -> list[int]:
        """Return the pids of the pattern's other processes on the host of a rank."""
        hosts = self._hosts()
        return [self._ranks[each].worker.pid for each in ranks if each != rank and hosts[each] == hosts[rank]]

    def _transports(self, flow: Flow) -> tuple[str, ...]:
        """Return the transports of a flow; none if its initiator has partners on its own host and on others.

        A backend's log does not say to which partner it refers.
        """
        hosts, initiator = self._hosts(), self._kind.initiator(flow)
        ends = [each.ranks for each in self._flows if initiator in each.ranks]
        if len({hosts[one] == hosts[other] for one, other in ends}) > 1:
            return ()
        log = self._ranks[initiator].worker.output()
        return self._backend.transports(log, self._kind.op, flow.size, self._kind.memory)
