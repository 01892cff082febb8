# SPDX-License-Identifier: Apache-2.0
"""The supervisor process: it owns what must not outlive a test run, and cleans up when its last client is gone.

:mod:`pytest_nixl.processes.supervisor` starts it with the arguments READY DIRECTORY, or with READY FOLDER SOCKET: a
folder in which it makes the run directory, and the socket of its first client. READY is the end of a pipe.
It has one thread with one loop, and uses only the standard library: Python starts with ``-I`` and ``-S``, which is
faster and keeps the client's packages out of it. A clean-up that needs other packages runs in a forked child with the
client's ``sys.path`` (:mod:`pytest_nixl.processes.leftovers`).
"""

from __future__ import annotations

import contextlib
import errno
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
    watched,
    write_watched,
)

#: Seconds from SIGTERM to SIGKILL.
TERMINATE_SECONDS = 2.0
#: Timeout in seconds for removing containers and prefixes.
CLEAN_SECONDS = 8.0
#: Seconds to wait for the exit status of a process that has ended.
ZOMBIE_SECONDS = 0.5
#: Seconds after which a supervisor ends if no client ever connects.
LONELY_SECONDS = 10.0

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


class Client:
    """One connection, and the resources to clean up when it ends."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = b""
        self.children: set[int] = set()
        self.watched: dict[int, str] = {}
        self.remote: dict[str, dict[str, Any]] = {}
        self.path: list[str] = []


class Supervisor:
    """The event loop of the supervisor, and the resources that it owns."""

    def __init__(self, directory: str, ready: int, first: int | None = None) -> None:
        self.selector = selectors.DefaultSelector()
        self.clients: set[Client] = set()
        self.shared = Client(socket.socket(socket.AF_UNIX))
        self.ended: dict[int, str] = {}
        self.living: set[int] = set()
        self.stopping: dict[int, float] = {}
        self.waiting: list[tuple[Client, int]] = []
        self.cleaners: dict[int, float] = {}
        self.had_client = False
        self.end_by: float | None = None
        self.born = time.monotonic()
        self._watch_signals()
        self.is_shared = first is None
        self.directory = directory if first is None else _make_directory(directory)
        self.shm = _make_shared_memory(os.path.basename(self.directory))
        try:
            if first is not None:
                _write_log(self.directory)
                self._welcome(socket.socket(fileno=first))
            self.folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            self._own()
            self._listen()
        except BaseException:
            for made in filter(None, (self.shm, "" if self.is_shared else self.directory)):
                remove(made)
            raise
        # The process that waits for this line may be dead. Then its connection ends, or no client ever connects.
        with contextlib.suppress(OSError):
            os.write(ready, b"ready " + os.fsencode(self.directory) + b"\n")
        os.close(ready)

    def _own(self) -> None:
        """Hold the lock of the file ``owner``, which appears with its lock held, and take over what is written down."""
        name = f"{OWNER}-{os.getpid()}"
        self.owned = os.open(name, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self.folder)
        fcntl.flock(self.owned, fcntl.LOCK_EX)
        os.write(self.owned, os.fsencode(os.path.basename(self.directory)))
        os.rename(name, OWNER, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        self.shared.remote.update(watched(self.directory))

    def _note_watched(self) -> None:
        owners = (self.shared, *self.clients)
        write_watched(self.directory, {key: item for each in owners for key, item in each.remote.items()})

    def _listen(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        # Use a descriptor of the directory, because its path may be too long for a socket address.
        self.listener.bind(f"/proc/self/fd/{self.folder}/supervisor.socket")
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)

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
        if self.end_by is None:
            self.end_by = time.monotonic() + TERMINATE_SECONDS

    # The loop

    def run(self) -> None:
        """Serve until the last client is gone, or SIGTERM or SIGQUIT comes; then clean up."""
        try:
            while not (self._is_to_end() and self._close_door()):
                self._turn(self._next_deadline())
        finally:
            self._clean_all()

    def _is_to_end(self) -> bool:
        """Whether SIGTERM or SIGQUIT has come, the last client has gone, or none has come in time."""
        if self.end_by is not None:
            return True
        return not self.clients if self.had_client else time.monotonic() - self.born > LONELY_SECONDS

    def _turn(self, timeout: float | None) -> None:
        for key, _ in self.selector.select(timeout):
            if key.fileobj is self.listener:
                self._accept()
            elif key.fd == self.wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake, 4096)
            elif isinstance(key.data, Client):
                self._receive(key.data)
        self._reap()
        self._escalate()

    def _next_deadline(self) -> float | None:
        deadlines = [*self.stopping.values(), *self.cleaners.values()]
        if not self.had_client:
            deadlines.append(self.born + LONELY_SECONDS + 0.1)
        if self._is_to_end():
            return 0.01
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _close_door(self) -> bool:
        """Prevent further connections; return False if a client is connecting right now.

        The lock is held until this process ends, so that no other supervisor starts in the directory meanwhile.
        """
        self.lock = os.open("lock", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self.folder)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            # A client that was stopped while it connects must not keep a supervisor that was asked to end.
            return self.end_by is not None and time.monotonic() > self.end_by
        self._accept()
        if self.clients and self.end_by is None:
            os.close(self.lock)
            return False
        return True

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.ECONNABORTED):
                    raise
                return
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        client = Client(connection)
        self.clients.add(client)
        self.had_client = True
        self.selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: Client) -> None:
        try:
            data = client.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._vanished(client)
            return
        client.buffer += data
        while b"\n" in client.buffer:
            line, client.buffer = client.buffer.split(b"\n", 1)
            self._answer(client, json.loads(line))

    def _answer(self, client: Client, request: dict[str, Any]) -> None:
        operation = getattr(self, f"do_{request.pop('do')}")
        try:
            result = operation(client, **request)
        except OSError as error:
            self._send(client, {"error": f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")})
            return
        if result is not _LATER:
            self._send(client, {"result": result})

    def _send(self, client: Client, answer: dict[str, Any]) -> None:
        # If the client has ended before its answer, the next read notices it.
        with contextlib.suppress(OSError):
            client.connection.sendall(json.dumps(answer).encode() + b"\n")

    # Requests

    def do_hello(self, client: Client, path: list[str]) -> int:
        """Store the client's ``sys.path``, which the clean-up of containers and prefixes uses; return the own pid."""
        client.path = path
        if not self.shared.path and (left := abandoned(os.path.dirname(self.directory))):
            self._fork_cleaner(path, partial(_remove_runs, left))
        self.shared.path = path
        return os.getpid()

    def do_shared_memory(self, client: Client) -> str:
        """Return the directory in /dev/shm; empty if there is none."""
        return self.shm

    def do_spawn(self, client: Client, argv: list[str], env: dict[str, str | None], log: str, shared: bool) -> int:
        """Start a process that dies with the supervisor; return its pid."""
        environment = {**os.environ, **{name: value for name, value in env.items() if value is not None}}
        for name in (name for name, value in env.items() if value is None):
            environment.pop(name, None)
        pid = self._fork(argv, environment, os.path.join(self.directory, log))
        self.living.add(pid)
        (self.shared if shared else client).children.add(pid)
        return pid

    def do_stop(self, client: Client, pid: int) -> Any:
        """End a process and its group; the answer is sent after it has ended."""
        if pid not in self.living:
            return self.ended.get(pid)
        self._terminate(pid)
        self.waiting.append((client, pid))
        return _LATER

    def do_kill(self, client: Client, pid: int, number: int) -> bool:
        """Send a signal to the group of a process that the supervisor started."""
        if pid not in self.living:
            return False
        return _signal_group(pid, number)

    def do_status(self, client: Client, pid: int) -> dict[str, Any]:
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

    def do_watch_process(self, client: Client, pid: int) -> bool:
        """Kill a process when the client is gone; return False if it has already ended."""
        started = start_time(pid)
        if started is None:
            return False
        client.watched[pid] = started
        return True

    def do_unwatch_process(self, client: Client, pid: int) -> None:
        client.watched.pop(pid, None)

    def do_watch_remote(self, client: Client, key: str, item: dict[str, Any], shared: bool) -> None:
        """Remove a container or a prefix when the client (with ``shared``: the last client) is gone."""
        (self.shared if shared else client).remote[key] = item
        self._note_watched()

    def do_unwatch_remote(self, client: Client, key: str) -> None:
        client.remote.pop(key, None)
        self.shared.remote.pop(key, None)
        self._note_watched()

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
            for item in [item for item in self.waiting if item[1] == pid]:
                self.waiting.remove(item)
                self._send(item[0], {"result": self.ended.get(pid)})

    # Cleaning

    def _vanished(self, client: Client) -> None:
        self.selector.unregister(client.connection)
        client.connection.close()
        self.clients.discard(client)
        self.waiting = [item for item in self.waiting if item[0] is not client]
        self._clean(client)

    def _clean(self, client: Client) -> None:
        for pid, started in client.watched.items():
            if start_time(pid) == started:
                _kill_watched(pid)
        for items in by_place(client.remote.values()):
            self._fork_cleaner(client.path, partial(_clean_remote, items))
        for pid in client.children:
            self._terminate(pid)

    def _fork_cleaner(self, path: list[str], clean: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                sys.path[:] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))), *path]
                clean()
                code = 0
            finally:
                os._exit(code)
        self.cleaners[pid] = time.monotonic() + CLEAN_SECONDS

    def _clean_all(self) -> None:
        for client in [*self.clients]:
            self._vanished(client)
        self.selector.unregister(self.listener)
        self.listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink("supervisor.socket", dir_fd=self.folder)
        # Prefixes in an external etcd must be deleted. The etcd processes of this run end after the cleaners.
        self._clean(self.shared)
        deadline = time.monotonic() + CLEAN_SECONDS + 1.0
        while (self.living or self.cleaners) and time.monotonic() < deadline:
            self._turn(0.05)
        for pid in self.living:
            _signal_group(pid, signal.SIGKILL)
        if self.shm:
            remove(self.shm)
        remove(self._withdrawn() if self.is_shared else self.directory)

    def _withdrawn(self) -> str:
        """Rename the shared run directory, whose name is known to others: none must use it while it is removed."""
        path = f"{self.directory}-{os.getpid()}"
        try:
            os.rename(self.directory, path)
        except OSError:
            return self.directory
        return path


_LATER = object()


def _clean_remote(items: list[dict[str, Any]]) -> None:
    for left in clean_remote(items):
        print(f"supervisor: {left}", file=sys.stderr)


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
    import ctypes

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
    """Be the supervisor until its last client is gone."""
    ready, directory = int(sys.argv[1]), sys.argv[2]
    try:
        started = Supervisor(directory, ready, int(sys.argv[3]) if len(sys.argv) > 3 else None)
    except OSError as error:
        path = os.path.join(directory, error.filename or "")  # it may be relative to the run directory
        os.write(ready, os.fsencode(f"failed {error.errno or 0} {path}\n"))
        os._exit(1)
    started.run()
    # Skip the interpreter's shutdown: nothing is left to do.
    os._exit(0)
