# SPDX-License-Identifier: Apache-2.0
"""A proxy to an etcd: it counts the requests of each client, and can hold, delay or lose them, or cut connections.

Each client gets a port of its own. Any program that is given this port as its etcd uses the proxy without a change, by
gRPC or by the HTTP gateway. The proxy runs in a thread of this process and ends with it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pytest_nixl.etcd.endpoints import parse_endpoint
from pytest_nixl.etcd.proxy.client import ProxyClient, ProxyError
from pytest_nixl.etcd.proxy.request import Request

T = TypeVar("T")

#: Timeout in seconds for one call into the proxy's thread, which never blocks.
_CALL_SECONDS = 10.0


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

    def __exit__(self, kind: object, *_: object) -> None:
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
        :raises ProxyLateError: when ``seconds`` have passed; the message lists the last requests.
        :raises ProxyError: if the proxy itself failed.
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
                remaining = deadline - time.monotonic()
                if value or remaining <= 0:
                    return value
                self.changed.wait(remaining)

    def describe(self) -> str:
        """Return the last 8 requests of each client, one per line."""
        lines = [str(request) for client in self.clients for request in client.requests[-8:]]
        return (
            "\n".join(["the last requests through the etcd proxy:", *lines])
            if lines
            else "the etcd proxy saw no request"
        )

    def check(self) -> None:
        """Check that the proxy itself works. :raises ProxyError: if it failed, so that its results are invalid."""
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

    @property
    def forwarded(self) -> int:
        """How many requests were forwarded so far."""
        return self._sent

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
