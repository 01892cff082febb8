# SPDX-License-Identifier: Apache-2.0
"""Rank 0's view of its peers: start workers on them, and speak to these through the mailbox as if they were local."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pytest_nixl.cluster.messages import Message, PeerAnswer, WorkerEnded, WorkerLine, check_answer
from pytest_nixl.cluster.peer_server import LARGEST_OUTPUT
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import StrictError, printable, unpack
from pytest_nixl.processes.hosts import Host

Send = Callable[[dict[str, Any]], None]


class PeerError(NixlPluginError):
    """A peer did not answer, refused a request, or could not do it."""


class PeerLateError(PeerError):
    """A peer did not answer before its deadline."""

    late = True


class PeerClient(Host):
    """One peer as rank 0 sees it: a host on which workers start, and which answers requests.

    :param rank: the rank of the peer.
    :param name: its name in messages: ``rank 1 on node-b``.
    :param send: sends it a message.
    :param timeout: seconds that it may take to answer.
    """

    def __init__(self, rank: int, name: str, send: Send, timeout: float) -> None:
        self.rank = rank
        self.name = name
        self._send = send
        self._timeout = timeout
        self._numbers = itertools.count(1)
        #: The answers to pending requests by number: None until the answer arrives.
        self._answers: dict[int, PeerAnswer | None] = {}
        self._answered = threading.Condition()
        self._processes: dict[int, RemoteProcess] = {}
        self._lost: NixlPluginError | None = None

    @property
    def gone(self) -> bool:
        """Whether the peer is lost."""
        return self._lost is not None

    @property
    def error(self) -> NixlPluginError | None:
        """Why the peer is lost; None if it is not."""
        return self._lost

    def ask(self, request: str, /, *, within: float | None = None, **arguments: Any) -> Any:
        """Send a request to the peer, wait for its answer, and return the result.

        :param request: the name of the request.
        :param within: seconds to wait; None for the timeout of this peer.
        :param arguments: the arguments of the request, as JSON values.
        :raises PeerLateError: if no answer arrives in time.
        :raises PeerError: if the peer refuses, or its answer is not valid.
        :raises NixlPluginError: if the peer is lost.
        """
        message = self.request(request, **arguments)
        try:
            self._send(message)
            return self.answer(message, within=within)
        finally:
            self.forget(message)

    def request(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Return the message of a request, for a caller that sends it; then call :meth:`answer` and :meth:`forget`.

        :raises NixlPluginError: if the peer is lost.
        """
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        with self._answered:
            self._answers[number] = None
        return {"ask": name, "number": number, **arguments}

    def forget(self, message: Mapping[str, Any]) -> None:
        """Expect no answer to a request any more."""
        with self._answered:
            del self._answers[message["number"]]

    def answer(self, message: Mapping[str, Any], *, within: float | None = None, since: float | None = None) -> Any:
        """Wait for the answer to a request that was sent, and return the result. Errors as :meth:`ask`.

        :param since: the monotonic time from which ``within`` counts; None for now.
        """
        seconds = self._timeout if within is None else within
        remaining = seconds if since is None else since + seconds - time.monotonic()
        service, number = message["ask"], message["number"]
        with self._answered:
            self._answered.wait_for(lambda: self._answers[number] or self._lost is not None, remaining)
            answer = self._answers[number]
        if self._lost is not None:
            raise self._lost
        if answer is None:
            raise PeerLateError(
                f"{self.name} did not answer {service!r} within {seconds:g} s",
                "check that its process still runs, and read its last output",
            )
        if answer.error is not None:
            raise PeerError(f"{self.name} refused {service!r}: {printable(answer.error)}", printable(answer.remedy))
        try:
            check_answer(service, answer.result)
        except StrictError as error:
            raise self._nonsense(service, error) from None
        return answer.result

    def _nonsense(self, request: str, error: StrictError) -> PeerError:
        return PeerError(
            f"{self.name} sent an invalid answer to {request!r}: {error}",
            "install the same version of pytest-nixl on every rank; and give every rank a --nixl-group-token, because "
            "without one any client of the etcd can write an answer",
        )

    def unpack(self, request: str, text: str, most: int) -> bytes:
        """Return the bytes in a compressed text that the peer answered.

        :param most: the largest number of bytes.
        :raises PeerError: if the text is not a compressed text, or holds more bytes.
        """
        try:
            return unpack(text, most=most)
        except StrictError as error:
            raise self._nonsense(request, error) from None

    def _new_process(self, role: str, environment: Mapping[str, str | None], start_timeout: float) -> RemoteProcess:
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
        return process

    def line(self, worker: int, line: str) -> None:
        """Send one line to a worker of the peer."""
        self._send({"worker": worker, "line": line})

    def receive(self, message: Message) -> None:
        """Handle a message from the peer."""
        if isinstance(message, PeerAnswer):
            with self._answered:
                if message.number in self._answers:  # else the request timed out
                    self._answers[message.number] = message
                    self._answered.notify_all()
        elif isinstance(message, WorkerLine) and message.worker in self._processes:
            self._processes[message.worker].received(message.line)
        elif isinstance(message, WorkerEnded) and message.worker in self._processes:
            self._processes[message.worker].ended(message.code)

    def mark_lost(self, error: NixlPluginError) -> None:
        """Mark the peer as lost: end every wait for it, and mark its workers as ended."""
        with self._answered:
            self._lost = self._lost or error  # the first error is the cause
            self._answered.notify_all()
        for process in self._processes.values():
            process.ended(None)


