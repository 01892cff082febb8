# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest, or of our command, in processes forked from one which has imported pytest and the plugin.

Each is a process of its own, with its own directory, variables and output, as ``python -m pytest`` is. It does not
import Python's modules again, which is half of the processor time of most runs. For the same reason its workers are
forked, too, and the first row of a launch is timed as early as the others. Both are doubles: what a row measures is
another figure, so a test that judges figures executes its runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Variables that are read before a run's first line: by the loader, libc or Python. PYTHONPATH is applied by the run.
_READ_FIRST = re.compile(r"LD_|GLIBC_|MALLOC_|PYTHON(?!PATH$)|LC_|LANG|LOCPATH|TZ")
#: Packages of pytest_nixl of which a run imports modules when it needs them.
_PACKAGES = ("checks", "checks/doctor", "cluster", "etcd", "etcd_servers", "host", "judge", "measure", "nixl",
             "processes", "report", "session", "store")  # fmt: skip
_Variables = tuple[tuple[str, str], ...]
#: What Python imports before its first line, if it is on the path.
_CUSTOM = {"sitecustomize", "usercustomize"}
#: For setns and prctl, from Linux's headers: Python has names for them from 3.12 on.
_NEWNS, _NEWUTS, _NEWNET = 0x20000, 0x4000000, 0x40000000
_PR_SET_PDEATHSIG = 1
#: Folders without modules that are imported already.
_OURS = (ROOT, ROOT / "tests")


def start_forked(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: int, errors: int, host: int = 0,
    module: str = "pytest",
) -> ForkedRun | None:  # fmt: skip
    """Start ``python -m pytest`` with ``arguments``; return it, or None if it must be executed.

    :param env: all its variables.
    :param output: the descriptor of its stdout.
    :param errors: the descriptor of its stderr.
    :param host: the id of the process whose namespaces it enters; 0 for none. ``cwd`` is a path there.
    :param module: what is started instead of pytest: ``pytest_nixl.cli``.
    """
    parent = _Parent.of(_read_first(env))
    paths = [str(cwd), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if parent is None or any(map(parent.shadowed_by, paths)):
        return None
    request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "path": paths, "host": host,
               "module": module}  # fmt: skip
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(parent.address)
    socket.send_fds(channel, [b"run"], [output, errors])
    channel.sendall(json.dumps(request).encode())
    return ForkedRun(channel)


class ForkedRun:
    """A run that was forked, with the methods of :class:`subprocess.Popen` that tests need."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.pid = int(channel.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code as :meth:`poll`. :raises subprocess.TimeoutExpired: it runs for longer."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                self.returncode = int(self._channel.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(["pytest"], timeout or 0.0) from None
            self._channel.close()
        return self.returncode

    def kill(self) -> None:
        """End it with SIGKILL, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _read_first(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if _READ_FIRST.match(name)}


def _unsteered() -> dict[str, str]:
    """Return this process's variables without those that :func:`_read_first` returns or change :func:`_import_all`."""
    steers = re.compile(rf"PYTEST_|NIXL_|OMPI_|SLURM_|JOB_COMPLETION_|RANK$|WORLD_SIZE$|{_READ_FIRST.pattern}")
    return {name: value for name, value in os.environ.items() if not steers.match(name)}


#: The number of runs with variables of their own that are executed before they get a process to be forked from.
_EXECUTED = 2


