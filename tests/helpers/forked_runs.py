# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest in processes that are forked from one which has imported pytest and the plugin.

Each is a process of its own, with its own directory, variables and output, as ``python -m pytest`` is. It does not
import Python's modules again, which is half of the processor time of most runs. For the same reason its workers are
forked, too, and so is the process that they are forked from; and the first row of a launch is timed as early as the
others. All are doubles: what a row measures is another figure, so a test that judges figures executes its runs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Variables that are read before a run's first line: by the loader, libc or Python. PYTHONPATH is applied by the run.
_READ_FIRST = re.compile(r"LD_|GLIBC_|MALLOC_|PYTHON(?!PATH$)|LC_|LANG|LOCPATH|TZ")
#: Packages of pytest_nixl of which a run imports modules when it needs them.
_PACKAGES = ("checks", "cluster", "etcd", "etcd_servers", "host", "judge", "measure", "nixl", "processes", "report",
             "session", "store")  # fmt: skip
#: What Python imports before its first line, if it is on the path.
_CUSTOM = {"sitecustomize", "usercustomize"}
#: Folders without modules that are imported already.
_OURS = (ROOT, ROOT / "tests")


def run_forked(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: int, errors: int, timeout: float
) -> int | None:
    """Run ``python -m pytest`` with ``arguments``; return its exit code, or None if it must be executed.

    :param env: all its variables.
    :param output: the descriptor of its stdout.
    :param errors: the descriptor of its stderr.
    :raises subprocess.TimeoutExpired: it took longer, and was killed.
    """
    parent = _Parent.current()
    paths = [str(cwd), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if _read_first(env) != parent.read_first or any(map(parent.shadowed_by, paths)):
        return None
    request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "path": paths}
    channel, pid = _ask(parent.address, request, [output, errors])
    with channel:
        channel.settimeout(timeout)
        try:
            return int(channel.recv(64))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, timeout) from None


def _ask(address: Any, request: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[socket.socket, int]:
    """Ask for a forked process; return the connection, which tells its exit code, and its id."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect(address)
        socket.send_fds(channel, [b"fork"], descriptors)
        channel.sendall(json.dumps(request).encode())
        return channel, int(channel.recv(64))
    except BaseException:
        channel.close()
        raise


def _read_first(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if _READ_FIRST.match(name)}


def _unsteered() -> dict[str, str]:
    """Return this process's variables without those that would change the run of :func:`_import_all`."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NIXL_"))}


class _Parent:
    """The process from which the runs are forked. It ends when this process ends."""

    _current: _Parent | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        # pytest must be the first that imports the package in a run, or it warns that it cannot rewrite it.
        from pytest_nixl.processes.worker_parent import BLAS_THREADS

        self._owner = os.getpid()
        self.read_first = _read_first(os.environ)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind("")  # a free name in the abstract namespace
            listening.listen(64)
            self.address = listening.getsockname()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                cwd=ROOT, env={**_unsteered(), BLAS_THREADS: "1"}, pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._process.stdout is not None
        with self._process.stdout as output:
            self._imported = _CUSTOM.union(json.loads(output.readline()))
        atexit.register(self._close)

    @classmethod
    def current(cls) -> _Parent:
        """Return that of this process."""
        with cls._lock:
            if cls._current is None or cls._current._owner != os.getpid():
                cls._current = cls()
            return cls._current

    def shadowed_by(self, path: str) -> bool:
        """Whether a folder has a module that a new Python would import in place of one that is imported already."""
        if Path(path) in _OURS or not Path(path).is_dir():
            return False
        return not self._imported.isdisjoint(name.partition(".")[0] for name in os.listdir(path))

    def _close(self) -> None:
        if self._owner == os.getpid():
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def _import_all() -> None:
    """Import what a run imports, by a run, and what others import later."""
    # The plugin by its name, because a run that names it wants it to be imported so.
    loaded = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:nixl", "-p", "pytest_nixl.plugin"]
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main([*loaded, "--collect-only", "-qq", "suites/bandwidth/test_bandwidth.py"])
    assert code == 0, code
    # pytest-xdist gives its workers the paths of its first import.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("conftest", "suites", "xdist")]:
        del sys.modules[name]
    for package in _PACKAGES:
        for module in pkgutil.iter_modules([str(ROOT / "pytest_nixl" / package)]):
            if not module.ispkg and not module.name.startswith("__"):
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"pytest_nixl.{package}.{module.name}")
    save_time(setattr)
    importlib.import_module("pytest_nixl.nixl.worker.commands")


