# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest in processes that are forked from one which has imported pytest and the plugin.

Each is a process of its own, with its own directory, variables and output, as ``python -m pytest`` is. It does not
import Python's modules again, which is half of the processor time of most runs. For the same reason its workers are
forked, too, and the first row of a launch is timed as early as the others. Both are doubles: what a row measures is
another figure, so a test that judges figures executes its runs.
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
from typing import Any, NoReturn

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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(parent.address)
        socket.send_fds(channel, [b"run"], [output, errors])
        channel.sendall(json.dumps(request).encode())
        pid = int(channel.recv(64))
        channel.settimeout(timeout)
        try:
            return int(channel.recv(64))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, timeout) from None


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
        self._owner = os.getpid()
        self.read_first = _read_first(os.environ)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind("")  # a free name in the abstract namespace
            listening.listen(64)
            self.address = listening.getsockname()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                cwd=ROOT, env=_unsteered(), pass_fds=[listening.fileno()],
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


def save_time(replace: Callable[[object, str, object], None]) -> None:
    """Let workers of rows be forked, and make few transfers before the first row of a launch."""
    from pytest_nixl.measure import worker_pair
    from pytest_nixl.processes import hosts

    replace(hosts, "MEASURED", ())
    replace(hosts, "FACTS", "")
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


def _run(request: dict[str, Any], outputs: Sequence[int]) -> NoReturn:
    """Be the run that was asked for."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, *outputs)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:2] = request["path"]
    sys.argv = [str(Path(pytest.__file__).with_name("__main__.py")), *request["arguments"]]
    raise SystemExit(pytest.main())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, str(ROOT))
    _import_all()
    gc.collect()
    gc.freeze()
    os.write(1, json.dumps(sorted({name.partition(".")[0] for name in sys.modules})).encode() + b"\n")
    _serve(socket.socket(fileno=int(sys.argv[1])))
