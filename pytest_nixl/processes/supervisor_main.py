# SPDX-License-Identifier: Apache-2.0
"""The supervisor process: it owns what must not outlive a test run, and cleans up when its client is gone.

:mod:`pytest_nixl.processes.supervisor` starts it with the arguments READY FOLDER SOCKET: the end of a pipe, the folder
in which it makes the run directory, and the socket of its client.
It has one thread with one loop, and uses only the standard library: Python starts with ``-I`` and ``-S``, which is
faster and keeps the client's packages out of it. A clean-up that needs other packages runs in a forked child with the
client's ``sys.path`` (:mod:`pytest_nixl.processes.leftovers`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pytest_nixl.processes.leftovers import (
    OWNER,
    SHARED_MEMORY,
    abandoned,
    by_place,
    clean_remote,
    remove,
    remove_run,
    write_watched,
)

#: Seconds from SIGTERM to SIGKILL.
TERMINATE_SECONDS = 2.0
#: Timeout in seconds for removing containers and prefixes.
CLEAN_SECONDS = 8.0
#: Seconds to wait for the exit status of a process that has ended.
ZOMBIE_SECONDS = 0.5

_PR_SET_PDEATHSIG = 1


def start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended.

    Pid and start time together identify one process, even if the pid is used again.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    # A zombie has ended.
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def describe_status(status: int) -> str:
    """Return in words how a process ended. ``status`` is the status from ``waitpid``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"ended by {signal.Signals(number).name}"
        except ValueError:
            return f"ended by signal {number}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


