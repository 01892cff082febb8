# SPDX-License-Identifier: Apache-2.0
"""External programs on a rank's host: they run, their output is read, and they end with their worker."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.etcd import running, wait_until
from helpers.needs import need_programs
from helpers.two_ranks import two

from pytest_nixl.cluster.peer_client import PeerError
from pytest_nixl.core.ring_buffer import RingBuffer
from pytest_nixl.core.wire import Ref
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.model.tools import own_variables, variable
from pytest_nixl.processes.external_program import RunningProgram, Tool, ToolError, contention_of
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerDiedError, WorkerError
from pytest_nixl.processes.worker_process import ended

Make = Callable[..., Tool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a shell script the tool ``nixlbench``, like a wrapper of the real program."""
    tools: list[Tool] = []

    def tool(script: str, *, mode: int = 0o755) -> Tool:
        path = tmp_path / "wrapper"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(mode)
        tools.append(Tool(LocalHost(supervisor(), 1, own=own_variables({"nixlbench": str(path)})), "nixlbench", 60))
        return tools[-1]

    yield tool
    for started in tools:
        started.close()


def children(program: RunningProgram) -> list[int]:
    """Wait until a program prints its own pid and its child's; return both."""
    assert program.wait_for("\n", 60)
    return [int(pid) for pid in program.output().split()]


#: A program that starts another one, as a wrapper does, and prints both pids.
WITH_A_CHILD = "sleep 300 & echo $$ $!; wait"


def test_the_real_program_runs_between_two_workers_without_nixl() -> None:
    need_programs("ucx_perftest", packages="ucx-utils")
    with (
        Tool(LocalHost(supervisor(), 0), "ucx_perftest", 60) as client_tool,
        Tool(LocalHost(supervisor(), 1), "ucx_perftest", 60) as server_tool,
    ):
        assert client_tool.is_installed
        assert os.path.basename(client_tool.path) == "ucx_perftest"
        if Path(client_tool.path).read_bytes()[:4] == b"\x7fELF":  # a wrapper script does not tell its version
            assert client_tool.versions["ucx"].count(".") == 2
        port = str(20000 + os.getpid() % 10000)
        with server_tool.start(["-p", port], {"UCX_TLS": "tcp"}) as server:
            # The line comes at once, although the output is not a terminal.
            assert server.wait_for("Waiting for connection", 60), server.output()
            options = ["127.0.0.1", "-p", port, "-t", "ucp_put_bw", "-s", "4096", "-n", "100", "-w", "10", "-f"]
            with client_tool.start(options, {"UCX_TLS": "tcp"}) as client:
                output = client.final_output(60)
                assert "bandwidth (MB/s)" in output
                assert client.poll() == 0
                assert client.output() == output
            assert server.wait(60) == 0
        assert not running(server.pid)
        for tool in (client_tool, server_tool):
            assert "nixl" not in tool.worker.versions
            assert "nixl" not in Path(f"/proc/{tool.worker.pid}/maps").read_text().replace("pytest_nixl", "")


def test_a_failed_program_is_reported_with_rank_and_last_lines(make: Make) -> None:
    tool = make("echo 'one step'; echo 'no such device' >&2; exit 3")
    program = tool.start(["--op", "READ"])
    error = program.failure(ended(program.wait(60)))
    host = tool.worker.versions["host"]
    assert error.reason == f"nixlbench of rank 1 on {host} ended with exit code 3"
    assert error.detail == "its last lines:\n  | one step\n  | no such device"
    assert error.remedy.endswith(f": {tool.path} --op READ")


def test_a_quiet_program_ends_by_itself(make: Make) -> None:
    """It has longer than its children have after its end, also if it has closed its output."""
    assert make("exec > /dev/null 2>&1; sleep 0.8; exit 3").start([]).wait(60) == 3


def test_a_crashed_program_is_reported_with_its_signal(make: Make) -> None:
    program = make("kill -SEGV $$").start([])
    error = program.failure(ended(program.wait(60)))
    assert re.fullmatch(r"nixlbench of rank 1 on \S+ was ended by SIGSEGV", error.reason)
    assert error.detail == "it wrote nothing"


def test_a_hanging_program_is_killed_with_its_children(make: Make) -> None:
    program = make(WITH_A_CHILD).start([])
    pids = children(program)
    with pytest.raises(ToolError, match=r"did not end within 0.1 s"):
        program.wait(0.1)
    assert program.poll() == -signal.SIGKILL
    wait_until(lambda: not any(map(running, pids)), 60, "the program and its child to end")


