# SPDX-License-Identifier: Apache-2.0
"""How an agent is created, and what its worker is asked. The workers are doubles, which keep what they are asked."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.agent_options import AgentOptions, BackendParameter, ThreadCounts
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl import agent as agent_module
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.backends import libraries
from pytest_nixl.nixl.backends.ucx import VRAM_AS_HOST
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.nixl.gpus import gpus, require_gpu
from pytest_nixl.processes.worker_errors import NixlError, WorkerError

Log = list[tuple[Any, ...]]
GPUS = [{"number": number, "name": "H", "uuid": f"u{number}", "pci": f"0000:0{number}:00.0"} for number in range(2)]


class LoggedWorker:
    """A worker that writes to a log what it is asked, and answers at once.

    :ivar faults: what it raises, by the command.
    """

    def __init__(self, log: Log, rank: int = 0, role: str = "agent") -> None:
        self.log, self.rank, self.role, self.pid = log, rank, role, 100 + rank
        self.name, self.timeout, self.alive = f"rank {rank}", 7.0, True
        self.agent_names: dict[int, str] = {}
        self.versions: dict[str, Any] = {"host": platform.node()}
        self.text = ""
        self.answers: dict[str, Any] = {
            "create_agent": {"agent": Ref(rank + 1, "agent"), "versions": {"ucx": "1.20.0"}},
            "devices": {"devices": GPUS, "why": "", "remedy": ""},
        }
        self.faults: dict[str, Exception] = {}

    def request(self, command: str, **values: Any) -> Any:
        self.log.append((self.rank, command, values))
        return SimpleNamespace(worker=self, result=lambda: self.answer(command))

    def call(self, command: str, **values: Any) -> Any:
        return self.request(command, **values).result()

    def answer(self, command: str) -> Any:
        if command in self.faults:
            raise self.faults[command]
        return self.answers.get(command)

    def output(self) -> str:
        return self.text

    def cancel(self) -> None:
        self.log.append((self.rank, "cancel"))

    def kill(self) -> None:
        self.log.append((self.rank, "kill"))

    def ask_to_end(self) -> None:
        self.log.append((self.rank, "ask"))

    def close(self) -> None:
        self.log.append((self.rank, "close"))


class LoggedHost:
    """A host on which such workers start."""

    def __init__(self, log: Log, rank: int) -> None:
        self.log, self.rank = log, rank
        self.workers: list[LoggedWorker] = []

    def start(self, role: str, environment: Any, timeout: float, start_timeout: float) -> Any:
        self.log.append((self.rank, "start", role, environment, timeout, start_timeout))
        self.workers.append(LoggedWorker(self.log, self.rank, role))
        return self.workers[-1]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What all workers are asked, in order."""

    def results(pending: Sequence[Any], *, serving: Sequence[Any] = ()) -> list[Any]:
        if serving:
            written.append(("end of serving",))
        return [request.result() for request in pending]

    written: Log = []
    monkeypatch.setattr(agent_module, "results", results)
    return written


def agent_of(log: Log, backend: str = "UCX", **options: Any) -> tuple[NixlAgent, LoggedWorker]:
    """Create an agent in such a worker, and forget what was asked until then."""
    worker = LoggedWorker(log)
    created = NixlAgent.within(cast(Any, worker), name="a", backends=[backend], **options)
    log.clear()
    return created, worker


CREATED = {
    "backends": ["UCX"], "progress_thread": True, "listen_thread": False, "listen_port": 0, "telemetry": False,
    "sync_mode": "auto", "parameters": {"UCX": {}}, "threads": 0,
}  # fmt: skip
OPTIONS = AgentOptions(
    False, ThreadCounts(4, 2), "strict", (BackendParameter("UCX", "num_workers", "2"),), telemetry=True
)


