# SPDX-License-Identifier: Apache-2.0
"""A measurement of flows from its start to its end: what each rank is asked, in which order, and what follows.

The ranks are doubles that answer at once. ``test_rank_flows.py`` has the real NIXL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.checks.pattern import rank_flows
from pytest_nixl.checks.pattern.fairness import ALONE, LOADS, TOGETHER, FlowSamples, PatternKind, PatternSamples
from pytest_nixl.checks.pattern.rank_flows import RankFlows
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.device_counters import LossyDevice
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.samples import Corruption
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import Flow, TrafficPattern
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.gpus import LinkGpu
from pytest_nixl.processes.worker_errors import WorkerError

#: Two flows to rank 0, one back to rank 1; rank 3 rests.
FLOWS = (Flow(1, 0, 64), Flow(2, 0, 128), Flow(0, 1, 32))
KIND = PatternKind(TrafficPattern("matrix", 4, FLOWS), "UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 2)
#: The transfers in a second of each flow in a trial or a window.
RATE = 100


class Rank:
    """One rank: its worker, its agent and its buffers, which answer at once."""

    def __init__(self, number: int, host: str, log: list[tuple[Any, ...]], wrong: Mapping[int, Sequence[Any]]) -> None:
        self.number, self.name, self.ref, self.worker = number, f"agent {number}", f"ref {number}", self
        self.pid, self.versions = 10 + number, {"host": host, "obstacle": f"obstacle of {number}"}
        self.killed, self._log, self._steps = 0, log, list[Any]()
        #: What each comparison of this rank finds, in turn.
        self._wrong = iter(wrong.get(number, ()))
        self._reports = 0
        #: The seconds of its fastest trial.
        self.trial = 0.01
        #: How many steps its reports lack, and the memory that its backend can register.
        self.short, self.segments = 0, ["DRAM_SEG", "VRAM_SEG"]

    def start(self, role: str, environment: object, timeout: float, start_timeout: float) -> Rank:
        self._log.append((self.number, "start", role, timeout, start_timeout))
        return self

    def get_backend_mem_types(self, backend: str) -> list[str]:
        assert backend == "UCX"
        return self.segments

    def call(self, command: str, *, device: int) -> None:
        self._log.append((self.number, command, device))

    def request_buffer(self, size: int, memory: str, *, device: int) -> Any:
        self._log.append((self.number, "allocate", size, memory, device))
        return SimpleNamespace(result=lambda: SimpleNamespace(
            register=None, size=size, descriptor=lambda offset, length: (offset, length, 0),
            fill_parts=self._fill, compare_parts=self._compare, compared=lambda answer, count: answer[:count],
        ))  # fmt: skip

    def register(self, buffer: Any) -> None:
        self._log.append((self.number, "register", buffer.size))

    def _fill(self, parts: list[tuple[int, int, int]], *, inverted: bool = False) -> None:
        self._log.append((self.number, "fill", inverted, parts))

    def _compare(self, parts: list[tuple[int, int, int]]) -> list[Any]:
        self._log.append((self.number, "compare", parts))
        return next(self._wrong, None) or [None] * len(parts)

    def request(self, command: str, **arguments: Any) -> Any:
        self._log.append((self.number, command, arguments))
        if command == "flows_prepare":
            return f"endpoint {self.number}"
        if command == "flows_run":
            self._steps = arguments["steps"]
            return None
        assert arguments == {"endpoint": f"endpoint {self.number}"}
        self._reports += 1
        reports = [None if step is None else self._report(step) for step in self._steps]
        return reports[self.short :]

    def _report(self, step: dict[str, Any]) -> dict[str, Any]:
        durations = step["durations"]
        # The first transfers also connect, and take long; of the others the fastest counts.
        trials = (9.0, self.trial, 2 * self.trial)
        seconds = [duration or trials[number] for number, duration in enumerate(durations)]
        counts = [int(RATE * part) + number + self._reports for number, part in enumerate(seconds)]
        contention = 0.1 * self.number + 0.01 * self._reports
        return {"windows": [(flow, counts, seconds) for flow in step["flows"]], "contention": contention}

    def output(self) -> str:
        self._log.append((self.number, "output"))
        return f"log of {self.number}"

    def kill(self) -> None:
        self.killed += 1

    def ask_to_end(self) -> None:
        self._log.append((self.number, "ask to end"))

    def close(self) -> None:
        self._log.append((self.number, "close"))


class Measurement:
    """Flows of four ranks that are doubles, and what these were asked."""

    def __init__(
        self, settings: Settings, kind: PatternKind, hosts: str, wrong: Mapping[int, Sequence[Any]],
        patch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        self.log: list[tuple[Any, ...]] = []
        self.ranks = [Rank(number, host, self.log, wrong) for number, host in enumerate(hosts)]
        self.losses: list[tuple[Any, ...]] = []
        seeds = iter(range(1, 99))
        patch.setattr(rank_flows, "secrets", SimpleNamespace(randbits=lambda bits: next(seeds)))
        patch.setattr(NixlAgent, "within_each", self._create_agents)
        visible = [LinkGpu(number, "H100", f"GPU-{number}", "") for number in (4, 5)]
        patch.setattr(rank_flows, "gpus", lambda worker, memory: visible)
        patch.setattr(rank_flows, "connect_partners", lambda agents, pairs: self.note("connect", len(agents), pairs))
        patch.setattr(rank_flows, "results", self._wait)
        backend = type(BACKENDS["UCX"])
        patch.setattr(backend, "transports", lambda backend, log, *row: (f"{log} {row[:2]}",))
        patch.setattr(rank_flows, "loss_counters", self._count_losses)
        patch.setattr(rank_flows, "lossy_devices", self._find_losses)
        self.settings, self._kind = settings, kind

    def start(self) -> RankFlows:
        """Start the ranks, and return their flows."""
        options = self.settings.agents[0]
        self.flows = RankFlows(cast(Any, self.ranks), list("wxyz"), self._kind, self.settings, options)
        return self.flows

    def _create_agents(self, workers: Sequence[Rank], **options: Any) -> list[Rank]:
        self.note("create", options["backends"], options["progress_thread"], options["agent_options"])
        return list(workers)

    def _wait(self, requests: Sequence[Any], serving: Sequence[Any] = ()) -> list[Any]:
        self.note("wait", len(requests), len(serving))
        return list(requests)

    def note(self, *step: Any) -> None:
        self.log.append(("pytest", *step))

    def _count_losses(self, workers: Sequence[Rank], before: Any = None) -> dict[str, str]:
        self.note("count losses", [worker.number for worker in workers], before)
        return dict.fromkeys("abc", "after" if before else "before")

    def _find_losses(self, *arguments: Any) -> tuple[LossyDevice, ...]:
        self.losses.append(arguments)
        return (LossyDevice(f"found {len(self.losses)}", "rxe0", 1, {}),)

    def requests_of(self, command: str) -> list[tuple[Any, ...]]:
        return [(rank, *rest) for rank, name, *rest in self.log if name == command]


Measure = Callable[..., Measurement]


@pytest.fixture
def measured(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Measure:
    def make(
        wrong: Mapping[int, Sequence[Any]] | None = None, kind: PatternKind = KIND, hosts: str = "aabcd", **changes: Any
    ) -> Measurement:
        settings = make_settings(**{"timeout": 60.0, "start_timeout": 90.0, "duration": 0.0, **changes})
        return Measurement(settings, kind, hosts, wrong or {}, monkeypatch)

    return make


def test_ranks_start_connect_and_prepare_the_transfers_of_each_slot(measured: Measure) -> None:
    """The rank that most flows touch, rank 0, coordinates, and is connected with each rank that has a flow."""
    measurement = measured()
    measurement.start()
    assert measurement.requests_of("start") == [(rank, "flows", 60.0, 90.0) for rank in range(4)]
    assert measurement.requests_of("connect") == [("pytest", 4, {(0, 1), (0, 2)})]
    assert measurement.requests_of("register") == [(0, 64), (1, 128), (2, 256), (0, 2 * 192), (1, 64)]
    prepared = dict(measurement.requests_of("flows_prepare"))
    assert prepared.keys() == {0, 1, 2}
    assert prepared[2] == {
        "agent": "ref 2", "op": "WRITE", "plugin": "UCX", "memory": ["DRAM", "DRAM"],
        "flows": [{
            "number": 1, "partner": "agent 0",
            "slots": [[[0, 128, 0], [128, 128, 0]], [[128, 128, 0], [256, 128, 0]]],
        }],
    }  # fmt: skip
    assert [flow["slots"] for rank in (0, 1) for flow in prepared[rank]["flows"]] == [
        [[[0, 32, 0], [0, 32, 0]], [[32, 32, 0], [32, 32, 0]]], [[[0, 64, 0], [0, 64, 0]], [[64, 64, 0], [64, 64, 0]]],
    ]  # fmt: skip
    assert [agent.name for agent in measurement.flows.agents] == [f"agent {rank}" for rank in range(4)]
    assert {rank: buffer.size for rank, buffer in measurement.flows.buffers.items()} == {0: 384, 1: 64}


def test_flows_are_verified_timed_alone_and_together_and_verified_again(measured: Measure) -> None:
    measurement = measured()
    measurement.start()
    measurement.log.clear()
    so_far: list[PatternSamples] = []

    def clear(samples: PatternSamples) -> bool:
        so_far.append(samples)
        return len(so_far) == 2

    samples = measurement.flows.measure(repeats=4, clear=clear)
    runs = [arguments for rank, arguments in measurement.requests_of("flows_run") if rank == 0]
    # Each transfer once; how long each step takes; two repetitions; each transfer once more.
    flows = [[[part["flows"] for part in run["steps"] if part] for run in [arguments]] for arguments in runs]
    assert [len(steps) for (steps,) in flows] == [1, 4, 4, 4, 1]
    assert [run["run"] for run in runs] == list(range(runs[0]["run"], runs[0]["run"] + 5))
    durations = [[tuple(part["durations"]) for part in run["steps"]] for run in runs]
    # The slowest flow takes 0.01 s for each transfer in flight, and ten of them are to fit into a window of 0.1 s.
    timed = [(pytest.approx(0.01), pytest.approx(0.1))] * 4
    assert durations == [[(0.0,)], [(0.0, 0.0, 0.0)] * 4, timed, timed, [(0.0,)]]
    steps = measurement.requests_of("flows_run")
    posts = {rank: [part and part["flows"] for part in run["steps"]] for rank, run in steps[3:6]}
    assert posts == {0: [[], [2], [], [2]], 1: [None, [], [0], [0]], 2: [[1], None, None, [1]]}
    # The patterns of sources are new for each verification; before it the targets get their complements.
    names = [
        (name, *(rest[:1] if name == "fill" else ()))
        for rank, name, *rest in measurement.log
        if rank in ("pytest", 0) and name not in ("wait", "output")
    ]
    run = [("flows_run",), ("flows_report",)]
    verify = [("fill", False), ("fill", True), *run, ("compare",)]
    assert names == [
        *verify, ("fill", False), *run, ("count losses",), *run, *run, ("count losses",), ("compare",), *verify,
    ]  # fmt: skip
    parts = [parts for rank, inverted, parts in measurement.requests_of("fill") if rank == 0 and inverted]
    assert [[(offset, size) for _, offset, size in part] for part in parts] == [[(0, 128), (128, 256)]] * 2
    compared = [parts for rank, parts in measurement.requests_of("compare") if rank == 0]
    filled = [parts for rank, inverted, parts in measurement.requests_of("fill") if rank == 1 and not inverted]
    assert [seed for ((seed, _, _), _) in compared] == [seed for ((seed, _, _),) in filled]
    assert len({part[0][0] for part in filled}) == 3
    assert measurement.requests_of("count losses") == [
        ("pytest", [0, 1, 2, 3], None), ("pytest", [0, 1, 2, 3], dict.fromkeys("abc", "before")),
    ]  # fmt: skip
    # The coordinator only serves, and a log is read once, if it cannot be of partners on its host and of others.
    assert {step[2:] for step in measurement.log if step[1] == "wait" and step[3]} == {(2, 1)}
    assert measurement.requests_of("output") == [(1,), (2,)]
    assert [flow.transports for flow in samples.flows] == [
        ("log of 1 ('WRITE', 64)",), ("log of 2 ('WRITE', 128)",), (),
    ]  # fmt: skip
    # What is known so far has the windows, and of the ends of a flow the larger contention.
    assert [len(part.flows[0].alone) for part in so_far] == [1, 2]
    assert (samples.kind, samples.names, samples.hosts, samples.gpus) == (KIND, tuple("wxyz"), tuple("aabc"), ())
    for flow, part in zip(FLOWS, samples.flows, strict=True):
        assert part.flow == flow
        # The second window of each repetition counts; the reports of a run of four steps are one.
        assert part.alone == part.together
        assert [count for count, _ in part.alone] == [10 + 1 + 3, 10 + 1 + 4]
        most = 0.1 * max(flow.ranks) + 0.04
        assert dict(part.contention) == {ALONE: pytest.approx(most), TOGETHER: pytest.approx(most)}
    check_losses(measurement, samples.flows)


def check_losses(measurement: Measurement, flows: Sequence[FlowSamples]) -> None:
    """Compare what is looked for of each flow: the counters of its hosts, and the bytes of all its windows."""
    before = dict.fromkeys("abc", "before")
    for number, (flow, part, lost) in enumerate(zip(FLOWS, flows, measurement.losses, strict=True)):
        moved = flow.size * sum(count for load in LOADS for count, _ in part.windows(load))
        hosts = {"aabc"[rank]: "after" for rank in flow.ranks}
        assert lost == (before, hosts, part.transports, moved)
        assert (part.lossy[0].host, part.protocol) == (f"found {number + 1}", "")
    assert [part.obstacle for part in flows] == ["obstacle of 1", "", "obstacle of 0"]
    assert {part.corruption for part in flows} == {None}


WRONG = {"wrong_bytes": 3, "total_bytes": 128, "offset": 5, "expected": 1, "found": 2}
PHASES = ["before the timed transfers", "after the timed transfers", "in the transfers after the timed ones"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_first_corruption_of_each_flow_is_kept_with_its_phase(measured: Measure, number: int) -> None:
    """Of rank 0 the second flow is wrong, from a comparison on; of rank 1 its flow at last."""
    later = {**WRONG, "offset": 99}
    comparisons = [[None, None]] * number + [[None, WRONG], *[[None, later]] * (2 - number)]
    samples = measured({0: comparisons, 1: [None, None, [later]]}).start().measure(repeats=1)
    assert [flow.corruption for flow in samples.flows] == [
        None, Corruption(PHASES[number], 3, 128, 5, 1, 2), Corruption(PHASES[2], 3, 128, 99, 1, 2),
    ]  # fmt: skip


def test_a_rank_that_fails_ends_all(measured: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measured()
    measurement.start()

    def fail(requests: Sequence[Any], serving: Sequence[Any] = ()) -> list[Any]:
        raise WorkerError("rank 2 has ended")

    monkeypatch.setattr(rank_flows, "results", fail)
    with pytest.raises(WorkerError, match="rank 2 has ended"):
        measurement.flows.measure()
    assert [rank.killed for rank in measurement.ranks] == [1, 1, 1, 1, 0]


def test_each_rank_is_told_its_coordinators_and_who_shares_its_host(measured: Measure) -> None:
    """Of a flow that is measured alone the rank that does not post coordinates; a step waits for all ranks."""
    measurement = measured()
    measurement.start()
    measurement.log.clear()
    measurement.flows.measure(repeats=1)
    requests_of = dict(measurement.requests_of("flows_run")[3:6])
    assert [requests_of[rank]["own"] for rank in range(3)] == [[11], [10], []]
    assert {(arguments["timeout"], arguments["seconds"]) for arguments in requests_of.values()} == {(60.0, 605.0)}
    follows = {"coordinator": "agent 0", "members": []}
    assert [requests_of[rank]["everyone"] for rank in range(3)] == [
        {"coordinator": "", "members": ["agent 1", "agent 2"]}, follows, follows,
    ]  # fmt: skip
    leads = [{"coordinator": "", "members": [f"agent {member}"]} for member in range(3)]
    # 2->0, 0->1 and 1->0 alone, and all together.
    assert [[part and part["group"] for part in requests_of[rank]["steps"]] for rank in range(3)] == [
        [leads[2], {"coordinator": "agent 1", "members": []}, leads[1], {"coordinator": "", "members": [
            "agent 1", "agent 2"]}],
        [None, leads[0], follows, follows],
        [follows, None, None, follows],
    ]  # fmt: skip
    assert [part["busy"] for part in requests_of[0]["steps"]] == [1, 2, 2, 2]
    timed = measurement.requests_of("flows_run")[6][1]
    assert timed["timeout"] == pytest.approx(60 + 3 * 0.11)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_rank_whose_report_lacks_a_step_is_an_error(measured: Measure, short: int) -> None:
    measurement = measured()
    measurement.start()
    measurement.ranks[short].short = 1
    with pytest.raises(WorkerError, match=r"^a rank did not report each step of a traffic pattern"):
        measurement.flows.measure()


GPU = MemoryPair("DRAM", "VRAM")


@pytest.mark.parametrize(
    ("op", "memory", "hosts", "devices", "ends"),
    [
        ("WRITE", GPU, "aaaa", [4, 5, 4, 5], ("DRAM", "VRAM")),  # the ranks of one host share its GPUs in turn
        ("READ", GPU, "aaab", [4, 4, 4, 4], ("VRAM", "DRAM")),
        ("WRITE", MemoryPair("DRAM", "DRAM"), "aaaa", [], ("DRAM", "DRAM")),
    ],
)
@pytest.mark.parametrize("progress", ["auto", "on"])
def test_each_rank_has_memory_for_the_flows_that_leave_and_for_those_that_arrive(
    op: str, memory: MemoryPair, hosts: str, devices: list[int], ends: tuple[str, str], progress: str, measured: Measure
) -> None:
    measurement = measured(kind=replace(KIND, op=op, memory=memory), hosts=hosts, progress_thread=(progress,))
    flows = measurement.start()
    assert measurement.requests_of("activate") == list(enumerate(devices))
    used = devices or [0] * 4
    leaving, arriving = [(0, 64), (1, 128), (2, 256)], [(0, 384), (1, 64)]
    assert measurement.requests_of("allocate") == [
        (rank, size, kind, used[rank])
        for kind, parts in zip(ends, (leaving, arriving), strict=True)
        for rank, size in parts
    ]
    assert measurement.requests_of("create") == [("pytest", ["UCX"], progress == "on", measurement.settings.agents[0])]
    assert [gpu.number for gpu in flows.measure(repeats=1).gpus] == devices


def test_a_rank_that_cannot_start_or_has_no_gpu_memory_ends_those_before_it(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = measured(kind=replace(KIND, memory=GPU))
    measurement.ranks[1].segments = ["DRAM_SEG"]
    with pytest.raises(NotApplicableError, match=r"^DRAM:VRAM needs a backend that supports GPU memory, but UCX does"):
        measurement.start()
    assert [rank.killed for rank in measurement.ranks] == [1, 1, 1, 1, 0]
    measurement = measured()

    def refuse(*_: object) -> Rank:
        raise WorkerError("no process can be started")

    monkeypatch.setattr(measurement.ranks[2], "start", refuse)
    with pytest.raises(WorkerError, match="no process can be started"):
        measurement.start()
    assert [rank.killed for rank in measurement.ranks] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("duration", "timeout", "slowest", "window"),
    [(2.0, 60.0, 0.001, 2.0), (0.0, 60.0, 0.001, 0.1), (0.0, 60.0, 1.0, 10.0), (0.0, 8.0, 1.0, 2.0)],
)
def test_a_window_is_long_enough_for_the_slowest_flow_and_a_quarter_of_the_deadline_at_most(
    duration: float, timeout: float, slowest: float, window: float, measured: Measure
) -> None:
    measurement = measured(duration=duration, timeout=timeout)
    measurement.ranks[2].trial = slowest
    measurement.start().measure(repeats=1)
    together = measurement.requests_of("flows_run")[6][1]["steps"][-1]
    assert list(together["durations"]) == pytest.approx([0.1 * window, window])


def test_the_workers_of_a_pattern_end_at_the_same_time(measured: Measure) -> None:
    measurement = measured()
    flows = measurement.start()
    measurement.log.clear()
    flows.close()
    assert measurement.log == [(rank, step) for step in ("ask to end", "close") for rank in range(4)]


def test_the_flows_that_leave_one_rank_lie_behind_each_other_and_its_log_is_understood_once_for_a_size(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    flows = (Flow(1, 0, 64), Flow(1, 2, 64), Flow(1, 3, 32))
    measurement = measured(kind=replace(KIND, pattern=TrafficPattern("outcast", 4, flows)), hosts="abcd")
    measurement.start()
    ((_, prepared),) = [request for request in measurement.requests_of("flows_prepare") if request[0] == 1]
    assert [flow["slots"] for flow in prepared["flows"]] == [
        [[[start + slot * size, size, 0], [slot * size, size, 0]] for slot in (0, 1)]
        for start, size in ((0, 64), (128, 64), (256, 32))
    ]
    sizes: list[int] = []

    def transports(backend: object, log: str, op: str, size: int, memory: MemoryPair) -> tuple[str, ...]:
        sizes.append(size)
        return (log,)

    monkeypatch.setattr(type(BACKENDS["UCX"]), "transports", transports)
    assert [flow.transports for flow in measurement.flows.measure(repeats=1).flows] == [("log of 1",)] * 3
    assert sizes == [64, 32]
