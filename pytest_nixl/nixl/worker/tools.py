# SPDX-License-Identifier: Apache-2.0
"""External programs that a worker starts from a fixed list of names, and that end with the worker.

Rank 0 sends a name, arguments and a few variables. Each rank itself determines the path of the program, and so which
code runs: by its own option, which reaches the worker as a variable, or by its own PATH.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from pytest_nixl.core.cpu_contention import allowed_processors, busy_seconds
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.ring_buffer import RingBuffer
from pytest_nixl.core.strict import Number
from pytest_nixl.model.tools import FROM_OTHER_RANKS, TOOLS, not_from_other_ranks, variable
from pytest_nixl.model.worker_commands import Count, Seconds


class ProgramGuard:
    """End the watched process groups when this process has ended, for any reason. Create it before any thread."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        if os.fork() == 0:
            try:
                os.setsid()
                _keep_only(reading)
                _watch(reading)
            finally:
                os._exit(0)
        os.close(reading)

    def watch(self, group: int) -> None:
        """End this process group when this process has ended."""
        os.write(self._writing, b"+%d\n" % group)

    def forget(self, group: int) -> None:
        """Stop watching a process group, because it has ended."""
        os.write(self._writing, b"-%d\n" % group)


def _keep_only(descriptor: int) -> None:
    """Close all other descriptors, so that pytest sees the worker's socket close when the worker ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def _watch(reading: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            group = int(line[1:])
            if line.startswith(b"+"):
                groups.add(group)
            else:
                groups.discard(group)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


#: The time for which a program's children may keep its output open after the program has ended, in seconds.
_STRAGGLERS = 0.5
#: The interval at which a wait checks for a cancellation, in seconds.
_SLICE = 0.05
_PR_SET_PDEATHSIG = 1
#: Looked up here, because between fork and exec it would not be safe.
_prctl = ctypes.CDLL(None).prctl
#: A socket that listens, in /proc/net/tcp.
_LISTENS = "0A"


class Program:
    """A running program with its output and, after its end, its exit code.

    :param argv: its path and arguments.
    :param environment: its environment variables.
    :raises OSError: it cannot be executed.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self.output = RingBuffer()
        self.changed = threading.Condition()
        self.code: int | None = None
        #: After its end: seconds of the clock, its own CPU seconds, the CPU seconds of all processes in that time, and
        #: the number of processors.
        self.cost: dict[str, float] = {}
        self._began = time.monotonic(), busy_seconds(allowed_processors())
        self._ended = self._silent = False
        parent = os.getpid()
        self._reading, writing = _line_by_line()
        try:
            # Its own process group, so that its children are ended with it.
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
        """Whether the program has ended and all its output has been read."""
        return self._ended and self._silent

    def signal(self, number: int) -> None:
        """Send a signal to the program and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # a closed terminal raises EIO
            while data := os.read(self._reading, 1 << 16):
                with self.changed:
                    self.output.write(data)
                    self.changed.notify_all()
        os.close(self._reading)
        with self.changed:
            self._silent = True
            self.changed.notify_all()

    def _wait(self) -> None:
        # Not reaped until its group is ended, so that no other process gets its pid.
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
                "all": busy_seconds(allowed_processors()) - busy,
                "processors": len(allowed_processors()),
            }
            self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
            self._ended = True
            self.changed.notify_all()


#: A program's new output: ``from`` is the offset of the first returned byte, and ``more`` says whether more bytes are
#: ready. ``code`` is negative for a signal, and None while the program runs or has unread output. After its end it has
#: the ``cost`` (see :class:`Program`).
ToolOutput = TypedDict(
    "ToolOutput",
    {
        "from": Count,
        "bytes": bytes,
        "more": bool,
        "code": Annotated[int, Number(-128, 255, whole=True)] | None,
        "cost": dict[str, Seconds],
    },
)


class Tools:
    """The programs of one worker.

    Its methods raise :class:`NixlPluginError` if a name is not in :data:`TOOLS`, or if a program is missing or cannot
    be executed.

    :param cancelled: returns whether pytest has sent another command.
    """

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._guard: ProgramGuard | None = None

    def find(self, tool: str) -> dict[str, str] | None:
        """Return the program's ``path`` and, if known, the versions of its ``ucx`` and ``libfabric``; None if it is
        missing.
        """
        path = _path(tool)
        return None if path is None else {"path": path, **_versions(path)}

    def start(self, tool: str, arguments: Sequence[str], variables: Mapping[str, str | None]) -> Program:
        """Start a program.

        :param variables: changes to this rank's environment variables; None unsets one.
        """
        path = _path(tool)
        if path is None:
            raise NixlPluginError(f"{tool} is not on this rank's PATH", TOOLS[tool])
        for name in not_from_other_ranks(variables):
            names = ", ".join(sorted(FROM_OTHER_RANKS))
            raise NixlPluginError(
                f"the variable {name} cannot be passed to {tool}: expected one of {names}",
                f"set {name} in the environment of the rank itself",
            )
        environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
        if self._guard is None:
            self._guard = ProgramGuard()
        try:
            program = Program([path, *map(str, arguments)], environment)
        except OSError as error:
            remedy = f"run `chmod +x {path}`, and check that it is built for this machine's architecture"
            raise NixlPluginError(f"{path} cannot be executed: {error.strerror}", remedy) from None
        self._guard.watch(program.pid)
        return program

    def look(self, program: Program, seen: int, timeout: float) -> ToolOutput:
        """Wait until a program has written more than ``seen`` bytes or has ended, and return its new output.

        :param timeout: the longest time to wait, in seconds.
        """
        deadline = time.monotonic() + timeout
        with program.changed:
            while program.output.total <= seen and not program.over and not self._cancelled():
                if (remaining := deadline - time.monotonic()) <= 0:
                    break
                program.changed.wait(min(remaining, _SLICE))
            first, data = program.output.since(seen)
            more = program.output.total > first + len(data)
            if program.over and self._guard is not None:
                self._guard.forget(program.pid)
            code = program.code if program.over else None
            return {"from": first, "bytes": data, "more": more, "code": code, "cost": program.cost}

    def listens(self, program: Program, port: int) -> bool:
        """Return whether a program or its children listen on a TCP port, from the kernel's tables."""
        sockets = set()
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[1].endswith(f":{port:04X}") and fields[3] == _LISTENS:
                        sockets.add(f"socket:[{fields[9]}]")
        return bool(sockets) and not sockets.isdisjoint(_opened_by(program.pid))

    def end(self, program: Program, number: int) -> None:
        """Send a signal to a program and its children."""
        if not program.over:
            program.signal(number)


