# SPDX-License-Identifier: Apache-2.0
"""A program of a worker, within this process: its output and its end, and on which ports it listens."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.ring_buffer import RingBuffer
from pytest_nixl.model.tools import variable
from pytest_nixl.nixl.worker.tools import Program, Tools


def looked(
    ring: RingBuffer, position: int, *, over: bool = False, cancelled: bool = False, within: float = 0.01
) -> dict[str, Any]:
    """Look at a program that writes nothing more, and return the answer without its cost."""
    program = SimpleNamespace(output=ring, changed=threading.Condition(), over=over, code=3, cost={})
    return {**Tools(lambda: cancelled).look(cast(Program, program), position, within)}


def test_a_look_returns_what_is_new_and_says_whether_there_is_more() -> None:
    ring = RingBuffer(1 << 20)
    ring.write(b"ab")
    assert looked(ring, 0) == {"from": 0, "bytes": b"ab", "more": False, "code": None, "cost": {}}
    assert looked(ring, 1)["bytes"] == b"b"
    assert looked(ring, 2) == {"from": 2, "bytes": b"", "more": False, "code": None, "cost": {}}
    ring.write(b"c" * (1 << 19))
    assert looked(ring, 1)["more"]
    assert looked(ring, ring.total, over=True)["code"] == 3


@pytest.mark.parametrize(("within", "cancelled"), [(0.05, False), (60.0, True)])
def test_a_look_ends_with_its_time_or_when_pytest_has_sent_another_command(within: float, cancelled: bool) -> None:
    began = time.monotonic()
    looked(RingBuffer(8), 0, cancelled=cancelled, within=within)
    assert cancelled or time.monotonic() - began >= within
    assert time.monotonic() - began < 60


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


def test_the_path_of_a_program_is_that_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("nixlbench"), "/none/of/these")
    tools = Tools(lambda: False)
    assert tools.find("nixlbench") == {"path": "/none/of/these"}
    monkeypatch.delenv(variable("nixlbench"))
    monkeypatch.setenv("PATH", "/none")
    assert tools.find("nixlbench") is None
    with pytest.raises(NixlPluginError, match="a worker cannot start 'sh': expected nixlbench"):
        tools.find("sh")
