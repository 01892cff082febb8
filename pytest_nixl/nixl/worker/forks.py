# SPDX-License-Identifier: Apache-2.0
"""Fork workers from a process that has imported what each of them needs, but nothing of NIXL.

A worker that is forked is one launch, as one that is executed: its environment is set before NIXL, UCX or libfabric is
loaded, and its memory is mapped at other addresses. Python and numpy are imported once instead of in each worker.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

#: The descriptors of a request for a worker: its channel, its log, its working directory.
DESCRIPTORS = 3
#: The mapped memory of two workers begins up to this many bytes apart, in steps of the second.
_APART, _STEP = 4 << 30, 2 << 20


def serve_forks(channel: socket.socket, become_worker: Callable[[socket.socket, int], None]) -> None:
    """Answer requests, each a line of JSON, until the connection ends.

    A request with ``environment`` and descriptors is answered by the process id of a new worker, or by 0 if this
    process cannot fork; a request with ``ended``, a worker's process id, by its exit code (negative for a signal).

    :param channel: the connection to pytest's process, with whose end this process ends.
    :param become_worker: serves the commands of a worker; it gets the worker's channel and the id of this process.
    """
    import pytest_nixl.nixl.worker.commands  # noqa: F401 - imports numpy too

    alone = len(os.listdir("/proc/self/task")) == 1  # a process with threads cannot fork safely
    gc.freeze()
    own = os.getpid()
    while True:
        request, descriptors = _request(channel)
        if "ended" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
        elif not alone:
            answer = 0
        elif (answer := os.fork()) == 0:
            channel.close()
            _change(request["environment"], *descriptors[1:])
            become_worker(socket.socket(fileno=descriptors[0]), own)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(b"%d\n" % answer)


def _request(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    content, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, DESCRIPTORS)
    while not content.endswith(b"\n"):
        part = channel.recv(1 << 20)
        if not part:
            os._exit(0)
        content += part
    return json.loads(content), descriptors


def _change(environment: dict[str, str], log: int, directory: int) -> None:
    """Give a forked process what an executed one gets from its parent; its channel keeps its descriptor."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.fchdir(directory)
    os.close(log)
    os.close(directory)
    _kept.append(_other_addresses())


def _other_addresses() -> mmap.mmap | None:
    """Take a part of the address space, so that what is mapped next has another address than in other workers."""
    size = _STEP * (1 + secrets.randbelow(_APART // _STEP))
    with contextlib.suppress(OSError):  # the address space may be limited
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    return None


_kept: list[mmap.mmap | None] = []
