# SPDX-License-Identifier: Apache-2.0
"""Run an external program on a rank's host, and read its output and exit code from here."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_nixl.core.cpu_contention import too_many
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.ring_buffer import RingBuffer
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.tools import TOOLS
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.processes.worker_process import START_SECONDS

#: Number of output lines that an error quotes, and seconds that one request for new output may wait.
_TAIL_LINES, _LOOK_SECONDS = 12, 1.0


class ToolError(NixlPluginError):
    """An external program could not be started, failed, or did not end in time."""


class Tool:
    """An external program on the host of ``place``, with a worker that starts it.

    :param place: the host on which to run it.
    :param name: one of :data:`~pytest_nixl.model.tools.TOOLS`.
    :param timeout: seconds that the worker may take for a step, in addition to the program's time.
    :param start_timeout: seconds that the worker may take to start.
    :raises WorkerError: if the worker does not start.
    """

    def __init__(self, place: Host, name: str, timeout: float, start_timeout: float = START_SECONDS) -> None:
        self.name = name
        self.worker = place.start("tool", {}, timeout, start_timeout)
        try:
            self._found: dict[str, str] | None = self.worker.call("tool_find", tool=name)
        except BaseException:
            self.worker.kill()
            raise

    def __enter__(self) -> Tool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_installed(self) -> bool:
        """Whether the rank has the program."""
        return self._found is not None

    @property
    def path(self) -> str:
        """Path of the program on the rank's host; empty if it is not there."""
        return (self._found or {}).get("path", "")

    @property
    def versions(self) -> dict[str, str]:
        """Versions of ``ucx`` and ``libfabric`` that the program uses, if they can be determined."""
        return {name: value for name, value in (self._found or {}).items() if name != "path"}

    @property
    def where(self) -> str:
        """Program, rank and host, for messages."""
        return f"{self.name} of rank {self.worker.rank} on {self.worker.versions['host']}"

    def start(self, arguments: Sequence[str], variables: Mapping[str, str | None] | None = None) -> RunningProgram:
        """Start the program.

        :param arguments: arguments of the program.
        :param variables: changes to the rank's environment: variables of UCX, libfabric and NIXL, and
            CUDA_VISIBLE_DEVICES. None unsets a variable.
        :raises ToolError: if the rank does not have the program, or cannot execute it.
        """
        if not self.is_installed:
            raise ToolError(f"{self.where} was not found: it is not on that rank's PATH", TOOLS[self.name])
        try:
            started = self.worker.call(
                "tool_start", tool=self.name, arguments=list(arguments), variables=dict(variables or {})
            )
        except WorkerError as error:
            raise ToolError(error.reason, error.remedy, error.detail) from None
        return RunningProgram(self, started["program"], started["pid"], [self.path, *arguments])

    def close(self) -> None:
        """End the worker and every program that it started."""
        self.worker.close()


class RunningProgram:
    """A started external program. As a context manager it kills the program on exit."""

    def __init__(self, tool: Tool, ref: Ref, pid: int, argv: Sequence[str]) -> None:
        self.tool = tool
        #: Process id on its host.
        self.pid = pid
        self.argv = tuple(argv)
        self._ref = ref
        self._output, self._seen = RingBuffer(), 0
        self._code: int | None = None
        #: After its end, in seconds: wall time (``clock``), CPU time of the program (``own``) and CPU time of the whole
        #: host during that time (``all``). Also the number of ``processors``.
        self.cost: dict[str, float] = {}

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(NixlPluginError):  # a worker that is gone has ended the program too
            self.kill()

    def output(self) -> str:
        """Return the output of stdout and stderr so far: at most the last MiB."""
        self._look(0.0)
        return self._output.text()

    def poll(self) -> int | None:
        """Return its exit code (negative for a signal), or None while it runs."""
        self._look(0.0)
        return self._code

    def poll_within(self, seconds: float) -> int | None:
        """Wait for new output or its end, at most ``seconds``; return its exit code, or None while it runs."""
        self._look(seconds)
        return self._code

    def final_output(self, seconds: float) -> str:
        """Wait for its end and return its output, with any exit code. :raises ToolError: after ``seconds``."""
        self.wait(seconds)
        return self._output.text()

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit code (negative for a signal).

        :raises ToolError: if it has not ended within ``seconds``. It is killed then.
        """
        deadline = time.monotonic() + seconds
        while self._code is None:
            remaining = deadline - time.monotonic()
            self._look(max(0.0, min(remaining, _LOOK_SECONDS)))
            if remaining <= 0 and self._code is None:
                self.kill()
                raise self.failure(f"did not end within {seconds:g} s and was killed")
        return self._code

    def wait_for(self, text: str, seconds: float) -> bool:
        """Wait until its output contains ``words``; return False if it ends or ``seconds`` pass before that."""
        deadline = time.monotonic() + seconds
        while text not in self._output.text():
            remaining = deadline - time.monotonic()
            if self._code is not None or remaining <= 0:
                return False
            self._look(min(remaining, _LOOK_SECONDS))
        return True

    def listens(self, port: int) -> bool:
        """Whether the program listens on a TCP port of its host."""
        return bool(self.tool.worker.call("tool_listens", program=self._ref, port=port))

    def signal(self, number: int) -> None:
        """Send a signal to the program and its children."""
        if self._code is None:
            self.tool.worker.call("tool_end", program=self._ref, number=int(number))

    def kill(self) -> None:
        """Kill the program and its children, and wait for its end."""
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + self.tool.worker.timeout
        while self._code is None and time.monotonic() < deadline:
            self._look(_LOOK_SECONDS)

    def failure(self, fault: str, remedy: str = "") -> ToolError:
        """Return an error about the program with the last lines of its output.

        :param fault: verb phrase that follows the program's name.
        :param remedy: what the user can do; by default, read the output or run the command by hand.
        """
        lines = [line for line in self._output.text().splitlines() if line.strip()][-_TAIL_LINES:]
        detail = "its last lines:\n" + "\n".join(f"  | {line}" for line in lines) if lines else "it wrote nothing"
        command = " ".join(self.argv)
        return ToolError(
            f"{self.tool.where} {fault}",
            remedy or f"read its last lines below, or run it there by hand: {command}",
            detail,
        )

    def _look(self, timeout: float) -> None:
        while self._code is None:
            state: dict[str, Any] = self.tool.worker.call(
                "tool_look",
                seconds=self.tool.worker.timeout + timeout,
                program=self._ref,
                seen=self._seen,
                timeout=timeout,
            )
            if lost := state["from"] - self._seen:
                self._output.write(b"\n[%d bytes of output dropped]\n" % lost)
            self._output.write(state["bytes"])
            self._seen = state["from"] + len(state["bytes"])
            if not state["more"]:
                self._code, self.cost = state["code"], state["cost"]
                return
            timeout = 0.0


def contention_of(first: RunningProgram, second: RunningProgram) -> float | None:
    """Return the contention while ``first`` ran: how many of the cores that both need other processes used on its host.

    None if it is unknown because one of the programs has not ended.
    """
    local = [first, *([second] if _host(first) == _host(second) else [])]
    if not all(program.cost for program in local):
        return None
    taken = (first.cost["all"] - sum(program.cost["own"] for program in local)) / first.cost["clock"]
    return too_many(max(0.0, taken), int(first.cost["processors"]), len(local))


def _host(started: RunningProgram) -> str:
    return str(started.tool.worker.versions["host"])
