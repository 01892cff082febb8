# SPDX-License-Identifier: Apache-2.0
"""The process from which workers are forked, so that each starts without importing Python's modules again."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from pytest_nixl.processes.supervisor import SupervisorClient

#: The script of workers, and of the process from which they are forked.
SCRIPT = Path(__file__).parents[1] / "nixl" / "worker" / "__main__.py"
#: ``0`` executes each worker, as for a comparison of the two ways.
FORK = "PYTEST_NIXL_FORK"
#: On import, numpy's OpenBLAS starts a thread for each core, which spins for a while. No worker needs them.
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
#: Variables that are read before the first line of a worker: by the loader, libc, Python or numpy's libraries.
_READ_FIRST = re.compile(r"LD_|GLIBC_|MALLOC_|PYTHON|OPENBLAS_|GOTO_|OMP_|MKL_|BLIS_|NPY_|NUMPY_|LC_|LANG|LOCPATH|TZ")
#: The time to import Python's modules on a busy machine or a cold file system, in seconds.
_START_SECONDS = 180.0
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_NAMESPACES = ("mnt", "net", "ipc", "uts", "user", "pid_for_children", "cgroup")


class ForkedWorker:
    """A forked process, with the methods of :class:`subprocess.Popen` that workers need.

    :param parent: the process from which it was forked.
    """

    def __init__(self, parent: WorkerParent, pid: int) -> None:
        self.pid = pid
        self._parent = parent
        self._code: int | None = None
        self._lock = threading.Lock()
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as :meth:`poll`. :raises subprocess.TimeoutExpired: it runs for longer."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired([], timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        with self._lock:
            if self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """End it with SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float | None) -> int | None:
        """Wait for the end, and return the exit code; None if it still runs."""
        if self._code is None:
            waiting = select.poll()
            waiting.register(self._handle, select.POLLIN)
            if not waiting.poll(None if seconds is None else seconds * 1000):
                return None
            with self._lock:
                if self._code is None:
                    self._code = self._parent.code_of(self.pid)
                    os.close(self._handle)
        return self._code


class WorkerParent:
    """The process from which workers are forked. It ends when this process has ended.

    :param supervisor: ends it if this process is killed.
    :param environment: its environment variables.
    """

    def __init__(self, supervisor: SupervisorClient, environment: Mapping[str, str]) -> None:
        self.supervisor = supervisor
        self.read_first = _read_first(environment)
        self.situation = _situation()
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_START_SECONDS)
        with theirs, (supervisor.directory / "worker-parent.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
        #: Whether it forks: it does not if its modules cannot be imported, or start threads.
        self.able = True
        supervisor.watch_process(self._process.pid)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fork(self, channel: socket.socket, log: IO[bytes], environment: Mapping[str, str]) -> ForkedWorker | None:
        """Return a new worker; None if it cannot be forked.

        :param channel: the worker's end of its channel.
        :param log: the file for its output.
        :param environment: all its variables.
        """
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            pid = self._ask({"environment": dict(environment)}, [channel.fileno(), log.fileno(), directory])
            self.able = bool(pid)
            return ForkedWorker(self, pid) if pid else None
        except ProcessLookupError:  # it has ended with its parent
            self.able = False
            return None
        finally:
            os.close(directory)

    def code_of(self, pid: int) -> int:
        """Return the exit code of a worker that has ended; that of SIGKILL if this process has ended before it."""
        code = self._ask({"ended": pid}, [])
        return -signal.SIGKILL if code is None else code

    def close(self) -> None:
        """End it, and its workers with it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Close the descriptor in a process that was forked from this one, of which it is no child."""
        self._process.returncode = 0
        with contextlib.suppress(OSError):
            os.close(self._channel.detach())

    def _ask(self, request: Mapping[str, object], descriptors: list[int]) -> int | None:
        """Send a request and return the answer; None if the process has ended."""
        content = json.dumps(request).encode() + b"\n"
        answer = b""
        with self._lock, contextlib.suppress(OSError):
            sent = socket.send_fds(self._channel, [content], descriptors)
            self._channel.sendall(content[sent:])
            while not answer.endswith(b"\n"):
                part = self._channel.recv(64)
                if not part:
                    return None
                answer += part
        return int(answer) if answer else None


_current: WorkerParent | None = None
_lock = threading.Lock()


def fork_worker(
    supervisor: SupervisorClient, channel: socket.socket, log: IO[bytes], environment: Mapping[str, str]
) -> ForkedWorker | None:
    """Return a worker that is forked; None if it must be executed, because it would differ from an executed one.

    :param channel: the worker's end of its channel.
    :param log: the file for its output.
    :param environment: all its variables. Its directory, limits, processors and namespaces are those of this process.
    """
    global _current
    if os.environ.get(FORK) == "0" or not hasattr(os, "pidfd_open"):
        return None
    with _lock:
        if _current is None or _current.supervisor is not supervisor:
            if _current is not None:
                _current.close()
            _current = WorkerParent(supervisor, {BLAS_THREADS: "1", **os.environ})
        parent = _current
    same = parent.read_first == _read_first(environment) and parent.situation == _situation()
    return parent.fork(channel, log, environment) if parent.able and same else None


def parent_of_workers() -> int:
    """Return the id of the process from which workers are forked; 0 if there is none."""
    return 0 if _current is None else _current.pid


def _read_first(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_FIRST.match(name)}


def _situation() -> tuple[object, ...]:
    """Return what a process inherits from its parent and a worker must have from this one."""
    folder = "/proc/self/ns"
    namespaces = [os.readlink(f"{folder}/{name}") for name in _NAMESPACES if os.path.lexists(f"{folder}/{name}")]
    limits = [resource.getrlimit(kind) for kind in _LIMITS]
    return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), os.getresuid(), namespaces, limits


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()


def _forget_after_fork() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.forget()
        _current = None


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)