def save_time(replace: Callable[[object, str, object], None]) -> None:
    """Let workers of rows be forked, and make few transfers before the first row of a launch."""
    from pytest_nixl.measure import worker_pair
    from pytest_nixl.processes import hosts

    replace(hosts, "EXECUTED", ())
    replace(worker_pair, "FIRST_SETTLE_SECONDS", worker_pair.SETTLE_SECONDS)


def _serve(listening: socket.socket) -> None:
    """Fork a run for each connection, until stdin is closed; tell its exit code when it has ended."""
    waiting = select.poll()
    waiting.register(0, select.POLLHUP)
    waiting.register(listening, select.POLLIN)
    runs: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor == 0:
                return
            if descriptor == listening.fileno():
                channel = listening.accept()[0]
                _, passed, _, _ = socket.recv_fds(channel, 16, 2)
                request = json.loads(channel.recv(1 << 20))
                pid = os.fork()
                if not pid:
                    for other in (listening, channel, *(theirs for _, theirs in runs.values())):
                        other.close()
                    for handle in runs:
                        os.close(handle)
                    (_run if "arguments" in request else _fork_workers)(request, passed)
                for each in passed:
                    os.close(each)
                handle = os.pidfd_open(pid)
                waiting.register(handle, select.POLLIN)
                runs[handle] = pid, channel
                channel.sendall(b"%d" % pid)
            else:
                pid, channel = runs.pop(descriptor)
                waiting.unregister(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with channel, contextlib.suppress(OSError):
                    channel.sendall(b"%d" % code)


def _run(request: Mapping[str, Any], outputs: Sequence[int]) -> NoReturn:
    """Be the run that was asked for."""
    _become(request, *outputs)
    os.chdir(request["cwd"])
    sys.argv = [str(Path(pytest.__file__).with_name("__main__.py")), *request["arguments"]]
    raise SystemExit(pytest.main())


def _fork_workers(request: Mapping[str, Any], passed: Sequence[int]) -> NoReturn:
    """Be the process from which a run forks its workers."""
    channel, log = passed
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _become(request, log, os.dup(log))
        work = importlib.import_module("pytest_nixl.nixl.worker.__main__").work
        from pytest_nixl.nixl.worker.forks import serve_forks

        serve_forks(socket.socket(fileno=channel), work)
    finally:
        os._exit(1)


def _become(request: Mapping[str, Any], output: int, errors: int) -> None:
    """Give a forked process what an executed one gets from its parent."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, errors)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:2] = request["path"]


class _WorkerParents:
    """What a run has in place of the module ``subprocess``, to start the process from which its workers are forked.

    :param address: where this process is asked for it.
    """

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    def __init__(self, address: Any) -> None:
        from pytest_nixl.processes import worker_parent

        self._address, self._ours = address, worker_parent
        self._read_first = self._without_path(os.environ)
        self._situation = worker_parent._situation()

    def Popen(  # noqa: N802 - its name in subprocess
        self, command: Sequence[str], *, pass_fds: Sequence[int], stdout: IO[bytes], env: Mapping[str, str], **more: Any
    ) -> _Forked | subprocess.Popen[bytes]:
        """Return the new process, which is executed if it would differ from this one in what cannot be changed."""
        if self._read_first != self._without_path(env) or self._situation != self._ours._situation():
            return subprocess.Popen(command, pass_fds=pass_fds, stdout=stdout, env=env, **more)
        path = [str(ROOT), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        channel, pid = _ask(self._address, {"env": dict(env), "path": path}, [*pass_fds, stdout.fileno()])
        channel.close()
        return _Forked(pid)

    def _without_path(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return what is read before a worker's first line, but for PYTHONPATH, which a forked process applies."""
        return {name: value for name, value in self._ours._read_first(env).items() if name != "PYTHONPATH"}


class _Forked:
    """A process that is no child of this one, with the methods of :class:`subprocess.Popen` that its owner needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it with SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for its end."""
        waiting = select.poll()
        waiting.register(self._handle, select.POLLIN)
        waiting.poll()
        os.close(self._handle)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, str(ROOT))
    _import_all()
    gc.collect()
    gc.freeze()
    os.write(1, json.dumps(sorted({name.partition(".")[0] for name in sys.modules})).encode() + b"\n")
    listening = socket.socket(fileno=int(sys.argv[1]))
    worker_parents = importlib.import_module("pytest_nixl.processes.worker_parent")
    setattr(worker_parents, "subprocess", _WorkerParents(listening.getsockname()))  # noqa: B010 - mypy: a module is one
    _serve(listening)
