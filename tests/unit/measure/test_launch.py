# SPDX-License-Identifier: Apache-2.0
"""Pairs whose agents have a progress thread, worker threads or parameters, with the real NIXL."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.measure import launch as measure_launch
from pytest_nixl.measure.launch import Launch
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.agent_options import AgentOptions, ThreadCounts
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.worker_errors import GpuFullError, WorkerError, WorkerHungError

DRAM = MemoryPair("DRAM", "DRAM")
MakePairs = Callable[..., Launches]
#: Seconds beyond a deadline that its report may take on a busy machine.
LATE = 60.0


def threads(agent: NixlAgent) -> int:
    """Return the number of threads of an agent's process."""
    return len(os.listdir(f"/proc/{agent.worker.pid}/task"))


def link(pairs: Launches, options: AgentOptions | None = None) -> Link:
    return pairs.link("UCX", "WRITE", DRAM, agent_options=options)


@pytest.mark.long
def test_a_pair_has_the_threads_of_its_options(make_pairs: MakePairs) -> None:
    pairs = make_pairs()
    plain = link(pairs)
    usual = threads(plain.initiator)
    assert threads(plain.target) == usual
    progress = link(pairs, AgentOptions(progress_thread=True))
    assert (threads(progress.initiator), threads(progress.target)) == (usual + 1, usual + 1)
    several = link(pairs, AgentOptions(threads=ThreadCounts(3, 0)))
    assert (threads(several.initiator), threads(several.target)) == (usual + 3, usual)


@pytest.mark.long
def test_a_target_that_stops_for_ever_is_named_within_its_deadline(make_pairs: MakePairs) -> None:
    # UCX over TCP needs the target's progress; the memory copy of one host does not.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        stopping = link(make_pairs())
    stopping.target.worker.timeout = 3.0  # only of the step that it does not answer
    stopping.target.worker.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerHungError, match=r"rank 1 \(target worker, pid \d+\), which was stopped by a signal"):
        stopping.move(65536)
    assert time.monotonic() - started < 3.0 + LATE
    assert not stopping.initiator.worker.alive, "both workers are ended"


@pytest.mark.parametrize(
    ("every", "turns", "partners"),
    [
        *[
            ([*combinations(range(count), 2)], *counts)
            for count, *counts in ((2, 1, 1), (5, 3, 4), (8, 3, 4), (64, 6, 32))
        ],
        ([(0, 2), (0, 3)], 1, 2),
        ([(0, 2), (3, 0), (2, 1)], 1, 2),
    ],
)
def test_all_pairs_connect_in_few_turns_with_none_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, every: list[tuple[int, int]], turns: int, partners: int
) -> None:
    """The workers are doubles, because 64 real ones take minutes."""
    batches: list[tuple[set[int], set[int]]] = []
    served: list[tuple[float, float, bool]] = []
    added: list[tuple[int, int]] = []
    connected: list[tuple[int, int]] = []

    def answer(pending: Sequence[tuple[int, str]], serving: Sequence[tuple[int, str]] = ()) -> list[bytes]:
        if serving:
            batches.append(({number for number, _ in pending}, {number for number, _ in serving}))
        return [b"%d" % number for number, _ in pending]

    def agent(number: int) -> SimpleNamespace:
        def request(command: str, **values: Any) -> tuple[int, str]:
            added.extend((number, int(number_text)) for number_text in values.get("metadata", ()))
            connected.extend((number, int(number_text)) for number_text in values.get("targets", ()))
            if command == "serve":
                served.append((values["seconds"], values["timeout"], values["idle"]))
            return number, command

        return SimpleNamespace(name=str(number), ref=None, worker=SimpleNamespace(request=request, timeout=1.0))

    monkeypatch.setattr(measure_launch, "results", answer)
    measure_launch.connect_partners(cast(Any, [agent(number) for number in range(64)]), every)
    assert sorted(added) == sorted([*every, *((other, first) for first, other in every)])
    assert sorted(connected) == sorted(tuple(sorted(pair)) for pair in every)
    assert len(batches) == 3 * turns
    assert not any(asking & polling for asking, polling in batches)
    assert all(seconds > timeout for seconds, timeout, _ in served), "a rank answers after its last poll"
    assert max(timeout for _, timeout, _ in served) == partners, "a second for each partner of the rank that asks"
    assert {idle for _, _, idle in served} == {len(every) > 1}


