# SPDX-License-Identifier: Apache-2.0
"""Pytest's side of a worker: start it, ask it, wait for it with a deadline, and say how it ended."""

from __future__ import annotations

import contextlib
import logging
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import StrictError, check
from pytest_nixl.core.wire import decode, encode
from pytest_nixl.processes.answers import REPLY, check_answer

_log = logging.getLogger(__name__)

_TAIL_LINES = 12
_NOISE = re.compile(r"[|+]\s*$|^I\d{4} [\d:.]+ |^[\d-]+ [\d:]+ NIXL (INFO|DEBUG) ")
#: Seconds for a worker to start, where nobody says: a busy machine, or a cold file system, takes minutes over imports.
START_SECONDS = 180.0
#: The steps that are a worker's start, with an option of their own.
_START_STEPS = {"hello": "start (import NIXL)", "create_agent": "make its agent"}
#: What a function of a test raises where it cannot import something: NIXL's own failure is told apart.
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
#: How long the partner of a worker that died may take to report its own view of it.
_PARTNER_GRACE = 2.0
#: How long the kernel may take to end a process that has closed its channel, and its peer to say so.
_END_SECONDS = 30.0
#: faulthandler's heading of each stack that it writes, and how long it may take to write them.
_STACKS_MARK, _STACKS_SECONDS = "(most recent call first)", 1.0


_NIXL_REMEDY = "the cause is in NIXL's own lines below"
#: By NIXL's class, where there is more to say.
_NIXL_REMEDIES = {
    "nixlMismatchError": f"{_NIXL_REMEDY}; metadata that cannot be read was cut on its way, or is of another release "
    "of NIXL: run one on all ranks",
}


class WorkerError(NixlPluginError):
    """A worker died, hung, or could not do what it was asked."""


class WorkerDiedError(WorkerError):
    """The process ended by itself or was ended by someone else."""


class WorkerHungError(WorkerError):
    """The process did not answer in time, and was ended by us."""

    late = True


class WorkerLateError(WorkerError):
    """The process gave up a step at its deadline, and lives."""

    late = True


class NixlError(WorkerError):
    """NIXL itself reported an error. ``type_name`` is NIXL's class, such as ``nixlNotFoundError``."""

    def __init__(self, reason: str, remedy: str, detail: str, type_name: str) -> None:
        super().__init__(reason, remedy, detail)
        self.type_name = type_name


class Pending:
    """A request that was sent and is not answered yet."""

    def __init__(self, worker: Worker, number: int, step: str, seconds: float) -> None:
        self.worker = worker
        self.number = number
        self.step = step
        #: How long it may take, and when that is over.
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def result(self) -> Any:
        """Wait for the answer. :raises WorkerError: when the worker dies, hangs or refuses."""
        return self.worker._answer(self)


class Process(Protocol):
    """A worker's process, on this host or on a peer's."""

    #: Where it is spoken to, one line of JSON for each message; it reads as closed once the process has ended.
    channel: socket.socket

    @property
    def pid(self) -> int:
        """The process id, on its host."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        ...

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code, negative for a signal, once it has ended; None where it has not within ``seconds``."""
        ...

    def kill(self) -> None:
        """End it at once, and forget it."""
        ...

    def state(self) -> str:
        """Say what its kernel has it doing."""
        ...

    def signal(self, number: int) -> None:
        """Send it a signal."""
        ...

    def output(self) -> str:
        """All that it has written to stdout and stderr."""
        ...