@pytest.mark.parametrize(
    ("role", "values", "changed"),
    [
        ("agent", {}, {}),
        ("agent", {"listen_thread": True, "listen_port": 5, "progress_thread": False, "telemetry": True},
         {"listen_thread": True, "listen_port": 5, "progress_thread": False, "telemetry": True}),
        ("agent", {"progress_thread": None}, {"progress_thread": False}),
        ("agent", {"progress_thread": None, "backends": ("LIBFABRIC", "UCX")},
         {"progress_thread": True, "backends": ["LIBFABRIC", "UCX"], "parameters": {"LIBFABRIC": {}, "UCX": {}}}),
        *[
            (role, {"agent_options": OPTIONS}, {"threads": threads, "sync_mode": "strict", "telemetry": True,
                                                "parameters": {"UCX": {"num_workers": "2"}}})
            for role, threads in (("initiator", 4), ("target", 2))
        ],
    ],
)  # fmt: skip
def test_an_agent_is_created_with_its_options(
    log: Log, role: str, values: dict[str, Any], changed: dict[str, Any]
) -> None:
    worker = cast(Any, LoggedWorker(log, 3, role))
    created = NixlAgent.within(worker, **{"backends": ("UCX",), **values})
    [(_, command, arguments)] = log
    assert arguments.pop("name") == created.name
    assert created.name.startswith(f"rank3-{role}-")
    assert (command, arguments) == ("create_agent", {**CREATED, **changed})
    assert (created.ref, worker.agent_names, worker.versions["ucx"]) == (Ref(4, "agent"), {4: created.name}, "1.20.0")
    again = created.beside("b", listen_port=9)
    options = {**CREATED, **changed, "name": "b", "listen_port": 9}
    assert (log[1], again.worker) == ((3, "create_agent", options), worker)
    assert created.siblings == ()
    backends = ", ".join(changed.get("backends", ["UCX"]))
    assert repr(again) == f"<NixlAgent 'b' created with {backends} in rank 3>"
    worker.alive = False
    assert repr(NixlAgent(worker, Ref(9, "agent"), "c")) == (
        "<NixlAgent 'c' created with no backend in rank 3, which has ended>"
    )


def test_agents_that_cannot_be_created_end_their_workers(log: Log) -> None:
    workers = [LoggedWorker(log, rank) for rank in range(2)]
    workers[1].faults["create_agent"] = WorkerError("no UCX")
    with pytest.raises(WorkerError, match="no UCX"):
        NixlAgent.within_each(cast(Any, workers), ["a", None], backends=["UCX"])
    assert log[0][2]["name"] == "a"
    assert log[1][2]["name"].startswith("rank1-agent-")
    assert log[2:] == [(0, "kill"), (1, "kill")]


@pytest.mark.parametrize(
    ("run", "values", "backend", "progress"),
    [
        ({}, {}, "UCX", True),
        ({"backend": ("POSIX", "LIBFABRIC", "UCX")}, {}, "LIBFABRIC", True),
        ({"backend": ("POSIX", "OBJ")}, {}, "POSIX", True),
        ({}, {"backends": ["POSIX"]}, "POSIX", True),
        ({"progress_thread": ("off",)}, {}, "UCX", False),
        ({"progress_thread": ("off",)}, {"progress_thread": None}, "UCX", False),
        ({"progress_thread": ("off",)}, {"progress_thread": True}, "UCX", True),
        ({}, {"progress_thread": None}, "UCX", False),
        ({"progress_thread": ("off", "on")}, {}, "UCX", False),
        ({}, {"agent_options": AgentOptions(False, ThreadCounts(8, 8))}, "UCX", True),
    ],
)
def test_agents_start_on_their_hosts_in_turn_with_the_options_of_the_run(
    log: Log, make_settings: Callable[..., Settings], run: dict[str, Any], values: dict[str, Any], backend: str,
    progress: bool,
) -> None:  # fmt: skip
    settings = make_settings(timeout=5.0, start_timeout=9.0, threads=ThreadCounts(3, 3), **run)
    hosts = cast(Any, [LoggedHost(log, rank) for rank in range(3)])
    environment = {"NIXL_ETCD_NAMESPACE": "/x", "A": "1"}
    with Agents(hosts[0], settings) as agents:
        first = agents.start("a", environment=environment, **values)
        others = agents.start_each(["b", None, "d"], hosts=hosts[1:], **values)
    assert [agent.worker.rank for agent in (first, *others)] == [0, 1, 2, 1]
    for agent in (first, *others):
        assert f"{agent.name!r} created with {backend} in" in repr(agent)
    plain = {"NIXL_ETCD_ENDPOINTS": None, "NIXL_ETCD_NAMESPACE": None}
    starts = [entry[2:] for entry in log if entry[1] == "start"]
    assert starts == [
        ("agent", {**plain, **environment}, 5.0, 9.0), *[("agent", plain, 5.0, 9.0)] * 3,
    ]  # fmt: skip
    created = [entry[2] for entry in log if entry[1] == "create_agent"]
    threads = 8 if "agent_options" in values else 3
    assert [(fields["backends"], fields["progress_thread"], fields["threads"]) for fields in created] == [
        ([backend], progress, threads)
    ] * 4
    assert list(agents.workers) == list(first.siblings) == [agent.worker for agent in (first, *others)]
    assert log[-8:] == [(rank, step) for step in ("ask", "close") for rank in (0, 1, 2, 1)]
    earlier = agents.workers
    another = first.another("e", host=hosts[2])
    assert len(earlier) == 4
    assert (another.name, another.worker.rank, len(agents.workers)) == ("e", 2, 5)


