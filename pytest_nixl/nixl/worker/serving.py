# SPDX-License-Identifier: Apache-2.0
"""Serve the commands of a worker: prepare its process, answer until its parent ends, and report errors.

The process ends with ``os._exit`` instead of a normal exit of Python, in which several NIXL builds crash or hang.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_nixl.core import rdma_fault, resource_limits
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.wire import decode, encode
from pytest_nixl.model import nixl_releases
from pytest_nixl.nixl.installed import hidden_module

if TYPE_CHECKING:
    from pytest_nixl.nixl.worker import commands, nixl_api, transfer
else:  # loaded when the process is prepared: if they hang, the stack of each thread is printed
    commands = lazy_module("pytest_nixl.nixl.worker.commands")
    nixl_api = lazy_module("pytest_nixl.nixl.worker.nixl_api")
    transfer = lazy_module("pytest_nixl.nixl.worker.transfer")

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_IOLBF = 1
#: Sleeps between polls take tens of microseconds, to which the kernel would add fifty.
_SLACK_NANOSECONDS = 1000
#: NIXL's errors that an RDMA device can cause.
_OF_DEVICES = {"nixlBackendError", "nixlRemoteDisconnectError"}
#: The module that a worker with GPU memory has imported.
_OF_GPU_MEMORY = "pytest_nixl.nixl.worker.vram"


def _prepare_process(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)
    # Let C libraries write line by line: UCX's output is read while the worker runs, and must survive a crash.
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)
    if os.getppid() != parent:
        os._exit(1)
    # Print the stack of every thread on SIGUSR1, which the parent sends before it ends a worker that hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()


def _error(error: BaseException) -> dict[str, Any]:
    module = type(error).__module__
    kind = "python"
    if isinstance(error, NixlPluginError):
        text = "".join(traceback.format_exception(error))
        name = type(error).__name__
        return {"kind": "ours", "type": name, "message": error.reason, "remedy": error.remedy, "traceback": text}
    if isinstance(error, commands.CommandRefusedError):
        kind = "refused"
    elif isinstance(error, transfer.StepTimeoutError):
        kind = "timeout"
    elif nixl_releases.is_error(module):
        kind, name = "nixl", type(error).__name__
        of_devices = name in _OF_DEVICES
        of_gpu = of_devices and _OF_GPU_MEMORY in sys.modules
        for fault, remedy in (
            resource_limits.shortage() or ("", ""),
            rdma_fault.rdma_fault(os.environ) if of_devices else ("", ""),
            rdma_fault.passthrough_fault(os.environ) if of_gpu else ("", ""),
        ):
            if fault:
                description = f"{error}: {fault}"
                return {"kind": kind, "type": name, "message": description, "remedy": remedy, "traceback": ""}
        if of_devices and rdma_fault.wants_rdma(os.environ):
            first = f"{rdma_fault.PEER_REMEDY}; " if name == "nixlRemoteDisconnectError" else ""
            remedy = f"{first}{rdma_fault.ASK_DOCTOR}; and read NIXL's log lines below"
            return {"kind": kind, "type": name, "message": str(error), "remedy": remedy, "traceback": ""}
    elif isinstance(error, nixl_api.NixlCallError):
        remedy = "correct the arguments of the call; NIXL's log lines below may say more"
        return {"kind": "nixl", "type": error.type_name, "message": str(error), "remedy": remedy, "traceback": ""}
    elif isinstance(error, nixl_api.NixlImportError):
        return {"kind": "import", "type": module, "message": str(error), "remedy": error.remedy, "traceback": ""}
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        exceeded = resource_limits.address_space_fault()
        fault = exceeded or "the kernel gives it no more"
        remedy = "end other processes, or measure smaller blocks"
        if exceeded:
            remedy = resource_limits.ADDRESS_SPACE_REMEDY
        description = f"memory cannot be allocated: {fault}"
        return {"kind": "ours", "type": module, "message": description, "remedy": remedy, "traceback": ""}
    elif isinstance(error, ImportError) and (hidden := hidden_module(error)):
        reason = f"{error}; {hidden[0]}"
        return {"kind": "ours", "type": module, "message": reason, "remedy": hidden[1], "traceback": ""}
    text = "".join(traceback.format_exception(error))
    return {"kind": kind, "type": type(error).__name__, "message": str(error), "traceback": text}


class _Lines:
    """Read lines from the parent, and tell whether another line has arrived."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = b""

    def __iter__(self) -> Iterator[bytes]:
        while True:
            while b"\n" not in self._buffer:
                chunk = self._channel.recv(1 << 20)
                if not chunk:
                    return
                self._buffer += chunk
            line, _, self._buffer = self._buffer.partition(b"\n")
            yield line

    def waiting(self) -> bool:
        return bool(self._buffer or select.select([self._channel], [], [], 0)[0])


def _serve(channel: socket.socket) -> None:
    lines = _Lines(channel)
    served = commands.Commands(cancelled=lines.waiting)
    for line in lines:
        message = decode(line)
        command, number = message["command"], message["number"]
        if command == "exit":
            return
        if command == "cancel":
            continue  # it was for a command that has already ended
        try:
            reply = encode({"number": number, "result": served.handle(command, message["arguments"])})
        except Exception as error:  # every failure is an answer, which pytest interprets
            reply = encode({"number": number, "error": _error(error)})
        channel.sendall(reply)


def work(channel: socket.socket, parent: int) -> NoReturn:
    """Serve commands, then end the process immediately.

    :param parent: the id of the parent, with which the process ends.
    """
    _prepare_process(parent)
    status = 0
    try:
        _serve(channel)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
