# SPDX-License-Identifier: Apache-2.0
"""Nothing is left behind: a helper process that owns what must not outlive the test run.

It is started when first used, ignores Ctrl-C, and cleans when its last client has gone, also by ``kill -9``: processes,
containers, prefixes in an etcd, and its private run directory. The workers of pytest-xdist share one.
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

if TYPE_CHECKING:
    from pytest_nixl.etcd.endpoints import Endpoint

#: Seconds for the supervisor to start, and to answer one request (ending a process takes it 2 s at most).
ANSWER_SECONDS = 90.0
#: Seconds that :func:`close_supervisor` waits for the cleaning.
CLEAN_SECONDS = 10.0

_MAIN = Path(__file__).with_name("_supervisor_main.py")
_RUN_VARIABLE = "PYTEST_XDIST_TESTRUNUID"
_DOCKER_VARIABLES = ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "HOME", "PATH")


class SupervisorError(NixlPluginError):
    """The supervisor could not be started, has gone, or could not do what it was asked."""


class SupervisorClient:
    """The connection of this process to a supervisor. May be used by several threads."""

    def __init__(self, directory: Path, connection: socket.socket, *, shared: bool) -> None:
        #: The private run directory; it goes with everything in it.
        self.directory = directory
        #: Whether the workers of pytest-xdist share this supervisor.
        self.shared = shared
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()
        self._shared_memory: str | None = None
        #: The supervisor's own process.
        self.pid: int = self._ask("hello", path=[os.path.abspath(part) for part in sys.path])

    def spawn(
        self, argv: Sequence[str], *, log: str, env: Mapping[str, str | None] | None = None, shared: bool = False
    ) -> int:
        """Start a process that ends with this client (shared: with the last one), and return its pid.

        :param log: name in the run directory of the file that gets its stdout and stderr.
        :param env: what to add to the environment; None for a variable to remove.
        :raises SupervisorError: where the program cannot be executed.
        """
        if Path(log).name != log:
            raise ValueError(f"{log!r} is not the name of a file in the run directory")
        pid: int = self._ask("spawn", argv=list(argv), env=dict(env or {}), log=log, shared=shared)
        return pid

    def stop(self, pid: int) -> str | None:
        """End a spawned process and its group (SIGTERM, after 2 s SIGKILL); return how it ended."""
        how: str | None = self._ask("stop", pid=pid)
        return how

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to the group of a spawned process; return whether it was still there."""
        return bool(self._ask("kill", pid=pid, number=int(number)))

    def alive(self, pid: int) -> bool:
        """Whether a spawned process is still running."""
        return bool(self._ask("status", pid=pid)["alive"])

    def how_ended(self, pid: int) -> str:
        """Say how a spawned process ended: ``ended by SIGKILL``, ``ended with exit code 1``; or ``running``."""
        return str(self._ask("status", pid=pid)["how"])

    def watch_process(self, pid: int) -> bool:
        """Have a process that this one started killed when this one vanishes; False where it has ended already."""
        return bool(self._ask("watch_process", pid=pid))

    def unwatch_process(self, pid: int) -> None:
        """Forget a watched process."""
        self._ask("unwatch_process", pid=pid)

    def watch_container(self, name: str, *, shared: bool = False, expected: bool = False) -> None:
        """Have a container removed at the end.

        :param name: its id or name.
        :param expected: whether it is only about to be created, under this name.
        """
        environment = {key: os.environ[key] for key in _DOCKER_VARIABLES if key in os.environ}
        item = {"kind": "container", "name": name, "environment": environment, "expected": expected}
        self._ask("watch_remote", key=f"container {name}", item=item, shared=shared)

    def unwatch_container(self, name: str) -> None:
        """Forget a watched container."""
        self._ask("unwatch_remote", key=f"container {name}")

    def watch_prefix(
        self,
        prefix: str,
        endpoints: Sequence[Endpoint],
        *,
        cacert: str = "",
        cert: str = "",
        key: str = "",
        user: str = "",
        password: str = "",
    ) -> None:
        """Have every key under ``prefix`` deleted at the end. The credentials stay in the supervisor's memory."""
        parts = [[e.scheme, e.host, e.port, e.user, e.password] for e in endpoints]
        files = {name: os.path.abspath(path) if path else "" for name, path in
                 (("cacert", cacert), ("cert", cert), ("key", key))}  # fmt: skip
        credentials = {**files, "user": user, "password": password}
        item = {"kind": "prefix", "name": prefix, "endpoints": parts, "credentials": credentials}
        self._ask("watch_remote", key=_prefix_key(prefix, endpoints), item=item, shared=False)

    def unwatch_prefix(self, prefix: str, endpoints: Sequence[Endpoint]) -> None:
        """Forget a watched prefix."""
        self._ask("unwatch_remote", key=_prefix_key(prefix, endpoints))

    @property
    def shared_memory(self) -> str:
        """A directory in /dev/shm for what processes share; it goes with the supervisor. Empty: none can be made."""
        if self._shared_memory is None:
            self._shared_memory = str(self._ask("shared_memory"))
        return self._shared_memory

    def close(self) -> None:
        """Leave: what is this client's own goes now, what is shared goes with the last client. Does not wait."""
        self._reader.close()
        self._connection.close()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or in the process that this one was forked from."""
        return self._connection.fileno() < 0

    def _ask(self, operation: str, **request: Any) -> Any:
        with self._lock:
            if self.closed:
                raise SupervisorError("the supervisor of this run was left already", "call supervisor() again")
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
        return SupervisorError(
            f"the supervisor of this run (process {getattr(self, 'pid', 'unknown')}) has gone: {why}",
            "find out who killed it: the processes that it owned have ended with it",
        )


_current: SupervisorClient | None = None
_current_lock = threading.RLock()


def supervisor() -> SupervisorClient:
    """Return this process's supervisor; the first use, and the first after a close or a fork, starts or joins one.

    :raises SupervisorError: where it cannot be started.
    """
    global _current
    with _current_lock:
        if _current is None or _current.closed:
            _current = _join(_run_name())
        return _current


def close_supervisor() -> None:
    """Leave this process's supervisor, if there is one; where this was its last client, wait until it has cleaned."""
    global _current
    with _current_lock:
        if _current is None or _current.closed:
            return
        leaving, _current = _current, None
    leaving.close()
    if not leaving.shared:
        _wait_until_gone(leaving)