class Supervisor:
    """The event loop of the supervisor, and the resources that it owns.

    :param folder: the folder in which it makes the run directory.
    :param ready: the end of a pipe, on which it says that it is ready.
    :param connection: the connection to its client.
    """

    def __init__(self, folder: str, ready: int, connection: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.connection = connection
        self.buffer = b""
        self.path: list[str] = []
        self.watched: dict[int, str] = {}
        self.remote: dict[str, dict[str, Any]] = {}
        self.living: set[int] = set()
        self.ended: dict[int, str] = {}
        self.stopping: dict[int, float] = {}
        self.waiting: list[int] = []
        self.cleaners: dict[int, float] = {}
        self.is_to_end = False
        self._watch_signals()
        self.directory = _make_directory(folder)
        self.shm = _make_shared_memory(os.path.basename(self.directory))
        try:
            _write_log(self.directory)
            self._own()
        except BaseException:
            for path in filter(None, (self.shm, self.directory)):
                remove(path)
            raise
        self.selector.register(connection, selectors.EVENT_READ)
        # The process that waits for this line may be dead. Then its connection ends.
        with contextlib.suppress(OSError):
            os.write(ready, b"ready " + os.fsencode(self.directory) + b"\n")
        os.close(ready)

    def _own(self) -> None:
        """Hold the locks of the files ``owner``, which appear with their locks held, until this process ends."""
        for directory in filter(None, (self.shm, self.directory)):
            path = os.path.join(directory, OWNER)
            owned = os.open(f"{path}-new", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(owned, fcntl.LOCK_EX)
            os.write(owned, os.fsencode(os.path.basename(self.directory)))
            os.rename(f"{path}-new", path)

    def _watch_signals(self) -> None:
        self.wake, write = os.pipe()
        for end in (self.wake, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ending in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(ending, self._on_term)
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        self.selector.register(self.wake, selectors.EVENT_READ)

    def _on_term(self, *_: object) -> None:
        self.is_to_end = True

    # The loop

    def run(self) -> None:
        """Serve until the client is gone, or SIGTERM or SIGQUIT comes; then clean up."""
        try:
            while not self.is_to_end:
                deadlines = [*self.stopping.values(), *self.cleaners.values()]
                self._turn(max(0.0, min(deadlines) - time.monotonic()) if deadlines else None)
        finally:
            self._clean()

    def _turn(self, timeout: float | None) -> None:
        for key, _ in self.selector.select(timeout):
            if key.fileobj is self.connection:
                self._receive()
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake, 4096)
        self._reap()
        self._escalate()

    def _receive(self) -> None:
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.is_to_end = True
            return
        self.buffer += data
        while b"\n" in self.buffer:
            line, self.buffer = self.buffer.split(b"\n", 1)
            self._answer(json.loads(line))

    def _answer(self, request: dict[str, Any]) -> None:
        operation = getattr(self, f"do_{request.pop('do')}")
        try:
            result = operation(**request)
        except OSError as error:
            self._send({"error": f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")})
            return
        if result is not _LATER:
            self._send({"result": result})

    def _send(self, answer: dict[str, Any]) -> None:
        # If the client has ended before its answer, the next read notices it.
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(answer).encode() + b"\n")

    # Requests

    def do_hello(self, path: list[str]) -> int:
        """Store the client's ``sys.path``, which the clean-up of containers and prefixes uses; return the own pid."""
        self.path = path
        if remaining := abandoned(os.path.dirname(self.directory)):
            self._fork_cleaner(partial(_remove_runs, remaining))
        return os.getpid()

    def do_shared_memory(self) -> str:
        """Return the directory in /dev/shm; empty if there is none."""
        return self.shm

    def do_spawn(self, argv: list[str], env: dict[str, str | None], log: str) -> int:
        """Start a process that dies with the supervisor; return its pid."""
        environment = {**os.environ, **{name: value for name, value in env.items() if value is not None}}
        for name in (name for name, value in env.items() if value is None):
            environment.pop(name, None)
        pid = self._fork(argv, environment, os.path.join(self.directory, log))
        self.living.add(pid)
        return pid

    def do_stop(self, pid: int) -> Any:
        """End a process and its group; the answer is sent after it has ended."""
        if pid not in self.living:
            return self.ended.get(pid)
        self._terminate(pid)
        self.waiting.append(pid)
        return _LATER

    def do_kill(self, pid: int, number: int) -> bool:
        """Send a signal to the group of a process that the supervisor started."""
        if pid not in self.living:
            return False
        return _signal_group(pid, number)

    def do_status(self, pid: int) -> dict[str, Any]:
        """Return whether a process is alive, and how it ended."""
        self._reap()
        # A process with many threads is a zombie for a moment before its exit status is available.
        deadline = time.monotonic() + ZOMBIE_SECONDS
        while pid in self.living and start_time(pid) is None and time.monotonic() < deadline:
            time.sleep(0.002)
            self._reap()
        if pid in self.living:
            return {"alive": True, "how": "running"}
        return {"alive": False, "how": self.ended.get(pid, "was not started by this supervisor")}

    def do_watch_process(self, pid: int) -> bool:
        """Kill a process when the client is gone; return False if it has already ended."""
        started = start_time(pid)
        if started is None:
            return False
        self.watched[pid] = started
        return True

    def do_unwatch_process(self, pid: int) -> None:
        self.watched.pop(pid, None)

    def do_watch_remote(self, key: str, item: dict[str, Any]) -> None:
        """Remove a container or a prefix when the client is gone."""
        self.remote[key] = item
        write_watched(self.directory, self.remote)

    def do_unwatch_remote(self, key: str) -> None:
        self.remote.pop(key, None)
        write_watched(self.directory, self.remote)

    # Processes

    def _fork(self, argv: list[str], environment: dict[str, str], log: str) -> int:
        prctl = _prctl()
        supervisor = os.getpid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        failed, fail = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != supervisor:
                    os._exit(1)
                null = os.open(os.devnull, os.O_RDONLY)
                for number, descriptor in enumerate((null, output, output)):
                    os.dup2(descriptor, number)
                for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(argv[0], argv, environment)
            except OSError as error:
                os.write(fail, str(error.errno).encode())
            finally:
                os._exit(127)
        os.close(fail)
        os.close(output)
        with os.fdopen(failed, "rb") as file:
            failure = file.read()
        if failure:
            os.waitpid(pid, 0)
            raise OSError(int(failure), os.strerror(int(failure)), argv[0])
        return pid

    def _terminate(self, pid: int) -> None:
        if pid in self.living and pid not in self.stopping:
            # A stopped process handles SIGTERM only after SIGCONT.
            for number in (signal.SIGTERM, signal.SIGCONT):
                _signal_group(pid, number)
            self.stopping[pid] = time.monotonic() + TERMINATE_SECONDS

    def _escalate(self) -> None:
        now = time.monotonic()
        for pid in [pid for pid, deadline in self.stopping.items() if deadline <= now]:
            _signal_group(pid, signal.SIGKILL)
            self.stopping[pid] = now + TERMINATE_SECONDS
        for pid in [pid for pid, deadline in self.cleaners.items() if deadline <= now]:
            _signal_group(pid, signal.SIGKILL)
            self.cleaners[pid] = now + TERMINATE_SECONDS

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.cleaners.pop(pid, None) is None and pid in self.living:
                self.living.discard(pid)
                self.stopping.pop(pid, None)
                self.ended[pid] = describe_status(status)
                # Kill the rest of its process group.
                _signal_group(pid, signal.SIGKILL)
            while pid in self.waiting:
                self.waiting.remove(pid)
                self._send({"result": self.ended.get(pid)})

    # Cleaning

    def _fork_cleaner(self, clean: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                sys.path[:] = [
                    os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))),
                    *self.path,
                ]
                clean()
                code = 0
            finally:
                os._exit(code)
        self.cleaners[pid] = time.monotonic() + CLEAN_SECONDS

    def _clean(self) -> None:
        self.selector.unregister(self.connection)
        self.connection.close()
        self.kill_watched()
        # Prefixes in an external etcd must be deleted. The etcd processes of this run end after the cleaners.
        for items in by_place(self.remote.values()):
            self._fork_cleaner(partial(_clean_remote, items))
        for pid in self.living:
            self._terminate(pid)
        deadline = time.monotonic() + CLEAN_SECONDS + 1.0
        while (self.living or self.cleaners) and time.monotonic() < deadline:
            self._turn(0.05)
        for pid in self.living:
            _signal_group(pid, signal.SIGKILL)
        if self.shm:
            remove(self.shm)
        remove(self.directory)

    def kill_watched(self) -> None:
        """Kill the watched processes that still run."""
        for pid, started in self.watched.items():
            if start_time(pid) == started:
                _kill_watched(pid)


_LATER = object()


def _clean_remote(items: list[dict[str, Any]]) -> None:
    for remaining in clean_remote(items):
        print(f"supervisor: {remaining}", file=sys.stderr)


def _remove_runs(directories: list[str]) -> None:
    for directory in directories:
        remove_run(directory)


def _make_directory(folder: str) -> str:
    """Make a private directory with an unused name in ``folder``; return its path."""
    while True:
        directory = os.path.join(folder, f"pytest-nixl-{os.urandom(6).hex()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
            return directory


def _make_shared_memory(name: str) -> str:
    """Make a private directory in /dev/shm; return its path, or an empty string if it cannot be made."""
    directory = f"{SHARED_MEMORY}/{name}"
    try:
        if not os.statvfs(SHARED_MEMORY).f_bavail:  # no file in the directory could be written
            return ""
        os.mkdir(directory, 0o700)
    except OSError:
        return ""
    return directory


def _write_log(directory: str) -> None:
    """Redirect stdout and stderr to the supervisor's log."""
    log = os.open(os.path.join(directory, "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)


def _prctl() -> Any:
    return ctypes.CDLL(None, use_errno=True).prctl


def _signal_group(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _kill_watched(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Be the supervisor until its client is gone."""
    _prctl()(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # a supervisor that was stopped resumes to clean up
    ready, directory = int(sys.argv[1]), sys.argv[2]
    try:
        started = Supervisor(directory, ready, socket.socket(fileno=int(sys.argv[3])))
    except OSError as error:
        path = os.path.join(directory, error.filename or "")  # it may be relative to the run directory
        os.write(ready, os.fsencode(f"failed {error.errno or 0} {path}\n"))
        os._exit(1)
    started.run()
    # Skip the interpreter's shutdown: nothing is left to do.
    os._exit(0)
