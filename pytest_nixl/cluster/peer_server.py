# SPDX-License-Identifier: Apache-2.0
"""The peer's side of rank 0's requests: a closed set of requests, none of which sends code through etcd."""

from __future__ import annotations

import contextlib
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
from pytest_nixl.model.tools import FROM_OTHER_RANKS, not_from_other_ranks
from pytest_nixl.model.worker_commands import WORKER_COMMANDS
from pytest_nixl.processes.hosts import LocalProcess
from pytest_nixl.processes.supervisor import SupervisorClient

Send = Callable[[dict[str, Any]], None]
#: A function that answers a request of rank 0; its arguments and its result are JSON values.
Service = Callable[..., Any]

#: The number of bytes that are sent from the end of a worker's output.
LARGEST_OUTPUT = 4 << 20
#: The form of a line to a worker.
_REQUEST = {"command": Text(64), "number": Number(0, 1 << 53, whole=True), "arguments": Every(Any, keys=True)}


@dataclass(frozen=True)
class Ending:
    """How a run ends, as rank 0 tells every peer.

    :param code: the exit code of every rank.
    :param verdict: the verdict in a few lines, for the terminal.
    :param refusal: why the run did not start; empty if it did.
    :param verdict_fields: the verdict with counts and failing results, for every rank's ``verdict.json``.
    """

    code: int
    verdict: str = ""
    refusal: str = ""
    verdict_fields: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the ending as JSON values."""
        return asdict(self)


def _refuse(request: str, /, **_: Any) -> None:
    raise NixlPluginError(f"a peer has no request {request!r}")


class PeerServer:
    """Runs workers for rank 0 on this rank, and answers the requests of rank 0.

    :param supervisor: the supervisor that owns the workers.
    :param rank: the rank of this process.
    :param send: sends a message to rank 0.
    :param over: called when rank 0 has said how the run ends.
    :param services: the requests that are not about workers, by name.
    :param own_variables: variables of the workers that rank 0 cannot set; they replace what it sets.
    """

    def __init__(
        self,
        supervisor: SupervisorClient,
        rank: int,
        send: Send,
        over: Callable[[], None],
        services: Mapping[str, Service],
        own_variables: Mapping[str, str | None],
    ) -> None:
        self._supervisor = supervisor
        self._rank = rank
        self._send = send
        self._over = over
        self._services = services
        self._own = own_variables
        self._processes: dict[int, LocalProcess] = {}
        #: Held while a worker is added, because rank 0 may ask for one while this rank leaves.
        self._adding = threading.Lock()
        self._closed = False
        #: The number of workers that were started.
        self.started = 0
        #: How the run ends; None as long as rank 0 has not said.
        self.ending: Ending | None = None

    def receive(self, message: Message) -> None:
        """Handle a message from rank 0."""
        if isinstance(message, WorkerLine):
            self._pass_on(message.worker, message.line)
            return
        if not isinstance(message, PeerRequest):
            return  # a peer sends no requests, so that it expects no answers
        service = message.request
        if service in self._services:
            # In a thread of its own: a slow request must not delay messages to workers.
            request = (message, self._services[service])
            threading.Thread(target=self._answer, args=request, name=f"service {service}", daemon=True).start()
            return
        method = getattr(self, f"_do_{service}", None)
        self._answer(message, method or partial(_refuse, service))
        if self.ending is not None:
            self._over()

    def _answer(self, ask: PeerRequest, method: Service) -> None:
        number = ask.number
        try:
            check_ask(ask.request, ask.arguments)
            answer = {"answer": number, "result": method(**ask.arguments)}
        except NixlPluginError as error:
            answer = {"answer": number, "error": error.reason, "remedy": error.remedy}
        except StrictError as error:
            answer = {"answer": number, "error": f"invalid arguments of {ask.request!r}: {error}"}
        except Exception as error:  # report any error to rank 0, and go on
            answer = {"answer": number, "error": f"{type(error).__name__}: {error}"}
        try:
            self._send(answer)
        except (NixlPluginError, TypeError, ValueError) as error:
            # The answer may be too large: send the reason instead. Otherwise the lease ends on both sides.
            reason = error.reason if isinstance(error, NixlPluginError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(NixlPluginError):
                self._send({"answer": number, "error": reason, "remedy": getattr(error, "remedy", "")})

    def close(self) -> None:
        """Kill all workers, and start no further one."""
        with self._adding:
            self._closed = True
        for process in self._processes.values():
            process.kill()
        self._processes.clear()

    def _pass_on(self, worker: int, line: str) -> None:
        """Pass a line from rank 0 on to a worker if its command is allowed; else answer with a refusal."""
        process = self._processes.get(worker)
        if process is None:
            return
        try:
            message = decode(line.encode())
            check(_REQUEST, message)
        except StrictError:
            return  # rank 0 does not send such a line, so that no one expects an answer
        allowed = WORKER_COMMANDS.get(message["command"])
        if allowed is None or not allowed.peers:
            reason = f"rank 0 may not send {message['command']!r} to a worker of another rank"
            error = {"kind": "refused", "type": "refused", "message": reason, "traceback": ""}
            refusal = encode({"number": message["number"], "error": error})
            with contextlib.suppress(NixlPluginError):  # nothing can be sent: the lease ends on both sides
                self._send({"worker": worker, "line": refusal.decode().rstrip("\n")})
            return
        if message["command"] == "hello":
            # The worker loads modules from this rank's own path, not from rank 0's.
            message["arguments"] = {"path": sys.path, "loads": message["arguments"].get("loads", True)}
        with contextlib.suppress(OSError):  # the worker has ended, which _listen reports
            process.channel.sendall(encode(message))

    def _do_start(self, worker: int, role: str, environment: dict[str, str | None]) -> int:
        # Only this rank itself chooses its programs and files.
        for name in not_from_other_ranks(environment):
            raise NixlPluginError(
                f"rank 0 may not set {name} for a worker of another rank: expected one of "
                f"{', '.join(sorted(FROM_OTHER_RANKS))}",
                f"set {name} in the environment of the command that starts that rank",
            )
        with self._adding:
            if self._closed:
                raise NixlPluginError(f"rank {self._rank} is leaving, and starts no worker")
            process = LocalProcess(self._supervisor, self._rank, role, {**environment, **self._own})
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

    def _do_end(self, code: int, verdict: str, refusal: str, verdict_fields: dict[str, Any]) -> None:
        self.ending = Ending(code, printable(verdict), printable(refusal), verdict_fields)

    def _listen(self, worker: int, process: LocalProcess) -> None:
        """Send the lines of a worker to rank 0, and then that it has ended."""
        with contextlib.suppress(OSError, NixlPluginError):
            with process.channel.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    self._send({"worker": worker, "line": line.rstrip("\n")})
        with contextlib.suppress(NixlPluginError):  # rank 0 is gone
            self._send({"worker": worker, "ended": process.wait(5)})
