# SPDX-License-Identifier: Apache-2.0
"""Claimants in processes of their own, started in milliseconds: forked by a process that has loaded what they need.

Run as ``python forkserver.py FD PARENT`` it is that process; it and all its children end when its parent has gone.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 180.0


class ForkedClaimant:
    """One process that claims a rank, by a function ``module:function``.

    The function gets its arguments by name, and ``announce``, which it calls with the rank that it was given; that
    returns when the claimant may go on: it keeps its claim until then.
    """

    def __init__(self, pid: int, channel: socket.socket, changed: threading.Condition) -> None:
        self.pid = pid
        #: What it said last: ``rank``, or ``error`` and ``kind``; None where it has said nothing yet.
        self.message: dict[str, Any] | None = None
        #: Whether its process has ended.
        self.ended = False
        self._channel = channel
        self._changed = changed
        self._reader = threading.Thread(target=self._read, name=f"claimant {pid}", daemon=True)
        self._reader.start()

    def go_on(self) -> None:
        """Let it go on after its announcement, to leave."""
        with suppress(BrokenPipeError):
            self._channel.sendall(b"\n")

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Wait until it says something or ends; return what it said last."""
        return self.wait_for(lambda message: True, seconds)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any] | None:
        """Wait until what it said last is wanted, or it ends; return what it said last."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended or (self.message is not None and wanted(self.message)), seconds)
        return self.message

    def wait_until_ended(self, seconds: float) -> bool:
        """Wait until its process has ended; return whether it has."""
        self._reader.join(seconds)
        return self.ended

    def kill(self) -> None:
        """End it by SIGKILL, and wait until it has ended."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reader.join(_START_SECONDS)

    def close(self) -> None:
        """End it."""
        self.kill()
        self._channel.close()

    def _read(self) -> None:
        with self._channel.makefile("rb") as lines:
            with suppress(ConnectionResetError):
                for line in lines:
                    with self._changed:
                        self.message = json.loads(line)
                        self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class ForkServer:
    """The process that forks claimants. As a context manager it ends with its block, and they with it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._channel = ours
        self._channel.settimeout(_START_SECONDS)
        self._claimants: list[ForkedClaimant] = []

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def start(
        self, function: str, arguments: Mapping[str, Any], changed: threading.Condition | None = None
    ) -> ForkedClaimant:
        """Fork a claimant that calls ``module:function``. ``changed`` is notified of all that it says."""
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps({"function": function, "arguments": dict(arguments)}).encode()
            socket.send_fds(self._channel, [len(request).to_bytes(4, "big") + request], [theirs.fileno()])
        answer = self._channel.recv(4)
        if len(answer) < 4:
            ours.close()
            raise RuntimeError(f"the process that forks claimants has ended with {self._process.wait()}")
        claimant = ForkedClaimant(int.from_bytes(answer, "big"), ours, changed or threading.Condition())
        self._claimants.append(claimant)
        return claimant

    def close(self) -> None:
        """End it and every claimant."""
        for claimant in self._claimants:
            claimant.close()
        self._channel.close()
        self._process.wait(_START_SECONDS)


def _main(channel: socket.socket) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for module in ("etcd3gw.client", "pytest_nixl.cluster.joining", "pytest_nixl.checks.rank_race.functions"):
        importlib.import_module(module)
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, 4, 1)
        if not head:
            os._exit(0)
        request = b""
        while len(request) < int.from_bytes(head, "big"):
            request += channel.recv(int.from_bytes(head, "big") - len(request))
        pid = os.fork()
        if pid == 0:
            channel.close()
            _die_with_parent()
            _claim(json.loads(request), socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        channel.sendall(pid.to_bytes(4, "big"))


def _claim(request: Mapping[str, Any], channel: socket.socket) -> None:
    def say(**message: Any) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    def announce(rank: int) -> None:
        say(rank=rank, host=socket.gethostname())
        channel.recv(1)

    try:
        module, _, function = request["function"].partition(":")
        getattr(importlib.import_module(module), function)(announce=announce, **request["arguments"])
    except BaseException as error:
        say(error=str(error), kind=type(error).__name__, host=socket.gethostname())
    os._exit(0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    # The folder of this file is no place to import from.
    sys.path[:] = json.loads(sys.argv[3])
    if os.getppid() == int(sys.argv[2]):
        _main(socket.socket(fileno=int(sys.argv[1])))