def test_unknown_options_and_callers_are_refused(log: Log) -> None:
    agent, _ = agent_of(log)
    with pytest.raises(TypeError) as caught:
        agent.beside(backend="UCX")  # type: ignore[call-arg]
    assert str(caught.value) == (
        "beside() has no option 'backend'; it has name, agent_options, backends, listen_port, listen_thread, "
        "progress_thread, telemetry"
    )
    with pytest.raises(TypeError, match=r"another\(\) has no option 'rank'; it has name, agent_options, backends, env"):
        agent.another(rank=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="only an agent of the fixture nixl_agent can start another"):
        agent.another()
    with pytest.raises(TypeError, match="needs settings=nixl_settings"):
        Agents()
    assert log == []


POLLED = (0, "serve", {"seconds": 12.0, "agent": Ref(1, "agent"), "timeout": 7.0})


@pytest.mark.parametrize(
    ("backend", "progress", "polled"), [("LIBFABRIC", False, True), ("LIBFABRIC", True, False), ("UCX", False, False)]
)
def test_an_agent_that_others_wait_for_is_polled(log: Log, backend: str, progress: bool, polled: bool) -> None:
    agent, worker = agent_of(log, backend, progress_thread=progress)
    with agent.polled():
        log.append(("body",))
    assert log == ([POLLED, ("body",), ("end of serving",)] if polled else [("body",)])
    for alive in (True, False):
        log.clear()
        worker.alive = alive
        worker.faults["serve"] = WorkerError("a consequence")
        with pytest.raises(KeyError), agent.polled():
            raise KeyError
        assert log == ([POLLED, *([(0, "cancel")] if alive else [])] if polled else [])


