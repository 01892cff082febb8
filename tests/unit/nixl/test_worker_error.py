# SPDX-License-Identifier: Apache-2.0
"""What a worker says of an error, and how it reads its commands and ends."""

from __future__ import annotations

import errno
import os
import socket
import sys
import types
from traceback import format_exception
from typing import Any, cast

import pytest

from pytest_nixl.core import rdma_fault, resource_limits
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.wire import decode, encode
from pytest_nixl.nixl.worker import serving as worker
from pytest_nixl.nixl.worker.commands import CommandRefusedError
from pytest_nixl.nixl.worker.nixl_api import NixlCallError, NixlImportError
from pytest_nixl.nixl.worker.transfer import StepTimeoutError

#: The module that only a worker with GPU memory imports.
VRAM = "pytest_nixl.nixl.worker.vram"


MODULE = "nixl_cu12._bindings"


def nixl_error(name: str, status: str) -> Exception:
    """Return a double of an error of NIXL, which a card or a wrong call causes."""
    kind: type[Exception] = type(name, (Exception,), {"__module__": MODULE})
    return kind(status)


DISCONNECTED = nixl_error("nixlRemoteDisconnectError", "NIXL_ERR_REMOTE_DISCONNECT")
FAILED = nixl_error("nixlBackendError", "NIXL_ERR_BACKEND")
OTHER = nixl_error("nixlInvalidParamError", "NIXL_ERR_INVALID_PARAM")
CARD, PORT, SHORTAGE = (
    ("a card beside a GPU", "try another"),
    ("the port is down", "bring it up"),
    ("no file", "raise it"),
)
LOG = f"{rdma_fault.ASK_DOCTOR}; and read NIXL's log lines below"


@pytest.mark.parametrize(
    ("error", "faults", "gpu_memory", "transports", "fault", "remedy"),
    [
        (DISCONNECTED, {"passthrough_fault": CARD}, True, "", *CARD),
        (DISCONNECTED, {"passthrough_fault": CARD}, False, "", "", None),
        (OTHER, {"passthrough_fault": CARD, "rdma_fault": PORT}, True, "rc", "", None),
        (OTHER, {"shortage": SHORTAGE}, False, "", *SHORTAGE),
        (FAILED, {"passthrough_fault": CARD, "rdma_fault": PORT}, True, "rc", *PORT),
        (FAILED, {"passthrough_fault": CARD, "rdma_fault": PORT, "shortage": SHORTAGE}, True, "rc", *SHORTAGE),
        (FAILED, {}, False, "rc", "", LOG),
        (DISCONNECTED, {}, False, "rc", "", f"{rdma_fault.PEER_REMEDY}; {LOG}"),
        (DISCONNECTED, {}, False, "tcp", "", None),
    ],
)
def test_an_error_of_nixl_names_what_the_host_lacks(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    faults: dict[str, tuple[str, str]],
    gpu_memory: bool,
    transports: str,
    fault: str,
    remedy: str | None,
) -> None:
    for name in ("rdma_fault", "passthrough_fault"):
        monkeypatch.setattr(rdma_fault, name, lambda environ, name=name: faults.get(name, ("", "")))
    monkeypatch.setattr(resource_limits, "shortage", lambda: faults.get("shortage"))
    monkeypatch.setenv("UCX_TLS", transports)
    monkeypatch.delitem(sys.modules, VRAM, raising=False)
    if gpu_memory:
        monkeypatch.setitem(sys.modules, VRAM, types.ModuleType(VRAM))
    message = f"{error}: {fault}" if fault else str(error)
    reply = worker._error(error)
    text = (
        {"remedy": remedy, "traceback": ""} if remedy else {"traceback": f"{MODULE}.{type(error).__name__}: {error}\n"}
    )
    assert reply == {"kind": "nixl", "type": type(error).__name__, "message": message, **text}


NO_MEMORY = "memory cannot be allocated: the kernel gives it no more", "end other processes, or measure smaller blocks"
HIDDEN = "/x/nixl.py hides the module nixl", "rename it"


@pytest.mark.parametrize(
    ("error", "kind", "name", "message", "remedy"),
    [
        (CommandRefusedError("no"), "refused", "CommandRefusedError", "no", None),
        (StepTimeoutError("late"), "timeout", "StepTimeoutError", "late", None),
        (NixlImportError("none", "install it"), "import", "pytest_nixl.nixl.worker.nixl_api", "none", "install it"),
        (
            NixlCallError(KeyError("x")),
            "nixl",
            "KeyError",
            "'x'",
            "correct the arguments of the call; NIXL's log lines below may say more",
        ),
        (OSError(errno.EIO, "broken"), "python", "OSError", "[Errno 5] broken", None),
        (MemoryError(), "ours", "builtins", *NO_MEMORY),
        (OSError(errno.ENOMEM, "none left"), "ours", "builtins", *NO_MEMORY),
        (NixlPluginError("it is full", "empty it"), "ours", "NixlPluginError", "it is full", "empty it"),
        (ImportError("no x"), "ours", "builtins", f"no x; {HIDDEN[0]}", HIDDEN[1]),
    ],
)
def test_each_kind_of_error_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str, name: str, message: str, remedy: str | None
) -> None:
    monkeypatch.setattr(worker, "hidden_module", lambda error: HIDDEN)
    monkeypatch.setattr(resource_limits, "address_space_fault", lambda: "")
    traceback = "".join(format_exception(error)) if remedy is None or (kind == "ours" and name != "builtins") else ""
    expected = {"kind": kind, "type": name, "message": message, "traceback": traceback}
    assert worker._error(error) == (expected if remedy is None else {**expected, "remedy": remedy})


def test_memory_beyond_the_limit_of_the_process_is_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_limits, "address_space_fault", lambda: "ulimit -v is 1 GiB")
    reply = worker._error(MemoryError())
    assert reply["message"] == "memory cannot be allocated: ulimit -v is 1 GiB"
    assert reply["remedy"] == resource_limits.ADDRESS_SPACE_REMEDY


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
