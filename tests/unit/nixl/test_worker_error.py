# SPDX-License-Identifier: Apache-2.0
"""What a worker says of an error, and how it reads its commands and ends."""

from __future__ import annotations

import errno
import os
import socket
import sys
import types
from typing import Any, cast

import pytest

from pytest_nixl.core import rdma_fault
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.wire import decode, encode
from pytest_nixl.nixl.worker import serving as worker
from pytest_nixl.nixl.worker.commands import CommandRefusedError
from pytest_nixl.nixl.worker.nixl_api import NixlImportError
from pytest_nixl.nixl.worker.transfer import StepTimeoutError

#: The module that only a worker with GPU memory imports.
VRAM = "pytest_nixl.nixl.worker.vram"


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - NIXL's name
    """A double of NIXL's error, which needs a card that cannot access GPU memory."""


class nixlBackendError(Exception):  # noqa: N801 - NIXL's name
    """A double of NIXL's error, which needs a card that cannot be used."""


for error in (nixlRemoteDisconnectError, nixlBackendError):
    error.__module__ = "nixl_cu12._bindings"


def test_passed_through_card_is_named_if_the_worker_has_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_fault, "passthrough_fault", lambda environ: ("a card beside a GPU", "try another card"))
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setitem(sys.modules, VRAM, types.ModuleType(VRAM))
    reply = worker._error(nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT"))
    assert (reply["kind"], reply["type"]) == ("nixl", "nixlRemoteDisconnectError")
    assert (reply["message"], reply["remedy"]) == (
        "NIXL_ERR_REMOTE_DISCONNECT: a card beside a GPU",
        "try another card",
    )
    monkeypatch.delitem(sys.modules, VRAM)
    reply = worker._error(nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT"))
    assert (reply["message"], reply.get("remedy")) == ("NIXL_ERR_REMOTE_DISCONNECT", None)


def test_a_worker_that_is_told_to_use_rdma_names_doctor_and_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_fault, "rdma_fault", lambda environ: ("", ""))
    monkeypatch.setenv("UCX_TLS", "rc")
    reply = worker._error(nixlBackendError("NIXL_ERR_BACKEND"))
    assert reply["remedy"] == f"{rdma_fault.ASK_DOCTOR}; and read NIXL's log lines below"
    monkeypatch.setattr(rdma_fault, "rdma_fault", lambda environ: ("the port is down", "bring it up"))
    reply = worker._error(nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT"))
    assert (reply["message"], reply["remedy"]) == ("NIXL_ERR_REMOTE_DISCONNECT: the port is down", "bring it up")


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (CommandRefusedError("no"), "refused", "no"),
        (StepTimeoutError("late"), "timeout", "late"),
        (NixlImportError("none"), "import", "none"),
        (ValueError("bad"), "python", "bad"),
        (OSError(errno.EIO, "broken"), "python", "[Errno 5] broken"),
        (MemoryError(), "ours", "memory cannot be allocated: the kernel gives it no more"),
        (OSError(errno.ENOMEM, "none left"), "ours", "memory cannot be allocated: the kernel gives it no more"),
        (NixlPluginError("it is full", "empty it"), "ours", "it is full"),
    ],
)
def test_each_kind_of_error_is_told(error: Exception, kind: str, expected: str) -> None:
    reply = worker._error(error)
    assert (reply["kind"], reply["message"]) == (kind, expected)
    memory = "end other processes, or measure smaller blocks"
    remedies = {"it is full": "empty it", f"{error}": getattr(error, "remedy", None)}
    assert reply.get("remedy") == remedies.get(expected, memory)
    assert (type(error).__name__ in reply["traceback"]) is not expected.startswith(("memory", "none"))


def test_a_worker_answers_each_command_until_it_is_told_to_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lines = [
            {"command": "none", "number": 1, "arguments": {}}, {"command": "cancel", "number": 2},
            {"command": "hello", "number": 3, "arguments": {"path": [], "loads": False}},
            {"command": "exit", "number": 4}, {"command": "none", "number": 5, "arguments": {}},
        ]  # fmt: skip
        ours.sendall(b"".join(map(encode, lines)))
        worker._serve(theirs)
        first, second = map(decode, ours.recv(1 << 20).splitlines())
    assert (first["number"], first["error"]["kind"]) == (1, "refused")
    assert (second["number"], second["result"]["pid"]) == (3, os.getpid())


def test_a_line_that_comes_in_parts_is_read_whole() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        read = worker._Lines(theirs)
        assert not read.waiting()
        ours.sendall(b"one\ntw")
        lines = iter(read)
        assert next(lines) == b"one"
        assert read.waiting()
        ours.sendall(b"o\n")
        assert next(lines) == b"two"
        assert not read.waiting()
        ours.sendall(b"three")
        assert read.waiting()
        ours.close()
        assert list(lines) == [], "the end of pytest ends it"


@pytest.mark.parametrize("status", [0, 1])
def test_a_worker_ends_at_once_and_with_the_stack_of_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    def serve(_: object) -> None:
        if status:
            raise ValueError("made by a test")

    monkeypatch.setattr(worker, "_prepare_process", lambda parent: print(parent))
    monkeypatch.setattr(worker, "_serve", serve)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        worker.work(cast(Any, None), 7)
    assert caught.value.code == status
    output = capsys.readouterr()
    assert output.out == "7\n"
    assert ("ValueError: made by a test" in output.err) is bool(status)


def test_agent_that_does_not_answer_over_rdma_is_looked_for_on_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_fault, "rdma_fault", lambda environ: ("", ""))
    monkeypatch.setenv("UCX_TLS", "rc")
    remedy = worker._error(nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT"))["remedy"]
    assert "check that the other agent's process runs" in remedy
    local_remedy = worker._error(nixlBackendError("NIXL_ERR_BACKEND"))["remedy"]
    assert "the other agent" not in local_remedy
    assert remedy.endswith(local_remedy), "the doctor of this host, too"