@pytest.mark.parametrize("backend", ["LIBFABRIC", "UCX"])
def test_agents_that_wait_for_each_other_connect_while_the_other_is_polled(
    log: Log, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    (first, _), (other, _) = (agent_of(log, backend) for _ in range(2))

    @contextlib.contextmanager
    def polled() -> Iterator[None]:
        log.append(("polled",))
        yield
        log.append(("until here",))

    monkeypatch.setattr(other, "polled", polled)
    first.connect_to(other)
    connect = {"agent": first.ref, "method": "make_connection", "arguments": ["a", []], "keywords": {}}
    assert log == ([("polled",), (0, "call", connect), ("until here",)] if backend == "LIBFABRIC" else [])


@pytest.mark.parametrize(
    ("memory", "values", "sent"),
    [
        ("DRAM", {"pages": "base"}, {"directory": "", "alignment": 1, "pages": "base"}),
        ("DRAM", {"pages": "huge"}, {"directory": "", "alignment": 1}),
        ("FILE", {"pages": "base", "directory": "/d", "alignment": 8}, {"directory": "/d", "alignment": 8}),
        ("VRAM", {"device": 1, "directory": "/d"}, {"device": 1}),
    ],
)
def test_a_buffer_is_requested_with_what_its_memory_has(
    log: Log, memory: str, values: dict[str, Any], sent: dict[str, Any]
) -> None:
    agent, worker = agent_of(log)
    worker.answers["allocate"] = {"buffer": Ref(7, "buffer"), "address": 64, "device": 5}
    buffer = agent.request_buffer(32, memory, **values).result()
    assert log[-1] == (0, "allocate", {"size": 32, "memory_type": memory, **sent})
    assert buffer == Buffer(cast(Any, worker), Ref(7, "buffer"), 64, 32, memory, 5)
    assert worker.versions.get("gpu") == ("GPU 1, H (0000:01:00.0)" if memory == "VRAM" else None)
    log.clear()
    assert agent.allocate(16, "FILE", directory="/e", alignment=4).size == 16
    assert log == [(0, "allocate", {"size": 16, "memory_type": "FILE", "directory": "/e", "alignment": 4})]
    assert [gpu.uuid for gpu in agent.gpus()] == ["u0", "u1"]
    log.clear()
    agent.run("os:getcwd", buffer=buffer, other=1)
    agent.delete()
    arguments = {"buffer": Ref(7, "buffer"), "other": 1}
    run = {"agent": agent.ref, "function": "os:getcwd", "arguments": arguments}
    assert log[0][2].pop("file").endswith("os.py")
    assert log == [(0, "run", run), (0, "forget", {"objects": [agent.ref]})]


def test_a_requested_buffer_is_that_of_its_side(
    log: Log, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents(cast(Any, LoggedHost(log, 0)), make_settings())
    agent: Any = agents.start("one")
    monkeypatch.setattr(agent, "allocate", lambda size, memory, *, device: (memory, device))
    for pairs, initiator, expected in (
        ("DRAM:VRAM", True, ("DRAM", 1)), ("DRAM:VRAM", False, ("VRAM", 2)), ("DRAM:FILE", False, ("DRAM", 2)),
        ("DRAM:DRAM VRAM:DRAM VRAM:VRAM", True, ("VRAM", 1)), ("DRAM:DRAM VRAM:DRAM VRAM:VRAM", False, ("DRAM", 2)),
    ):  # fmt: skip
        agents.settings = make_settings(memory=tuple(map(MemoryPair.parse, pairs.split())), devices=DevicePair(1, 2))
        assert agent.allocate_asked(64, initiator=initiator) == expected
    agents.settings = make_settings(memory=(MemoryPair("VRAM", "VRAM"),), devices=None)
    assert agent.allocate_asked(64) == ("VRAM", 0)


#: NIXL's words if UCX takes GPU memory for host memory.
REFUSED = "E0101 10:00:00.0 1 ucx_backend.cpp:1] VRAM memory is detected as host by UCX. Check that CUDA is supported"


@pytest.mark.parametrize(
    ("memory", "output", "lacks", "reason"),
    [
        ("VRAM", REFUSED, "libuct_cuda needs libnvidia-ml.so.1", "rank 0 could not register memory of GPU 5: "),
        ("VRAM", REFUSED, "", "rank 0 could not register memory of GPU 5: "),
        ("VRAM", "another error", "", ""),
        ("DRAM", REFUSED, "", ""),
    ],
)
def test_gpu_memory_that_ucx_takes_for_host_memory_is_a_finding(
    log: Log, memory: str, output: str, lacks: str, reason: str
) -> None:
    agent, worker = agent_of(log)
    buffer = Buffer(cast(Any, worker), Ref(7, "buffer"), 64, 32, memory, 5)
    error = NixlError("it was refused", "", "the last lines", "nixlBackendError")
    worker.faults["register"], worker.text, worker.versions[libraries.LACKS] = error, output, lacks
    with pytest.raises(FindingError if reason else NixlError) as caught:
        agent.register(buffer)
    assert log == [(0, "register", {"agent": agent.ref, "buffer": Ref(7, "buffer")})]
    if not reason:
        assert caught.value is error
        return
    assert isinstance(caught.value, FindingError)
    lacking = f"; UCX cannot load its CUDA modules: {lacks}, which cannot be found or loaded" if lacks else ""
    whole = f"GPU memory is treated as host memory: {reason}VRAM memory is detected as host by UCX{lacking}"
    assert caught.value.reason == whole
    assert (caught.value.finding, caught.value.detail) == (VRAM_AS_HOST, "the last lines")
    assert caught.value.remedy.count("NVIDIA_DRIVER_CAPABILITIES") == bool(lacks)


@pytest.mark.parametrize(
    ("count", "number", "host", "reason"),
    [
        (2, 1, "", ""),
        (2, 2, "", "it needs GPU 2, but the worker sees only GPUs 0 to 1"),
        (1, 1, "node-b", "it needs GPU 1, but the worker sees only GPU 0 (rank 3, node-b)"),
        (2, -1, "", "it needs GPU -1, but the worker sees only GPUs 0 to 1"),
    ],
)
def test_a_gpu_that_a_worker_does_not_see_is_named(log: Log, count: int, number: int, host: str, reason: str) -> None:
    worker = cast(Any, LoggedWorker(log, 3))
    worker.answers["devices"] = {"devices": GPUS[:count]}
    worker.versions["host"] = host or platform.node()
    if not reason:
        assert (require_gpu(worker, number).uuid, [gpu.number for gpu in gpus(worker)]) == ("u1", [0, 1])
        return
    with pytest.raises(NotApplicableError) as caught:
        require_gpu(worker, number, "it")
    assert caught.value.reason == reason
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy
    for reason_of_worker, text in (("there is no driver", "there is no driver"), ("", "CUDA sees no GPU")):
        worker.answers["devices"] = {"devices": [], "why": reason_of_worker, "remedy": "install it"}
        with pytest.raises(NotApplicableError) as caught:
            gpus(worker)
        where = f" (rank 3, {host})" if host else ""
        assert (caught.value.reason, caught.value.remedy) == (f"this test needs a GPU, and {text}{where}", "install it")
