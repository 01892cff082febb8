# SPDX-License-Identifier: Apache-2.0
"""What the parts of the proxy know of each other: a client of the proxy, and a protocol's reader of its connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pytest_nixl.etcd.proxy.request import Access, Request

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

    def next_place(self) -> int: ...

    def notify(self) -> None: ...


class RequestObserver(Protocol):
    """A client of the proxy, as a protocol's reader sees it: it is told of each request, and may hold or lose it."""

    def passed(self, method: str, accesses: tuple[Access, ...]) -> Request: ...

    def confirmed(self, request: Request) -> None: ...

    def withdrawn(self, request: Request) -> None: ...

    def arrived(self, link: Any, method: str, accesses: tuple[Access, ...], forward: Callable[[], None]) -> Request: ...

    def answered(self, link: Any, request: Request, answer: bytes, deliver: Callable[[], None]) -> None: ...


class ClientLink(Protocol):
    """A connection, as the reader of its protocol sees it."""

    @property
    def client(self) -> RequestObserver: ...

    def to_client(self, data: bytes) -> None: ...

    def to_server(self, data: bytes) -> None: ...

    def close(self) -> None: ...
