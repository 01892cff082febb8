# SPDX-License-Identifier: Apache-2.0
"""A peer's side: a closed set of things that rank 0 may ask for. No code comes by etcd."""

from __future__ import annotations

import contextlib
import sys
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from pytest_nixl.errors import NixlPluginError
from pytest_nixl.keeper import Keeper
from pytest_nixl.worker.local import LocalProcess
from pytest_nixl.worker.wire import decode, encode

Send = Callable[[dict[str, Any]], None]
#: Something that rank 0 may ask for beside workers.
Service = Callable[..., Any]

#: What a worker here does for rank 0: everything that it can, but to call a function of a test's.
WORKER_COMMANDS = frozenset(
    {"activate", "allocate", "call", "cancel", "compare", "connect", "create_agent", "devices", "exit", "fill",
     "forget", "free_port", "hello", "measure", "move", "read", "register", "serve", "tool_end", "tool_find",
     "tool_listens", "tool_look", "tool_start", "write"}
)  # fmt: skip
#: Bytes of a worker's output that are sent, at most: the last ones.
_OUTPUT = 4 << 20


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


class Serving:
    """The workers that a peer runs for rank 0.

    :param send: sends rank 0 a message.
    :param over: called when rank 0 has said that the run has ended.
    :param services: what it may ask for beside workers, by name.
    :param own: variables of the workers that rank 0 has no say in.
    """

    def __init__(
        self,
        keeper: Keeper,
        rank: int,
        send: Send,
        over: Callable[[], None],
        services: Mapping[str, Service],
        own: Mapping[str, str | None],
    ) -> None:
        self._keeper = keeper
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

    def receive(self, message: dict[str, Any]) -> None:
        """Do what rank 0 asks for."""
        if "line" in message:
            self._pass_on(int(message["worker"]), str(message["line"]))
            return
        what = message.get("ask", "")
        arguments = {name: value for name, value in message.items() if name not in ("ask", "number")}
        if what in self._services:
            # What takes its time must not hold up the workers' messages.
            asked = (message.get("number"), self._services[what], arguments)
            threading.Thread(target=self._answer, args=asked, name=f"service {what}", daemon=True).start()
            return
        method = getattr(self, f"_do_{what}", None)
        self._answer(message.get("number"), method or partial(_refuse, what), arguments)
        if self.ending is not None:
            self._over()

    def _answer(self, number: int | None, method: Service, arguments: dict[str, Any]) -> None:
        try:
            answer = {"answer": number, "result": method(**arguments)}
        except NixlPluginError as error:
            answer = {"answer": number, "error": error.reason, "remedy": error.remedy}
        except (OSError, TypeError, KeyError, ValueError) as error:
            answer = {"answer": number, "error": f"{type(error).__name__}: {error}"}
        try:
            self._send(answer)
        except NixlPluginError as error:
            # It is too large, say. Where nothing can be sent at all, the lease tells both sides so.
            with contextlib.suppress(NixlPluginError):
                self._send({"answer": number, "error": error.reason, "remedy": error.remedy})

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
        message = decode(line.encode())
        if message.get("command") not in WORKER_COMMANDS:
            words = f"{message.get('command')!r} is not among what rank 0 may ask of another rank's workers"
            error = {"kind": "refused", "type": "refused", "message": words, "traceback": ""}
            refusal = encode({"number": message.get("number"), "error": error})
            self._send({"worker": worker, "line": refusal.decode().rstrip("\n")})
            return
        if message["command"] == "hello":
            # Modules are found where this rank finds them.
            message["arguments"] = {"path": sys.path, "loads": message["arguments"].get("loads", True)}
        with contextlib.suppress(OSError):  # it has ended, and says so itself
            process.channel.sendall(encode(message))

    def _do_start(self, worker: int, role: str, environment: dict[str, str | None]) -> int:
        # Which programs are run is this rank's own to say.
        process = LocalProcess(self._keeper, f"rank{self._rank}-{role}", {**environment, **self._own})
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
        text = self._processes[worker].output().encode()[-_OUTPUT:]
        return b64encode(zlib.compress(text)).decode()

    def _do_signal(self, worker: int, signal: int) -> None:
        self._processes[worker].signal(signal)

    def _do_end(self, **plain: Any) -> None:
        self.ending = Ending(**plain)

    def _listen(self, worker: int, process: LocalProcess) -> None:
        """Carry what a worker writes to rank 0, and that it has ended."""
        with contextlib.suppress(OSError, NixlPluginError):
            with process.channel.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    self._send({"worker": worker, "line": line.rstrip("\n")})
        with contextlib.suppress(NixlPluginError):  # rank 0 has gone, and nobody asks any more
            self._send({"worker": worker, "ended": process.wait(5)})
