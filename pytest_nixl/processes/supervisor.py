# SPDX-License-Identifier: Apache-2.0
"""Client of the supervisor, a process that cleans up what must not outlive the test run, even after ``kill -9``.

The supervisor starts at first use and ignores Ctrl-C. When its client is gone, it ends processes, removes
containers, deletes key prefixes in etcd, and removes its private run directory. Each worker of pytest-xdist has one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.resource_limits import file_fault
from pytest_nixl.processes.leftovers import remove_run
from pytest_nixl.processes.supervisor_main import start_time

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers bring it

    from pytest_nixl.etcd.client import Credentials
    from pytest_nixl.etcd.endpoints import Endpoint

#: Timeout in seconds for the start of the supervisor and for one answer (it ends a process within about 2 s).
ANSWER_SECONDS = 90.0
#: Seconds that :func:`close_supervisor` waits for the clean-up.
CLEAN_SECONDS = 10.0

#: What a Python runs that finds no packages. The folder of this one is in its path as long as it imports the
#: supervisor, behind those of Python itself.
_MAIN = (
    f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); "
    "from pytest_nixl.processes.supervisor_main import main; sys.path.pop(); main()"
)
_DOCKER_VARIABLES = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "HOME", "PATH")


class SupervisorError(NixlPluginError):
    """The supervisor could not be started, has ended, or could not execute a request."""


class SupervisorClient:
    """The connection of this process to its supervisor. Thread-safe."""

    def __init__(self, directory: Path, connection: socket.socket) -> None:
        #: The private run directory. The supervisor removes it with its contents.
        self.directory = directory
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()
        self._shared_memory: str | None = None
        #: The containers and prefixes that the supervisor watches for this client, with their passwords, by their keys.
        self._watched: dict[str, dict[str, Any]] = {}
        #: Process id of the supervisor.
        self.pid: int = self._ask("hello", path=[os.path.abspath(part) for part in sys.path])

    def spawn(self, argv: Sequence[str], *, log: str, env: Mapping[str, str | None] | None = None) -> int:
        """Start a process and return its pid. The supervisor ends the process when this client is gone.

        :param argv: program and arguments.
        :param log: name of a file in the run directory for stdout and stderr.
        :param env: variables to add to the environment; None removes a variable.
        :raises SupervisorError: if the program cannot be executed.
        """
        if Path(log).name != log:
            raise ValueError(f"{log!r} is not the name of a file in the run directory")
        pid: int = self._ask("spawn", argv=list(argv), env=dict(env or {}), log=log)
        return pid

    def stop(self, pid: int) -> str | None:
        """End a spawned process and its group (SIGTERM, after 2 s SIGKILL); return a description of its end."""
        how: str | None = self._ask("stop", pid=pid)
        return how

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to the process group of a spawned process; return whether the process still existed."""
        return bool(self._ask("kill", pid=pid, number=int(number)))

    def alive(self, pid: int) -> bool:
        """Whether a spawned process is still running."""
        return bool(self._ask("status", pid=pid)["alive"])

    def how_ended(self, pid: int) -> str:
        """Return how a spawned process ended: ``ended by SIGKILL``, ``ended with exit code 1``, or ``running``."""
        return str(self._ask("status", pid=pid)["how"])

    def watch_process(self, pid: int) -> bool:
        """Ask the supervisor to kill process ``pid`` when this client is gone; return False if it has already ended."""
        return bool(self._ask("watch_process", pid=pid))

    def unwatch_process(self, pid: int) -> None:
        """Stop watching a process."""
        self._ask("unwatch_process", pid=pid)

    def watch_container(self, name: str, *, expected: bool = False) -> None:
        """Ask the supervisor to remove a container when this client is gone.

        :param name: id or name of the container.
        :param expected: whether the container is not created yet, but will be under this name.
        """
        environment = {key: os.environ[key] for key in _DOCKER_VARIABLES if key in os.environ}
        item = {"kind": "container", "name": name, "environment": environment, "expected": expected}
        self._watch(f"container {name}", item)

    def unwatch_container(self, name: str) -> None:
        """Stop watching a container."""
        self._unwatch(f"container {name}")

    def watch_prefix(self, prefix: str, endpoints: Sequence[Endpoint], **credentials: Unpack[Credentials]) -> None:
        """Ask the supervisor to delete all keys under ``prefix`` when this client is gone.

        The credentials are kept only in the memory of the supervisor. See :func:`pytest_nixl.etcd.client.connect`.
        """
        parts = [[e.scheme, e.host, e.port, e.user, e.password] for e in endpoints]
        whole: dict[str, Any] = {**credentials}
        whole |= {name: os.path.abspath(whole[name]) for name in ("cacert", "cert", "key") if whole.get(name)}
        item = {"kind": "prefix", "name": prefix, "endpoints": parts, "credentials": whole}
        self._watch(_prefix_key(prefix, endpoints), item)

    def unwatch_prefix(self, prefix: str, endpoints: Sequence[Endpoint]) -> None:
        """Stop watching a prefix."""
        self._unwatch(_prefix_key(prefix, endpoints))

    def _watch(self, key: str, item: dict[str, Any]) -> None:
        self._watched[key] = item
        self._ask("watch_remote", key=key, item=item)

    def _unwatch(self, key: str) -> None:
        self._watched.pop(key, None)
        self._ask("unwatch_remote", key=key)

    @property
    def shared_memory(self) -> str:
        """Directory in /dev/shm for shared memory, removed with the supervisor. Empty if it cannot be made."""
        if self._shared_memory is None:
            self._shared_memory = str(self._ask("shared_memory"))
        return self._shared_memory

    def close(self) -> None:
        """Disconnect: the supervisor cleans up and ends. Does not wait."""
        self._reader.close()
        self._connection.close()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or in the process from which this one was forked."""
        return self._connection.fileno() < 0

    def _ask(self, operation: str, **request: Any) -> Any:
        with self._lock:
            if self.closed:
                raise SupervisorError("this connection to the supervisor is closed", "call supervisor() again")
            try:
                self._connection.sendall(json.dumps({"do": operation, **request}).encode() + b"\n")
                line = self._reader.readline()
            except OSError as error:
                raise self._gone(str(error)) from None
        if not line:
            raise self._gone("it closed the connection")
        answer = json.loads(line)
        if "error" in answer:
            program = f" {request['argv'][0]}" if "argv" in request else ""
            raise SupervisorError(f"the supervisor could not {operation.replace('_', ' ')}{program}: {answer['error']}")
        return answer.get("result")

    def _gone(self, reason: str) -> SupervisorError:
        self.close()
        remaining = _wait_until_gone(self) if hasattr(self, "pid") else []
        return SupervisorError(
            f"the supervisor of this run (pid {getattr(self, 'pid', 'unknown')}) has ended: {reason}",
            "find out what killed it (for example `dmesg | grep -i oom`); the processes that it owned ended with it",
            "\n".join(remaining),
        )


_current: SupervisorClient | None = None
_current_lock = threading.RLock()


def supervisor() -> SupervisorClient:
    """Return this process's connection to its supervisor; start one if there is none (also after a fork).

    :raises SupervisorError: if the supervisor cannot be started.
    """
    global _current
    with _current_lock:
        if _current is None or _current.closed:
            try:
                _current = _start()
            except OSError as error:
                reason, remedy = file_fault(error)
                raise SupervisorError(f"the supervisor of this run cannot be started: {reason}", remedy) from None
        return _current


def close_supervisor() -> None:
    """Disconnect from the supervisor, if connected, and wait until it has cleaned up."""
    global _current
    with _current_lock:
        if _current is None or _current.closed:
            return
        leaving, _current = _current, None
    leaving.close()
    _wait_until_gone(leaving)


def _wait_until_gone(leaving: SupervisorClient) -> list[str]:
    """Wait until the supervisor has cleaned up. If it was killed, remove what is left; return what could not be."""
    deadline = time.monotonic() + CLEAN_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(leaving.pid, os.WNOHANG)[0]:
                break
        except ChildProcessError:
            # Another process started it, or its exit status was already read.
            if start_time(leaving.pid) is None or not leaving.directory.exists():
                break
        time.sleep(0.005)
    else:
        return []
    if not leaving.directory.exists():
        return []
    return remove_run(str(leaving.directory), leaving._watched)


def _forget_after_fork() -> None:
    """Drop the parent's connection in a forked child, which must not keep it open."""
    global _current, _current_lock
    _current_lock = threading.RLock()
    if _current is not None:
        # A thread that does not exist in the child may hold the reader's lock: only close the descriptor.
        with contextlib.suppress(OSError):
            os.close(_current._connection.detach())
        _current = None


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close_supervisor)


