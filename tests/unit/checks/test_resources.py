# SPDX-License-Identifier: Apache-2.0
"""What a process has in use, counted by what it opens, maps and starts."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.endurance import worker
from pytest_nixl.checks.endurance.worker import _anonymous, _link, _shared_files, held
from pytest_nixl.nixl.worker import nixl_api

MIB = 1 << 20


def test_what_is_opened_is_counted_under_its_kind_and_gone_when_it_is_closed(tmp_path: Path) -> None:
    before = held()
    ended = threading.Event()
    with ExitStack() as open_now:
        for pair in range(2):
            for end in socket.socketpair():
                open_now.enter_context(end)
            open_now.enter_context((tmp_path / str(pair)).open("w"))
        open_now.enter_context((tmp_path / "third").open("w"))
        started = threading.Thread(target=ended.wait, args=(60,))
        started.start()
        now = held()
        ended.set()
        started.join(60)
    opened = {name: now[name] - before[name] for name in ("sockets", "descriptors", "threads", "shared-memory")}
    assert opened == {"sockets": 4, "descriptors": 3, "threads": 1, "shared-memory": 0}
    after = held()
    assert all(after[name] == before[name] for name in opened)


def test_a_file_of_shared_memory_is_counted_once_however_often_it_is_mapped() -> None:
    before = _shared_files()
    files = [os.memfd_create(name) for name in "ab"]
    maps = []
    for file in files:
        os.ftruncate(file, MIB)
        maps += [mmap.mmap(file, MIB), mmap.mmap(file, MIB)]
    assert _shared_files() - before == 2
    for mapping in maps:
        mapping.close()
    for file in files:
        os.close(file)
    assert _shared_files() == before


def test_memory_is_counted_in_bytes_when_it_is_touched() -> None:
    before = _anonymous()
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        untouched = _anonymous() - before
        for place in range(0, 64 * MIB, 4096):
            pages[place] = 1
        touched = _anonymous() - before
    assert untouched < 32 * MIB <= touched < 96 * MIB


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
    for block in blocks:
        ctypes.memset(block, 1, 64 << 10)
    assert held()["memory"] - before >= 48 * MIB
    for block in blocks[:-1]:
        library.free(block)
    assert held()["memory"] - before < 16 * MIB
    library.free(blocks[-1])


def test_memory_is_also_read_of_a_kernel_without_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text("Name: x\nVmRSS: 900 kB\nRssAnon: 3 kB\nRssFile: 50 kB\nVmSwap: 4 kB\n")
    monkeypatch.setattr(worker, "_SELF", tmp_path)
    assert _anonymous() == 7 * 1024
    (tmp_path / "smaps_rollup").write_text("Rss: 900 kB\nAnonymous: 5 kB\nLazyFree: 7 kB\nSwap: 6 kB\nSwapPss: 6 kB\n")
    assert _anonymous() == 11 * 1024


def test_a_descriptor_that_is_gone_has_no_link() -> None:
    read, write = os.pipe()
    assert _link(str(read)).startswith("pipe:")
    for descriptor in (read, write):
        os.close(descriptor)
    assert _link(str(read)) == ""


@pytest.mark.parametrize(
    ("cycle", "calls"),
    [
        ("transfer", ["transfer_all", "finish", "agent.release_xfer_handle"]),
        (
            "connection",
            ["peer.get_agent_metadata", "agent.add_remote_agent", "transfer_all", "finish", "agent.release_xfer_handle",
             "agent.remove_remote_agent"],
        ),
        ("registration", ["regions", "agent.register_memory", "agent.deregister_memory"]),
        ("publication", ["agent.send_local_metadata", "agent.invalidate_local_metadata"]),
    ],
)  # fmt: skip
def test_a_cycle_undoes_what_it_does(cycle: str, calls: list[str]) -> None:
    scene = MagicMock()
    worker.CYCLES[cycle](scene)
    assert [name for name, _, _ in scene.mock_calls] == calls
    if cycle == "registration":
        scene.agent.deregister_memory.assert_called_once_with(scene.agent.register_memory.return_value)


@pytest.mark.parametrize(("cycle", "removed"), [("connection", 1), ("transfer", 0)])
def test_only_cycles_of_connections_begin_without_one(
    monkeypatch: pytest.MonkeyPatch, cycle: str, removed: int
) -> None:
    monkeypatch.setattr(worker, "CycleScene", MagicMock())
    monkeypatch.setattr(worker, "_scenes", {})
    monkeypatch.setitem(worker.CYCLES, cycle, lambda scene: None)
    agent = MagicMock()
    for _ in range(2):
        assert "heap" in worker.repeat(agent, cycle, "UCX", 1, 60)
    assert agent.remove_remote_agent.call_count == removed


def test_an_agent_of_a_cycle_is_deleted_with_its_memory_and_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, usual, cycle_agent = MagicMock(backend="UCX", numbers=iter([4])), MagicMock(), MagicMock()
    usual.name, scene.agent = "a", usual
    create = MagicMock(return_value=cycle_agent)
    monkeypatch.setattr(nixl_api, "make_agent", create)
    worker.CYCLES["agent"](scene)
    assert create.call_args.args == ("a-child-4",)
    assert [name for name, _, _ in cycle_agent.mock_calls] == [
        "create_backend", "register_memory", "add_remote_agent", "release_xfer_handle", "deregister_memory",
        "remove_remote_agent",
    ]  # fmt: skip
    assert scene.agent is usual
    assert usual.mock_calls == []