def test_metadata_that_is_too_large_for_one_request_is_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[list[bytes]] = []
    large = bytes(measure_launch._PART_BYTES // 2)

    def request(command: str, **values: Any) -> str:
        parts.extend([values["metadata"]] if command == "add_agents" else [])
        return command

    agent = SimpleNamespace(name="a", ref=None, worker=SimpleNamespace(request=request, timeout=1.0))
    monkeypatch.setattr(measure_launch, "results", lambda pending, serving=(): [large] * len(pending))
    measure_launch.connect_partners(cast(Any, [agent] * 8), [(0, 4), (0, 5), (0, 6)])
    assert [len(part) for part in parts] == [2, 1, 1, 1, 1]


def releases(*each: tuple[str, str]) -> list[Any]:
    """Return the workers of ranks with these releases of NIXL and UCX."""
    return [
        SimpleNamespace(rank=rank, versions={"nixl_package": "nixl-cu12", "nixl": nixl, "ucx": ucx})
        for rank, (nixl, ucx) in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (releases(("1.5.1", "1.20.0"), ("1.5.1", "1.20.0")), ""),
        (
            releases(("1.5.1", "1.20.0"), ("1.5.1", "1.19.0")),
            "rank 0 has nixl-cu12 1.5.1 (UCX 1.20.0) and rank 1 has nixl-cu12 1.5.1 (UCX 1.19.0)",
        ),
        (releases(("1.5.1", ""), ("1.4.0", "")), "rank 0 has nixl-cu12 1.5.1 and rank 1 has nixl-cu12 1.4.0"),
    ],
)
def test_an_error_between_different_releases_names_them_once(workers: list[Any], message: str) -> None:
    with pytest.raises(WorkerError) as caught, measure_launch.versions_named(workers):
        with measure_launch.versions_named(workers):
            raise WorkerError("refused", "try again")
    assert caught.value.reason == (f"refused; {message}, which may be the cause" if message else "refused")
    assert caught.value.remedy.endswith("try again")
    assert ("install the same release of NIXL on all ranks" in caught.value.remedy) == bool(message)


class AgentOfEnd:
    """An agent that keeps what it registers. It is a double, because no machine of CI has GPU memory.

    :param room: the largest buffer for which its GPU has memory.
    """

    def __init__(self, *types: str, room: int = 1 << 30) -> None:
        self._types, self._room = types or ("DRAM_SEG", "BLK_SEG"), room
        self.freed: list[int] = []
        self.registered: list[Any] = []
        self.ended: list[str] = []
        self.worker = SimpleNamespace(
            alive=True, ask_to_end=lambda: self.ended.append("asked"), kill=lambda: self.ended.append("killed")
        )
        self.register = self.registered.append

    def close(self) -> None:
        self.ended.append("closed")

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return list(self._types)

    def request_buffer(self, size: int, memory: str, **values: Any) -> Any:
        buffer = SimpleNamespace(
            size=size, memory=memory, descriptor=lambda offset, part: (offset, part, 0),
            free=lambda: self.freed.append(size), **values,
        )  # fmt: skip

        def result() -> Any:
            if size > self._room:
                raise GpuFullError(f"no room for {size}", "end others")
            return buffer

        return SimpleNamespace(result=result)

    def register_memory(self, parts: list[Any], memory: str) -> None:
        self.registered.append((parts, memory))


def pair_of_doubles(regions: int = 1) -> Any:
    pair: Any = Launch.__new__(Launch)
    vars(pair).update(
        backend=SimpleNamespace(NAME="POSIX"), memory=MemoryPair("DRAM", "VRAM"), capacity=64, _directory="/d",
        _alignment=8, _pages="huge", _regions=regions, _warmup_seconds=measure_launch.FIRST_WARMUP_SECONDS,
        initiator=AgentOfEnd(), target=AgentOfEnd(),
    )  # fmt: skip
    return pair


def test_the_memory_of_an_end_is_registered_in_its_regions() -> None:
    whole, parts, objects = AgentOfEnd(), AgentOfEnd(), AgentOfEnd()
    buffer = pair_of_doubles()._request_buffer(whole, "DRAM", 3, 64).result()
    assert (buffer.size, buffer.device, buffer.directory, buffer.alignment, buffer.pages) == (64, 3, "/d", 8, "huge")
    pair_of_doubles()._register(whole, buffer)
    assert whole.registered == [buffer]
    pair_of_doubles(4)._register(parts, buffer)
    assert parts.registered == [([(offset, 16, 0, "") for offset in (0, 16, 32, 48)], "DRAM")]
    pair_of_doubles()._register(objects, objects.request_buffer(64, "OBJ").result())
    assert objects.registered == [], "a row registers its own objects"
    with pytest.raises(NotApplicableError, match="but POSIX supports only BLK and DRAM"):
        pair_of_doubles()._request_buffer(AgentOfEnd(), "VRAM", 0, 64)