def _start() -> SupervisorClient:
    """Start a supervisor for this process only.

    The supervisor makes the run directory after it holds its end of the connection. So if this process is killed at any
    time, either the supervisor notices it, or there is no directory yet.
    """
    if not os.path.isdir("/proc/self/fd"):
        raise SupervisorError(
            "/proc is not mounted, so pytest-nixl cannot find and end the processes of a run",
            "mount it: `mount -t proc proc /proc`",
        )
    ours, theirs = socket.socketpair()
    try:
        ours.settimeout(ANSWER_SECONDS)
        with theirs, tempfile.TemporaryFile() as log:
            answer = _launch(log, theirs.fileno())
        return SupervisorClient(Path(os.fsdecode(answer)), ours)
    except BaseException:
        ours.close()
        raise


def _launch(log: IO[bytes], connection: int) -> bytes:
    """Start the supervisor process, wait until it is ready, and return its run directory.

    :raises SupervisorError: if it does not start.
    """
    folder = tempfile.gettempdir()
    if "\n" in folder:  # the supervisor answers with one line, and UCX's and NIXL's logs would have its halves
        raise SupervisorError(
            f"the directory for temporary files, {folder!r}, has a line break in its name",
            "set TMPDIR to a directory without one",
        )
    ready, tell = os.pipe()
    with os.fdopen(ready, "rb") as pipe:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, str(tell), folder, str(connection)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                pass_fds=[tell, connection],
                start_new_session=True,
            )
        finally:
            os.close(tell)
        line = pipe.readline()
    if not line.startswith(b"ready "):
        process.wait(ANSWER_SECONDS)
        if line.startswith(b"failed "):
            number, _, path = os.fsdecode(line).removeprefix("failed ").rstrip("\n").partition(" ")
            raise OSError(int(number), os.strerror(int(number)), path)
        log.seek(0)
        text = log.read().decode(errors="replace").strip()
        raise SupervisorError("the supervisor did not start", "read its output below", text[-2000:])
    # It outlives this process. Setting a returncode avoids the ResourceWarning of Popen.
    process.returncode = 0
    return line.removeprefix(b"ready ").rstrip(b"\n")


def _prefix_key(prefix: str, endpoints: Sequence[Endpoint]) -> str:
    return f"prefix {prefix} {','.join(map(str, endpoints))}"
