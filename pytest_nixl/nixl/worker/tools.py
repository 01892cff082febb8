# SPDX-License-Identifier: Apache-2.0
"""Programs of other projects, started by a worker from a closed set of names; each ends with the worker.

What comes from rank 0 is a name, arguments and a few variables. Where the program is, and so which code runs, is for
the rank itself to say: by its own option, which reaches the worker as a variable, or by its own PATH.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_nixl.core.cpu_contention import busy_seconds, own_processors
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.ring_buffer import RingBuffer
from pytest_nixl.model.tools import TOOLS, variable
from pytest_nixl.nixl.worker.guard import ProgramGuard

_VARIABLES = re.compile(r"(UCX|FI|NIXL)_[A-Z0-9_]+|CUDA_VISIBLE_DEVICES")
#: These name where libraries are loaded from, or what is written to: the rank's own to say.
_OF_FILES = re.compile(r"\w*_(DIR|PATH|PATHS|FILE)")
#: Seconds for which what a program has started may hold its output open once it has itself ended.
_STRAGGLERS = 0.5
#: How often a wait looks for rank 0's word that it is over, in seconds.
_SLICE = 0.05
_PR_SET_PDEATHSIG = 1
#: Looked up here, not between fork and exec.
_prctl = ctypes.CDLL(None).prctl
#: A socket that listens, in /proc/net/tcp.
_LISTENS = "0A"


class Program:
    """A program that was started: its output so far, and how it has ended.

    :raises OSError: where it cannot be executed.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self.output = RingBuffer()
        self.changed = threading.Condition()
        self.code: int | None = None
        #: When it has ended, in seconds: of the clock, and of processor time that it took and that all took meanwhile,
        #: of how many processors.
        self.cost: dict[str, float] = {}
        self._began = time.monotonic(), busy_seconds(own_processors())
        self._ended = self._silent = False
        parent = os.getpid()
        self._reading, writing = _line_by_line()
        try:
            # Its own group, so that what it starts itself is ended with it.
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),
            )
        except BaseException:
            os.close(self._reading)
            raise
        finally:
            os.close(writing)
        self.pid = self._process.pid
        for task in (self._read, self._wait):
            threading.Thread(target=task, name=f"{argv[0]} {self.pid}", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether it has ended and all that it wrote has been read."""
        return self._ended and self._silent

    def signal(self, number: int) -> None:
        """Send it, and what it has started, a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a terminal ends
            while data := os.read(self._reading, 1 << 16):
                with self.changed:
                    self.output.write(data)
                    self.changed.notify_all()
        os.close(self._reading)
        with self.changed:
            self._silent = True
            self.changed.notify_all()

    def _wait(self) -> None:
        # Not reaped until its group is ended: nobody else can have its number meanwhile.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self.changed:
            self.changed.wait_for(lambda: self._silent, _STRAGGLERS)
        self.signal(signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        began, busy = self._began
        with self.changed:
            self.cost = {
                "clock": time.monotonic() - began,
                "own": usage.ru_utime + usage.ru_stime,
                "all": busy_seconds(own_processors()) - busy,
                "processors": len(own_processors()),
            }
            self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
            self._ended = True
            self.changed.notify_all()


class Tools:
    """The programs of one worker.

    :param cancelled: whether pytest has asked for something else meanwhile.
    :raises NixlPluginError: by each method, where a name is none of :data:`TOOLS`, a program is not there, or it cannot
        be executed.
    """

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._guard: ProgramGuard | None = None

    def find(self, tool: str) -> dict[str, str] | None:
        """Return the program's ``path`` and, as far as they tell, the versions ``ucx`` and ``libfabric`` that it runs
        on; None: it is not there.
        """
        path = _path(tool)
        return None if path is None else {"path": path, **_versions(path)}

    def start(self, tool: str, arguments: Sequence[str], variables: Mapping[str, str | None]) -> Program:
        """Start a program, with what differs from this rank's own variables; None unsets one."""
        path = _path(tool)
        if path is None:
            raise NixlPluginError(f"there is no {tool} on this rank's PATH", TOOLS[tool])
        for name in variables:
            named = variables[name] is not None and _OF_FILES.fullmatch(name)
            if not _VARIABLES.fullmatch(name) or named:
                raise NixlPluginError(
                    f"the variable {name} is not given to {tool}: expected one of UCX, libfabric or NIXL that names no "
                    "file, or CUDA_VISIBLE_DEVICES",
                    "set it on the rank itself, where it is started",
                )
        environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
        if self._guard is None:
            self._guard = ProgramGuard()
        try:
            program = Program([path, *map(str, arguments)], environment)
        except OSError as error:
            remedy = "see that it is built for this machine, and that its file may be executed"
            raise NixlPluginError(f"{path} cannot be executed: {error.strerror}", remedy) from None
        self._guard.watch(program.pid)
        return program

    def look(self, program: Program, seen: int, patience: float) -> dict[str, Any]:
        """Return what a program has written after the first ``seen`` bytes, as soon as there is some or it has ended.

        :param patience: seconds to wait for that, at most.
        :returns: ``from`` (of which byte on), ``bytes``, ``more`` (whether there are more already), ``code`` (negative
            for a signal; None: it runs, or has more to say), and ``cost`` when it has ended: see :class:`Program`.
        """
        deadline = time.monotonic() + patience
        with program.changed:
            while program.output.total <= seen and not program.over and not self._cancelled():
                if (left := deadline - time.monotonic()) <= 0:
                    break
                program.changed.wait(min(left, _SLICE))
            first, data = program.output.since(seen)
            more = program.output.total > first + len(data)
            if program.over and self._guard is not None:
                self._guard.forget(program.pid)
            code = program.code if program.over else None
            return {"from": first, "bytes": data, "more": more, "code": code, "cost": program.cost}

    def listens(self, program: Program, port: int) -> bool:
        """Whether a program, or what it has started, listens on a TCP port: the kernel says so, nothing connects."""
        sockets = set()
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[1].endswith(f":{port:04X}") and fields[3] == _LISTENS:
                        sockets.add(f"socket:[{fields[9]}]")
        return bool(sockets) and not sockets.isdisjoint(_opened_by(program.pid))

    def end(self, program: Program, number: int) -> None:
        """Send a program, and what it has started, a signal."""
        if not program.over:
            program.signal(number)


def _path(tool: str) -> str | None:
    if tool not in TOOLS:
        raise NixlPluginError(f"{tool!r} is no program that a worker starts: expected {', '.join(TOOLS)}")
    return os.environ.get(variable(tool)) or shutil.which(tool)


def _opened_by(group: int) -> Iterator[str]:
    """Yield what the processes of a group have open, as the kernel names it."""
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group:
                for descriptor in os.scandir(f"{entry.path}/fd"):
                    with contextlib.suppress(OSError):
                        yield os.readlink(descriptor.path)


def _line_by_line() -> tuple[int, int]:
    """Return the two ends of what takes a program's output: a terminal where there is one to be had, as programs write
    to it line by line and keep back what goes to a pipe.
    """
    try:
        reading, writing = os.openpty()
    except OSError:
        return os.pipe()
    tty.setraw(writing)
    return reading, writing


def _die_with(parent: int) -> None:
    """In the program's process, before it becomes the program: be killed with the worker."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _versions(path: str) -> dict[str, str]:
    """Ask the libraries that a program would load for their versions, without running the program."""
    try:
        done = subprocess.run(
            [path], env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    libraries = {Path(each).name: each for each in re.findall(r"=> (/\S+)", done.stdout)}
    found = {}
    for name, library in libraries.items():
        with contextlib.suppress(OSError, AttributeError):
            if name.startswith("libucp.so"):
                ucp = ctypes.CDLL(library).ucp_get_version_string
                ucp.restype = ctypes.c_char_p
                found["ucx"] = str(ucp().decode())
            elif name.startswith("libfabric.so"):
                version = ctypes.CDLL(library).fi_version() & 0xFFFFFFFF
                found["libfabric"] = f"{version >> 16}.{version & 0xFFFF}"
    return found
