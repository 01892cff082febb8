# SPDX-License-Identifier: Apache-2.0
"""A proxy to an etcd: it counts the requests of each client, and can hold, delay or lose them, or cut connections.

Each client gets a port of its own. Any program that is given this port as its etcd uses the proxy without a change, by
gRPC or by the HTTP gateway. The proxy runs in a thread of this process and ends with it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.endpoints import parse_endpoint
from pytest_nixl.etcd.proxy.connection import ProxiedConnection
from pytest_nixl.etcd.proxy.request import Access, Request, State, main_key

T = TypeVar("T")
#: Tells whether a rule applies to a request.
Matching = Callable[[Request], bool]

_HOST = "127.0.0.1"
#: Timeout in seconds for one call into the proxy's thread, which never blocks.
_CALL_SECONDS = 10.0


class ProxyError(NixlPluginError):
    """The proxy failed, or was used in a wrong way."""


class ProxyLateError(ProxyError):
    """An awaited condition did not become true before its deadline."""

    late = True


class EtcdProxy:
    """A proxy to one etcd, for any number of clients.

    Use ``with EtcdProxy(url) as proxy: client = proxy.client("rank 0")``, and give ``client.endpoint`` to the program.

    :param endpoint: URL of the etcd; plaintext only, as NIXL speaks it.
    """

    def __init__(self, endpoint: str) -> None:
        parsed = parse_endpoint(endpoint)
        if parsed.scheme != "http":
            raise ValueError(f"the etcd proxy needs a plaintext etcd, not {parsed}: expected http://HOST:PORT")
        self.host, self.port = parsed.host, parsed.port
        self.clients: list[ProxyClient] = []
        self.changed = threading.Condition()
        self._errors: list[BaseException] = []
        self._sent = 0
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._failed)
        self._thread = threading.Thread(target=self._loop.run_forever, name="etcd proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> EtcdProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
        if kind is None:
            self.check()

    def client(self, name: str = "") -> ProxyClient:
        """Open a port for one more client. ``name`` is its name in requests and messages."""
        client = ProxyClient(self, name or f"client {len(self.clients)}")
        self.call(client.listen)
        self.clients.append(client)
        return client

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request of every client, client by client."""
        return tuple(request for client in self.clients for request in client.requests)

    def wait(self, condition: Callable[[], T], what: str, *, seconds: float) -> T:
        """Return the first true value of ``condition``, which is called again after every event of the proxy.

        :param what: completes the message "waited N s for …".
        :param seconds: timeout in seconds.
        :raises PathLateError: when ``seconds`` have passed; the message lists the last requests.
        :raises PathError: if the proxy itself failed.
        """
        value = self.wait_quietly(condition, seconds=seconds)
        if not value:
            raise ProxyLateError(f"waited {seconds:g} s for {what}", detail=self.describe())
        return value

    def wait_quietly(self, condition: Callable[[], T], *, seconds: float) -> T:
        """Return the same as :meth:`wait`; after ``seconds``, return the last value instead of raising."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while True:
                self.check()
                value = condition()
                left = deadline - time.monotonic()
                if value or left <= 0:
                    return value
                self.changed.wait(left)

    def describe(self) -> str:
        """Return the last 8 requests of each client, one per line."""
        lines = [str(request) for client in self.clients for request in client.requests[-8:]]
        return (
            "\n".join(["the last requests through the etcd proxy:", *lines])
            if lines
            else "the etcd proxy saw no request"
        )

    def check(self) -> None:
        """Check that the proxy itself works. :raises PathError: if it failed, so that its results are invalid."""
        if self._errors:
            error = self._errors[0]
            raise ProxyError(f"the proxy to etcd at {self.host}:{self.port} failed: {error!r}") from error

    def close(self) -> None:
        """Cut all connections and end the proxy's thread. Does nothing if it is already closed."""
        if self._loop.is_closed():
            return
        for client in self.clients:
            self.call(client.shut)
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(_CALL_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_SECONDS)
        self._loop.close()

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the proxy's thread, between two events, and return its result."""
        if self._loop.is_closed():
            raise ProxyError("the etcd proxy is closed")

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CALL_SECONDS)

    def notify(self) -> None:
        """Wake the threads that wait for an event. Call it in the proxy's thread."""
        with self.changed:
            self.changed.notify_all()

    def start(self, work: Any) -> None:
        """Start a coroutine. Call it in the proxy's thread."""
        task = self._loop.create_task(work)
        task.add_done_callback(self._done)

    def next_place(self) -> int:
        """Return the sequence number of a request that is forwarded now. Call it in the proxy's thread."""
        self._sent += 1
        return self._sent

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function`` after ``seconds``. Call this method in the proxy's thread."""
        self._loop.call_later(seconds, function)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the proxy's thread."""
        return self._loop

    def failed(self, error: BaseException) -> None:
        """Record that the proxy itself failed. Call it in the proxy's thread."""
        self._errors.append(error)
        self.notify()

    def _done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failed(context.get("exception") or RuntimeError(context["message"]))


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # Aborted connections are closed in the next iterations of the loop.
    for _ in range(3):
        await asyncio.sleep(0)


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

    def __init__(self, path: EtcdProxy, name: str) -> None:
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
        self._to_lose: set[Request] = set()
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

    def release(self, request: Request | None = None, *, lose_answer: bool = False) -> None:
        """Forward a held request. Without ``request``, forward all held requests and stop holding.

        :param lose_answer: whether to lose its answer: see :meth:`lose_answer`.
        :raises PathError: if the request is not held.
        """

        def do() -> None:
            if request is None:
                self._holding = None
            elif request not in self._held:
                raise ProxyError(f"cannot release this request, because it is not held: {request}")
            for one in [request] if request is not None else list(self._held):
                self._do_release(one, lose_answer)

        self.path.call(do)

    def release_if_held(self, request: Request, *, lose_answer: bool = False) -> bool:
        """Forward a held request as :meth:`release` does; return False if its client has cancelled it."""

        def do() -> bool:
            if request not in self._held:
                return False
            self._do_release(request, lose_answer)
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
            self.path.later(seconds, lambda: None if link.ended else self._send(request, link, forward))
        else:
            self._send(request, link, forward)
        self.path.notify()
        return request

    def answered(self, link: ProxiedConnection, request: Request, answer: bytes, deliver: Callable[[], None]) -> None:
        """Deliver an answer to the client, or lose it according to the rules."""
        request.answer = answer
        self._in_flight.pop(request, None)
        if request in self._to_lose or _hit(self._losses, request):
            self._to_lose.discard(request)
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

    def _send(self, request: Request, link: ProxiedConnection, forward: Callable[[], None]) -> None:
        request.sent = self.path.next_place()
        self._in_flight[request] = link
        forward()

    def _do_release(self, request: Request, lose_answer: bool) -> None:
        if lose_answer:
            self._to_lose.add(request)
        link, forward = self._held.pop(request)
        request.state = State.SENT
        self._send(request, link, forward)

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
