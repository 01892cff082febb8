# SPDX-License-Identifier: Apache-2.0
"""Pytest's side of a worker: send requests, wait for answers with a deadline, and report how the worker ended."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pytest_nixl.core.errors import GpuMemoryError
from pytest_nixl.core.rdma_fault import MEMLOCK_REMEDY, PORT_REMEDY, failed_device, peer_failure_remedy, refused_locks
from pytest_nixl.core.resource_limits import (
    MEMORY_REMEDY,
    memory_kills,
    shortage,
    start_fault,
)
from pytest_nixl.core.strict import Form, OneOf, StrictError, Text, check
from pytest_nixl.core.wire import ForeignRefError, Ref, decode, encode
from pytest_nixl.model.worker_commands import WORKER_COMMANDS, Count
from pytest_nixl.processes.worker_errors import (
    GpuFullError,
    NixlAbsentError,
    NixlError,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    WorkerLateError,
)

#: One line: the answer to a request, or an error.
REPLY: Form = OneOf(
    (
        {"number": Count, "result": Any},
        {
            "number": Count,
            "error": {"kind": Text(64), "type": Text(1024), "message": Text(), "traceback": Text(), "remedy?": Text()},
        },
    )
)


def check_answer(command: str, result: Any) -> None:
    """Check a worker's answer.

    :param command: the command that was sent.
    :param result: the answer.
    :raises StrictError: the answer does not have the form for this command.
    """
    check(WORKER_COMMANDS[command].answer, result)
    if command == "measure" and not 0 < len(result["windows"]) == len(result["transfers"]):
        raise StrictError("it does not contain one number of transfers for each window")


_log = logging.getLogger(__name__)

_TAIL_LINES = 12
_NOISE = re.compile(r"[|+]\s*$|^I\d{4} [\d:.]+ |^[\d-]+ [\d:]+ NIXL (INFO|DEBUG) ")
#: The default deadline to start a worker, in seconds: on a busy machine or a cold file system imports take minutes.
START_SECONDS = 180.0
#: The steps of a worker's start, whose deadline has a separate option.
_START_STEPS = {"hello": "start (import NIXL)", "create_agent": "create its agent"}
#: A step that UCX may never end, and the time in seconds between two looks at what it writes meanwhile.
_ENDLESS_STEP, _LOOK_SECONDS = "create_agent", 5.0
#: The errors of failed imports in a test's function; a failed import of NIXL is another error.
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
#: Where the text begins that Python or UCX writes of a crash.
_CRASH = re.compile(r"^Fatal Python error|^.*Caught signal|^=+ backtrace", re.MULTILINE)
#: The time for the other worker of a pair to report its own error after one has died, in seconds.
_PARTNER_GRACE = 2.0
#: The time for a process to end after it has closed its channel, in seconds.
_END_SECONDS = 30.0
#: A text in faulthandler's heading of each stack, and the time to print the stacks, in seconds.
_STACKS_MARK, _STACKS_SECONDS = "(most recent call first)", 1.0


_NIXL_REMEDY = "read the cause in NIXL's log lines below"
#: More specific remedies by NIXL's error class.
_NIXL_REMEDIES = {
    "nixlMismatchError": f"{_NIXL_REMEDY}; the metadata was cut in transit or comes from another release of NIXL: "
    "install the same release on all ranks",
    "nixlNotAllowedError": f"{_NIXL_REMEDY}; if metadata cannot be loaded, this agent still knows an earlier agent of "
    "that name, such as one that was restarted, or an earlier registration of its memory: call `remove_remote_agent` "
    "first",
}


class Pending:
    """A request to a worker that is not answered yet."""

    def __init__(self, worker: Worker, number: int, step: str, seconds: float, description: str) -> None:
        self.worker = worker
        self.number = number
        self.step = step
        #: The step in errors, such as ``'add_remote_agent' of agent 'a'``.
        self.words = description
        #: The time that the request may take, in seconds, and the deadline on the monotonic clock.
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def result(self) -> Any:
        """Wait for the answer.

        :raises WorkerError: the worker dies, hangs or refuses the command.
        """
        return self.worker._answer(self)

    @property
    def wait_seconds(self) -> float:
        """The time in seconds until its deadline, or until the next look at what the worker writes."""
        remaining = self.deadline - time.monotonic()
        return min(remaining, _LOOK_SECONDS) if self.step == _ENDLESS_STEP else remaining

    @property
    def endless(self) -> str:
        """That UCX tries for ever to lock memory, and writes a line for each try; empty if it does not."""
        return refused_locks(self.worker.output()) if self.step == _ENDLESS_STEP else ""

    @property
    def hopeless(self) -> bool:
        """Whether its deadline is over, or the worker will never answer."""
        return self.deadline <= time.monotonic() or bool(self.endless)


class Process(Protocol):
    """A worker's process, on this host or on a peer's."""

    #: Whether it is on this host.
    here: bool
    #: The socket for messages, one line of JSON each. It is closed when the process has ended.
    channel: socket.socket

    @property
    def pid(self) -> int:
        """The process id on its host."""

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code (negative for a signal); None if the process has not ended within ``seconds``."""

    def kill(self) -> None:
        """End the process immediately."""

    def state(self) -> str:
        """Return the kernel's state of the process in words, such as ``sleeping``."""

    def signal(self, number: int) -> None:
        """Send a signal to the process."""

    def output(self) -> str:
        """Return everything that the process has written to stdout and stderr."""


