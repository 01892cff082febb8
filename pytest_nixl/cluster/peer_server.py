# SPDX-License-Identifier: Apache-2.0
"""A peer's side: a closed set of things that rank 0 may ask for. No code comes by etcd."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from pytest_nixl.cluster.messages import Message, PeerRequest, WorkerLine, check_ask
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import Every, Number, StrictError, Text, check, pack, printable
from pytest_nixl.core.wire import decode, encode
from pytest_nixl.processes.local_process import LocalProcess
from pytest_nixl.processes.supervisor import SupervisorClient

Send = Callable[[dict[str, Any]], None]
#: Something that rank 0 may ask for beside workers.
Service = Callable[..., Any]

#: What a worker here does for rank 0: everything that it can, but to call a function of a test's.
WORKER_COMMANDS = frozenset(
    {"activate", "allocate", "call", "cancel", "compare", "connect", "create_agent", "devices", "exit", "fill",
     "forget", "free_port", "hello", "measure", "move", "read", "register", "serve", "tool_end", "tool_find",
     "tool_listens", "tool_look", "tool_start", "write"}
)  # fmt: skip
#: What rank 0 may set of a worker's environment: what names no file or directory, of which code could be loaded.
_VARIABLES = re.compile(r"(UCX|FI|NIXL|ETCD)_[A-Z0-9_]+|CUDA_[A-Z_]+")
_OF_FILES = re.compile(r"\w*_(DIR|DIRS|PATH|PATHS|FILE|FILES|MODULES?)")
#: Bytes of a worker's output that are sent, at most: the last ones.
LARGEST_OUTPUT = 4 << 20
#: A line that a worker may be written.
_REQUEST = {"command": Text(64), "number": Number(0, 1 << 53, whole=True), "arguments": Every(Any, keys=True)}


@dataclass(frozen=True)
class Ending:
    """How a run ends, as rank 0 tells it.

    :param code: the exit code of every rank.
    :param verdict: what it came to, a few lines to read.
    :param refusal: why the run did not start; empty: it did.
    :param told: the verdict with counts and failing results, as ``verdict.json`` has it in every rank's folder.
    """

    code: int
    verdict: str = ""
    refusal: str = ""
    told: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def _refuse(what: str, **_: Any) -> None:
    raise NixlPluginError(f"a peer does nothing that is called {what!r}")


class PeerServer:
    """The workers that a peer runs for rank 0.

    :param send: sends rank 0 a message.
    :param over: called when rank 0 has said that the run has ended.
    :param services: what it may ask for beside workers, by name.
    :param own: variables of the workers that rank 0 has no say in.
    """

    def __init__(
        self,
        supervisor: SupervisorClient,
        rank: int,
        send: Send,
        over: Callable[[], None],
        services: Mapping[str, Service],
        own: Mapping[str, str | None],
    ) -> None:
        self._supervisor = supervisor
        self._rank = rank
        self._send = send
        self._over = over
        self._services = services
        self._own = own
        self._processes: dict[int, LocalProcess] = {}
        #: Workers that were started.
        self.started = 0
        #: How the run ends; None: rank 0 has not said.
        self.ending: Ending | None = None

    def receive(self, message: Message) -> None:
        """Do what rank 0 asks for."""
        if isinstance(message, WorkerLine):
            self._pass_on(message.worker, message.line)
            return
        if not isinstance(message, PeerRequest):
            return  # a peer asks for nothing, and so nothing is answered
        what = message.what
        if what in self._services:
            # What takes its time must not hold up the workers' messages.
            asked = (message, self._services[what])
            threading.Thread(target=self._answer, args=asked, name=f"service {what}", daemon=True).start()
            return
        method = getattr(self, f"_do_{what}", None)
        self._answer(message, method or partial(_refuse, what))
        if self.ending is not None:
            self._over()

    def _answer(self, ask: PeerRequest, method: Service) -> None:
        number = ask.number
        try:
            check_ask(ask.what, ask.arguments)
            answer = {"answer": number, "result": method(**ask.arguments)}
        except NixlPluginError as error:
            answer = {"answer": number, "error": error.reason, "remedy": error.remedy}
        except StrictError as error:
            answer = {"answer": number, "error": f"these are no arguments of {ask.what!r}: {error}"}
        except Exception as error:  # whatever it is, rank 0 is to hear of it, and this rank goes on
            answer = {"answer": number, "error": f"{type(error).__name__}: {error}"}
        try:
            self._send(answer)
        except (NixlPluginError, TypeError, ValueError) as error:
            # It is too large, say. Where nothing can be sent at all, the lease tells both sides so.
            reason = error.reason if isinstance(error, NixlPluginError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(NixlPluginError):
                self._send({"answer": number, "error": reason, "remedy": getattr(error, "remedy", "")})

    def close(self) -> None:
        """End all workers."""
        for process in self._processes.values():
            process.kill()
        self._processes.clear()

    def _pass_on(self, worker: int, line: str) -> None:
        """Give a line to a worker, if it asks for what a worker here may do."""
        process = self._processes.get(worker)
        if process is None:
            return
        try:
            message = decode(line.encode())
            check(_REQUEST, message)
        except StrictError:
            return  # neither rank 0 nor a worker writes such a line, and there is nobody to be told
        if message["command"] not in WORKER_COMMANDS:
            words = f"{message['command']!r} is not among what rank 0 may ask of another rank's workers"
            error = {"kind": "refused", "type": "refused", "message": words, "traceback": ""}
            refusal = encode({"number": message["number"], "error": error})
            with contextlib.suppress(NixlPluginError):  # the lease tells both sides that nothing can be sent
                self._send({"worker": worker, "line": refusal.decode().rstrip("\n")})
            return
        if message["command"] == "hello":
            # Modules are found where this rank finds them.
            message["arguments"] = {"path": sys.path, "loads": message["arguments"].get("loads", True)}
        with contextlib.suppress(OSError):  # it has ended, and says so itself
            process.channel.sendall(encode(message))

    def _do_start(self, worker: int, role: str, environment: dict[str, str | None]) -> int:
        # Which programs are run, and of which files, is this rank's own to say.
        for name, value in environment.items():
            if not _VARIABLES.fullmatch(name) or (value is not None and _OF_FILES.fullmatch(name)):
                raise NixlPluginError(
                    f"a peer does not set {name} for its workers: expected a variable of NIXL, UCX, libfabric or CUDA "
                    "that names no file",
                    "set it on that rank itself, where it is started",
                )
        process = LocalProcess(self._supervisor, f"rank{self._rank}-{role}", {**environment, **self._own})
        self._processes[worker] = process
        self.started += 1
        threading.Thread(target=self._listen, args=(worker, process), daemon=True).start()
        return process.pid

    def _do_kill(self, worker: int) -> int | None:
        process = self._processes[worker]
        process.kill()
        return process.wait()

    def _do_state(self, worker: int) -> str:
        return self._processes[worker].state()

    def _do_output(self, worker: int) -> str:
        return pack(self._processes[worker].output().encode()[-LARGEST_OUTPUT:])

    def _do_signal(self, worker: int, signal: int) -> None:
        self._processes[worker].signal(signal)

    def _do_end(self, code: int, verdict: str, refusal: str, told: dict[str, Any]) -> None:
        self.ending = Ending(code, printable(verdict), printable(refusal), told)

    def _listen(self, worker: int, process: LocalProcess) -> None:
        """Carry what a worker writes to rank 0, and that it has ended."""
        with contextlib.suppress(OSError, NixlPluginError):
            with process.channel.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    self._send({"worker": worker, "line": line.rstrip("\n")})
        with contextlib.suppress(NixlPluginError):  # rank 0 has gone, and nobody asks any more
            self._send({"worker": worker, "ended": process.wait(5)})
