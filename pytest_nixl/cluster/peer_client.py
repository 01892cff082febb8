# SPDX-License-Identifier: Apache-2.0
"""Rank 0's side of the peers: their workers, spoken to by the mailbox as a worker of this host is by its socket."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pytest_nixl.cluster.messages import Message, PeerAnswer, WorkerEnded, WorkerLine, check_answer
from pytest_nixl.cluster.peer_server import LARGEST_OUTPUT
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import StrictError, printable, unpack
from pytest_nixl.processes.worker_process import START_SECONDS, Worker

Send = Callable[[dict[str, Any]], None]


class PeerError(NixlPluginError):
    """A peer did not answer, or could not do what it was asked."""


class PeerLateError(PeerError):
    """A peer did not answer before its deadline."""

    late = True


class PeerClient:
    """One peer, which is asked for workers and for what its host knows. It is a place of workers.

    :param name: how failures name it: ``rank 1 on node-b``.
    :param send: sends it a message.
    :param timeout: seconds that it may take to answer.
    """

    def __init__(self, rank: int, name: str, send: Send, timeout: float) -> None:
        self.rank = rank
        self.name = name
        self._send = send
        self._timeout = timeout
        self._numbers = itertools.count(1)
        #: By number, of what is asked and not given up: None until it is answered.
        self._answers: dict[int, PeerAnswer | None] = {}
        self._answered = threading.Condition()
        self._processes: dict[int, RemoteProcess] = {}
        self._lost: NixlPluginError | None = None

    @property
    def gone(self) -> bool:
        """Whether it is taken for gone."""
        return self._lost is not None

    @property
    def error(self) -> NixlPluginError | None:
        """Why it is taken for gone; None: it is not."""
        return self._lost

    def ask(self, what: str, *, within: float | None = None, **arguments: Any) -> Any:
        """Ask the peer and wait for its answer.

        :param within: seconds, where the usual ones are too many.
        :raises PeerError: where the answer does not come, or is a refusal.
        """
        seconds = self._timeout if within is None else within
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        with self._answered:
            self._answers[number] = None
        try:
            self._send({"ask": what, "number": number, **arguments})
            with self._answered:
                self._answered.wait_for(lambda: self._answers[number] or self._lost is not None, seconds)
                answer = self._answers[number]
        finally:
            with self._answered:
                del self._answers[number]
        if self._lost is not None:
            raise self._lost
        if answer is None:
            raise PeerLateError(
                f"{self.name} did not answer {what!r} within {seconds:g} s",
                "see whether its process still runs, and read what it printed last",
            )
        if answer.error is not None:
            raise PeerError(f"{self.name} refused {what!r}: {printable(answer.error)}", printable(answer.remedy))
        try:
            check_answer(what, answer.result)
        except StrictError as error:
            raise self._nonsense(what, error) from None
        return answer.result

    def _nonsense(self, what: str, error: StrictError) -> PeerError:
        return PeerError(
            f"{self.name} answered {what!r} with what no rank of this version answers: {error}",
            "see that every rank has the same pytest-nixl; without a --nixl-group-token a stranger may have written it",
        )

    def unpack(self, what: str, text: str, most: int) -> bytes:
        """Return the bytes that it answered as a packed text. :raises PeerError: where it is none, or too large."""
        try:
            return unpack(text, most=most)
        except StrictError as error:
            raise self._nonsense(what, error) from None

    def start(
        self,
        role: str,
        environment: Mapping[str, str | None],
        timeout: float,
        start_timeout: float = START_SECONDS,
    ) -> Worker:
        """Start a worker there."""
        number = next(self._numbers)
        process = RemoteProcess(self, number)
        self._processes[number] = process
        try:
            within = max(self._timeout, start_timeout)
            process.pid = self.ask("start", within=within, worker=number, role=role, environment=dict(environment))
        except BaseException:
            process.ended(None)
            process.channel.close()
            raise
        return Worker(process, rank=self.rank, role=role, timeout=timeout, start_timeout=start_timeout)

    def line(self, worker: int, line: str) -> None:
        """Send a worker there one line."""
        self._send({"worker": worker, "line": line})

    def receive(self, message: Message) -> None:
        """Take a message of the peer's."""
        if isinstance(message, PeerAnswer):
            with self._answered:
                if message.number in self._answers:  # else it was given up
                    self._answers[message.number] = message
                    self._answered.notify_all()
        elif isinstance(message, WorkerLine) and message.worker in self._processes:
            self._processes[message.worker].received(message.line)
        elif isinstance(message, WorkerEnded) and message.worker in self._processes:
            self._processes[message.worker].ended(message.code)

    def lost(self, error: NixlPluginError) -> None:
        """Take it for gone: whoever waits for it is told, and its workers are dead."""
        with self._answered:
            self._lost = self._lost or error  # what came first says why
            self._answered.notify_all()
        for process in self._processes.values():
            process.ended(None)


class RemoteProcess:
    """A worker of a peer's; ``channel`` is the end of a pair of sockets whose other end the mailbox feeds."""

    def __init__(self, peer: PeerClient, number: int) -> None:
        self.pid = 0
        self.channel, self._far = socket.socketpair()
        self._peer = peer
        self._number = number
        self._code: int | None = None
        self._over = threading.Event()
        self._feeder = threading.Thread(target=self._feed, name=f"worker {number} of {peer.name}", daemon=True)
        self._feeder.start()

    @property
    def alive(self) -> bool:
        """Whether it still runs, as far as its peer has said."""
        return not self._over.is_set()

    def wait(self, seconds: float | None = None) -> int | None:
        """Return its exit code once it has ended; None where it has not within ``seconds``, or its peer has gone."""
        self._over.wait(seconds)
        return self._code

    def kill(self) -> None:
        """Have its peer end it."""
        if self.alive:
            with suppress(NixlPluginError):  # a peer that has gone takes its workers with it
                self._code = self._peer.ask("kill", worker=self._number)
            self.ended(self._code)
        self.channel.close()

    def state(self) -> str:
        """Say what its kernel has it doing."""
        return str(self._peer.ask("state", worker=self._number))

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._peer.ask("signal", worker=self._number, signal=int(number))

    def output(self) -> str:
        """All that it has written to stdout and stderr; nothing is known of a peer's that has gone."""
        if self._peer.gone:
            return ""
        text = self._peer.ask("output", worker=self._number)
        return self._peer.unpack("output", text, LARGEST_OUTPUT).decode(errors="replace")

    def received(self, line: str) -> None:
        """Take a line that it wrote."""
        with suppress(OSError):  # whoever waited for it has gone
            self._far.sendall(line.encode() + b"\n")

    def ended(self, code: int | None) -> None:
        """Take it for ended; its channel then reads as closed."""
        if self._over.is_set():
            return
        self._code = code
        self._over.set()
        with suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)

    def _feed(self) -> None:
        """Carry what is written to ``channel`` to the peer, until either end is closed."""
        with self._far, self._far.makefile("r", encoding="utf-8") as lines:
            try:
                for line in lines:
                    self._peer.line(self._number, line.rstrip("\n"))
            except (NixlPluginError, OSError):
                self.ended(None)
