# SPDX-License-Identifier: Apache-2.0
"""Functions that let one call of the real NIXL in a worker keep something each time, as a leak does."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_kept: list[Any] = []


def _after(agent: Any, method: str, action: Callable[[], Any]) -> None:
    """Call ``action`` after each call of a method of the agent, and keep what it returns."""
    kind, original = type(agent), getattr(type(agent), method)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        answer = original(self, *given, **named)
        if (result := action()) is not None:
            _kept.append(result)
        return answer

    setattr(kind, method, call)


def nothing(agent: Any, method: str) -> None:
    """Keep nothing, but call a function like the others do."""
    _after(agent, method, lambda: None)


def kibibyte(agent: Any, method: str) -> None:
    """Keep 1 KiB that was allocated by ``malloc``."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    _after(agent, method, lambda: library.malloc(ctypes.c_size_t(1024)))


def descriptor(agent: Any, method: str) -> None:
    """Keep one open file descriptor."""
    _after(agent, method, lambda: os.open("/dev/null", os.O_RDONLY))


def connected(agent: Any, method: str) -> None:
    """Keep a socket open."""
    _after(agent, method, socket.socket)


def thread(agent: Any, method: str) -> None:
    """Keep a thread that waits."""

    def start() -> threading.Thread:
        started = threading.Thread(target=threading.Event().wait, daemon=True)
        started.start()
        return started

    _after(agent, method, start)


def region(agent: Any) -> None:
    """Let ``deregister_memory`` keep the region."""
    type(agent).deregister_memory = lambda *_, **__: None


def keys(agent: Any) -> None:
    """Let ``invalidate_local_metadata`` leave the keys in etcd."""
    type(agent).invalidate_local_metadata = lambda *_, **__: None


def slower(agent: Any, method: str) -> None:
    """Let each call of a method take 0.1 µs more than the one before."""
    calls = itertools.count(1)

    def wait() -> None:
        until = time.perf_counter() + 1e-7 * next(calls)
        while time.perf_counter() < until:
            pass

    _after(agent, method, wait)


def close_connections(agent: Any) -> None:
    """Let ``remove_remote_agent`` do nothing and ``add_remote_agent`` load a peer once: no connection is left."""
    kind, original = type(agent), type(agent).add_remote_agent
    descriptors: dict[tuple[str, bytes], Any] = {}

    def add_remote_agent(self: Any, metadata: bytes) -> Any:
        if (self.name, metadata) not in descriptors:
            descriptors[self.name, metadata] = original(self, metadata)
        return descriptors[self.name, metadata]

    kind.add_remote_agent = add_remote_agent
    kind.remove_remote_agent = lambda *_: None