class LaunchedWorker:
    """A worker that keeps what it is told. It is a double, because no machine of CI has GPUs."""

    versions: ClassVar = {"host": platform.node()}

    def __init__(self, *gpus: str) -> None:
        self.calls: list[Any] = []
        self.gpus = gpus

    def call(self, command: str, **values: Any) -> Any:
        if command == "devices":
            return {"devices": [{"number": n, "name": "", "uuid": gpu, "pci": ""} for n, gpu in enumerate(self.gpus)]}
        return self.calls.append((command, values))

    def kill(self) -> None:
        self.calls.append("killed")


Make = Callable[..., tuple[Launch, list[Any]]]


@pytest.fixture
def launch(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Launch a pair of such workers. Return it and, in order, what is started, created and connected."""

    def make(
        backend: str, memory: MemoryPair, workers: Sequence[LaunchedWorker], ends: Sequence[AgentOfEnd] = (),
        **more: Any,
    ) -> tuple[Launch, list[Any]]:  # fmt: skip
        created: list[Any] = []

        def within_each(started: Sequence[Any], **values: Any) -> list[AgentOfEnd]:
            created.append((started, values["backends"], values["progress_thread"]))
            return list(ends) or [AgentOfEnd() for _ in started]

        def start(worker: LaunchedWorker, role: str, environment: Any, *limits: float) -> LaunchedWorker:
            created.append((role, environment.get("A"), environment["NIXL_ETCD_ENDPOINTS"], *limits))
            return worker

        monkeypatch.setattr(NixlAgent, "within_each", within_each)
        monkeypatch.setattr(measure_launch, "connect_partners", lambda *values: created.append(values))
        hosts: Any = [SimpleNamespace(start=partial(start, worker)) for worker in workers]
        settings = make_settings(progress_thread=("off", "on"), timeout=7.0, start_timeout=9.0)
        return Launch(hosts, settings, BACKENDS[backend], memory, 64, **more), created

    return make


def test_a_launch_of_a_storage_backend_has_one_worker_without_a_progress_thread(launch: Make) -> None:
    worker, unused = LaunchedWorker(), LaunchedWorker()
    pair, created = launch("POSIX", MemoryPair("DRAM", "FILE"), [worker, unused])
    assert created == [("initiator", None, None, 7.0, 9.0), ([worker], ["POSIX"], False)]
    assert pair.initiator is pair.target
    assert [buffer.memory for buffer in cast(Any, pair.initiator).registered] == ["DRAM", "FILE"]
    assert worker.calls == []


def test_a_launch_starts_both_workers_and_connects_agents_with_registered_buffers(launch: Make) -> None:
    workers, ends = [LaunchedWorker("a", "b"), LaunchedWorker("a", "b")], [AgentOfEnd("VRAM_SEG") for _ in range(2)]
    pair, created = launch(
        "UCX", MemoryPair("VRAM", "VRAM"), workers, ends, variables=({"A": "1"}, {"A": "2"}), alignment=8,
        devices=DevicePair(1, 0), agent_options=AgentOptions(progress_thread=True), pages="base",
    )  # fmt: skip
    assert created == [
        ("initiator", "1", None, 7.0, 9.0), ("target", "2", None, 7.0, 9.0), (workers, ["UCX"], True), (ends, [(0, 1)]),
    ]  # fmt: skip
    assert [worker.calls for worker in workers] == [[("activate", {"device": 1})], [("activate", {"device": 0})]]
    buffers = [buffer for end in ends for buffer in end.registered]
    assert [(buffer.size, buffer.device, buffer.alignment, buffer.pages) for buffer in buffers] == [
        (64, 1, 8, "base"), (64, 0, 8, "base")
    ]  # fmt: skip
    assert (list(pair.buffers), pair.capacity, pair.shortage) == (buffers, 64, None)
    for waits in ((1.0, 2.0), (2.0, 1.0)):
        for buffer, seconds in zip(buffers, waits, strict=True):
            buffer.gpu_wait = lambda seconds=seconds: seconds
        assert pair.kernel_seconds() == 2.0


@pytest.mark.parametrize(("rooms", "capacity"), [((64, 64), 64), ((64, 40), 32), ((16, 32), 16), ((16, 8), None)])
def test_a_launch_takes_the_largest_buffers_for_which_both_gpus_have_memory(
    launch: Make, rooms: tuple[int, int], capacity: int | None
) -> None:
    ends = [AgentOfEnd("VRAM_SEG", room=room) for room in rooms]
    workers = [LaunchedWorker("a"), LaunchedWorker("b")]
    if capacity is None:
        with pytest.raises(GpuFullError, match="no room for 16"):
            launch("UCX", MemoryPair("VRAM", "VRAM"), workers, ends, smaller=(32, 16))
        assert [worker.calls[-1] for worker in workers] == ["killed"] * 2
    else:
        pair, _ = launch("UCX", MemoryPair("VRAM", "VRAM"), workers, ends, smaller=(32, 16))
        assert (pair.capacity, [buffer.size for buffer in pair.buffers]) == (capacity, [capacity] * 2)
        assert str(pair.shortage and pair.shortage.reason) == (
            f"no room for {2 * capacity}" if capacity < 64 else "None"
        )
    tried = [64, 32, 16][: [64, 32, 16].index(capacity or 16) + (capacity is None)]
    assert [end.freed for end in ends] == [[size for size in tried if size <= room] for room in rooms]


def test_a_launch_that_fails_ends_its_workers_after_each_has_activated_its_gpu(launch: Make) -> None:
    first, other = LaunchedWorker("a", "b"), LaunchedWorker("c", "a", "b")
    with pytest.raises(NotApplicableError, match="but UCX supports only BLK and DRAM"):
        launch("UCX", MemoryPair("VRAM", "VRAM"), [first, other])
    assert first.calls == [("activate", {"device": 0}), "killed"]
    assert other.calls == [("activate", {"device": 0}), "killed"]


def test_a_worker_has_the_variables_of_its_backend_that_the_user_has_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_NIXL_SET", "mine")
    backend = cast(Any, SimpleNamespace(environment=lambda environ: {"PYTEST_NIXL_SET": "1", "PYTEST_NIXL_NEW": "2"}))
    assert measure_launch.worker_environment(backend) == {"NIXL_ETCD_ENDPOINTS": None, "PYTEST_NIXL_NEW": "2"}


@pytest.mark.parametrize(
    ("memory", "requested", "target", "chosen"),
    [
        ("VRAM:VRAM", None, "ab", (0, 1)),
        ("VRAM:VRAM", None, "ba", (0, 0)),
        ("VRAM:VRAM", None, "a", (0, 0)),
        ("DRAM:VRAM", None, "ab", (0, 0)),
        ("DRAM:DRAM", DevicePair(5, 6), "", (0, 0)),
        ("VRAM:DRAM", DevicePair(1, 9), "", (1, 0)),
        ("VRAM:VRAM", DevicePair(1, 1), "ab", (1, 1)),
    ],
)
def test_ends_of_a_link_get_their_gpus(
    memory: str, requested: DevicePair | None, target: str, chosen: tuple[int, int]
) -> None:
    first, other = cast(Any, LaunchedWorker("a", "c")), cast(Any, LaunchedWorker(*target))
    assert measure_launch.choose_gpus(first, other, MemoryPair.parse(memory), requested) == DevicePair(*chosen)


def test_a_gpu_that_the_target_does_not_see_is_refused() -> None:
    first, other = cast(Any, LaunchedWorker("a", "c")), cast(Any, LaunchedWorker("a"))
    with pytest.raises(NotApplicableError, match="needs GPU 1, but the worker sees only GPU 0"):
        measure_launch.choose_gpus(first, other, MemoryPair("VRAM", "VRAM"), DevicePair(0, 1))


def test_only_the_first_row_of_a_launch_settles_long() -> None:
    pair = pair_of_doubles()
    later = measure_launch.WARMUP_SECONDS
    assert [pair.warmup_seconds() for _ in range(3)] == [measure_launch.FIRST_WARMUP_SECONDS, later, later]
    assert later < measure_launch.FIRST_WARMUP_SECONDS


@pytest.mark.parametrize("end", ["initiator", "target"])
def test_a_launch_is_healthy_while_both_workers_run_and_ends_both(end: str) -> None:
    pair = pair_of_doubles()
    assert pair.healthy
    getattr(pair, end).worker.alive = False
    assert not pair.healthy
    pair.close()
    pair.kill()
    assert [agent.ended for agent in (pair.initiator, pair.target)] == [["asked", "closed", "killed"]] * 2
