# SPDX-License-Identifier: Apache-2.0
"""A program of a worker, within this process: its output and its end, and on which ports it listens."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from helpers.etcd import wait_until

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.ring_buffer import RingBuffer
from pytest_nixl.model.tools import FROM_OTHER_RANKS, TOOLS, variable
from pytest_nixl.nixl.worker import tools as tools_module
from pytest_nixl.nixl.worker.tools import Program, Tools


def looked(ring: RingBuffer, position: int, *, over: bool = False) -> dict[str, Any]:
    """Look at a program that writes nothing more, and return the answer without its cost."""
    program = SimpleNamespace(output=ring, changed=threading.Condition(), over=over, code=3, cost={})
    return {**Tools(lambda: False).look(cast(Program, program), position, 0.01)}


def test_a_look_returns_what_is_new_and_says_whether_there_is_more() -> None:
    ring = RingBuffer(1 << 20)
    ring.write(b"ab")
    assert looked(ring, 0) == {"from": 0, "bytes": b"ab", "more": False, "code": None, "cost": {}}
    assert looked(ring, 1)["bytes"] == b"b"
    assert looked(ring, 2) == {"from": 2, "bytes": b"", "more": False, "code": None, "cost": {}}
    ring.write(b"c" * (1 << 19))
    assert looked(ring, 1)["more"]
    assert looked(ring, ring.total, over=True)["code"] == 3


@pytest.mark.parametrize(("within", "cancelled"), [(0.05, False), (20.0, True)])
def test_a_look_ends_with_its_time_or_when_pytest_has_sent_another_command(within: float, cancelled: bool) -> None:
    began, commands = time.monotonic(), iter([False])
    program = SimpleNamespace(output=RingBuffer(8), changed=threading.Condition(), over=False, code=3, cost={})
    Tools(lambda: next(commands, cancelled)).look(cast(Program, program), 0, within)
    assert cancelled or time.monotonic() - began >= within
    assert not cancelled or time.monotonic() - began < within


def test_a_program_has_its_output_its_exit_code_and_its_cost() -> None:
    program = Program(["/bin/sh", "-c", "echo $0 $A >&2; exit 3"], {"A": "1"})
    tools = Tools(lambda: False)
    output, answer = b"", tools.look(program, 0, 60)
    while answer["code"] is None:
        output += answer["bytes"]
        answer = tools.look(program, len(output), 60)
    assert (output + answer["bytes"], answer["code"]) == (b"/bin/sh 1\n", 3)
    cost = answer["cost"]
    assert 0 <= cost["own"] <= cost["clock"] < 60
    assert 0 <= cost["all"] <= (cost["clock"] + 1) * cost["processors"]
    assert cost["processors"] == len(os.sched_getaffinity(0))
    tools.end(program, signal.SIGKILL)  # nothing happens


def test_a_program_that_closes_its_output_runs_to_its_end() -> None:
    program = Program(["/bin/sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 3"], {})
    assert Tools(lambda: False).look(program, 0, 60)["code"] == 3


def test_a_program_that_cannot_be_executed_leaves_no_descriptor() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No such file"):
        Program(["/none"], {})
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_program_listens_on_the_ports_of_its_own_processes() -> None:
    ours, other = (cast(Program, SimpleNamespace(pid=group)) for group in (os.getpgid(0), 1 << 23))
    tools = Tools(lambda: False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not tools.listens(ours, port)
        listener.listen()
        assert tools.listens(ours, port)
        assert not tools.listens(other, port)


ALLOWED = ", ".join(sorted(FROM_OTHER_RANKS))


class VersionString:
    """UCX's function that returns its version, a text only if it is told to."""

    restype: object = None

    def __call__(self) -> bytes | int:
        return b"1.20.0" if self.restype is ctypes.c_char_p else 7


