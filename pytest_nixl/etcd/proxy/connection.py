# SPDX-License-Identifier: Apache-2.0
"""One connection of a client through the proxy, and the one to the etcd that goes with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pytest_nixl.etcd.proxy.http1 import Http1
from pytest_nixl.etcd.proxy.http2 import PREFACE, Http2
from pytest_nixl.etcd.proxy.interfaces import RequestObserver
from pytest_nixl.etcd.proxy.request import BadClientError


class _Speaker(Protocol):
    def from_client(self, data: bytes) -> None: ...

    def from_server(self, data: bytes) -> None: ...


class ProxiedConnection(asyncio.Protocol):
    """A connection of a client, together with its connection to the etcd."""

    def __init__(self, client: RequestObserver) -> None:
        self.client = client
        self.ended = False
        self._down: asyncio.Transport | None = None
        self._up: asyncio.Transport | None = None
        self._speaker: _Speaker | None = None
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
            if len(self._start) < len(PREFACE) and PREFACE.startswith(self._start):
                return
            self._speaker = Http2(self) if self._start.startswith(PREFACE) else Http1(self)
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
