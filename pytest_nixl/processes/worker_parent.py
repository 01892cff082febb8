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

from pytest_nixl.core.resource_limits import let_end_first
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
_NAMESPACES = ("mnt", "net", "ipc", "uts", "user", "pid_for_children", "time_for_children", "cgroup")
#: What a process inherits of its parent's signals, rights and users, as lines of ``/proc/thread-self/status``.
_INHERITED = re.compile(r"^(?:Umask|Uid|Gid|Groups|SigBlk|SigIgn|Cap\w+|NoNewPrivs|Seccomp):.*", re.MULTILINE)
#: The loader loads these before Python's first line: they read the variables of the process that is executed.
_PRELOADED = ("LD_PRELOAD", "LD_AUDIT")


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
        return self._code

    def __del__(self) -> None:
        """Release the descriptor. It is not closed before, because another thread may be waiting for it."""
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._handle)


class WorkerParent:
    """The process from which workers are forked. It ends when pytest's process ends.

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
            self._process = execute(theirs, log, environment)
        #: Whether it answers: it does not after its end, nor if its modules cannot be imported.
        self.able = True
        self._number = 0
        self._received = b""
        self._forks: set[int] = set()
        supervisor.watch_process(self._process.pid)

    @property
    def pid(self) -> int:
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
        finally:
            os.close(directory)
        if not pid:
            return None
        try:
            return ForkedWorker(self, pid)
        except ProcessLookupError:  # it has ended with its parent
            return None
        except BaseException:
            os.kill(pid, signal.SIGKILL)  # its parent keeps the id
            raise

    def code_of(self, pid: int) -> int:
        """Return the exit code of a worker that has ended; -SIGKILL if the parent ended before it."""
        code = self._ask({"ended": pid}, [])
        return -signal.SIGKILL if code is None else code

    def close(self) -> None:
        """End it, and its workers with it."""
        self.able = False
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Close this end of the channel in a child of pytest, which is not the parent of this process."""
        self._process.returncode = 0
        with contextlib.suppress(OSError):
            os.close(self._channel.detach())

    def _ask(self, request: Mapping[str, object], descriptors: list[int]) -> int | None:
        """Send a request and return the answer; None if the process has ended, or does not answer and was ended."""
        with self._lock:
            if not self.able:
                return None
            self._number += 1
            content = json.dumps({**request, "number": self._number}).encode() + b"\n"
            if descriptors:
                self._forks.add(self._number)
            try:
                sent = socket.send_fds(self._channel, [content], descriptors)
                self._channel.sendall(content[sent:])
            except BaseException as error:  # a part of the request may have been sent
                self.close()
                if isinstance(error, OSError):
                    return None
                raise
            return self._answer()

    def _answer(self) -> int | None:
        """Return the answer to the last request. A caller that was interrupted may have left an earlier one unread."""
        try:
            while True:
                while b"\n" not in self._received:
                    part = self._channel.recv(64)
                    if not part:
                        raise ConnectionResetError
                    self._received += part
                line, _, self._received = self._received.partition(b"\n")
                number, answer = map(int, line.split())
                if number == self._number:
                    return answer
                if number in self._forks and answer:
                    os.kill(answer, signal.SIGKILL)  # nobody knows this worker; its parent keeps its id
        except OSError:  # a late worker must not share the channel with the one that is executed instead
            self.close()
            return None


def execute(channel: socket.socket, log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Execute the process from which workers are forked.

    :param channel: its end of the channel to this process.
    :param log: the file for its output.
    :param environment: all its variables.
    """
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(channel.fileno())],
        pass_fds=[channel.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )
    let_end_first(process.pid)
    return process


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
    parent = prepare(supervisor, environment)
    if parent is None:
        return None
    same = parent.read_first == _read_first(environment) and parent.situation == _situation()
    return parent.fork(channel, log, environment) if same else None


def prepare(supervisor: SupervisorClient, environment: Mapping[str, str]) -> WorkerParent | None:
    """Return the process from which workers are forked, started if there is none; None if none may be forked.

    It is started early so that it has imported its modules when the first worker is needed.

    :param environment: all variables of a worker.
    """
    global _current
    if environment.get(FORK) == "0" or not _possible(environment):
        return None
    with _lock:
        if _current is None or _current.supervisor is not supervisor:
            if _current is not None:
                _current.close()
            _current = WorkerParent(supervisor, {BLAS_THREADS: "1", **os.environ})
        return _current


def parent_of_workers() -> int:
    """Return the id of the process from which workers are forked; 0 if there is none."""
    return 0 if _current is None else _current.pid


def starts_workers(pid: int) -> bool:
    """Whether a process starts the workers of this run: it is this process, or the one from which they are forked.

    :param pid: its id; 0, which a process from outside of a container has as its parent, is neither.
    """
    return pid in {os.getpid(), parent_of_workers()} - {0}


def _read_first(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_FIRST.match(name)}


def _possible(environment: Mapping[str, str]) -> bool:
    """Whether a worker with these variables may be forked, and the kernel can name it by a descriptor."""
    if any(environment.get(name) for name in _PRELOADED) or _content("/etc/ld.so.preload").strip():
        return False
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:  # a forked worker takes more of it
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old Python or kernel, or a filter of system calls
        return False
    return True


def _situation() -> tuple[object, ...]:
    """Return what a process inherits from its parent and a worker must have from this one."""
    folder = "/proc/thread-self"
    namespaces = [f"{folder}/ns/{name}" for name in _NAMESPACES]
    return (
        sys.executable,
        os.sched_getaffinity(0),
        os.sched_getscheduler(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        _INHERITED.findall(_content(f"{folder}/status")),
        [os.readlink(path) for path in namespaces if os.path.lexists(path)],
        [_content(f"{folder}/{name}") for name in ("cgroup", "oom_score_adj")],
        [resource.getrlimit(kind) for kind in _LIMITS],
    )


def _content(path: str) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def close_parent() -> None:
    """End the process from which workers are forked, if there is one, and its workers with it."""
    global _current
    with _lock:
        if _current is not None:
            _current.close()
            _current = None


def _forget_after_fork() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.forget()
        _current = None


atexit.register(close_parent)
os.register_at_fork(after_in_child=_forget_after_fork)
