# SPDX-License-Identifier: Apache-2.0
"""The way from an object to a file by agents with several backends each, on the real NIXL and moto."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.cli_run import Finished, run
from helpers.doubled_nixl import DoubledClock

from pytest_nixl.checks.metadata import hierarchy
from pytest_nixl.checks.metadata.hierarchy import SIZE, Leg, add_storage, judge_legs, move_through
from pytest_nixl.core import polling
from pytest_nixl.core.errors import LateError, NotApplicableError
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.nixl.s3_server import open_bucket
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError

NAMES = ["object to host memory", "host memory to host memory", "host memory to file"]
GOOD = [Leg(name, backend, backend, 0.1, None) for name, backend in zip(NAMES, ("OBJ", "UCX", "POSIX"), strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("same_agent", [False, True], ids=["two agents", "one agent"])
def test_bytes_are_right_after_each_leg(make_settings: Callable[..., Settings], same_agent: bool) -> None:
    with (
        open_bucket("embedded", supervisor) as bucket,
        Agents(LocalHost(supervisor()), make_settings()) as agents,
    ):
        environment = {**bucket.environment}
        pair = agents.start_each(["initiator", "target"], environment=environment, progress_thread=None)
        reader, writer = pair[0], pair[0 if same_agent else 1]
        add_storage(reader, writer, bucket)
        legs = move_through(reader, writer, "UCX", bucket, directory="", seconds=120)
        assert [replace(leg, seconds=0.1) for leg in legs] == GOOD
        assert all(leg.seconds > 0 for leg in legs)
        assert bucket.client.keys() == []


@pytest.mark.long
def test_the_suite_passes_with_its_own_server() -> None:
    done = run("suites/metadata/test_hierarchy.py", "--nixl-level=extended", "--nixl-s3=embedded", "-v")
    assert done.code == 0, done.output
    assert "2 PASS" in done.output
    for agents in ("2 agents", "1 agent"):
        assert f"{agents}: {SIZE} bytes are right after each leg: {NAMES[0]} by OBJ in " in done.output


@pytest.mark.long
def test_the_suite_passes_on_two_ranks(nixl_private_etcd: PrivateEtcd) -> None:
    def rank(_: int) -> Finished:
        return run(
            "suites/metadata/test_hierarchy.py", "--nixl-level=extended", "--nixl-s3=embedded", "--nixl-ranks=2",
            f"--nixl-etcd={nixl_private_etcd.endpoint}", env={"NIXL_GROUP_TOKEN": "of these two ranks and no other"},
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(rank, range(2)))
    assert [done.code for done in ranks] == [0, 0], ranks[0].output + ranks[1].output
    assert all("NIXL verdict: PASS (2 PASS; 0 rows measured)" in done.output for done in ranks)


FAILED = NixlError("it failed", "", "", "nixlBackendError")


class DoubledAgent:
    """An agent of a NIXL that moves bytes as it is asked, with mistakes that the real one cannot be made to make."""

    def __init__(self, name: str, world: DoubledWorld) -> None:
        self.name, self.world = name, world

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self.world.calls.append((self.name, method, *arguments))

    def get_plugin_list(self) -> list[str]:
        return self.world.plugins

    def allocate(self, size: int, memory: str = "DRAM", **options: Any) -> Any:
        assert options == ({} if memory == "DRAM" else {"directory": "/d", "alignment": 4096})
        contents = [bytes(size)]
        self.world.memory.append(contents)
        self.world.calls.append((self.name, "allocate", memory))
        place = len(self.world.memory) - 1
        return SimpleNamespace(memory=memory, descriptor=lambda: (place, size, 0), read=lambda: contents[0])

    def get_new_notifs(self) -> None:
        """Make progress: bytes that are late arrive."""
        for contents in self.world.memory:
            del contents[:-1]

    def register(self, buffer: Any) -> None:
        self.world.calls.append((self.name, "register", buffer.memory))

    def get_agent_metadata(self) -> str:
        return f"metadata of {self.name}"

    def polled(self) -> Any:
        self.world.calls.append((self.name, "polled"))
        return contextlib.nullcontext()

    def connect_to(self, other: Any) -> None:
        self.world.calls.append((self.name, "connect_to", other.name))

    def get_xfer_descs(self, regions: Any, kind: str) -> Any:
        return (*regions, kind)

    def initialize_xfer(self, op: str, local: Any, remote: Any, owner: str, text: bytes, *, backends: Any) -> Any:
        self.world.calls.append((self.name, op, local, remote, owner, text, *backends))
        return op, local[0][0], remote[0][0], *backends

    def query_xfer_backend(self, handle: Any) -> Any:
        return "ANOTHER" if self.world.mistakes.get(handle[3]) == "ignored" else handle[3]

    def transfer(self, handle: Any) -> str:
        op, local, remote, backend = handle
        content = self.world.objects["pytest-nixl/hierarchy"] if backend == "OBJ" else self.world.memory[local][-1]
        flipped = content[:77] + bytes([content[77] ^ 1]) + content[78:]
        mistake = self.world.mistakes.get(backend)
        if mistake == "slow":
            self.world.clock.sleep(0.5)
        self.world.memory[local if op == "READ" else remote][:] = {
            "late": [flipped, content], "wrong": [flipped]}.get(f"{mistake}", [content])  # fmt: skip
        return "PROC" if mistake in ("stalls", "slow", FAILED) else "DONE"

    def check_xfer_state(self, handle: Any) -> str:
        if self.world.mistakes.get(handle[3]) is FAILED:
            raise FAILED
        self.world.polls += 1
        return "DONE" if self.world.polls == 3 and self.world.mistakes.get(handle[3]) == "slow" else "PROC"

    def check_remote_xfer_done(self, name: str, text: bytes) -> bool:
        self.world.calls.append((self.name, "notified", name, text))
        return "unnotified" not in self.world.mistakes.values()


class DoubledWorld:
    """What doubled agents share: the objects of a bucket, and what they were asked for, in order.

    :param fault: the fault of the bucket's server.
    :param mistakes: what a backend does, by its name: ``late`` bytes arrive at the second look, ``wrong`` ones never;
        it ``stalls``, is ``slow``, ``unnotified`` or ``ignored``; or an error.
    """

    def __init__(self, fault: str = "", **mistakes: Any) -> None:
        self.memory: list[list[bytes]] = []
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.polls, self.probes = 0, 0
        self.clock = DoubledClock()
        self.mistakes, self.fault = mistakes, fault
        self.plugins = ["UCX", "POSIX", "OBJ", "LIBFABRIC"]
        put, discard = self.objects.__setitem__, lambda key, _: self.objects.pop(key)
        self.bucket: Any = SimpleNamespace(client=SimpleNamespace(put=put, discard=discard, probe=self._probe))
        secret = {"access_key": "x", "secret_key": "x", "session_token": "x"}
        self.bucket.parameters = {"region": "r", **secret, "bucket": "b"}

    def _probe(self, key: str) -> None:
        assert key == "pytest-nixl/hierarchy-probe"
        self.probes += 1
        if self.fault:
            raise ObjectStoreError(self.fault)

    def agents(self, *names: str) -> list[Any]:
        agents = {name: DoubledAgent(name, self) for name in names}
        return [agents[name] for name in names]

    def move(self, writer: str, network: str = "UCX", seconds: float = 60) -> list[Leg]:
        try:
            reader, writing = self.agents("a", writer)
            return move_through(reader, writing, network, self.bucket, directory="/d", seconds=seconds)
        finally:
            assert self.objects == {}


@pytest.mark.parametrize("writer", ["a", "b"])
def test_each_leg_is_asked_for_by_its_backend(writer: str) -> None:
    world = DoubledWorld()
    assert [replace(leg, seconds=0.1) for leg in world.move(writer)] == GOOD
    notified = b"" if writer == "a" else b"hierarchy"
    meets = [("b", "polled"), ("a", "add_remote_agent", "metadata of b"), ("a", "connect_to", "b")]
    near, far = ((0, SIZE, 0), "DRAM"), ((1, SIZE, 0), "DRAM")
    handles = ("a", ("READ", 0, 0, "OBJ")), ("a", ("WRITE", 0, 1, "UCX")), (writer, ("WRITE", 1, 2, "POSIX"))
    released = [(agent, "release_xfer_handle", handle) for agent, handle in handles]
    assert world.calls == [
        ("a", "allocate", "DRAM"), (writer, "allocate", "DRAM"), (writer, "allocate", "FILE"),
        ("a", "register", "DRAM"), ("a", "register_memory", [(0, SIZE, 1, "pytest-nixl/hierarchy")], "OBJ"),
        (writer, "register", "DRAM"), (writer, "register", "FILE"), *(meets if notified else []),
        ("a", "READ", near, ((0, SIZE, 1), "OBJ"), "a", b"", "OBJ"), released[0],
        ("a", "WRITE", near, far, writer, notified, "UCX"),
        *([("b", "notified", "a", b"hierarchy")] if notified else []), released[1],
        (writer, "WRITE", far, ((2, SIZE, 0), "FILE"), writer, b"", "POSIX"), released[2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mistakes", "writer", "network", "wrong"),
    [
        ({"POSIX": "wrong"}, "b", "UCX", [None, None, 77]),
        ({"OBJ": "wrong"}, "b", "UCX", [77, 77, 77]),
        ({"OBJ": "late"}, "a", "LIBFABRIC", [77, None, None]),
        # The bytes may arrive after a transfer that was only posted, as those of LIBFABRIC's WRITE do.
        ({"LIBFABRIC": "late"}, "a", "LIBFABRIC", [None, None, None]),
        ({"LIBFABRIC": "late"}, "b", "LIBFABRIC", [None, 77, None]),
        ({"UCX": "late"}, "a", "UCX", [None, 77, None]),
        ({"LIBFABRIC": "wrong"}, "a", "LIBFABRIC", [None, 77, 77]),
    ],
)
def test_bytes_are_compared_when_they_must_have_arrived(
    mistakes: dict[str, str], writer: str, network: str, wrong: list[int | None]
) -> None:
    seconds = 0.2 if "wrong" in mistakes.values() else 60
    assert [leg.wrong for leg in DoubledWorld(**mistakes).move(writer, network, seconds)] == wrong


@pytest.mark.parametrize(
    ("backend", "mistake", "fault", "error"),
    [
        ("OBJ", "stalls", "the server has a fault", ObjectStoreError),
        ("OBJ", FAILED, "the server has a fault", ObjectStoreError),
        ("OBJ", FAILED, "", NixlError),
        ("UCX", FAILED, "", NixlError),
    ],
)
def test_a_server_with_a_fault_is_named_before_the_leg_is_late(
    backend: str, mistake: Any, fault: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hierarchy, "ASK_SECONDS", 0.01 if mistake == "stalls" else 300)
    with pytest.raises(error, match=f"^{fault if error is ObjectStoreError else 'it failed'}$"):
        DoubledWorld(fault, **{backend: mistake}).move("b", seconds=300)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> DoubledClock:
    clock = DoubledClock()
    monkeypatch.setattr(hierarchy, "time", clock)
    monkeypatch.setattr(polling, "time", clock)
    return clock


def test_a_leg_ends_when_its_transfer_is_done_not_only_notified(clock: DoubledClock) -> None:
    world = DoubledWorld(UCX="slow", POSIX="ignored")
    world.clock = clock
    legs = world.move("b")
    assert [replace(leg, seconds=0.1) for leg in legs] == [*GOOD[:2], replace(GOOD[2], used="ANOTHER")]
    assert [round(leg.seconds, 3) for leg in legs] == [0.0, 0.52, 0.0]
    assert world.polls == 3


@pytest.mark.parametrize(
    ("backend", "mistake", "seconds", "state", "probes"),
    [
        ("OBJ", "stalls", 9, "PROC", 1),
        ("OBJ", "stalls", 4, "PROC", 0),
        ("UCX", "stalls", 9, "PROC", 0),
        ("UCX", "unnotified", 9, "DONE", 0),
        ("POSIX", "stalls", 9, "PROC", 0),
    ],
)
def test_a_leg_that_is_late_is_named_with_its_state(
    clock: DoubledClock, backend: str, mistake: str, seconds: int, state: str, probes: int
) -> None:
    world = DoubledWorld(**{backend: mistake})
    with pytest.raises(LateError) as late:
        world.move("b", seconds=seconds)
    name = dict(zip(("OBJ", "UCX", "POSIX"), NAMES, strict=True))[backend]
    assert str(late.value) == (
        f"waited {seconds} s for the leg {name}\nremedy: its state is {state}; read the workers' logs"
    )
    assert world.probes == probes


def test_storage_is_added_to_the_agents_that_need_it_without_secrets() -> None:
    world = DoubledWorld()
    reader, writer = world.agents("a", "b")
    add_storage(reader, writer, world.bucket)
    parameters = {"region": "r", "bucket": "b"}
    assert world.calls == [("a", "create_backend", "OBJ", parameters), ("b", "create_backend", "POSIX", {})]
    world.plugins = ["UCX", "POSIX"]
    with pytest.raises(NotApplicableError, match=r"^this NIXL has no plugin OBJ: it has UCX, POSIX$"):
        add_storage(reader, writer, world.bucket)


@pytest.mark.parametrize(
    ("legs", "judged"),
    [
        (GOOD, Judgement(Verdict.PASS, "4194304 bytes are right after each leg: object to host memory by OBJ in 100 "
                         "ms, host memory to host memory by UCX in 100 ms, host memory to file by POSIX in 100 ms")),
        ([GOOD[0], replace(GOOD[1], used="LIBFABRIC"), replace(GOOD[2], wrong=0)],
         Judgement(Verdict.FAIL, "host memory to host memory: NIXL uses LIBFABRIC, although UCX was chosen",
                   "create one agent for each backend")),
        ([*GOOD[:2], replace(GOOD[2], wrong=9)],
         Judgement(Verdict.CORRUPT, "host memory to file by POSIX: of 4194304 bytes the first wrong one is at offset 9",
                   "do not use POSIX in an agent with several backends, and keep the workers' logs")),
        ([replace(GOOD[0], wrong=0, used="UCX"), *GOOD[1:]],
         Judgement(Verdict.CORRUPT, "object to host memory by OBJ: of 4194304 bytes the first wrong one is at offset 0",
                   "do not use OBJ in an agent with several backends, and keep the workers' logs")),
    ],
)  # fmt: skip
def test_the_first_leg_that_is_wrong_is_named(legs: list[Leg], judged: Judgement) -> None:
    assert judge_legs(legs) == judged
