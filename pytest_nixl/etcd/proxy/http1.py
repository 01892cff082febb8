# SPDX-License-Identifier: Apache-2.0
"""Proxy one HTTP/1.1 connection, as used by clients of etcd's gateway: one request at a time."""

from __future__ import annotations

from typing import Any

import h11

from pytest_nixl.etcd.proxy.request import (
    BadClientError,
    ClientLink,
    Request,
    gateway_accesses,
    gateway_confirms,
    gateway_method,
)


class Http1:
    """Terminates HTTP/1.1 on both sides of a :class:`ProxiedConnection`."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link
        self._down = h11.Connection(h11.SERVER)
        self._up = h11.Connection(h11.CLIENT)
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._request: Request | None = None
        self._answer: h11.Response | None = None
        self._answer_body = bytearray()

    def from_client(self, data: bytes) -> None:
        """Handle bytes from the client."""
        self._down.receive_data(data)
        self._read_client()

    def from_server(self, data: bytes) -> None:
        """Handle bytes from the etcd."""
        self._up.receive_data(data)
        while True:
            event = self._up.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return
            self._from_server(event)

    def _read_client(self) -> None:
        while True:
            try:
                event = self._down.next_event()
            except h11.RemoteProtocolError as error:
                raise BadClientError(str(error)) from None
            if event is h11.NEED_DATA and self._down.they_are_waiting_for_100_continue:
                self._to_client(h11.InformationalResponse(status_code=100, headers=[]))
                continue
            if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return
            if isinstance(event, h11.Request):
                self._head = event
                self._body.clear()
            elif isinstance(event, h11.Data):
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._arrived()

    def _arrived(self) -> None:
        assert self._head is not None
        method = gateway_method(self._head.method.decode(), self._head.target.decode())
        self._request = self._link.client.arrived(
            self._link, method, gateway_accesses(method, bytes(self._body)), self._forward
        )

    def _forward(self) -> None:
        assert self._head is not None
        # The body is complete here, even if it was sent in chunks.
        headers = [(name, value) for name, value in self._head.headers if name not in (b"transfer-encoding", b"expect")]
        if self._body and not any(name == b"content-length" for name, _ in headers):
            headers.append((b"content-length", str(len(self._body)).encode()))
        head = h11.Request(method=self._head.method, target=self._head.target, headers=headers)
        self._to_server(head, h11.Data(data=bytes(self._body)), h11.EndOfMessage())

    def _from_server(self, event: Any) -> None:
        request = self._request
        assert request is not None
        if isinstance(event, h11.Response):
            self._answer = event
            self._answer_body.clear()
            if request.stream:
                self._to_client(event)
        elif isinstance(event, h11.Data):
            if request.stream:
                self._to_client(h11.Data(data=bytes(event.data)))
                self._read_answer_of_watch(request, bytes(event.data))
            else:
                self._answer_body += event.data
        elif isinstance(event, h11.EndOfMessage):
            if request.stream:
                self._deliver()
            else:
                self._link.client.answered(self._link, request, bytes(self._answer_body), self._deliver)

    def _read_answer_of_watch(self, request: Request, data: bytes) -> None:
        if request.method != "Watch" or request.confirmed:
            return
        *lines, incomplete = (bytes(self._answer_body) + data).split(b"\n")
        self._answer_body[:] = incomplete
        if any(gateway_confirms(line) for line in lines):
            self._link.client.confirmed(request)

    def _deliver(self) -> None:
        """Send the whole answer to the client, and continue with its next request."""
        assert self._answer is not None
        assert self._request is not None
        if self._request.stream:
            self._to_client(h11.EndOfMessage())
        else:
            self._to_client(self._answer, h11.Data(data=bytes(self._answer_body)), h11.EndOfMessage())
        if self._down.our_state is h11.MUST_CLOSE or self._up.our_state is h11.MUST_CLOSE:
            self._link.close()
            return
        self._request = None
        self._down.start_next_cycle()
        self._up.start_next_cycle()
        self._read_client()

    def _to_client(self, *events: Any) -> None:
        self._link.to_client(b"".join(self._down.send(event) or b"" for event in events))

    def _to_server(self, *events: Any) -> None:
        self._link.to_server(b"".join(self._up.send(event) or b"" for event in events))
