# SPDX-License-Identifier: Apache-2.0
"""A path to an etcd that is ours: it counts requests, and holds, delays, cuts and loses them for one client at a time.

A port of its own tells each client from the others. Nobody has to be changed: whatever is given that port as its etcd,
over gRPC or the HTTP gateway, goes this way. It lives in threads of this process, and dies with it.
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
#: Which requests a rule is for.
Matching = Callable[[Request], bool]

_HOST = "127.0.0.1"
#: Seconds for the path's own thread to do what it was told: it never waits for anybody.
_CALL_SECONDS = 10.0


class ProxyError(NixlPluginError):
    """The path did not do what it was told, or what was waited for on it did not come."""


class ProxyLateError(ProxyError):
    """What was waited for did not come before its deadline."""

    late = True


class EtcdProxy:
    """A path to one etcd, for any number of clients.

    :param endpoint: the etcd's URL; plaintext, as NIXL speaks it.

    ``with EtcdPath(url) as path: client = path.client("rank 0")``, and the client is given ``client.endpoint``.
    """

    def __init__(self, endpoint: str) -> None:
        parsed = parse_endpoint(endpoint)
        if parsed.scheme != "http":
            raise ValueError(
                f"a path goes to an etcd that speaks plaintext, not to {parsed}: expected http://HOST:PORT"
            )
        self.host, self.port = parsed.host, parsed.port
        self.clients: list[ProxyClient] = []
        self.changed = threading.Condition()
        self._errors: list[BaseException] = []
        self._sent = 0
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._failed)
        self._thread = threading.Thread(target=self._loop.run_forever, name="etcd path", daemon=True)
        self._thread.start()

    def __enter__(self) -> EtcdProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
        if kind is None:
            self.check()

    def client(self, name: str = "") -> ProxyClient:
        """Open a way for one more client. ``name`` is how requests and failures name it."""
        client = ProxyClient(self, name or f"client {len(self.clients)}")
        self.call(client.listen)
        self.clients.append(client)
        return client

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request of every client, client by client."""
        return tuple(request for client in self.clients for request in client.requests)

    def wait(self, condition: Callable[[], T], what: str, *, seconds: float) -> T:
        """Return the first true value of ``condition``, which is asked again whenever something happens on the path.

        :param what: completes the sentence "waited N s for …".
        :raises PathError: when ``seconds`` have passed, with the last requests; or where the path itself failed.
        """
        value = self.wait_quietly(condition, seconds=seconds)
        if not value:
            raise ProxyLateError(f"waited {seconds:g} s for {what}", detail=self.describe())
        return value

    def wait_quietly(self, condition: Callable[[], T], *, seconds: float) -> T:
        """Return the first true value of ``condition``, as :meth:`wait`; its last one when ``seconds`` have passed."""
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
        """Return the last requests of each client, a line each."""
        lines = [str(request) for client in self.clients for request in client.requests[-8:]]
        return "\n".join(["the last requests on the path to etcd:", *lines]) if lines else "no request was made"

    def check(self) -> None:
        """:raises PathError: where the path itself failed: what it did since is not what it was told."""
        if self._errors:
            error = self._errors[0]
            raise ProxyError(f"the path to etcd at {self.host}:{self.port} failed: {error!r}") from error

    def close(self) -> None:
        """Cut everybody off, and end the path's thread. Nothing happens where it is closed already."""
        if self._loop.is_closed():
            return
        for client in self.clients:
            self.call(client.shut)
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(_CALL_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_SECONDS)
        self._loop.close()

    def call(self, function: Callable[[], T]) -> T:
        """Have ``function`` done in the path's thread, between any two events of it, and return its result."""
        if self._loop.is_closed():
            raise ProxyError("the path to etcd is closed")

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CALL_SECONDS)

    def notify(self) -> None:
        """Wake who waits for something to happen. In the path's thread."""
        with self.changed:
            self.changed.notify_all()

    def start(self, work: Any) -> None:
        """Start a coroutine in the path's thread, which is the caller's."""
        task = self._loop.create_task(work)
        task.add_done_callback(self._done)

    def next_place(self) -> int:
        """Return the place of a request that is sent on now. In the path's thread."""
        self._sent += 1
        return self._sent

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have ``function`` called after some seconds. In the path's thread."""
        self._loop.call_later(seconds, function)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the path's thread."""
        return self._loop

    def failed(self, error: BaseException) -> None:
        """Remember that the path itself failed. In the path's thread."""
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
    # Connections that were aborted are closed in the next rounds of the loop.
    for _ in range(3):
        await asyncio.sleep(0)