def _wait_until_gone(leaving: SupervisorClient) -> None:
    deadline = time.monotonic() + CLEAN_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(leaving.pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            # Started by another process, or reaped by somebody else.
            if not leaving.directory.exists():
                return
        time.sleep(0.005)


def _forget_after_fork() -> None:
    """A forked child has no claim on its parent's supervisor, and must not keep the connection open."""
    global _current, _current_lock
    _current_lock = threading.RLock()
    if _current is not None:
        # The reader's lock may be held by a thread that does not exist here: close the descriptor only.
        with contextlib.suppress(OSError):
            os.close(_current._connection.detach())
        _current = None


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close_supervisor)


def _run_name() -> str:
    """Return the name that all workers of one pytest-xdist run share, empty without xdist.

    xdist sets its variable inside each worker. A pytest that was started *by* a worker's test inherits it and is
    another run: there the variable is what the process was started with.
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
            "/proc is not mounted, and without it no process that a run starts can be found and ended",
            "mount it: `mount -t proc proc /proc`",
        )
    if not run:
        return SupervisorClient(*_start_own(), shared=False)
    directory = Path(tempfile.gettempdir()) / f"pytest-nixl-{os.geteuid()}-{run[:16]}"
    while True:
        _make_private(directory)
        with _locked(directory) as current:
            # A supervisor that has just cleaned took the directory away under us.
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
                "remove it, or point TMPDIR at a directory of your own",
            )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the lock of a run directory. Yields False where the directory was removed meanwhile."""
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
    """Hold a lock that the workers of one run share; it goes with the process that holds it.

    :param name: of the lock's file in the run directory.
    """
    file = os.open(owner.directory / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _start_own() -> tuple[Path, socket.socket]:
    """Start a supervisor that nobody shares. It makes the run directory itself, once it holds its end of our connection:
    whenever this process is killed, the supervisor reads that, or there is no directory yet.
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
    """Start the supervisor's process, wait until it is ready, and return its run directory.

    :raises SupervisorError: where it does not start.
    """
    ready, tell = os.pipe()
    with os.fdopen(ready, "rb") as pipe:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_MAIN), str(tell), *arguments],
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
        log.seek(0)
        text = log.read().decode(errors="replace").strip()
        raise SupervisorError("the supervisor did not start", "see what it wrote", text[-2000:])
    # It outlives this process; without a returncode, Popen would warn of that.
    process.returncode = 0
    return line.removeprefix(b"ready ").rstrip(b"\n")


def _connect(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_SECONDS)
    # By a descriptor of the folder: the path itself may be longer than a socket's address can be.
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
