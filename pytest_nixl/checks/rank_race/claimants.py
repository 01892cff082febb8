# SPDX-License-Identifier: Apache-2.0
"""Processes that claim ranks. Each is forked within milliseconds by multiprocessing's fork server.

The fork server has imported the modules of claimants. A claimant ends when the process that started it has ended.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

#: What the fork server imports.
_MODULES = ["pytest_nixl.cluster.joining", "pytest_nixl.checks.rank_race.functions", __name__]
#: Timeout in seconds for the end of a killed claimant.
_END_SECONDS = 180.0
_processes = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
#: The program that a claimant sees as its parent's. It would run the real one, which may be a script, again.
_EMPTY_PROGRAM = ModuleType("__main__")


class Claimant:
    """A process that claims a rank by calling a function ``module:function``. It may be started in any thread.

    The function gets its arguments by name, and also ``announce``. It calls ``announce`` with its rank, which returns
    when the claimant may continue. The claimant keeps its rank until then.

    :param function: ``module:function`` that the process calls.
    :param arguments: arguments of the function by name.
    :param changed: condition that is notified of each message and of its end.
    """

    def __init__(self, function: str, arguments: Mapping[str, Any], changed: threading.Condition | None = None) -> None:
        #: Its last message: with ``rank``, or with ``error`` and ``kind``; None if there is none yet.
        self.message: dict[str, Any] | None = None
        #: When it came, by :func:`time.monotonic`.
        self.heard = 0.0
        #: Whether its process has ended.
        self.ended = False
        self._changed = changed or threading.Condition()
        self._channel, theirs = multiprocessing.Pipe()
        self._process = _processes.Process(target=_claim, args=(theirs, function, dict(arguments)), daemon=True)
        with theirs, _starting:
            _processes.set_forkserver_preload(_MODULES)
            program, sys.modules["__main__"] = sys.modules["__main__"], _EMPTY_PROGRAM
            try:
                self._process.start()
            finally:
                sys.modules["__main__"] = program
        self.pid = self._process.pid or 0
        self._reader = threading.Thread(target=self._read, name=f"claimant {self.pid}", daemon=True)
        self._reader.start()

    def go_on(self) -> None:
        """Let it continue after its announcement, so that it leaves."""
        with suppress(BrokenPipeError):
            self._channel.send("go on")

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Wait for a message or its end, at most ``seconds``; return its last message."""
        return self.wait_for(lambda message: True, seconds)

    def wait_for(self, matches: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any] | None:
        """Wait until ``matches`` accepts its last message, or it ends, at most ``seconds``; return its last message."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended or (self.message is not None and matches(self.message)), seconds)
        return self.message

    def wait_until_ended(self, seconds: float) -> bool:
        """Wait for its end, at most ``seconds``; return whether it has ended."""
        self._reader.join(seconds)
        return self.ended

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has ended."""
        if not self.ended:
            self._process.kill()
            self._reader.join(_END_SECONDS)

    def close(self) -> None:
        """Kill it and close the connection."""
        self.kill()
        self._channel.close()

    def _read(self) -> None:
        with suppress(EOFError, ConnectionResetError):
            while True:
                message = self._channel.recv()
                with self._changed:
                    self.message, self.heard = message, time.monotonic()
                    self._changed.notify_all()
        self._process.join(_END_SECONDS)
        with self._changed:
            self.ended = True
            self._changed.notify_all()


def _claim(channel: Connection, function: str, arguments: Mapping[str, Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def send(**message: Any) -> None:
        channel.send({**message, "host": socket.gethostname()})

    def announce(rank: int) -> None:
        send(rank=rank)
        channel.recv()

    try:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(announce=announce, **arguments)
    except BaseException as error:
        with suppress(OSError):
            send(error=str(error), kind=type(error).__name__)
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