def _path(tool: str) -> str | None:
    if tool not in TOOLS:
        raise NixlPluginError(f"a worker cannot start {tool!r}: expected {', '.join(TOOLS)}")
    return os.environ.get(variable(tool)) or shutil.which(tool)


def _opened_by(group: int) -> Iterator[str]:
    """Yield the kernel's names of the open files of a process group."""
    for process in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(process)) == group:
                for descriptor in os.listdir(f"/proc/{process}/fd"):
                    with contextlib.suppress(OSError):
                        yield os.readlink(f"/proc/{process}/fd/{descriptor}")


def _line_by_line() -> tuple[int, int]:
    """Return the two ends of a terminal for a program's output, or of a pipe if there is no terminal.

    Programs write to a terminal line by line, but buffer what they write to a pipe.
    """
    try:
        reading, writing = os.openpty()
    except OSError:
        return os.pipe()
    tty.setraw(writing)
    return reading, writing


def _die_with(parent: int) -> None:
    """Let the kernel kill this process with the worker. Called in the child before it executes the program."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _versions(path: str) -> dict[str, str]:
    """Return the versions of a program's UCX and libfabric, without running the program."""
    try:
        done = subprocess.run(
            [path],
            env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    versions = {}
    for line in done.stdout.splitlines():  # "libfabric.so.1 => /lib/libfabric.so.1 (0x00007f5c4e000000)"
        library = line.partition(" => ")[2].rpartition(" (")[0]
        name = os.path.basename(library)
        with contextlib.suppress(OSError, AttributeError):
            if name.startswith("libucp.so"):
                ucp = ctypes.CDLL(library).ucp_get_version_string
                ucp.restype = ctypes.c_char_p
                versions["ucx"] = str(ucp().decode())
            elif name.startswith("libfabric.so"):
                version = ctypes.CDLL(library).fi_version() & 0xFFFFFFFF
                versions["libfabric"] = f"{version >> 16}.{version & 0xFFFF}"
    return versions
