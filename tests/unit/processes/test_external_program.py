# SPDX-License-Identifier: Apache-2.0
"""External programs on a rank's host: they run, their output is read, and they end with their worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.etcd import running, wait_until
from helpers.needs import need_programs
from helpers.two_ranks import two

from pytest_nixl.cluster.peer_client import PeerError
from pytest_nixl.core.wire import Ref
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.model.tools import TOOLS, own_variables, variable
from pytest_nixl.processes.external_program import RunningProgram, Tool, ToolError, contention_of
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerDiedError, WorkerError
from pytest_nixl.processes.worker_process import START_SECONDS, ended

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
    assert ended(program.wait(60)) == "was ended by SIGTERM"
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


class ScriptedHost:
    """A host whose worker gives the answers of a test, and keeps what it is asked. A double of a slow program."""

    def __init__(self, *looks: dict[str, Any], host: str = "a", start: WorkerError | None = None) -> None:
        self.looks, self.calls = list(looks), list[tuple[str, dict[str, Any]]]()
        self.rank, self.timeout, self.versions = 2, 7.0, {"host": host}
        self.answers = {
            "tool_find": {"path": "/opt/nixlbench", "ucx": "1.20.0"}, "tool_listens": 1, "tool_end": None,
            "tool_start": {"program": Ref(5, "program"), "pid": 99},
        }  # fmt: skip
        self._refused = start
        self.killed = self.closed = False

    def start(self, *values: object) -> ScriptedHost:
        self.calls.append(("start", {"values": values}))
        return self

    def call(self, command: str, **values: Any) -> Any:
        self.calls.append((command, values))
        if command == "tool_start" and self._refused is not None:
            raise self._refused
        if command == "tool_look":
            answer = self.looks.pop(0) if self.looks else look()
            return {**answer, "from": values["seen"] if answer["from"] is None else answer["from"]}
        return self.answers[command]

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True

    def tool(self) -> Tool:
        return Tool(cast(Any, self), "nixlbench", 7.0)

    def program(self) -> RunningProgram:
        """Start the program, and forget what was asked until then."""
        started = self.tool().start(["--op", "READ"])
        self.calls.clear()
        return started


def look(text: bytes = b"", start: int | None = None, *, code: int | None = None, more: bool = False) -> dict[str, Any]:
    """Return the answer with new output of a program, which has ended if it has a code."""
    cost = {} if code is None else {"clock": 2.0, "own": 1.0, "all": 5.0, "processors": 2}
    return {"from": start, "bytes": text, "more": more, "code": code, "cost": cost}


def test_a_tool_says_where_it_is_and_starts_its_program_with_arguments_and_variables() -> None:
    host = ScriptedHost()
    with host.tool() as tool:
        assert (tool.is_installed, tool.path, tool.versions) == (True, "/opt/nixlbench", {"ucx": "1.20.0"})
        assert tool.where == "nixlbench of rank 2 on a"
        started = tool.start(("--op", "READ"), {"UCX_TLS": "tcp", "UCX_X": None})
    assert (started.pid, started.argv, host.closed) == (99, ("/opt/nixlbench", "--op", "READ"), True)
    variables = {"UCX_TLS": "tcp", "UCX_X": None}
    assert host.calls == [
        ("start", {"values": ("tool", {}, 7.0, START_SECONDS)}),
        ("tool_find", {"tool": "nixlbench"}),
        ("tool_start", {"tool": "nixlbench", "arguments": ["--op", "READ"], "variables": variables}),
    ]
    host.answers["tool_find"] = None
    absent = host.tool()
    assert (absent.is_installed, absent.path, absent.versions) == (False, "", {})
    with pytest.raises(ToolError) as caught:
        absent.start([])
    assert caught.value.reason == "nixlbench of rank 2 on a was not found: it is not on that rank's PATH"
    assert caught.value.remedy == TOOLS["nixlbench"]
    del host.answers["tool_find"]
    with pytest.raises(KeyError):
        host.tool()
    assert host.killed, "a worker that cannot search is not left"
    with pytest.raises(ToolError) as caught:
        ScriptedHost(start=WorkerError("it is no program", "make it one", "lines")).program()
    assert (caught.value.reason, caught.value.remedy, caught.value.detail) == (
        "it is no program", "make it one", "lines"
    )  # fmt: skip


def waits(host: ScriptedHost) -> list[tuple[int, float]]:
    """Return for each look at the output its first byte, and the time to wait for it beyond which it is late."""
    values = [arguments for command, arguments in host.calls if command == "tool_look"]
    assert all(look["seconds"] == pytest.approx(7.0 + look["timeout"]) for look in values)
    return [(look["seen"], round(look["timeout"], 1)) for look in values]


def test_output_is_read_on_from_where_it_was_and_what_was_dropped_is_counted() -> None:
    host = ScriptedHost(look(b"ab", more=True), look(b"c"), look(b"z\n", 9, more=True), look(b"\n", code=3))
    program = host.program()
    assert (program.output(), program.cost) == ("abc", {})
    assert program.poll_within(0.5) == 3
    assert program.cost == {"clock": 2.0, "own": 1.0, "all": 5.0, "processors": 2}
    assert program.output() == "abc\n[6 bytes of output dropped]\nz\n\n"
    assert program.poll() == program.wait(0.0) == 3
    program.signal(signal.SIGTERM)  # it has ended
    assert waits(host) == [(0, 0.0), (2, 0.0), (3, 0.5), (11, 0.0)]
    assert {command for command, _ in host.calls} == {"tool_look"}


def test_a_program_is_waited_for_a_second_at_a_time() -> None:
    host = ScriptedHost(look(b"start"), look(), look(b"ed"), look(b"x", code=0))
    program = host.program()
    assert program.wait_for("started", 60.0)
    assert program.final_output(60.0) == "startedx"
    assert waits(host) == [(0, 1.0), (5, 1.0), (5, 1.0), (7, 1.0)]
    assert not program.wait_for("more", 60.0), "it has ended"
    silent = ScriptedHost()
    assert silent.program().wait_for("", 0.0)
    assert not silent.program().wait_for("more", -1.0)
    assert (silent.calls, host.program().listens(4)) == ([], True)
    assert host.calls == [("tool_listens", {"program": Ref(5, "program"), "port": 4})]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_program_that_does_not_end_in_time_is_killed_and_named(leaves: bool) -> None:
    """At the end of its context, a program of a worker that is gone has ended, too."""
    output = b"".join(b"%d\n \n" % number for number in range(14))
    host = ScriptedHost(look(output), look(code=-9))
    program = host.program()
    if leaves:
        host.answers.pop("tool_end")
        host.call = lambda *_, **__: (_ for _ in ()).throw(WorkerError("it is gone"))  # type: ignore[method-assign]
        with program:
            pass
        return
    with pytest.raises(ToolError) as caught:
        program.wait(0.0)
    assert caught.value.reason == "nixlbench of rank 2 on a did not end within 0 s and was killed"
    assert caught.value.remedy == "read its last lines below, or run it there by hand: /opt/nixlbench --op READ"
    assert caught.value.detail == "its last lines:\n" + "\n".join(f"  | {number}" for number in range(2, 14))
    assert [command for command, _ in host.calls] == ["tool_look", "tool_end", "tool_look"]
    assert host.calls[1] == ("tool_end", {"program": Ref(5, "program"), "number": 9})
    failure = ScriptedHost().program().failure("failed", "turn it off")
    assert (failure.remedy, failure.detail) == ("turn it off", "it wrote nothing")


@pytest.mark.parametrize(
    ("hosts", "ended", "expected"),
    [("aa", 2, 1.0), ("ab", 2, 2.0), ("ab", 1, 2.0), ("aa", 1, None), ("ab", 0, None)],
)
def test_contention_counts_the_programs_of_the_first_host(hosts: str, ended: int, expected: float | None) -> None:
    programs = [ScriptedHost(host=host).program() for host in hosts]
    for program, cost in list(zip(programs, ((9.0, 1.0, 2.0, 3.0), (99.0, 4.0, 50.0, 9.0)), strict=True))[:ended]:
        program.cost = dict(zip(("all", "own", "clock", "processors"), cost, strict=True))
    assert contention_of(*programs) == expected
