# SPDX-License-Identifier: Apache-2.0
"""Broken or malicious servers: they send the bytes that a test wants, and as slowly as it wants."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pytest_nixl.etcd.endpoints import Endpoint

Answer = Callable[[], Iterable[bytes]]


@contextmanager
def serving(answer: Answer, to_get: Answer | None = None) -> Iterator[Endpoint]:
    """A server that reads one request per connection and sends the bytes of ``answer``; ``to_get`` for a GET."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            is_get = connection.recv(1 << 16).startswith(b"GET ")
            for part in to_get() if to_get is not None and is_get else answer():
                connection.sendall(part)
                if over.is_set():
                    return
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):  # closing with a part of the request unread would reset the connection
                pass

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield Endpoint("http", "127.0.0.1", listener.getsockname()[1])
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)


def dripping(start: bytes, drop: bytes) -> Answer:
    """Return an endless answer, with only short pauses between its bytes."""

    def drip() -> Iterator[bytes]:
        yield start
        while True:
            time.sleep(0.05)
            yield drop

    return drip