class _Rule:
    """What is to happen to the n-th request from now on that matches."""

    def __init__(self, matching: Matching, nth: int) -> None:
        self._matching, self._left = matching, nth

    def hits(self, request: Request) -> bool:
        if not self._matching(request):
            return False
        self._left -= 1
        return self._left == 0


def _hit(rules: list[_Rule], request: Request) -> bool:
    # Every rule counts the request, also after one that hits.
    return True in [rule.hits(request) for rule in rules]


def _any(request: Request) -> bool:
    return True


class ProxyClient:
    """The way of one client. Every method may be called from any thread, and is done when it returns."""

    def __init__(self, path: EtcdProxy, name: str) -> None:
        self.path = path
        self.name = name
        #: How connections broke the protocol, for which they were ended.
        self.broken: list[str] = []
        self._socket: socket.socket | None = None
        self._server: asyncio.AbstractServer | None = None
        self._port = 0
        self._links: set[ProxiedConnection] = set()
        self._requests: list[Request] = []
        self._cut = False
        self._holding: Matching | None = None
        self._held: dict[Request, tuple[ProxiedConnection, Callable[[], None]]] = {}
        #: Requests that were sent on and have no answer yet.
        self._in_flight: dict[Request, ProxiedConnection] = {}
        self._to_lose: set[Request] = set()
        self._losses: list[_Rule] = []
        self._drops: list[_Rule] = []
        self._delays: list[tuple[float, Matching]] = []

    def __repr__(self) -> str:
        return f"PathClient({self.name!r}, {self.endpoint})"

    @property
    def endpoint(self) -> str:
        """The URL that this client is given as its etcd; the same after a cut."""
        return f"http://{_HOST}:{self._port}"

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request that it has made, in their order; each message of a stream is one."""
        return tuple(self._requests)

    @property
    def held(self) -> tuple[Request, ...]:
        """The requests that are waiting to be released."""
        return tuple(self._held)

    @property
    def connections(self) -> int:
        """How many connections it has."""
        return len(self._links)

    @property
    def is_cut(self) -> bool:
        """Whether it is cut off."""
        return self._cut

    def hold(self, matching: Matching = _any) -> None:
        """From now on, hold each request that matches until it is released. Streams (watches) always pass."""

        def do() -> None:
            self._holding = matching

        self.path.call(do)

    def release(self, request: Request | None = None, *, lose_answer: bool = False) -> None:
        """Send a held request on; without ``request``, all of them, and hold no more.

        :param lose_answer: whether its answer is to be lost: see :meth:`lose_answer`.
        :raises PathError: where the request is not held (any more).
        """

        def do() -> None:
            if request is None:
                self._holding = None
            elif request not in self._held:
                raise ProxyError(f"a request that is not held cannot be released: {request}")
            for one in [request] if request is not None else list(self._held):
                self._do_release(one, lose_answer)

        self.path.call(do)

    def release_if_held(self, request: Request, *, lose_answer: bool = False) -> bool:
        """Send a held request on, as :meth:`release`; return False if its client has withdrawn it meanwhile."""

        def do() -> bool:
            if request not in self._held:
                return False
            self._do_release(request, lose_answer)
            return True

        return self.path.call(do)

    def drop(self, request: Request) -> None:
        """Throw a held request away before it reaches the etcd, and cut its connection."""

        def do() -> None:
            link, _ = self._held.pop(request)
            request.state = State.DROPPED
            link.abort()

        self.path.call(do)

    def lose_answer(self, matching: Matching = _any, *, nth: int = 1) -> None:
        """Lose the answer of the ``nth`` request from now on that matches.

        The etcd gets the request and does it; its answer is thrown away, and the connection is cut: to the client it
        looks like an etcd that died, or like one that never got the request. Streams have no answer to lose.
        """
        self.path.call(lambda: self._losses.append(_Rule(matching, nth)))

    def lose_request(self, matching: Matching = _any, *, nth: int = 1) -> None:
        """Lose the ``nth`` request from now on that matches: the etcd never gets it, and the connection is cut."""
        self.path.call(lambda: self._drops.append(_Rule(matching, nth)))

    def delay(self, seconds: float, matching: Matching = _any) -> None:
        """Send each request that matches on ``seconds`` later than it came; 0 ends every delay."""
        self.path.call(lambda: self._delays.append((seconds, matching)) if seconds else self._delays.clear())

    def cut(self) -> None:
        """Cut every connection, and refuse new ones, until :meth:`restore`. Held requests are thrown away."""
        self.path.call(self._do_cut)

    def restore(self) -> None:
        """Let new connections in again."""

        def do() -> None:
            if self._cut:
                self._cut = False
                self._open()

        self.path.call(do)

    def close(self) -> None:
        """Cut the client off for good, and give its port back."""
        self.path.call(self.shut)
        self.path.clients.remove(self)

    # What follows is called in the path's thread only.

    def listen(self) -> None:
        """Take a port, and let connections in."""
        self._bind(0)
        self._open()

    def shut(self) -> None:
        """Let nobody in any more, and give the port back."""
        self._do_cut()
        assert self._socket is not None
        self._socket.close()

    def attach(self, link: ProxiedConnection) -> None:
        """Take a new connection."""
        if self._cut:
            link.abort()  # accepted just before the cut
        else:
            self._links.add(link)
            self.path.notify()

    def detach(self, link: ProxiedConnection) -> None:
        """Forget a connection that has ended, and what of it was held."""
        self._links.discard(link)
        for request in [request for request, (owner, _) in self._held.items() if owner is link]:
            self.withdrawn(request)
        for request in [request for request, owner in self._in_flight.items() if owner is link]:
            self.withdrawn(request)
        self.path.notify()

    def withdrawn(self, request: Request) -> None:
        """Throw a request away that its client has given up: one that was held never reaches the etcd."""
        if self._held.pop(request, None) is not None:
            request.state = State.DROPPED
            self.path.notify()
        elif self._in_flight.pop(request, None) is not None:
            request.state = State.UNANSWERED
            self.path.notify()

    def passed(self, method: str, accesses: tuple[Access, ...]) -> Request:
        """Count a message of a stream, which is sent on at once."""
        request = self._counted(method, accesses)
        request.sent = self.path.next_place()
        self.path.notify()
        return request

    def arrived(
        self, link: ProxiedConnection, method: str, accesses: tuple[Access, ...], forward: Callable[[], None]
    ) -> Request:
        """Count a request, and send it on, hold it or lose it, as it was told."""
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
        """Give the client its answer, or lose it, as it was told."""
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
        # So that a cut can bind the port anew before it gives it up: nobody else can get it in between.
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
            # Asyncio does so for sockets that it made itself.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.path.start(self.path.loop.connect_accepted_socket(lambda: ProxiedConnection(self), connection))

    def _do_cut(self) -> None:
        if self._cut:
            return
        self._cut = True
        assert self._socket is not None
        listening = self._socket
        # A port that is bound and does not listen refuses connections, and nobody else gets it.
        self._bind(self._port)
        self.path.loop.remove_reader(listening)
        listening.close()
        for link in list(self._links):
            link.abort()
        self.path.notify()