def test_the_versions_of_the_libraries_that_a_program_loads_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    ucp, fabric = "/a => lib (of mine)/libucp.so.0.0", "/lib/libfabric.so.1.22"
    listing = (
        f"\tlibc.so.6 => /libc.so.6 (0x00007f)\n\tlibucp.so.0 => {ucp} (0x00007f12ab)\n"
        f"\tlibfabric.so.1 => {fabric} (0x00007f12ab)\n\tlibfabric.so.2 => not found\n"
        "\tlibucp.so.9 => /none/libucp.so.9 (0x00007f)\n\t/lib64/libfabric.so.9 (0x00007f)\n"
    )
    libraries = {
        ucp: SimpleNamespace(ucp_get_version_string=VersionString()),
        fabric: SimpleNamespace(fi_version=lambda: (1 << 16 | 22) - (1 << 32)),  # it returns an unsigned number
    }

    def load(path: str) -> object:
        if path not in libraries:
            raise OSError("cannot open shared object file")
        return libraries[path]

    def trace(argv: list[str], *, env: dict[str, str], text: bool, **_: object) -> SimpleNamespace:
        assert (argv, env["LD_TRACE_LOADED_OBJECTS"], text) == (["/program"], "1", True)
        return SimpleNamespace(stdout=listing)

    monkeypatch.setenv(variable("nixlbench"), "/program")
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(subprocess, "run", trace)
    expected = {"path": "/program", "ucx": "1.20.0", "libfabric": "1.22"}
    assert Tools(lambda: False).find("nixlbench") == expected


class Guard:
    """A guard that keeps what it is told, and forks no process."""

    guards: ClassVar[list[Guard]] = []

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.guards.append(self)

    def watch(self, group: int) -> None:
        self.log.append(("watch", group))

    def forget(self, group: int) -> None:
        self.log.append(("forget", group))


@pytest.fixture
def wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that is nixlbench on this rank, which prints arguments and variables."""
    monkeypatch.setattr(tools_module, "ProgramGuard", Guard)
    monkeypatch.setattr(Guard, "guards", [])
    path = tmp_path / "wrapper"
    path.write_text('#!/bin/sh\necho "$@ $UCX_TLS $UCX_NET_DEVICES $HOME"\n')
    path.chmod(0o755)
    monkeypatch.setenv(variable("nixlbench"), str(path))
    return path


def test_a_program_gets_its_arguments_and_variables_and_is_guarded_until_its_end(
    wrapper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    monkeypatch.setenv("HOME", "/home")
    tools = Tools(lambda: False)
    programs = []
    for number in range(2):
        program = tools.start("nixlbench", ["--op", str(number)], {"UCX_TLS": "tcp", "UCX_NET_DEVICES": None})
        programs.append(program)
    for number, program in enumerate(programs):
        wait_until(partial(getattr, program, "over"), 60, "the end of the program")
        assert tools.look(program, 0, 60)["bytes"] == f"--op {number} tcp  /home\n".encode()
    [guard] = Guard.guards
    pids = [program.pid for program in programs]
    assert guard.log == [*[("watch", pid) for pid in pids], *[("forget", pid) for pid in pids]]


@pytest.mark.parametrize(
    ("tool", "variables", "mode", "reason", "remedy"),
    [
        ("fi_rma_bw", {}, 0o755, "fi_rma_bw is not on this rank's PATH", TOOLS["fi_rma_bw"]),
        ("nixlbench", {"LD_PRELOAD": "/evil"}, 0o755,
         f"the variable LD_PRELOAD cannot be passed to nixlbench: expected one of {ALLOWED}",
         "set LD_PRELOAD in the environment of the rank itself"),
        ("nixlbench", {}, 0o644, "{path} cannot be executed: Permission denied",
         "run `chmod +x {path}`, and check that it is built for this machine's architecture"),
        ("sh", {}, 0o755, f"a worker cannot start 'sh': expected {', '.join(TOOLS)}", ""),
    ],
)  # fmt: skip
def test_a_program_that_may_not_or_cannot_be_started_is_named(
    wrapper: Path, monkeypatch: pytest.MonkeyPatch, tool: str, variables: dict[str, str], mode: int, reason: str,
    remedy: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "/none")
    wrapper.chmod(mode)
    with pytest.raises(NixlPluginError) as caught:
        Tools(lambda: False).start(tool, [], variables)
    assert (caught.value.reason, caught.value.remedy) == (reason.format(path=wrapper), remedy.format(path=wrapper))
    assert not any(guard.log for guard in Guard.guards)


def test_the_path_of_a_program_is_that_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("nixlbench"), "/none/of/these")
    tools = Tools(lambda: False)
    assert tools.find("nixlbench") == {"path": "/none/of/these"}
    monkeypatch.delenv(variable("nixlbench"))
    monkeypatch.setenv("PATH", "/none")
    assert tools.find("nixlbench") is None
