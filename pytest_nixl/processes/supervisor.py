# SPDX-License-Identifier: Apache-2.0
"""Client of the supervisor, a process that cleans up what must not outlive the test run, even after ``kill -9``.

The supervisor starts at first use and ignores Ctrl-C. When its last client is gone, it ends processes, removes
containers, deletes key prefixes in etcd, and removes its private run directory. The workers of pytest-xdist share one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
_RUN_VARIABLE = "PYTEST_XDIST_TESTRUNUID"
_DOCKER_VARIABLES = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "HOME", "PATH")


class SupervisorError(NixlPluginError):
    """The supervisor could not be started, has ended, or could not execute a request."""


class SupervisorClient:
    """The connection of this process to its supervisor. Thread-safe."""

    def __init__(self, directory: Path, connection: socket.socket, *, shared: bool) -> None:
        #: The private run directory. The supervisor removes it with its contents.
        self.directory = directory
        #: Whether the workers of pytest-xdist share this supervisor.
        self.shared = shared
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()
        self._shared_memory: str | None = None
        #: The containers and prefixes that the supervisor watches for this client, with their passwords, by their keys.
        self._watched: dict[str, dict[str, Any]] = {}
        #: Process id of the supervisor.
        self.pid: int = self._ask("hello", path=[os.path.abspath(part) for part in sys.path])

    def spawn(
        self, argv: Sequence[str], *, log: str, env: Mapping[str, str | None] | None = None, shared: bool = False
    ) -> int:
        """Start a process and return its pid. The supervisor ends the process when this client is gone.

        :param argv: program and arguments.
        :param log: name of a file in the run directory for stdout and stderr.
        :param env: variables to add to the environment; None removes a variable.
        :param shared: whether the process lives until the last client is gone.
        :raises SupervisorError: if the program cannot be executed.
        """
        if Path(log).name != log:
            raise ValueError(f"{log!r} is not the name of a file in the run directory")
        pid: int = self._ask("spawn", argv=list(argv), env=dict(env or {}), log=log, shared=shared)
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

    def watch_container(self, name: str, *, shared: bool = False, expected: bool = False) -> None:
        """Ask the supervisor to remove a container when this client is gone.

        :param name: id or name of the container.
        :param shared: whether to remove it only when the last client is gone.
        :param expected: whether the container is not created yet, but will be under this name.
        """
        environment = {key: os.environ[key] for key in _DOCKER_VARIABLES if key in os.environ}
        item = {"kind": "container", "name": name, "environment": environment, "expected": expected}
        self._watch(f"container {name}", item, shared)

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
        self._watch(_prefix_key(prefix, endpoints), item, shared=False)

    def unwatch_prefix(self, prefix: str, endpoints: Sequence[Endpoint]) -> None:
        """Stop watching a prefix."""
        self._unwatch(_prefix_key(prefix, endpoints))

    def _watch(self, key: str, item: dict[str, Any], shared: bool) -> None:
        self._watched[key] = item
        self._ask("watch_remote", key=key, item=item, shared=shared)

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
        """Disconnect: this client's resources are cleaned up now, shared ones with the last client. Does not wait."""
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
            what = f" {request['argv'][0]}" if "argv" in request else ""
            raise SupervisorError(f"the supervisor could not {operation.replace('_', ' ')}{what}: {answer['error']}")
        return answer.get("result")

    def _gone(self, why: str) -> SupervisorError:
        self.close()
        left = _wait_until_gone(self) if hasattr(self, "pid") else []
        return SupervisorError(
            f"the supervisor of this run (pid {getattr(self, 'pid', 'unknown')}) has ended: {why}",
            "find out what killed it (for example `dmesg | grep -i oom`); the processes that it owned ended with it",
            "\n".join(left),
        )


_current: SupervisorClient | None = None
_current_lock = threading.RLock()


