# SPDX-License-Identifier: Apache-2.0
"""What a process has in use, counted by what it opens, maps and starts, and what each cycle does and undoes."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.watching_agent import WatchingAgent, watching_agents

from pytest_nixl.checks.endurance import worker
from pytest_nixl.checks.endurance.worker import held
from pytest_nixl.nixl.worker.peer_scene import PEER, SIZE

MIB = 1 << 20


def test_what_is_opened_is_counted_under_its_kind_and_gone_when_it_is_closed(tmp_path: Path) -> None:
    """A file of shared memory counts once, however often it is mapped."""
    before = held()
    ended = threading.Event()
    with ExitStack() as open_now:
        for pair in range(2):
            for end in socket.socketpair():
                open_now.enter_context(end)
            open_now.enter_context((tmp_path / str(pair)).open("w"))
        for name in "abc":
            file = os.memfd_create(name)
            os.ftruncate(file, MIB)
            for _ in range(2):
                open_now.enter_context(mmap.mmap(file, MIB))
            open_now.callback(os.close, file)
        started = threading.Thread(target=ended.wait, args=(60,))
        started.start()
        now = held()
        ended.set()
        started.join(60)
    opened = {name: now[name] - before[name] for name in ("sockets", "descriptors", "threads", "shared-memory")}
    assert opened == {"sockets": 4, "descriptors": 2 + 3 * 3, "threads": 1, "shared-memory": 3}
    after = held()
    assert all(after[name] == before[name] for name in opened)


MAPS = """\
7f00-7f10 rw-s 00000000 00:01 11 /dev/shm/ucx (deleted)
7f10-7f20 rw-s 00001000 00:01 11 /dev/shm/ucx (deleted)
7f20-7f30 rw-s 00000000 00:02 11 /memfd:nixl (deleted)
7f30-7f40 rw-s 00000000 00:01 12 /SYSV00000000 (deleted)
7f40-7f50 r--p 00000000 00:01 13 /usr/lib/dev/shm/libc.so
7f50-7f60 rw-p 00000000 00:00 0
"""
STATUS = "Name: x\nVmRSS: 900 kB\nRssAnon: 3 kB\nRssFile: 50 kB\nVmSwap: 4 kB\n"
SUMS = "Rss: 900 kB\nAnonymous: 5 kB\nLazyFree: 7 kB\nSwap: 6 kB\nSwapPss: 6 kB\n"


def test_a_process_is_read_from_its_folder_also_of_a_kernel_without_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the C library only what it has is asked: one that is not glibc, or is older than 2.33, does not tell."""
    for name, target in (("0", "pipe:[1]"), ("1", "socket:[2]"), ("2", "socket:[3]"), ("3", "/dev/null")):
        (tmp_path / "fd").mkdir(exist_ok=True)
        (tmp_path / "fd" / name).symlink_to(target)
    (tmp_path / "fd" / "4").touch()  # a descriptor that is gone meanwhile has no link
    for name in ("7", "8", "9"):
        (tmp_path / "task" / name).mkdir(parents=True)
    (tmp_path / "maps").write_text(MAPS)
    (tmp_path / "status").write_text(STATUS)
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    counted = {"memory": 7 * 1024, "descriptors": 3, "sockets": 2, "threads": 3, "shared-memory": 3}
    assert held(tmp_path) == counted
    (tmp_path / "smaps_rollup").write_text(SUMS)
    assert held(tmp_path) == {**counted, "memory": 11 * 1024}


@pytest.fixture
def library() -> ctypes.CDLL:
    """The C library, whose ``malloc`` and ``free`` take and return addresses."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return libc


def test_blocks_of_malloc_are_counted_whether_or_not_they_have_a_map_of_their_own(library: ctypes.CDLL) -> None:
    before = held()["heap"]
    blocks = [library.malloc(size) for size in (64 * MIB, *[64 << 10] * 256)]
    assert 80 * MIB <= held()["heap"] - before < 96 * MIB
    for block in blocks:
        library.free(block)


def test_memory_that_the_program_has_freed_is_given_back_before_it_is_counted(library: ctypes.CDLL) -> None:
    before = held()["memory"]
    # Too small for maps of their own. The last one stays, because glibc itself gives back what is above all blocks.
    blocks = [library.malloc(64 << 10) for _ in range(1025)]
    assert held()["memory"] - before < 16 * MIB, "until it is touched"
    for block in blocks:
        ctypes.memset(block, 1, 64 << 10)
    assert 48 * MIB <= held()["memory"] - before < 80 * MIB
    for block in blocks[:-1]:
        library.free(block)
    assert held()["memory"] - before < 16 * MIB
    library.free(blocks[-1])


#: What the agent of each cycle is called to do each time, without questions.
TRANSFER = ["transfer", "release_xfer_handle"]
CYCLES = {
    "transfer": TRANSFER,
    "connection": ["add_remote_agent", *TRANSFER, "remove_remote_agent"],
    "registration": ["register_memory", "deregister_memory"],
    "publication": ["send_local_metadata", "invalidate_local_metadata"],
    "agent": [],
}
#: What the agent is called to do before the first cycle, and what each new agent of a cycle is called to do.
FIRST = ["add_remote_agent", "register_memory"]
CHILD = ["create_backend UCX", "register_memory", "add_remote_agent", *TRANSFER, "deregister_memory",
         "remove_remote_agent"]  # fmt: skip


@pytest.mark.parametrize("cycle", sorted({*CYCLES, *worker.CYCLES}))
def test_a_cycle_undoes_what_it_does(cycle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call also prepares what the cycles need; only those of connections begin without one."""
    agents = watching_agents(monkeypatch)
    name = f"cycles-of-{cycle}"
    agent = WatchingAgent(name, agents)
    answer = worker.repeat(agent, cycle, "UCX", 2, 60.0)
    first = [*FIRST, *["remove_remote_agent"] * (cycle == "connection")]
    assert agent.log == [*first, *CYCLES[cycle] * 2]
    assert answer["metadata"] == len(f"{name}.{PEER}.")
    assert {*answer} == {*held(), "metadata", "seconds", "reference"}
    agent.log.clear()
    worker.repeat(agent, cycle, "UCX", 1, 60.0, "a label")
    assert agent.log == [*CYCLES[cycle], f"send_partial_agent_metadata {SIZE} False a label"]
    children = [agents.get(f"{name}-child-{number}") for number in (1, 2, 3)] if cycle == "agent" else []
    for child in (*children, agent, agents[PEER]):
        assert child is not None
        assert (child.faults, child.handles, child.removed) == ([], set(), child.removed[:1] * len(child.removed))
        # The peer's memory, and that of the agent, are registered all the time.
        assert len(child.regions) == (child not in children)
    for child in children:
        assert child is not None
        assert (child.log, child.done, child.options) == (CHILD, 1, {"progress_thread": False})
    assert agent.done == 3 * (cycle in ("transfer", "connection"))
    assert {*agent.loaded} == ({PEER} if cycle != "connection" else set())


def test_the_fastest_cycle_counts_and_the_reference_apart_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    agents, naps = watching_agents(monkeypatch), iter([0.3, 0.1, 0.3, 9.0])
    monkeypatch.setitem(worker.CYCLES, "transfer", lambda scene: time.sleep(next(naps)))
    answer = worker.repeat(WatchingAgent("sleeper", agents), "transfer", "UCX", 3, 60.0)
    assert answer["reference"] < 0.1 <= answer["seconds"] < 0.3
    assert next(naps) == 9.0, "as many cycles as were requested"