class Worker:
    """The child process that owns NIXL, or that starts external programs.

    :param process: its process.
    :param rank: the rank for which it works, which every error names.
    :param role: ``initiator``, ``target`` or ``agent``; a ``tool`` does not load NIXL and only starts external
        programs.
    :param timeout: the deadline of each step except the start, in seconds.
    :param start_timeout: the deadline of its start, and of creating an agent in it, in seconds.
    """

    def __init__(
        self, process: Process, *, rank: int, role: str, timeout: float, start_timeout: float = START_SECONDS
    ) -> None:
        self.rank = rank
        self.role = role
        self.timeout = timeout
        self.start_timeout = start_timeout
        #: Whether these two come from --nixl-timeout and --nixl-start-timeout.
        self.by_option = True
        self._process = process
        self._buffer = bytearray()
        self._requests = 0
        self._kills = memory_kills()[0]
        #: The names of its agents, by the numbers of their references.
        self.agent_names: dict[int, str] = {}
        self._ended = self._stopped = self._asked_to_end = False
        _log.info("%s started", self.name)
        self._pending: Pending | None = self.request("hello", path=sys.path, loads=role != "tool")
        self._versions: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def name(self) -> str:
        """The name of this worker in errors."""
        return f"rank {self.rank} ({self.role} worker, pid {self.pid})"

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.alive

    @property
    def versions(self) -> dict[str, Any]:
        """The worker's ``python``, ``nixl``, ``nixl_package`` and ``host``. The first use waits for its start."""
        if self._versions is None:
            assert self._pending is not None
            self._versions = self._answer(self._pending)
        return self._versions

    def request(self, command: str, *, seconds: float | None = None, **arguments: Any) -> Pending:
        """Send a command without waiting for the answer.

        :param command: the name of the command.
        :param seconds: the deadline; None for the usual one of this worker.
        :param arguments: the arguments of the command.
        :raises WorkerError: the worker has died, or an argument is a reference to an object of another worker.
        """
        if command != "hello":
            _ = self.versions
        self._requests += 1
        usual = self.start_timeout if command in _START_STEPS else self.timeout
        seconds = usual if seconds is None else seconds
        pending = Pending(self, self._requests, command, seconds, _step_words(command, arguments, self.agent_names))
        try:
            self._send(command, pending.number, arguments)
        except ForeignRefError as error:
            raise self._foreign(str(arguments.get("method", command)), error.ref) from None
        except OSError:
            raise self._died(pending.words) from None
        return pending

    def call(self, command: str, *, seconds: float | None = None, **arguments: Any) -> Any:
        """Send a command like :meth:`request`, and wait for its answer.

        :raises WorkerError: the worker dies, hangs or refuses the command.
        """
        return self.request(command, seconds=seconds, **arguments).result()

    def output(self) -> str:
        """Return everything that the worker has written to stdout and stderr."""
        return self._process.output()

    def tail(self) -> str:
        """Return the last lines of the output, without UCX's tables and NIXL's INFO and DEBUG lines."""
        return "\n".join(f"  | {line}" for line in telling(self.output())[-_TAIL_LINES:])

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.signal(number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self._stopped = number == signal.SIGSTOP

    def kill(self) -> None:
        """End the process immediately."""
        self._process.kill()
        if not self._ended:
            self._ended = True
            _log.info("%s ended", self.name)

    def ask_to_end(self) -> None:
        """Ask the process to end, once, unless :meth:`signal` has stopped it: it could not do so."""
        if self.alive and not (self._stopped or self._asked_to_end):
            self._asked_to_end = True
            with contextlib.suppress(OSError):
                self._send("exit")

    def close(self) -> None:
        """Ask the process to end, and kill it if it has not ended within two seconds."""
        self.ask_to_end()
        if self._asked_to_end and not self._stopped:
            self._process.wait(2)
        self.kill()

    def fileno(self) -> int:
        """Return the descriptor of the channel, to wait for an answer."""
        return self._process.channel.fileno()

    @property
    def answered(self) -> bool:
        """Whether another answer has already arrived, together with the previous one."""
        return b"\n" in self._buffer

    def cancel(self) -> None:
        """Ask the worker to stop serving; the worker does not answer this."""
        with contextlib.suppress(OSError):
            self._send("cancel")

    def _send(self, command: str, number: int = 0, arguments: Mapping[str, Any] | None = None) -> None:
        message = {"command": command, "number": number, "arguments": dict(arguments or {})}
        self._process.channel.sendall(encode(message, self))

    def _answer(self, pending: Pending) -> Any:
        while True:
            line = self._line(pending)
            try:
                message = decode(line, self)
                check(REPLY, message)
                if message["number"] != pending.number:
                    continue  # the late answer to an abandoned request
                if "error" not in message:
                    check_answer(pending.step, message["result"])
                    return message["result"]
            except StrictError as error:
                raise self._nonsense(pending.step, error) from None
            raise self._failed(pending.words, message["error"])

    def _line(self, pending: Pending) -> bytes:
        searched = 0  # an answer with memory is large, and each part of it is searched once
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            remaining = pending.wait_seconds
            if remaining <= 0:
                raise self._hung(pending)
            if not _readable([self], remaining):
                if tail := pending.endless:
                    raise self._endless(pending, tail)
                continue
            chunk = self._receive()
            if not chunk:
                raise self._died(pending.words)
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _receive(self) -> bytes:
        try:
            return self._process.channel.recv(1 << 20)
        except ConnectionResetError:
            return b""

    def _died(self, step: str) -> WorkerError:
        code = self._process.wait(_END_SECONDS)
        if code is None and self.alive:  # it has closed its channel but still runs
            self._process.kill()
            code = self._process.wait(_END_SECONDS)
        how = "has gone with its rank" if code is None else ended(code)
        reason = f"{self.name} {how} during {step}"
        remedy = (
            "read its last lines below for a crash in NIXL, UCX or a driver; run `dmesg` to look for the OOM killer"
        )
        output = self.output()
        if code is not None and self._process.here:
            kills, limit = memory_kills()
            if code == -signal.SIGKILL and kills > self._kills:
                reason, remedy = f"{reason}: {limit}", MEMORY_REMEDY
            elif code != -signal.SIGKILL and (short := shortage(crashed=code < 0)):
                reason, remedy = f"{reason}: {short[0]}", short[1]
            elif os.strerror(errno.EAGAIN) in output:
                fault, remedy = start_fault()
                reason = f"{reason}: {fault}"
        if code is None:  # its rank has gone, so its last lines are unknown
            remedy = "read below how the ranks ended"
        tail = self.tail() if code is not None else ""
        if device := failed_device(tail):
            reason, remedy = f"{reason}: {device} went down or was removed, and UCX aborts then", PORT_REMEDY
        error = WorkerDiedError(reason, remedy, _quoted(tail) if code is not None else "")
        error.last_line = next(reversed(telling(_CRASH.split(output, maxsplit=1)[0])), "").strip()
        self.kill()
        return error

    def _hung(self, pending: Pending) -> WorkerError:
        state = self._process.state()
        self._process.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECONDS
        while _STACKS_MARK not in self.output() and time.monotonic() < deadline and self.alive:
            time.sleep(0.01)
        tail = self.tail()
        self.kill()
        limit = f"{pending.seconds:g} s"
        step = _START_STEPS.get(pending.step)
        did_not = f"did not {step}" if step else f"did not answer {pending.words}"
        reason = f"{self.name}, which was {state}, {did_not} before its deadline of {limit}, and was ended"
        busy = "if the machine is only busy, run it again with less load"
        if self.by_option:
            busy += f", or set {'--nixl-start-timeout' if step else '--nixl-timeout'} to more than {limit}"
        remedy = f"read the stacks of its threads below; {busy}"
        error = WorkerHungError(reason, remedy, _quoted(tail))
        # A process that was stopped by a signal is not late because of load.
        error.late = not state.startswith("stopped")
        return error

    def _endless(self, pending: Pending, line: str) -> WorkerError:
        tail = self.tail()
        self.kill()
        reason = f"{self.name} would never end {pending.words}, and was ended: {line}"
        remedy = f"{MEMLOCK_REMEDY}; read `pytest-nixl explain NIXL-LOCKED-MEMORY-HANGS`"
        return WorkerError(reason, remedy, _quoted(tail))

    def _foreign(self, step: str, ref: Ref) -> WorkerError:
        owner = ref.owner
        assert isinstance(owner, Worker)
        gone = "" if owner.alive else ", which has ended"
        return WorkerError(
            f"{step!r} of {self._agents()} ({self.name}) was given a {ref.kind} of {owner._agents()} "
            f"({owner.name}{gone}), and an object can be used only in its own worker",
            f"give it to {owner._agents()}; for another worker, create one there: descriptors of remote memory are "
            "created by the agent that transfers",
        )

    def _agents(self) -> str:
        """Return the names of its agents, for errors."""
        names = [repr(name) for name in self.agent_names.values()]
        return f"agent{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "a worker without an agent"

    def _nonsense(self, step: str, error: StrictError) -> WorkerError:
        self.kill()
        return WorkerError(
            f"{self.name} sent an answer to {step!r} that this version does not allow, and was ended: {error}",
            "install the same pytest-nixl on every rank; without --nixl-group-token a stranger may have written it",
        )

    def _failed(self, step: str, error: Mapping[str, str]) -> WorkerError:
        kind, type_name, message = error["kind"], error["type"], error["message"]
        detail = _quoted(self.tail())
        if kind == "nixl":
            reason = f"NIXL reported {type_name} ({message}) in {self.name} during {step}"
            environ = os.environ if self._process.here else {}
            remedy = error.get("remedy") or peer_failure_remedy(self.output(), environ)
            remedy = remedy or _NIXL_REMEDIES.get(type_name, _NIXL_REMEDY)
            return NixlError(reason, remedy, detail, type_name)
        if kind == "ours":
            error_type = GpuFullError if type_name == GpuMemoryError.__name__ else WorkerError
            return error_type(f"{message} (in {self.name} during {step})", error["remedy"])
        if kind == "import":
            reason = f"NIXL cannot be loaded in {self.name}: {message}"
            return NixlAbsentError(reason, error.get("remedy", ""), detail)
        if kind == "timeout":
            remedy = (
                "check whether the other rank still runs, and whether the path to it drops packets; if the machine is "
                "busy, increase --nixl-timeout"
            )
            return WorkerLateError(f"{self.name} stopped {step} at its deadline: {message}", remedy, detail)
        if kind == "refused":
            return WorkerError(f"{self.name} refused {step}: {message}", "", detail)
        remedy = "install the module for this Python, or correct the import" if type_name in _IMPORT_ERRORS else ""
        return WorkerError(f"{type_name} in {self.name} during {step}: {message}", remedy, error["traceback"])


def results(pending: Sequence[Pending], *, serving: Sequence[Pending] = ()) -> list[Any]:
    """Wait for the answers of several workers, and return them in the order of the requests.

    :param pending: the requests.
    :param serving: requests that run until they are cancelled, which happens when the others are answered.
    :raises WorkerError: a worker failed. The other workers get a moment to report their errors and are then ended. If a
        worker died or hung, its error is raised, because the other errors are consequences.
    """
    errors: list[WorkerError] = []
    hurried: set[Pending] = set()
    answers: dict[Pending, Any] = {}
    waiting, to_cancel = [*pending, *serving], list(serving)
    while waiting:
        if to_cancel and not set(waiting).intersection(pending):
            for request in to_cancel:
                request.worker.cancel()
            to_cancel = []
        for item in _ready(waiting):
            waiting.remove(item)
            try:
                answers[item] = item.result()
            except WorkerHungError as error:
                # A late worker whose deadline was shortened is a consequence; one stopped by a signal is the cause.
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
    """Return a sort key: a worker that died or hung is the cause of the other workers' errors."""
    return 0 if isinstance(error, WorkerDiedError) else 1 if isinstance(error, WorkerHungError) else 2


def _ready(waiting: Sequence[Pending]) -> list[Pending]:
    """Wait a while, and return the requests with something to read, or those that are not worth waiting for."""
    heads = {item.worker: item for item in reversed(waiting)}
    if answered := [item for item in heads.values() if item.worker.answered]:
        return answered
    ready = _readable(heads, max(0.0, min(item.wait_seconds for item in heads.values())))
    return [heads[worker] for worker in ready] or [item for item in heads.values() if item.hopeless]


def _readable(workers: Iterable[Worker], seconds: float) -> list[Worker]:
    """Wait until there is something to read, and return from whom; select(2) knows only descriptors below 1024."""
    waiting = select.poll()
    by_descriptor = {}
    for worker in workers:
        waiting.register(worker.fileno(), select.POLLIN)
        by_descriptor[worker.fileno()] = worker
    return [by_descriptor[descriptor] for descriptor, _ in waiting.poll(seconds * 1000)]


def telling(output: str) -> list[str]:
    """Return the lines of a worker's output without UCX's tables and NIXL's INFO and DEBUG lines."""
    return [line for line in output.splitlines() if line.strip() and not _NOISE.search(line)]


def _quoted(tail: str) -> str:
    return f"its last lines:\n{tail}" if tail else "it wrote nothing to stderr"


def ended(code: int) -> str:
    """Return in words how a process ended, by its exit code (negative for a signal)."""
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


#: The method of NIXL's agent that a command calls.
_METHODS = {"add_agents": "add_remote_agent", "register": "register_memory", "row_prepare": "initialize_xfer"}


def _step_words(command: str, arguments: Mapping[str, Any], agents: Mapping[int, str]) -> str:
    """Describe a worker's step: a call of NIXL by its method and its agent, such as ``'transfer' of agent 'a'``.

    :param agents: the names of the worker's agents, by the numbers of their references.
    """
    agent = arguments.get("agent")
    method = arguments.get("method") if command in ("call", "descriptor_list") else _METHODS.get(command)
    name = agents.get(agent.number) if isinstance(agent, Ref) else None
    return f"{method!r} of agent {name!r}" if method and name else repr(method or command)