def test_a_program_ends_by_a_signal_or_at_the_end_of_its_context(make: Make) -> None:
    tool = make("exec sleep 300")
    program = tool.start([])
    program.signal(signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM
    with tool.start([]) as program:
        assert program.poll() is None
        assert not program.wait_for("never", 0.05)
    assert program.poll() == -signal.SIGKILL


def test_children_of_an_ended_program_are_killed(make: Make) -> None:
    program = make("sleep 300 & echo $$ $!").start([])
    pids = children(program)
    assert program.wait(60) == 0  # although its child holds its output open
    wait_until(lambda: not any(map(running, pids)), 60, "its child to end")


@pytest.mark.parametrize("how", ["killed", "killed with its group", "closed"])
def test_a_program_ends_with_its_worker(make: Make, how: str) -> None:
    tool = make(WITH_A_CHILD)
    program = tool.start([])
    pids = children(program)
    assert pids[0] == program.pid
    assert all(map(running, pids))
    if how != "closed":
        (os.killpg if "group" in how else os.kill)(tool.worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"rank 1 \(tool worker, pid \d+\) was ended by SIGKILL"):
            program.wait(60)
    else:
        tool.close()
    wait_until(lambda: not any(map(running, pids)), 60, "the program and its child to end")


def test_only_the_last_mib_of_output_is_kept(make: Make) -> None:
    program = make("seq 1 400000; echo done").start([])  # 2.7 MB
    assert program.wait(60) == 0
    output = program.output()
    assert output.endswith("399999\n400000\ndone\n")
    assert len(output) <= 1 << 20


def test_a_late_reader_gets_the_end_of_the_output() -> None:
    buffer = RingBuffer(4)
    buffer.write(b"abcdef")
    assert buffer.since(0) == (2, b"cdef")
    assert buffer.since(3, 2) == (3, b"de")
    assert buffer.since(6) == (6, b"")
    assert buffer.text() == "cdef"


def test_a_missing_program_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with Tool(LocalHost(supervisor()), "ucx_perftest", 60) as tool:
        assert not tool.is_installed
        with pytest.raises(ToolError, match=r"ucx_perftest of rank 0 on \S+ was not found") as caught:
            tool.start([])
        assert "--nixl-raw-tools-dir=DIR" in caught.value.remedy


def test_a_program_that_cannot_be_executed_is_reported(make: Make) -> None:
    with pytest.raises(ToolError, match=r"wrapper cannot be executed: Permission denied"):
        make("true", mode=0o644).start([])


def test_only_programs_of_the_set_are_started_and_only_some_variables_are_given(make: Make) -> None:
    with pytest.raises(WorkerError, match=r"'sh': expected nixlbench, ucx_perftest"):
        Tool(LocalHost(supervisor()), "sh", 60)
    tool = make("echo TLS=$UCX_TLS devices=$UCX_NET_DEVICES")
    for name in ("LD_PRELOAD", "PATH", "NIXL_PLUGIN_DIR", "UCX_MODULE_DIR", "FI_PROVIDER_PATH", variable("nixlbench")):
        with pytest.raises(ToolError, match=f"the variable {name} .* nixlbench"):
            tool.start([], {name: "/tmp/evil"})
    assert tool.start([], {"UCX_TLS": "tcp", "UCX_NET_DEVICES": None}).final_output(60) == "TLS=tcp devices=\n"


def test_a_peer_runs_its_own_copy_of_the_program(
    nixl_private_etcd: PrivateEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_programs("ucx_perftest", packages="ucx-utils")
    evil = tmp_path / "nixlbench"
    evil.write_text("#!/bin/sh\necho evil\n")
    evil.chmod(0o755)
    with two(nixl_private_etcd) as ranks:
        with Tool(ranks.peer, "ucx_perftest", 60) as tool:
            program = tool.start(["-h"])
            assert "Usage: ucx_perftest" in program.output() or program.wait(60) is not None
            assert "Usage: ucx_perftest" in program.output()
        # Rank 0 cannot choose the program, neither by the variable nor by PATH.
        environment = {variable("nixlbench"): str(evil), "PATH": str(tmp_path)}
        with pytest.raises(PeerError, match=r"may not set (PATH|PYTEST_NIXL_TOOL_NIXLBENCH)"):
            ranks.peer.start("tool", environment, 60)
        tool = Tool(ranks.peer, "ucx_perftest", 60)
        program = tool.start(["-p", str(30000 + os.getpid() % 10000)])
        assert program.wait_for("Waiting", 60)
        started = time.monotonic()
        program.kill()
        assert time.monotonic() - started < 60
        assert not running(program.pid)
        tool.close()


@pytest.mark.parametrize(
    ("hosts", "ended", "expected"),
    [("aa", 2, 1.0), ("ab", 2, 2.0), ("ab", 1, 2.0), ("aa", 1, None), ("ab", 0, None)],
)
def test_contention_counts_the_programs_of_the_first_host(hosts: str, ended: int, expected: float | None) -> None:
    programs = [
        RunningProgram(cast(Any, SimpleNamespace(worker=SimpleNamespace(versions={"host": host}))), Ref(1, ""), 1, [])
        for host in hosts
    ]
    for program, cost in list(zip(programs, ((9.0, 1.0, 2.0, 3.0), (99.0, 4.0, 50.0, 9.0)), strict=True))[:ended]:
        program.cost = dict(zip(("all", "own", "clock", "processors"), cost, strict=True))
    assert contention_of(*programs) == expected