def supervisor() -> SupervisorClient:
    """Return this process's connection to its supervisor; start or join one if there is none (also after a fork).

    :raises SupervisorError: if the supervisor cannot be started.
    """
    global _current
    with _current_lock:
        if _current is None or _current.closed:
            try:
                _current = _join(_run_name())
            except OSError as error:
                words, remedy = file_fault(error)
                raise SupervisorError(f"the supervisor of this run cannot be started: {words}", remedy) from None
        return _current


def close_supervisor() -> None:
    """Disconnect from the supervisor, if connected. If it is not shared, wait until it has cleaned up."""
    global _current
    with _current_lock:
        if _current is None or _current.closed:
            return
        leaving, _current = _current, None
    leaving.close()
    if not leaving.shared or start_time(leaving.pid) is None:
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


def _run_name() -> str:
    """Return the name that all workers of one pytest-xdist run share; empty without xdist.

    xdist sets its variable inside each worker. If a worker's test starts another pytest, that is another run. It
    inherits the variable, so there the variable is in the environment with which the process was started.
    """
    run = os.environ.get(_RUN_VARIABLE, "")
    try:
        inherited = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        inherited = []
    return "" if f"{_RUN_VARIABLE}={run}".encode() in inherited else run


def _join(run: str) -> SupervisorClient:
    if not os.path.isdir("/proc/self/fd"):
        raise SupervisorError(
            "/proc is not mounted, so pytest-nixl cannot find and end the processes of a run",
            "mount it: `mount -t proc proc /proc`",
        )
    if not run:
        return SupervisorClient(*_start_own(), shared=False)
    directory = Path(tempfile.gettempdir()) / f"pytest-nixl-{os.geteuid()}-{run[:16]}"
    while True:
        _make_private(directory)
        with _locked(directory) as current:
            # A supervisor that was just ending has removed the directory: try again.
            if not current:
                continue
            try:
                connection = _connect(directory)
            except OSError:
                _start(directory)
                connection = _connect(directory)
            return SupervisorClient(directory, connection, shared=True)


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    with contextlib.suppress(FileNotFoundError):
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise SupervisorError(
                f"the run directory {directory} is not a private directory of this user",
                "remove it, or set TMPDIR to a directory of your own",
            )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the lock of a run directory. Yield False if the directory was removed in the meantime."""
    path = directory / "lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            current = os.path.samestat(os.fstat(file), path.stat())
        except FileNotFoundError:
            current = False
        yield current
    finally:
        os.close(file)


@contextlib.contextmanager
def locked(owner: SupervisorClient, name: str) -> Iterator[None]:
    """Hold a lock that the xdist workers of one run share. The lock is released if its holder ends.

    :param owner: connection to the supervisor.
    :param name: name of the lock file in the run directory.
    """
    file = os.open(owner.directory / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _start_own() -> tuple[Path, socket.socket]:
    """Start a supervisor for this process only.

    The supervisor makes the run directory after it holds its end of the connection. So if this process is killed at any
    time, either the supervisor notices it, or there is no directory yet.
    """
    ours, theirs = socket.socketpair()
    try:
        ours.settimeout(ANSWER_SECONDS)
        with theirs, tempfile.TemporaryFile() as log:
            said = _launch(log, [tempfile.gettempdir(), str(theirs.fileno())], [theirs.fileno()])
        return Path(os.fsdecode(said)), ours
    except BaseException:
        ours.close()
        raise


def _start(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        (directory / "supervisor.socket").unlink()
    with open(directory / "supervisor.log", "a+b") as log:
        _launch(log, [str(directory)], [])


def _launch(log: IO[bytes], arguments: Sequence[str], descriptors: Sequence[int]) -> bytes:
    """Start the supervisor process, wait until it is ready, and return its run directory.

    :raises SupervisorError: if it does not start.
    """
    ready, tell = os.pipe()
    with os.fdopen(ready, "rb") as pipe:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, str(tell), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                pass_fds=[tell, *descriptors],
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


def _connect(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_SECONDS)
    # Use a descriptor of the directory, because its path may be too long for a socket address.
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{folder}/supervisor.socket")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def _prefix_key(prefix: str, endpoints: Sequence[Endpoint]) -> str:
    return f"prefix {prefix} {','.join(map(str, endpoints))}"
