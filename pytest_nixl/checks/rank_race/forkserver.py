# SPDX-License-Identifier: Apache-2.0
"""Start claimants as processes within milliseconds, by forking a process that has already imported their modules.

``python forkserver.py FD PARENT PATH`` runs that process. It and all its children end when the parent has ended.
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
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 180.0


class ForkedClaimant:
    """A process that claims a rank by calling a function ``module:function``.

    The function gets its arguments by name, and also ``announce``. It calls ``announce`` with its rank, which returns
    when the claimant may continue. The claimant keeps its rank until then.
    """

    def __init__(self, pid: int, channel: socket.socket, changed: threading.Condition) -> None:
        self.pid = pid
        #: Its last message: with ``rank``, or with ``error`` and ``kind``; None if there is none yet.
        self.message: dict[str, Any] | None = None
        #: When it came, by :func:`time.monotonic`.
        self.heard = 0.0
        #: Whether its process has ended.
        self.ended = False
        self._channel = channel
        self._changed = changed
        self._reader = threading.Thread(target=self._read, name=f"claimant {pid}", daemon=True)
        self._reader.start()

    def go_on(self) -> None:
        """Let it continue after its announcement, so that it leaves."""
        with suppress(BrokenPipeError):
            self._channel.sendall(b"\n")

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Wait for a message or its end, at most ``seconds``; return its last message."""
        return self.wait_for(lambda message: True, seconds)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any] | None:
        """Wait until ``wanted`` accepts its last message, or it ends, at most ``seconds``; return its last message."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended or (self.message is not None and wanted(self.message)), seconds)
        return self.message

    def wait_until_ended(self, seconds: float) -> bool:
        """Wait for its end, at most ``seconds``; return whether it has ended."""
        self._reader.join(seconds)
        return self.ended

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has ended."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reader.join(_START_SECONDS)

    def close(self) -> None:
        """Kill it and close the connection."""
        self.kill()
        self._channel.close()

    def _read(self) -> None:
        with self._channel.makefile("rb") as lines:
            with suppress(ConnectionResetError):
                for line in lines:
                    with self._changed:
                        self.message, self.heard = json.loads(line), time.monotonic()
                        self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class ForkServer:
    """The process that forks claimants. At the end of its ``with`` block it ends, and the claimants with it."""

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
        self._lock = threading.Lock()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, function: str, arguments: Mapping[str, Any], changed: threading.Condition | None = None
    ) -> ForkedClaimant:
        """Fork a claimant. May be called from any thread.

        :param function: ``module:function`` that the claimant calls.
        :param arguments: arguments of the function by name.
        :param changed: condition that is notified of each message and of its end.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps({"function": function, "arguments": dict(arguments)}).encode()
            with self._lock:
                socket.send_fds(self._channel, [len(request).to_bytes(4, "big") + request], [theirs.fileno()])
                answer = self._channel.recv(4)
        if len(answer) < 4:
            ours.close()
            raise RuntimeError(f"the process that forks claimants ended with exit code {self._process.wait()}")
        claimant = ForkedClaimant(int.from_bytes(answer, "big"), ours, changed or threading.Condition())
        self._claimants.append(claimant)
        return claimant

    def close(self) -> None:
        """End the process and every claimant."""
        for claimant in self._claimants:
            claimant.close()
        self._channel.close()
        self._process.wait(_START_SECONDS)


def _main(channel: socket.socket, parent: int) -> None:
    _die_with(parent)
    own = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    for module in (
        "pytest_nixl.etcd.bounded_http",
        "pytest_nixl.cluster.joining",
        "pytest_nixl.checks.rank_race.functions",
    ):
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
            _die_with(own)
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


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, and end now if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    # Do not import from the directory of this file.
    sys.path[:] = json.loads(sys.argv[3])
    _main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