class RemoteProcess:
    """A worker that runs on a peer. It has the interface of a local process.

    ``channel`` is one end of a socket pair. Lines that are written to it are sent to the peer by the mailbox, and lines
    from the worker can be read from it.

    :param peer: the peer on which it runs.
    :param number: the number of the worker on that peer.
    """

    here = False

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
        """Whether the worker still runs, as far as its peer has said."""
        return not self._over.is_set()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the worker has ended and return its exit code.

        :param seconds: the time to wait; None for no limit.
        :returns: None if it has not ended in time, or if its peer is lost.
        """
        self._over.wait(seconds)
        return self._code

    def kill(self) -> None:
        """Have the peer kill the worker."""
        if self.alive:
            with suppress(NixlPluginError):  # the workers of a lost peer end with it
                self._code = self._peer.ask("kill", worker=self._number)
            self.ended(self._code)
        self.channel.close()

    def state(self) -> str:
        """Return the state of the process as the kernel of its host reports it."""
        return str(self._peer.ask("state", worker=self._number))

    def signal(self, number: int) -> None:
        """Send a signal to the worker."""
        self._peer.ask("signal", worker=self._number, signal=int(number))

    def output(self) -> str:
        """Return what the worker wrote to stdout and stderr, at most the last 4 MiB; empty if its peer is lost."""
        if self._peer.gone:
            return ""
        text = self._peer.ask("output", worker=self._number)
        return self._peer.unpack("output", text, LARGEST_OUTPUT).decode(errors="replace")

    def received(self, line: str) -> None:
        """Pass on a line from the worker."""
        with suppress(OSError):  # the reader has closed the channel
            self._far.sendall(line.encode() + b"\n")

    def ended(self, code: int | None) -> None:
        """Mark the worker as ended, and close its channel for reading."""
        if self._over.is_set():
            return
        self._code = code
        self._over.set()
        with suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)

    def _feed(self) -> None:
        """Send the lines that are written to ``channel`` to the peer, until one of the two ends is closed."""
        with self._far, self._far.makefile("r", encoding="utf-8") as lines:
            try:
                for line in lines:
                    self._peer.line(self._number, line.rstrip("\n"))
            except (NixlPluginError, OSError):
                self.ended(None)
