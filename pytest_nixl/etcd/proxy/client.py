# SPDX-License-Identifier: Apache-2.0
"""The proxy of one client: its port, its connections and those to the etcd, and the rules for its requests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.proxy.connection import HTTP2_PREFACE, Http1, Http2
from pytest_nixl.etcd.proxy.request import Access, BadClientError, Request, State, main_key

#: Tells whether a rule applies to a request.
Matching = Callable[[Request], bool]
_HOST = "127.0.0.1"


class ProxyError(NixlPluginError):
    """The proxy failed, or was used in a wrong way."""


T = TypeVar("T")


class ProxyControl(Protocol):
    """The proxy, as its clients and their connections see it."""

    host: str
    port: int
    clients: list[Any]
    #: Notified after every event of the proxy.
    changed: threading.Condition

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def start(self, work: Any) -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def wait(self, condition: Callable[[], T], what: str, *, seconds: float) -> T: ...

    def call(self, function: Callable[[], T]) -> T: ...

    def later(self, seconds: float, function: Callable[[], None]) -> None: ...

    @property
    def forwarded(self) -> int: ...

    def next_place(self) -> int: ...

    def notify(self) -> None: ...


class _Rule:
    """A rule that hits the n-th matching request from now on."""

    def __init__(self, matching: Matching, nth: int) -> None:
        self._matching, self._left = matching, nth

    def hits(self, request: Request) -> bool:
        if not self._matching(request):
            return False
        self._left -= 1
        return self._left == 0


def _hit(rules: list[_Rule], request: Request) -> bool:
    # Evaluate all rules, because each one counts the request.
    return True in [rule.hits(request) for rule in rules]


def _any(request: Request) -> bool:
    return True


class ProxyClient:
    """The proxy of one client. Public methods may be called from any thread, and take effect before they return."""

    def __init__(self, path: ProxyControl, name: str) -> None:
        self.path = path
        self.name = name
        #: Protocol errors for which connections of this client were closed.
        self.broken: list[str] = []
        self._socket: socket.socket | None = None
        self._server: asyncio.AbstractServer | None = None
        self._port = 0
        self._links: set[ProxiedConnection] = set()
        self._requests: list[Request] = []
        self._cut = False
        self._holding: Matching | None = None
        self._held: dict[Request, tuple[ProxiedConnection, Callable[[], None]]] = {}
        #: Forwarded requests without an answer.
        self._in_flight: dict[Request, ProxiedConnection] = {}
        self._losses: list[_Rule] = []
        self._drops: list[_Rule] = []
        self._delays: list[tuple[float, Matching]] = []

    def __repr__(self) -> str:
        return f"ProxyClient({self.name!r}, {self.endpoint})"

    @property
    def endpoint(self) -> str:
        """URL to give to this client as its etcd. A cut does not change it."""
        return f"http://{_HOST}:{self._port}"

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests of this client in order. Each message of a stream counts as one request."""
        return tuple(self._requests)

    @property
    def held(self) -> tuple[Request, ...]:
        """The requests that are held."""
        return tuple(self._held)

    @property
    def connections(self) -> int:
        """Number of open connections of this client."""
        return len(self._links)

    @property
    def is_cut(self) -> bool:
        """Whether this client is cut off."""
        return self._cut

    def hold(self, matching: Matching = _any) -> None:
        """Hold each matching request from now on, until it is released. Streams (watches) always pass."""

        def do() -> None:
            self._holding = matching

        self.path.call(do)

    def release(self, request: Request | None = None) -> None:
        """Forward a held request. Without ``request``, forward all held requests and stop holding.

        :raises ProxyError: if the request is not held.
        """

        def do() -> None:
            if request is None:
                self._holding = None
            elif request not in self._held:
                raise ProxyError(f"cannot release this request, because it is not held: {request}")
            for held in [request] if request is not None else list(self._held):
                self._do_release(held)

        self.path.call(do)

    def release_if_held(self, request: Request) -> bool:
        """Forward a held request as :meth:`release` does; return False if its client has cancelled it."""

        def do() -> bool:
            if request not in self._held:
                return False
            self._do_release(request)
            return True

        return self.path.call(do)

    def drop(self, request: Request) -> None:
        """Discard a held request, so that it never reaches the etcd, and cut its connection."""

        def do() -> None:
            link, _ = self._held.pop(request)
            request.state = State.DROPPED
            link.abort()

        self.path.call(do)

    def lose_answer(self, matching: Matching = _any, *, nth: int = 1) -> None:
        """Lose the answer of the ``nth`` matching request from now on (1 is the next one).

        The etcd executes the request; the proxy discards the answer and cuts the connection. The client cannot tell
        this from an etcd that died or never got the request. Streams have no answer to lose.
        """
        self.path.call(lambda: self._losses.append(_Rule(matching, nth)))

    def lose_request(self, matching: Matching = _any, *, nth: int = 1) -> None:
        """Discard the ``nth`` matching request from now on before it reaches the etcd, and cut its connection."""
        self.path.call(lambda: self._drops.append(_Rule(matching, nth)))

    def delay(self, seconds: float, matching: Matching = _any) -> None:
        """Forward each matching request ``seconds`` after it came; 0 ends all delays."""
        self.path.call(lambda: self._delays.append((seconds, matching)) if seconds else self._delays.clear())

    def cut(self) -> None:
        """Cut every connection and refuse new ones until :meth:`restore`. Discards held requests."""
        self.path.call(self._do_cut)

    def restore(self) -> None:
        """Accept new connections again after :meth:`cut`."""

        def do() -> None:
            if self._cut:
                self._cut = False
                self._open()

        self.path.call(do)

    def close(self) -> None:
        """Cut the client off permanently, and free its port."""
        self.path.call(self.shut)
        self.path.clients.remove(self)

    # The following methods are called in the proxy's thread only.

    def listen(self) -> None:
        """Bind a free port and accept connections."""
        self._bind(0)
        self._open()

    def shut(self) -> None:
        """Close all connections and free the port."""
        self._do_cut()
        assert self._socket is not None
        self._socket.close()

    def attach(self, link: ProxiedConnection) -> None:
        """Add a new connection."""
        if self._cut:
            link.abort()  # it was accepted just before the cut
        else:
            self._links.add(link)
            self.path.notify()

    def detach(self, link: ProxiedConnection) -> None:
        """Remove a connection that has ended, and its held requests."""
        self._links.discard(link)
        for request in [request for request, (owner, _) in self._held.items() if owner is link]:
            self.withdrawn(request)
        for request in [request for request, owner in self._in_flight.items() if owner is link]:
            self.withdrawn(request)
        self.path.notify()

    def withdrawn(self, request: Request) -> None:
        """Drop a request that its client has cancelled; a held request never reaches the etcd."""
        if self._held.pop(request, None) is not None:
            request.state = State.DROPPED
            self.path.notify()
        elif self._in_flight.pop(request, None) is not None:
            request.state = State.UNANSWERED
            self.path.notify()

    def passed(self, method: str, accesses: tuple[Access, ...]) -> Request:
        """Count a message of a stream. The caller forwards it at once."""
        request = self._counted(method, accesses)
        request.sent = self.path.next_place()
        self.path.notify()
        return request

    def confirmed(self, request: Request) -> None:
        """Note that etcd has confirmed a watch."""
        request.confirmed = True
        self.path.notify()

    def arrived(
        self, link: ProxiedConnection, method: str, accesses: tuple[Access, ...], forward: Callable[[], None]
    ) -> Request:
        """Count a request; then forward, delay, hold or discard it according to the rules."""
        request = self._counted(method, accesses)
        if request.stream:
            request.sent = self.path.next_place()
            forward()
        elif _hit(self._drops, request):
            request.state = State.DROPPED
            link.abort()
        elif self._holding is not None and self._holding(request):
            request.state = State.HELD
            self._held[request] = (link, forward)
        elif seconds := sum(seconds for seconds, matching in self._delays if matching(request)):
            self.path.later(seconds, lambda: None if link.ended else self.send_on(request, link, forward))
        else:
            self.send_on(request, link, forward)
        self.path.notify()
        return request

    def answered(self, link: ProxiedConnection, request: Request, answer: bytes, deliver: Callable[[], None]) -> None:
        """Deliver an answer to the client, or lose it according to the rules."""
        request.answer = answer
        request.answered = self.path.forwarded
        self._in_flight.pop(request, None)
        if _hit(self._losses, request):
            request.state = State.ANSWER_LOST
            link.abort()
        else:
            request.state = State.ANSWERED
            deliver()
        self.path.notify()

    def _counted(self, method: str, accesses: tuple[Access, ...]) -> Request:
        request = Request(self.name, len(self._requests) + 1, method, main_key(accesses), accesses)
        self._requests.append(request)
        return request

    def send_on(self, request: Request, link: ProxiedConnection, forward: Callable[[], None]) -> None:
        """Send a request on to etcd by calling ``forward``."""
        request.sent = self.path.next_place()
        self._in_flight[request] = link
        forward()

    def _do_release(self, request: Request) -> None:
        link, forward = self._held.pop(request)
        request.state = State.SENT
        self.send_on(request, link, forward)

    def _bind(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # So that a cut can bind the port again before it frees it, and no other process takes it in between.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.setblocking(False)
        self._socket.bind((_HOST, port))
        self._port = self._socket.getsockname()[1]

    def _open(self) -> None:
        assert self._socket is not None
        self._socket.listen(1024)
        self.path.loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        while True:
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            # Asyncio does this only for sockets that it made itself.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.path.start(self.path.loop.connect_accepted_socket(lambda: ProxiedConnection(self), connection))

    def _do_cut(self) -> None:
        if self._cut:
            return
        self._cut = True
        assert self._socket is not None
        listening = self._socket
        # A bound port that does not listen refuses connections, and no other process can take it.
        self._bind(self._port)
        self.path.loop.remove_reader(listening)
        listening.close()
        for link in list(self._links):
            link.abort()
        self.path.notify()


class ProxiedConnection(asyncio.Protocol):
    """A connection of a client, together with its connection to the etcd."""

    def __init__(self, client: ProxyClient) -> None:
        self.client = client
        self.ended = False
        self._down: asyncio.Transport | None = None
        self._up: asyncio.Transport | None = None
        self._speaker: Http1 | Http2 | None = None
        self._start = b""
        self._waiting = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._down = transport
        self.client.attach(self)
        if not self.ended:
            self.client.path.start(self._connect())

    def data_received(self, data: bytes) -> None:
        if self.ended:
            return
        if self._speaker is None:
            self._start += data
            if len(self._start) < len(HTTP2_PREFACE) and HTTP2_PREFACE.startswith(self._start):
                return
            self._speaker = Http2(self) if self._start.startswith(HTTP2_PREFACE) else Http1(self)
            data = self._start
        self.guard(self._speaker.from_client, data)

    def connection_lost(self, error: Exception | None) -> None:
        self.abort()

    def to_client(self, data: bytes) -> None:
        """Send bytes to the client."""
        if data and not self.ended and self._down is not None and not self._down.is_closing():
            self._down.write(data)

    def to_server(self, data: bytes) -> None:
        """Send bytes to the etcd, as soon as the connection to it is open."""
        if self.ended or not data:
            return
        if self._up is None:
            self._waiting += data
        elif not self._up.is_closing():
            self._up.write(data)

    def from_server(self, data: bytes) -> None:
        """Handle bytes from the etcd."""
        if self._speaker is not None and not self.ended:
            self.guard(self._speaker.from_server, data)

    def guard(self, take: Callable[[bytes], None], data: bytes) -> None:
        """Call ``take`` with ``data``; cut a client off that breaks the protocol, and record an error of the proxy."""
        try:
            take(data)
        except BadClientError as error:
            self.client.broken.append(str(error))
            self.abort()
        except Exception as error:
            # An error of the proxy must not look like a blocked client.
            self.client.path.failed(error)
            self.abort()

    def close(self) -> None:
        """Close both connections after sending what was written."""
        self._end(lambda transport: transport.close())

    def abort(self) -> None:
        """Abort both connections at once."""
        self._end(lambda transport: transport.abort())

    def _end(self, how: Callable[[asyncio.Transport], None]) -> None:
        if self.ended:
            return
        self.ended = True
        for transport in (self._down, self._up):
            if transport is not None:
                how(transport)
        self.client.detach(self)

    async def _connect(self) -> None:
        path = self.client.path
        try:
            transport, _ = await path.loop.create_connection(lambda: _Upstream(self), path.host, path.port)
        except OSError:
            self.abort()  # to the client it looks as if no etcd listens
            return
        if self.ended:
            transport.abort()
            return
        self._up = transport
        self._up.write(bytes(self._waiting))
        self._waiting.clear()


class _Upstream(asyncio.Protocol):
    """The connection to the etcd of a :class:`ProxiedConnection`."""

    def __init__(self, link: ProxiedConnection) -> None:
        self._link = link

    def data_received(self, data: bytes) -> None:
        self._link.from_server(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._link.close()
