# SPDX-License-Identifier: Apache-2.0
"""Fork workers from a process that has imported what each of them needs, but nothing of NIXL.

The environment of a forked worker is set before NIXL, UCX or libfabric is loaded. Python and numpy are imported once
instead of in each worker. They, the heap and the stack have the same addresses in all workers; only what is mapped
later has others. So workers whose figures decide the verdict of a row are not forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.lazy_module import lazy_module, load

if TYPE_CHECKING:
    from pytest_nixl.nixl.worker import commands, files
else:  # an executed worker reads this module too, before it is prepared to load them
    commands = lazy_module("pytest_nixl.nixl.worker.commands")
    files = lazy_module("pytest_nixl.nixl.worker.files")

#: The descriptors of a request for a worker: its channel, its log, its working directory.
DESCRIPTORS = 3
#: The mapped memory of two workers begins up to this many bytes apart, in steps of the second.
_APART, _STEP = 4 << 30, 4096


def serve_forks(channel: socket.socket, become_worker: Callable[[socket.socket, int], None]) -> None:
    """Answer requests, each a line of JSON, until the connection ends. An answer begins with the request's ``number``.

    A request with ``environment`` and descriptors is answered by the process id of a new worker, or by 0 if this
    process cannot fork; a request with ``ended``, a worker's process id, by its exit code (negative for a signal).

    :param channel: the connection to pytest's process, with whose end this process ends.
    :param become_worker: serves the commands of a worker; it gets the worker's channel and the id of this process.
    """
    load(commands)
    load(files)  # and numpy with it
    alone = len(os.listdir("/proc/self/task")) == 1  # a process with threads cannot fork safely
    inherited = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, no exit code is known
    gc.freeze()
    server = os.getpid()
    codes: dict[int, int] = {}
    while True:
        request, descriptors = _request(channel)
        if "ended" in request:
            answer = _code(request["ended"], codes)
        elif (answer := _fork() if alone else 0) < 0:
            try:
                channel.close()
                signal.signal(signal.SIGCHLD, inherited)
                _change(request["environment"], *descriptors[1:])
                become_worker(socket.socket(fileno=descriptors[0]), server)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(b"%d %d\n" % (request["number"], answer))


def _fork() -> int:
    """Return the id of a new process; -1 in that process, and 0 if there can be none."""
    try:
        return os.fork() or -1
    except OSError:  # too many processes, or no memory
        return 0


def _code(pid: int, codes: dict[int, int]) -> int:
    """Wait for the end of a process, and return its exit code, also if it is asked again."""
    if pid not in codes:
        codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes[pid]


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
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.fchdir(directory)
    os.close(directory)
    importlib.invalidate_caches()  # a folder of sys.path may be newer
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()
    _mappings.append(_other_addresses())


def _other_addresses() -> mmap.mmap | None:
    """Take a part of the address space, so that what is mapped next has another address than in other workers."""
    size = _STEP * (1 + int.from_bytes(os.urandom(4), "little") % (_APART // _STEP))
    with contextlib.suppress(OSError):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    return None


_mappings: list[mmap.mmap | None] = []
