# SPDX-License-Identifier: Apache-2.0
"""A program of another project, run on a rank's host and seen from here."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from pytest_nixl.core.cpu_contention import too_many
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.ring_buffer import RingBuffer
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.tools import TOOLS
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_process import START_SECONDS, WorkerError

#: Lines of a program's output that a failure quotes, and seconds for which one look at it waits.
_TAIL_LINES, _LOOK_SECONDS = 12, 1.0


class ToolError(NixlPluginError):
    """A program could not be started, failed, or did not end in time."""


class Tool:
    """A program by its name, on the host of a place, with a worker of its own that starts it.

    :param name: one of :data:`~pytest_nixl.model.tools.TOOLS`.
    :param timeout: seconds that the worker may take for any step, beyond the program's own time.
    :param start_timeout: seconds that the worker may take to start.
    :raises WorkerError: where the worker does not start.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def there(self) -> bool:
        """Whether that rank has it."""
        return self._found is not None

    @property
    def path(self) -> str:
        """Where that rank has it; empty: nowhere."""
        return (self._found or {}).get("path", "")

    @property
    def versions(self) -> dict[str, str]:
        """The versions of ``ucx`` and ``libfabric`` that it runs on, as far as these tell."""
        return {name: value for name, value in (self._found or {}).items() if name != "path"}

    @property
    def where(self) -> str:
        """How failures name it."""
        return f"{self.name} of rank {self.worker.rank} on {self.worker.versions['host']}"

    def start(self, arguments: Sequence[str], variables: Mapping[str, str | None] | None = None) -> RunningProgram:
        """Start it.

        :param variables: what differs from that rank's own, of UCX, libfabric, NIXL and CUDA's visible devices; None
            unsets one.
        :raises ToolError: where that rank does not have it, or cannot execute it.
        """
        if not self.there:
            raise ToolError(f"{self.where} is not there: it is not on that rank's PATH", TOOLS[self.name])
        try:
            found = self.worker.call(
                "tool_start", tool=self.name, arguments=list(arguments), variables=dict(variables or {})
            )
        except WorkerError as error:
            raise ToolError(error.reason, error.remedy, error.detail) from None
        return RunningProgram(self, found["program"], found["pid"], [self.path, *arguments])

    def close(self) -> None:
        """End the worker, and with it whatever it has started."""
        self.worker.close()


class RunningProgram:
    """A program that runs, or has ended; left as a context manager, it is killed."""

    def __init__(self, tool: Tool, ref: Ref, pid: int, argv: Sequence[str]) -> None:
        self.tool = tool
        #: Its process id, on its host.
        self.pid = pid
        self.argv = tuple(argv)
        self._ref = ref
        self._output, self._seen = RingBuffer(), 0
        self._code: int | None = None
        #: When it has ended, in seconds: ``clock``, and of processor time what it took (``own``) and its whole host
        #: meanwhile (``all``), of so many ``processors``.
        self.cost: dict[str, float] = {}

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(NixlPluginError):  # a worker that has gone has taken it along
            self.kill()

    def output(self) -> str:
        """What it has written to stdout and stderr so far: the last MiB of it."""
        self._look(0.0)
        return self._output.text()

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None: it runs."""
        self._look(0.0)
        return self._code

    def poll_within(self, seconds: float) -> int | None:
        """Return its exit code as soon as it has written more or has ended, or after ``seconds``; None: it runs."""
        self._look(seconds)
        return self._code

    def said(self, seconds: float) -> str:
        """Wait for its end, whatever the exit code, and return what it has written."""
        self.wait(seconds)
        return self._output.text()

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit code, negative for a signal.

        :raises ToolError: where it has not ended within ``seconds``; it is then killed.
        """
        deadline = time.monotonic() + seconds
        while self._code is None:
            left = deadline - time.monotonic()
            self._look(max(0.0, min(left, _LOOK_SECONDS)))
            if left <= 0 and self._code is None:
                self.kill()
                raise self.failure(f"did not end within {seconds:g} s, and was killed")
        return self._code

    def succeed(self, seconds: float) -> str:
        """Wait for its end, and return what it has written. :raises ToolError: where it fails, or does not end."""
        if (code := self.wait(seconds)) != 0:
            raise self.failure(ended(code))
        return self._output.text()

    def wait_for(self, words: str, seconds: float) -> bool:
        """Wait until it has written ``words``: False where it ends, or ``seconds`` pass, before that."""
        deadline = time.monotonic() + seconds
        while words not in self._output.text():
            left = deadline - time.monotonic()
            if self._code is not None or left <= 0:
                return False
            self._look(min(left, _LOOK_SECONDS))
        return True

    def listens(self, port: int) -> bool:
        """Whether it listens on a TCP port of its host."""
        return bool(self.tool.worker.call("tool_listens", program=self._ref, port=port))

    def signal(self, number: int) -> None:
        """Send it, and what it has started, a signal."""
        if self._code is None:
            self.tool.worker.call("tool_end", program=self._ref, number=int(number))

    def kill(self) -> None:
        """End it at once, with what it has started."""
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + self.tool.worker.timeout
        while self._code is None and time.monotonic() < deadline:
            self._look(_LOOK_SECONDS)

    def failure(self, what: str, remedy: str = "") -> ToolError:
        """Return an error that says ``what`` of it, with the last lines that it wrote."""
        lines = [line for line in self._output.text().splitlines() if line.strip()][-_TAIL_LINES:]
        detail = "its last lines:\n" + "\n".join(f"  | {line}" for line in lines) if lines else "it wrote nothing"
        command = " ".join(self.argv)
        return ToolError(
            f"{self.tool.where} {what}", remedy or f"read its last lines below, or run it there by hand: {command}",
            detail,
        )  # fmt: skip

    def _look(self, patience: float) -> None:
        while self._code is None:
            found: dict[str, Any] = self.tool.worker.call(
                "tool_look",
                seconds=self.tool.worker.timeout + patience,
                program=self._ref,
                seen=self._seen,
                patience=patience,
            )
            if lost := found["from"] - self._seen:
                self._output.write(b"\n[%d bytes were not kept]\n" % lost)
            self._output.write(found["bytes"])
            self._seen = found["from"] + len(found["bytes"])
            if not found["more"]:
                self._code, self.cost = found["code"], found["cost"]
                return
            patience = 0.0


def others_beside(first: RunningProgram, second: RunningProgram) -> float | None:
    """Return the cores that others of the first one's host took, while it ran, of those that the two programs need.

    None: it is not known, as one of them has not ended.
    """
    here = [first, *([second] if _host(first) == _host(second) else [])]
    if not all(each.cost for each in here):
        return None
    taken = (first.cost["all"] - sum(each.cost["own"] for each in here)) / first.cost["clock"]
    return too_many(max(0.0, taken), int(first.cost["processors"]), len(here))


def _host(started: RunningProgram) -> str:
    return str(started.tool.worker.versions["host"])


def ended(code: int) -> str:
    """Say how a program ended."""
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