class Worker:
    """One process that owns NIXL, or programs of other projects.

    :param rank: the rank that it works for; named in every failure.
    :param role: what it is to the link: ``initiator``, ``target`` or ``agent``; a ``tool`` loads no NIXL, and only
        starts programs of other projects.
    :param timeout: seconds that any step may take, but its start.
    :param start_timeout: seconds that its start may take, and each agent that is made in it.
    """

    def __init__(
        self, process: Process, *, rank: int, role: str, timeout: float, start_timeout: float = START_SECONDS
    ) -> None:
        self.rank = rank
        self.role = role
        self.timeout = timeout
        self.start_timeout = start_timeout
        #: Whether these two are what --nixl-timeout and --nixl-start-timeout say.
        self.by_option = True
        self._process = process
        self._buffer = b""
        self._requests = 0
        self._ended = False
        _log.info("%s started", self.name)
        self._pending: Pending | None = self.request("hello", path=sys.path, loads=role != "tool")
        self._versions: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def name(self) -> str:
        """How failures name this worker."""
        return f"rank {self.rank} ({self.role} worker, pid {self.pid})"

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.alive

    @property
    def versions(self) -> dict[str, Any]:
        """What the worker runs: python, nixl, nixl_package, host. Waits for its start on first use."""
        if self._versions is None:
            assert self._pending is not None
            self._versions = self._answer(self._pending)
        return self._versions

    def request(self, command: str, *, seconds: float | None = None, **arguments: Any) -> Pending:
        """Send a command without waiting; ``seconds`` is its own deadline where the usual one is too short."""
        if command != "hello":
            _ = self.versions
        self._requests += 1
        usual = self.start_timeout if command in _START_STEPS else self.timeout
        seconds = usual if seconds is None else seconds
        pending = Pending(self, self._requests, command, seconds)
        try:
            self._send(command, pending.number, arguments)
        except OSError:
            raise self._died(command) from None
        return pending

    def call(self, command: str, *, seconds: float | None = None, **arguments: Any) -> Any:
        """Send a command and wait for its answer. :raises WorkerError: when it dies, hangs or refuses."""
        return self.request(command, seconds=seconds, **arguments).result()

    def output(self) -> str:
        """All that the worker has written to stdout and stderr."""
        return self._process.output()

    def tail(self) -> str:
        """The last lines of that, without UCX's tables and what NIXL says of its ordinary steps."""
        return "\n".join(f"  | {line}" for line in telling(self.output())[-_TAIL_LINES:])

    def signal(self, number: int) -> None:
        """Send the process a signal, to see what comes of it."""
        self._process.signal(number)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        if not self._ended:
            self._ended = True
            _log.info("%s ended", self.name)

    def close(self) -> None:
        """Let the process end by itself, and end it where it does not within two seconds."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._send("exit")
                self._process.wait(2)
        self.kill()

    def fileno(self) -> int:
        """The descriptor to wait on for an answer."""
        return self._process.channel.fileno()

    @property
    def answered(self) -> bool:
        """Whether an answer is here already: it came together with the one before it."""
        return b"\n" in self._buffer

    def cancel(self) -> None:
        """Ask a worker that serves to stop serving; there is no answer to this."""
        try:
            self._send("cancel")
        except OSError:
            return

    def _send(self, command: str, number: int = 0, arguments: Mapping[str, Any] | None = None) -> None:
        message = {"command": command, "number": number, "arguments": dict(arguments or {})}
        self._process.channel.sendall(encode(message))

    def _answer(self, pending: Pending) -> Any:
        while True:
            line = self._line(pending)
            try:
                message = decode(line)
                check(REPLY, message)
                if message["number"] != pending.number:
                    continue  # the late answer to a request that was given up
                if "error" not in message:
                    check_answer(pending.step, message["result"])
                    return message["result"]
            except StrictError as error:
                raise self._nonsense(pending.step, error) from None
            raise self._failed(pending.step, message["error"])

    def _line(self, pending: Pending) -> bytes:
        while b"\n" not in self._buffer:
            left = pending.deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.channel], [], [], left)[0]:
                raise self._hung(pending)
            chunk = self._receive()
            if not chunk:
                raise self._died(pending.step)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _receive(self) -> bytes:
        try:
            return self._process.channel.recv(1 << 20)
        except ConnectionResetError:
            return b""

    def _died(self, step: str) -> WorkerError:
        code = self._process.wait(_END_SECONDS)
        if code is None and self.alive:  # it has closed its channel, and stays
            self._process.kill()
            code = self._process.wait(_END_SECONDS)
        how = "has gone with its rank" if code is None else _how_it_ended(code)
        reason = f"{self.name} {how} during {step!r}"
        remedy = "read its last lines below: a crash in NIXL, UCX or a driver shows there; `dmesg` shows the OOM killer"
        if code is None:  # and nobody is there who could tell its last lines
            remedy = "see what became of the ranks, which is said below"
        tail = self.tail() if code is not None else ""
        self.kill()
        return WorkerDiedError(reason, remedy, _quoted(tail) if code is not None else "")

    def _hung(self, pending: Pending) -> WorkerError:
        state = self._process.state()
        self._process.signal(signal.SIGUSR1)
        patience = time.monotonic() + _STACKS_SECONDS
        while _STACKS_MARK not in self.output() and time.monotonic() < patience and self.alive:
            time.sleep(0.01)
        tail = self.tail()
        self.kill()
        limit = f"{pending.seconds:g} s"
        what = _START_STEPS.get(pending.step)
        did_not = f"did not {what}" if what else f"did not answer {pending.step!r}"
        reason = f"{self.name}, which was {state}, {did_not} before its deadline of {limit}, and was ended"
        busy = "if the machine is merely busy, run it again where there is less to do"
        if self.by_option:
            busy += f", or give {'--nixl-start-timeout' if what else '--nixl-timeout'} more than {limit}"
        remedy = f"its threads' stacks are below; {busy}"
        error = WorkerHungError(reason, remedy, _quoted(tail))
        # A process that somebody stopped is not late because the host is busy.
        error.late = not state.startswith("stopped")
        return error

    def _nonsense(self, step: str, error: StrictError) -> WorkerError:
        self.kill()
        return WorkerError(
            f"{self.name} answered {step!r} with what no worker of this version answers, and was ended: {error}",
            "see that every rank has the same pytest-nixl; without a --nixl-group-token a stranger may have written it",
        )

    def _failed(self, step: str, error: Mapping[str, str]) -> WorkerError:
        kind, type_name, message = error["kind"], error["type"], error["message"]
        detail = _quoted(self.tail())
        if kind == "nixl":
            reason = f"NIXL reported {type_name} ({message}) in {self.name} during {step!r}"
            remedy = error.get("remedy") or _NIXL_REMEDIES.get(type_name, _NIXL_REMEDY)
            return NixlError(reason, remedy, detail, type_name)
        if kind == "ours":
            return WorkerError(f"{message} (in {self.name} during {step!r})", error["remedy"])
        if kind == "import":
            reason = f"NIXL cannot be loaded in {self.name}: {message}"
            remedy = (
                "install NIXL where this Python finds it: pip install --no-deps nixl nixl-cu12 (or nixl-cu13), or use "
                "the image's own build"
            )
            return WorkerError(reason, remedy, detail)
        if kind == "timeout":
            remedy = "see whether the other rank still runs; give --nixl-timeout more time if the machine is busy"
            return WorkerLateError(f"{self.name} gave up {step!r}: {message}", remedy, detail)
        if kind == "refused":
            return WorkerError(f"{self.name} refused {step!r}: {message}", "", detail)
        remedy = "make it importable for this Python, or mend the import" if type_name in _IMPORT_ERRORS else ""
        return WorkerError(f"{type_name} in {self.name} during {step!r}: {message}", remedy, error["traceback"])


def results(pending: Sequence[Pending], *, serving: Pending | None = None) -> list[Any]:
    """Wait for the answers of several workers at once, and return them in order; each worker's come in its own order.

    :param serving: a request that goes on until it is cancelled, which is done when the others are answered.
    :raises WorkerError: where one fails, the others are given a moment to say their own and are then ended. The error
        is that of the worker that died or hung, if one did: it is the cause, the others' are consequences.
    """
    errors: list[WorkerError] = []
    hurried: set[Pending] = set()
    answers: dict[Pending, Any] = {}
    waiting = [*pending, serving] if serving else list(pending)
    while waiting:
        if serving is not None and waiting == [serving]:
            serving.worker.cancel()
        for item in _ready(waiting):
            waiting.remove(item)
            try:
                answers[item] = item.result()
            except WorkerHungError as error:
                # One that was hurried, and is merely late, is a consequence; one that somebody stopped is the cause.
                errors += [] if item in hurried and error.late else [error]
            except WorkerError as error:
                errors.append(error)
            for other in waiting if errors else ():
                soon = time.monotonic() + _PARTNER_GRACE
                if other not in hurried and soon < other.deadline:
                    other.deadline = soon
                    hurried.add(other)
                other.worker.cancel()
    if errors:
        raise min(errors, key=_how_far_from_the_cause)
    return [answers[item] for item in pending]


def _how_far_from_the_cause(error: WorkerError) -> int:
    """What died or hung made the others fail: it is named first."""
    return 0 if isinstance(error, WorkerDiedError) else 1 if isinstance(error, WorkerHungError) else 2


def _ready(waiting: Sequence[Pending]) -> list[Pending]:
    """Return those that have something to read, or the one whose deadline passed first."""
    heads = {item.worker: item for item in reversed(waiting)}
    if answered := [item for item in heads.values() if item.worker.answered]:
        return answered
    first = min(heads.values(), key=lambda item: item.deadline)
    ready = select.select(list(heads), [], [], max(0.0, first.deadline - time.monotonic()))[0]
    return [heads[worker] for worker in ready] or [first]


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def telling(output: str) -> list[str]:
    """Return the lines of a worker's output without UCX's tables and what NIXL says of its ordinary steps."""
    return [line for line in output.splitlines() if line.strip() and not _NOISE.search(line)]


def _quoted(tail: str) -> str:
    return f"its last lines:\n{tail}" if tail else "it wrote nothing to stderr"