class _Parent:
    """A process from which runs are forked. It ends when this process ends.

    :param read_first: the variables that it and its runs begin with, of :func:`_read_first`.
    """

    _owners_pid = 0
    _all: ClassVar[dict[_Variables, _Parent]] = {}
    _asked: ClassVar[Counter[_Variables]] = Counter()
    _lock = threading.Lock()

    def __init__(self, read_first: Mapping[str, str]) -> None:
        self._owner = os.getpid()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind("")  # a free name in the abstract namespace
            listening.listen(64)
            self.address = listening.getsockname()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                cwd=ROOT, env={"OPENBLAS_NUM_THREADS": "1", **_unsteered(), **read_first},
                pass_fds=[listening.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._process.stdout is not None
        with self._process.stdout as output:
            self._imported = _CUSTOM.union(json.loads(output.readline()))
        atexit.register(self._close)

    @classmethod
    def of(cls, read_first: Mapping[str, str]) -> _Parent | None:
        """Return that of this process for some variables; None as long as it would save nothing."""
        expected = tuple(sorted(read_first.items()))
        with cls._lock:
            if cls._owners_pid != os.getpid():
                cls._owners_pid, cls._all, cls._asked = os.getpid(), {}, Counter()
            cls._asked[expected] += 1
            if expected not in cls._all:
                if read_first != _read_first(os.environ) and cls._asked[expected] <= _EXECUTED:
                    return None
                cls._all[expected] = cls(read_first)
            return cls._all[expected]

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
                    importlib.import_module(f"pytest_nixl.{package.replace('/', '.')}.{module.name}")
    # Its plugin imports it at the end of each run, even of one that does not use it. pytest warns of a plugin's module
    # that was imported before, unless its docstring says that it need not be rewritten.
    with contextlib.suppress(ImportError):
        importlib.import_module("hypothesis")
    for name in ("hypothesis", "_hypothesis_globals"):
        if name in sys.modules:
            sys.modules[name].__doc__ = "PYTEST_DONT_REWRITE"
    importlib.import_module("pytest_nixl.cli.doctor")  # the command that tests fork most
    importlib.import_module("pytest_nixl.nixl.worker.serving")
    importlib.import_module("pytest_nixl.nixl.worker.commands")
    importlib.import_module("pytest_nixl.nixl.worker.forks")
    # Else each run would ask git seven times, and a run that writes a record start a Python to ask the processor.
    benchmark = vars(importlib.import_module("pytest_benchmark.plugin"))
    processor = benchmark["get_cpu_info"]()
    benchmark.update(get_tag=lambda *_: "forked", get_cpu_info=lambda: dict(processor))
    tempfile.tempdir = None  # a run may have another TMPDIR
    vars(platform)["_uname_cache"] = None  # and another host name
    save_time(setattr)


def save_time(replace: Callable[[object, str, object], None]) -> None:
    """Let workers of rows be forked, and make few transfers before the first row of a launch."""
    from pytest_nixl.measure import launch
    from pytest_nixl.processes import hosts

    replace(hosts, "MEASURED", ())
    replace(hosts, "FACTS", "")
    replace(launch, "FIRST_WARMUP_SECONDS", launch.WARMUP_SECONDS)


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
                _, outputs, _, _ = socket.recv_fds(channel, 16, 2)
                request = json.loads(channel.recv(1 << 20))
                pid = os.fork()
                if not pid:
                    for other in (listening, channel, *(theirs for _, theirs in runs.values())):
                        other.close()
                    for handle in runs:
                        os.close(handle)
                    _run(request, outputs)
                for output in outputs:
                    os.close(output)
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


def _enter(host: int) -> None:
    """Enter the namespaces of a process: its network, its host name and its files. This process ends with its parent.

    :raises OSError: the process has ended.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(host)
    if libc.setns(handle, _NEWNET | _NEWUTS | _NEWNS) or libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), f"process {host} cannot be followed into its namespaces")
    os.close(handle)


class _Planted:
    """The process from which a run forks its workers, with the methods of :class:`subprocess.Popen` that the run needs.

    It is forked before the run imports anything, and waits until it is wanted.
    """

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._begun_with = self._inherited(os.environ)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            try:
                self._channel.close()
                self._wait_until_wanted(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()

    def serve(self, channel: socket.socket, log: IO[bytes], environment: Mapping[str, str]) -> _Planted | None:
        """Be what :func:`pytest_nixl.processes.worker_parent.execute` executes; return None if that is another."""
        if self._channel.fileno() < 0 or self._inherited(environment) != self._begun_with:
            return None
        with self._channel:
            socket.send_fds(self._channel, [json.dumps(dict(environment)).encode()], [channel.fileno(), log.fileno()])
        return self

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @staticmethod
    def _inherited(environment: Mapping[str, str]) -> tuple[object, ...]:
        """Return what a process has from its start on. The template has the variable of numpy's threads, too."""
        from pytest_nixl.processes import worker_parent

        variables = {name: value for name, value in environment.items() if name != worker_parent.BLAS_THREADS}
        return worker_parent._read_first(variables), worker_parent._situation()

    @staticmethod
    def _wait_until_wanted(channel: socket.socket) -> None:
        from pytest_nixl.nixl.worker import __main__ as worker

        os.setsid()
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        content, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not content:  # the run has ended
            os._exit(0)
        channel.close()
        for number in (1, 2):
            os.dup2(descriptors[1], number)
        os.environ.clear()
        os.environ.update(json.loads(content))
        sys.argv = [worker.__file__, str(descriptors[0])]
        worker.main(*sys.argv[1:])


def _run(request: dict[str, Any], outputs: Sequence[int]) -> NoReturn:
    """Be the run that was asked for."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, *outputs)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["host"]:
        _enter(request["host"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:2] = request["path"]
    from pytest_nixl.processes import worker_parent

    planted, execute = _Planted(), worker_parent.execute
    vars(worker_parent)["execute"] = lambda *arguments: planted.serve(*arguments) or execute(*arguments)
    package = importlib.import_module(request["module"])
    assert package.__file__ is not None
    sys.argv = [str(Path(package.__file__).with_name("__main__.py")), *request["arguments"]]
    try:
        code = package.main()
    except SystemExit as end:  # a parser's
        code = end.code
    # As at the end of Python, but for the objects, whose end would copy the memory of the process it was forked from.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, str(ROOT))
    _import_all()
    gc.collect()
    gc.freeze()
    os.write(1, json.dumps(sorted({name.partition(".")[0] for name in sys.modules})).encode() + b"\n")
    _serve(socket.socket(fileno=int(sys.argv[1])))
