# SPDX-License-Identifier: Apache-2.0
"""The workers of a traffic pattern, one for each rank, and the measurement of its flows alone and together."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pytest_nixl.checks.pattern.fairness import ALONE, TOGETHER, FlowSamples, PatternKind, PatternSamples, Window
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.wire import Ref
from pytest_nixl.measure.launch import connect_partners, versions_named, worker_environment
from pytest_nixl.measure.link import loss_counters, obstacle_between
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.device_counters import LossyDevice, lossy_devices
from pytest_nixl.model.samples import Corruption
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import Flow, rounds
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.backends.ucx import protocol
from pytest_nixl.nixl.buffer import Buffer, Part, PendingBuffer
from pytest_nixl.nixl.gpus import LinkGpu, gpus
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_errors import SAME_VERSION, WorkerError
from pytest_nixl.processes.worker_process import Pending, Worker, results


@dataclass(frozen=True)
class MeasuredFlows:
    """What was measured in a step.

    :param windows: the windows of each flow.
    :param contention: the cores that other processes took, by rank.
    """

    windows: dict[Flow, list[Window]]
    contention: dict[int, float]


@dataclass(frozen=True)
class FlowStep:
    """Flows that are measured at the same time.

    :param load: ``alone`` or ``together``.
    :param groups: the flows of each group. No rank is in two groups, and the flows of a group start together.
    :param durations: the seconds of each window; 0: each prepared transfer is posted once.
    """

    load: str
    groups: Sequence[Sequence[Flow]]
    durations: tuple[float, ...] = (0.0,)

    @property
    def flows(self) -> list[Flow]:
        """The flows of all groups."""
        return list(itertools.chain(*self.groups))

    @property
    def ranks(self) -> set[int]:
        """The ranks that take part."""
        return {rank for flow in self.flows for rank in flow.ranks}

    def measured(self, reports: Mapping[int, Any], posts: Mapping[Flow, tuple[int, int]]) -> MeasuredFlows:
        """Return what the ranks measured.

        :param reports: the report of each rank about this step; None of one that rested.
        :param posts: the rank that posts each flow, and the number of the flow.
        :raises WorkerError: a report lacks a flow or a window of one.
        """
        windows = {
            (rank, number): list(zip(transfers, seconds, strict=False))
            for rank, report in reports.items()
            if report is not None
            for number, transfers, seconds in report["windows"]
        }
        flow_windows = {flow: windows.get(posts[flow], []) for flow in self.flows}
        for flow, of_flow in flow_windows.items():
            if len(of_flow) != len(self.durations) or not all(reports.get(rank) for rank in flow.ranks):
                raise WorkerError(
                    f"rank {posts[flow][0]} did not report {len(self.durations)} windows of the flow {flow}",
                    SAME_VERSION,
                )
        return MeasuredFlows(flow_windows, {rank: reports[rank]["contention"] for rank in self.ranks})


#: How often at most each flow is measured alone, and all together, in turn.
REPEATS = 5
#: The least seconds of a window, and the least number of times that every transfer in flight fits into it.
LEAST_SECONDS, LEAST_TURNS = 0.1, 10
#: How often each prepared transfer is posted to learn how long it takes.
_TRIALS = 2
#: The share of a window that precedes it and is not counted.
_WARM_UP = 0.1
#: A buffer, and the part of it that belongs to each of its flows.
_FlowParts = tuple[Buffer, dict[Flow, Part]]


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

    The flows start and stop on the data path (:mod:`pytest_nixl.checks.pattern.worker.flows`): for all rounds together
    this process sends one command to each rank, waits, and asks for what was measured.

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
        #: The rank that posts each flow, and the number of the flow.
        self._posts = {flow: (kind.initiator(flow), number) for number, flow in enumerate(self._flows)}
        self._runs = itertools.count(secrets.randbits(48))
        self._places = self._placed()
        environment = worker_environment(self._backend)
        self._workers: list[Worker] = []
        self._gpus: list[LinkGpu] = []  # of each rank, if the flows use GPU memory
        try:
            for host in hosts[: kind.pattern.ranks]:
                limits = settings.timeout, settings.start_timeout
                self._workers.append(host.start("flows", environment, *limits))
            self._ranks = self._prepared(agent_options)
            with versions_named(self._workers):
                connect_partners(self.agents, self._partners())
            self._prepare(self._used())
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

    def measure(
        self, repeats: int = REPEATS, *, clear: Callable[[PatternSamples], bool] = lambda _: False
    ) -> PatternSamples:
        """Measure each flow alone and all together, in turn, and compare every byte before, after and in between.

        :param repeats: how often at most.
        :param clear: returns whether the repetitions so far suffice. Their samples lack transports and corruptions.
        :raises WorkerError: a worker dies or hangs, or NIXL reports an error; all workers are then ended.
        """
        try:
            corruption: dict[Flow, Corruption] = {}
            self._verify("before the timed transfers", corruption)
            seeds = self._fill(poison=False)
            windows: dict[str, dict[Flow, list[Window]]] = {load: {} for load in (ALONE, TOGETHER)}
            contention: dict[str, dict[Flow, float]] = {load: {} for load in (ALONE, TOGETHER)}
            alone = [[[flow] for flow in each] for each in rounds(self._kind.pattern, self._hosts())]
            steps = self._with_durations([*(FlowStep(ALONE, groups) for groups in alone), self._all_flows])
            before = loss_counters(self._workers)
            samples = self._repeat(steps, windows, contention)
            for _ in range(1, repeats):
                if clear(samples):
                    break
                samples = self._repeat(steps, windows, contention)
            after = loss_counters(self._workers, before)
            self._compare("after the timed transfers", seeds, corruption)
            self._verify("in the transfers after the timed ones", corruption)
        except BaseException:
            self.kill()
            raise
        reported = self._reported()

        def lossy(flow: Flow) -> tuple[LossyDevice, ...]:
            hosts = {self._hosts()[rank] for rank in flow.ranks}
            counted = {host: rows for host, rows in after.items() if host in hosts}
            moved = flow.size * sum(count for load in windows.values() for count, _ in load[flow])
            return lossy_devices(before, counted, reported[flow][0], moved)

        flows = [
            replace(
                measured,
                transports=reported[flow][0],
                corruption=corruption.get(flow),
                obstacle=obstacle_between(self._ranks[flow.source].worker, self._ranks[flow.target].worker),
                protocol=reported[flow][1],
                lossy=lossy(flow),
            )
            for flow, measured in zip(self._flows, samples.flows, strict=True)
        ]
        return replace(samples, flows=tuple(flows))

    def _repeat(
        self,
        steps: Sequence[FlowStep],
        windows: dict[str, dict[Flow, list[Window]]],
        contention: dict[str, dict[Flow, float]],
    ) -> PatternSamples:
        """Measure each step once more, and return what was measured so far."""
        self._timed(steps, windows, contention)
        flows = [
            FlowSamples(
                flow,
                tuple(windows[ALONE][flow]),
                tuple(windows[TOGETHER][flow]),
                tuple((load, contention[load][flow]) for load in (ALONE, TOGETHER)),
            )
            for flow in self._flows
        ]
        return PatternSamples(self._kind, tuple(flows), self._names, tuple(self._hosts()), tuple(self._gpus))

    def close(self) -> None:
        """End all workers, at the same time."""
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.close()

    def kill(self) -> None:
        """End all workers immediately."""
        for worker in self._workers:
            worker.kill()

    def _used(self) -> list[int]:
        return sorted({rank for flow in self._flows for rank in flow.ranks})

    @property
    def _all_flows(self) -> FlowStep:
        return FlowStep(TOGETHER, [self._flows])

    @cached_property
    def _coordinator(self) -> int:
        """The rank that most flows touch, which starts the steps of all."""
        touched = Counter(rank for flow in self._flows for rank in flow.ranks)
        return max(sorted(touched), key=touched.__getitem__)

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
        places = {}
        for flow in self._flows:
            source, target = used.get(("out", flow.source), 0), used.get(("in", flow.target), 0)
            places[flow] = _FlowPlace(source, target)
            used["out", flow.source] = source + flow.size * self._kind.depth
            used["in", flow.target] = target + flow.size * self._kind.depth
        return places

    def _prepared(self, agent_options: AgentOptions) -> list[_PatternRank]:
        """Create an agent for each rank, and its buffers."""
        kind = self._kind
        local = len(set(self._hosts())) == 1
        devices = [0] * len(self._workers)
        if kind.memory.on_gpu:
            for number, worker in enumerate(self._workers):
                visible = gpus(worker, kind.memory)
                self._gpus.append(visible[number % len(visible) if local else 0])
                devices[number] = self._gpus[number].number
                worker.call("activate", device=devices[number])
        agents = NixlAgent.within_each(
            self._workers,
            backends=[kind.backend],
            progress_thread=agent_options.progress_thread or False,
            agent_options=agent_options,
        )
        ends = (kind.memory.initiator, kind.memory.target)
        source, target = ends if kind.op == "WRITE" else ends[::-1]
        sent = [sum(flow.size for flow in self._flows if flow.source == rank) for rank in range(len(agents))]
        received = [sum(flow.size for flow in self._flows if flow.target == rank) for rank in range(len(agents))]
        outgoing = self._allocated(agents, sent, source, devices)
        incoming = self._allocated(agents, received, target, devices)
        return [_PatternRank(*parts) for parts in zip(agents, outgoing, incoming, strict=True)]

    def _allocated(
        self, agents: Sequence[NixlAgent], sizes: Sequence[int], memory: str, devices: Sequence[int]
    ) -> list[Buffer | None]:
        """Return a registered buffer of each agent; None where the size of one transfer of all its flows is 0."""
        pending = [
            self._request_buffer(agent, size * self._kind.depth, memory, device) if size else None
            for agent, size, device in zip(agents, sizes, devices, strict=True)
        ]
        buffers = [None if each is None else each.result() for each in pending]
        for agent, buffer in zip(agents, buffers, strict=True):
            if buffer is not None:
                agent.register(buffer)
        return buffers

    def _request_buffer(self, agent: NixlAgent, size: int, memory: str, device: int) -> PendingBuffer:
        if memory == "VRAM" and "VRAM_SEG" not in agent.get_backend_mem_types(self._kind.backend):
            raise NotApplicableError(
                f"{self._kind.memory} needs a backend that supports GPU memory, but {self._kind.backend} does not",
                "use --nixl-backend=UCX, or remove VRAM from --nixl-memory",
            )
        return agent.request_buffer(size, memory, device=device)

    def _prepare(self, numbers: Sequence[int]) -> None:
        """Prepare the transfers that some ranks post."""
        for number, endpoint in zip(numbers, results([self._request_flows(number) for number in numbers]), strict=True):
            self._ranks[number].endpoint = endpoint

    def _request_flows(self, number: int) -> Pending:
        kind, rank = self._kind, self._ranks[number]
        flows = []
        for place, flow in enumerate(self._flows):
            if self._posts[flow][0] != number:
                continue
            partner = self._ranks[flow.target if number == flow.source else flow.source]
            slots = []
            for slot in range(kind.depth):
                source, target = self._ends(flow, slot)
                slots.append([list(source), list(target)] if number == flow.source else [list(target), list(source)])
            flows.append({"number": place, "partner": partner.agent.name, "slots": slots})
        return rank.worker.request(
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
        seeds = {flow: secrets.randbits(63) for flow in self._flows}
        sources, targets = self._flow_parts(seeds, arriving=False), self._flow_parts(seeds, arriving=True)
        filling = [buffer.fill_parts(list(parts.values())) for buffer, parts in sources]
        if poison:
            filling += [buffer.fill_parts(list(parts.values()), inverted=True) for buffer, parts in targets]
        results(filling)
        return seeds

    def _flow_parts(self, seeds: dict[Flow, int], *, arriving: bool) -> list[_FlowParts]:
        """Return each buffer from which flows leave, or at which they arrive, and the part of each of its flows."""
        parts_of_rank: dict[int, dict[Flow, Part]] = {}
        for flow, seed in seeds.items():
            place = self._places[flow]
            rank, offset = (flow.target, place.target) if arriving else (flow.source, place.source)
            parts_of_rank.setdefault(rank, {})[flow] = seed, offset, flow.size * self._kind.depth
        buffers = [rank.incoming if arriving else rank.outgoing for rank in self._ranks]
        return [(buffer, parts_of_rank[rank]) for rank, buffer in enumerate(buffers) if buffer is not None]

    def _compare(self, phase: str, seeds: dict[Flow, int], corruption: dict[Flow, Corruption]) -> None:
        """Compare every byte at the target of each flow, and keep the first corruption of each."""
        targets = self._flow_parts(seeds, arriving=True)
        answers = results([buffer.compare_parts(list(parts.values())) for buffer, parts in targets])
        for (buffer, parts), comparison in zip(targets, answers, strict=True):
            for flow, wrong in zip(parts, buffer.compared(comparison, len(parts)), strict=True):
                if wrong is not None:
                    corruption.setdefault(flow, Corruption(phase=phase, **wrong))

    def _verify(self, phase: str, corruption: dict[Flow, Corruption]) -> None:
        """Post each transfer once with new patterns, and compare every byte."""
        seeds = self._fill(poison=True)
        self._run([self._all_flows])
        self._compare(phase, seeds, corruption)

    def _with_durations(self, steps: Sequence[FlowStep]) -> list[FlowStep]:
        """Return steps with windows that are long enough for the transfers in flight of their slowest flow."""
        # The first transfers also connect. Of the others the fastest counts: another process may hold one up.
        tried = self._run([replace(step, durations=(0.0,) * (1 + _TRIALS)) for step in steps])
        timed = []
        for step, trial in zip(steps, tried, strict=True):
            slowest = max(min(seconds for _, seconds in windows[1:]) for windows in trial.windows.values())
            least = max(self._settings.duration, LEAST_SECONDS, LEAST_TURNS * slowest)
            duration = min(least, self._settings.timeout / 4)
            timed.append(replace(step, durations=(_WARM_UP * duration, duration)))
        return timed

    def _timed(
        self,
        steps: Sequence[FlowStep],
        windows: dict[str, dict[Flow, list[Window]]],
        contention: dict[str, dict[Flow, float]],
    ) -> None:
        """Measure each step once, and add the windows and the cores that other processes took, by load and flow."""
        for step, answer in zip(steps, self._run(steps), strict=True):
            for flow, measured in answer.windows.items():
                windows[step.load].setdefault(flow, []).append(measured[-1])
                most = max(answer.contention[rank] for rank in flow.ranks)
                contention[step.load][flow] = max(contention[step.load].get(flow, 0.0), most)

    def _run(self, steps: Sequence[FlowStep]) -> list[MeasuredFlows]:
        """Run steps one after another, and return what was measured in each."""
        timeout = self._settings.timeout + 3 * max(sum(step.durations) for step in steps)
        run, first, used = next(self._runs), self._coordinator, self._used()
        parts = [self._parts(step) for step in steps]
        # Those that post first answer first; the coordinator polls until it is cancelled.
        requests = [
            self._ranks[rank].worker.request(
                "flows_run",
                seconds=2 * timeout * (len(steps) + 1) + 5,
                endpoint=self._ranks[rank].endpoint,
                run=run,
                everyone=self._gate(rank, first, used),
                steps=[part.get(rank) for part in parts],
                own=self._beside(rank, used),
                timeout=timeout,
            )
            for rank in [first, *(rank for rank in used if rank != first)]
        ]
        results(requests[1:], serving=requests[:1])
        pending = [
            self._ranks[rank].worker.request("flows_report", endpoint=self._ranks[rank].endpoint) for rank in used
        ]
        reports = results(pending)
        if any(len(report) != len(steps) for report in reports):
            raise WorkerError("a rank did not report each step of a traffic pattern", SAME_VERSION)
        answers = [dict(zip(used, of_step, strict=True)) for of_step in zip(*reports, strict=True)]
        return [step.measured(of_step, self._posts) for step, of_step in zip(steps, answers, strict=True)]

    def _parts(self, step: FlowStep) -> dict[int, dict[str, Any]]:
        """Return what each rank does in a step, for ranks that have a part in it."""
        parts = {}
        hosts = self._hosts()
        busy = Counter(hosts[rank] for rank in step.ranks)
        for group in step.groups:
            ranks = sorted({rank for flow in group for rank in flow.ranks})
            first = self._first(group, ranks)
            posts = defaultdict[int, list[int]](list)
            for flow in group:
                rank, number = self._posts[flow]
                posts[rank].append(number)
            for rank in ranks:
                parts[rank] = {
                    "group": self._gate(rank, first, ranks),
                    "flows": posts[rank],
                    "durations": list(step.durations),
                    "busy": busy[hosts[rank]],
                }
        return parts

    def _gate(self, rank: int, first: int, ranks: Iterable[int]) -> dict[str, Any]:
        """Return what a rank must know of a gate.

        :param first: the rank that coordinates it.
        :param ranks: all that pass it.
        """
        if rank != first:
            return {"coordinator": self._ranks[first].agent.name, "members": []}
        return {"coordinator": "", "members": [self._ranks[rank].agent.name for rank in ranks if rank != first]}

    def _first(self, group: Sequence[Flow], ranks: Sequence[int]) -> int:
        """Return the coordinator of a group: of one flow the rank that does not post, else that of all."""
        if len(group) == 1:
            return next(rank for rank in ranks if rank != self._posts[group[0]][0])
        return self._coordinator

    def _beside(self, rank: int, ranks: Iterable[int]) -> list[int]:
        """Return the pids of the processes of other ranks on the host of a rank."""
        hosts = self._hosts()
        return [
            self._ranks[neighbour].worker.pid
            for neighbour in ranks
            if neighbour != rank and hosts[neighbour] == hosts[rank]
        ]

    def _reported(self) -> dict[Flow, tuple[tuple[str, ...], str]]:
        """Return the transports of each flow and UCX's word for its protocol; nothing if its initiator has partners on
        its own host and on others.

        A backend's log does not say to which partner it refers. The log of each rank is read once, because a peer sends
        it through etcd.
        """
        hosts, near = self._hosts(), defaultdict[int, set[bool]](set)
        for flow in self._flows:
            for rank in flow.ranks:
                near[rank].add(hosts[flow.source] == hosts[flow.target])
        logs: dict[int, str] = {}
        read: dict[tuple[int, int], tuple[tuple[str, ...], str]] = {}
        for flow in self._flows:
            key = initiator, size = self._kind.initiator(flow), flow.size
            if len(near[initiator]) > 1:
                read[key] = (), ""
            elif key not in read:
                if initiator not in logs:
                    logs[initiator] = self._ranks[initiator].worker.output()
                rows = logs[initiator], self._kind.op, size, self._kind.memory
                read[key] = self._backend.transports(*rows), protocol(*rows)
        return {flow: read[self._kind.initiator(flow), flow.size] for flow in self._flows}
