# SPDX-License-Identifier: Apache-2.0
"""The two protocols of a proxied connection to an etcd: HTTP/1.1, one request at a time, and HTTP/2, many at once.

The proxy terminates HTTP/2 on both sides and does not forward frames. Header compression and stream numbers belong to
one connection, and would be wrong as soon as held requests change their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import h11

from pytest_nixl.etcd.proxy.request import (
    STREAMS,
    BadClientError,
    ClientLink,
    Request,
    gateway_accesses,
    gateway_confirms,
    gateway_method,
    grpc_accesses,
    grpc_confirms,
    grpc_method,
)

HTTP2_PREFACE = b"PRI * HTTP/2.0"
#: Flow control window in bytes: larger than any answer of etcd, so that no side waits for the proxy.
HTTP2_WINDOW = 1 << 24
Headers = list[tuple[bytes, bytes]]


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


class _Http2Side:
    """One of the two connections, with the data that waits for room in its flow control windows."""

    def __init__(self, *, client_side: bool) -> None:
        # Forward headers unchanged: client and etcd validate each other's headers themselves.
        config = h2.config.H2Configuration(
            client_side=client_side,
            header_encoding=None,
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        self.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: HTTP2_WINDOW})
        self.connection.increment_flow_control_window(HTTP2_WINDOW)
        self._waiting: dict[int, list[bytes | Headers | None]] = {}

    def push(self, stream: int, *items: bytes | Headers | None) -> None:
        """Queue data (bytes), trailers (headers, which end the stream) or the end (None), and send what fits."""
        self._waiting.setdefault(stream, []).extend(items)
        self.flush()

    def forget(self, stream: int) -> None:
        """Drop the queued data of a stream."""
        self._waiting.pop(stream, None)

    def reset(self, stream: int, code: int) -> None:
        """Reset a stream unless it has already ended."""
        self.forget(stream)
        with suppress(h2.exceptions.StreamClosedError, h2.exceptions.NoSuchStreamError):
            self.connection.reset_stream(stream, code)

    def flush(self) -> None:
        """Send as much queued data as the windows allow."""
        for stream in list(self._waiting):
            try:
                self._flush(stream)
            except (h2.exceptions.StreamClosedError, h2.exceptions.NoSuchStreamError):
                self.forget(stream)

    def _flush(self, stream: int) -> None:
        waiting = self._waiting[stream]
        while waiting:
            item = waiting[0]
            if isinstance(item, bytes):
                room = min(self.connection.local_flow_control_window(stream), self.connection.max_outbound_frame_size)
                if item and room <= 0:
                    return
                self.connection.send_data(stream, item[:room])
                if len(item) > room:
                    waiting[0] = item[room:]
                    continue
            elif item is None:
                self.connection.end_stream(stream)
            else:
                self.connection.send_headers(stream, item, end_stream=True)
            waiting.pop(0)
        del self._waiting[stream]


@dataclass
class _Http2Stream:
    """A request of the client and its answer so far."""

    headers: Headers
    method: str
    body: bytearray = field(default_factory=bytearray)
    request: Request | None = None
    #: Its stream number on the connection to the etcd; None before it is sent.
    upstream: int | None = None
    answer: list[bytes | Headers | None] = field(default_factory=list)
    #: The watches that etcd has not confirmed, in the order of its answers, and the begin of its next answer.
    unconfirmed: list[Request] = field(default_factory=list)
    partial_answer: bytearray = field(default_factory=bytearray)
    answer_headers: Headers | None = None
    #: Whether the answer consists of headers only, as gRPC errors do.
    bare: bool = False

    @property
    def endless(self) -> bool:
        return self.method in STREAMS


class Http2:
    """Terminates HTTP/2 on both sides of a :class:`ProxiedConnection`."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link
        self._down = _Http2Side(client_side=False)
        self._up = _Http2Side(client_side=True)
        #: Streams by the client's number, and the client's number by that on the connection to the etcd.
        self._streams: dict[int, _Http2Stream] = {}
        self._numbers: dict[int, int] = {}

    def from_client(self, data: bytes) -> None:
        """Handle bytes from the client."""
        try:
            events = self._down.connection.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            raise BadClientError(str(error)) from None
        for event in events:
            self._from_client(event)
        self._down.flush()
        self._send()

    def from_server(self, data: bytes) -> None:
        """Handle bytes from the etcd."""
        for event in self._up.connection.receive_data(data):
            self._from_server(event)
        self._up.flush()
        self._send()

    def _send(self) -> None:
        self._link.to_client(self._down.connection.data_to_send())
        self._link.to_server(self._up.connection.data_to_send())

    def _from_client(self, event: Any) -> None:
        if isinstance(event, h2.events.RequestReceived):
            headers = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
            stream = _Http2Stream(headers, grpc_method(dict(headers)[b":path"].decode()))
            self._streams[event.stream_id] = stream
            if stream.endless:
                self._open(event.stream_id, stream)
        elif isinstance(event, h2.events.DataReceived):
            self._down.connection.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            if (open_stream := self._streams.get(event.stream_id)) is not None:
                self._body(open_stream, event.data or b"")
        elif isinstance(event, h2.events.StreamEnded):
            if (open_stream := self._streams.get(event.stream_id)) is not None:
                self._ended(event.stream_id, open_stream)
        elif isinstance(event, h2.events.StreamReset):
            self._withdrawn(event.stream_id, int(event.error_code or 0))
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._link.close()

    def _body(self, stream: _Http2Stream, data: bytes) -> None:
        stream.body += data
        if stream.endless:
            assert stream.upstream is not None
            self._up.push(stream.upstream, data)
            for message in _take_messages(stream.body):
                # Each message is a request of its own: one more watch, or one more refresh of a lease.
                request = self._link.client.passed(stream.method, grpc_accesses(stream.method, message))
                if stream.method == "Watch" and request.accesses:
                    stream.unconfirmed.append(request)

    def _ended(self, number: int, stream: _Http2Stream) -> None:
        if stream.endless:
            assert stream.upstream is not None
            self._up.push(stream.upstream, None)
            return
        message = next(_take_messages(bytearray(stream.body)), b"")

        def forward() -> None:
            # The client may have cancelled it while it was held.
            if number in self._streams:
                self._open(number, stream)
                assert stream.upstream is not None
                self._up.push(stream.upstream, bytes(stream.body), None)
                self._send()

        accesses = grpc_accesses(stream.method, message)
        stream.request = self._link.client.arrived(self._link, stream.method, accesses, forward)

    def _open(self, number: int, stream: _Http2Stream) -> None:
        stream.upstream = self._up.connection.get_next_available_stream_id()
        self._numbers[stream.upstream] = number
        self._up.connection.send_headers(stream.upstream, stream.headers)

    def _withdrawn(self, number: int, code: int) -> None:
        self._down.forget(number)
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        if stream.request is not None:
            self._link.client.withdrawn(stream.request)
        if stream.upstream is not None:
            self._numbers.pop(stream.upstream, None)
            self._up.reset(stream.upstream, code)

    def _from_server(self, event: Any) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self._link.close()
            return
        upstream = getattr(event, "stream_id", None)
        if isinstance(event, h2.events.DataReceived):
            self._up.connection.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
        number = self._numbers.get(upstream) if upstream else None
        if number is None:
            return
        stream = self._streams[number]
        if isinstance(event, h2.events.ResponseReceived):
            stream.answer_headers = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
            stream.bare = event.stream_ended is not None
            if stream.endless:
                self._down.connection.send_headers(number, stream.answer_headers, end_stream=stream.bare)
        elif isinstance(event, h2.events.DataReceived):
            self._answer(number, stream, bytes(event.data or b""))
        elif isinstance(event, h2.events.TrailersReceived):
            self._answer(number, stream, [(bytes(name), bytes(value)) for name, value in event.headers or ()])
        elif isinstance(event, h2.events.StreamEnded):
            self._complete(number, stream)
        elif isinstance(event, h2.events.StreamReset):
            self._forget(number, stream)
            if stream.request is not None:
                self._link.client.withdrawn(stream.request)
            self._down.reset(number, int(event.error_code or 0))

    def _answer(self, number: int, stream: _Http2Stream, item: bytes | Headers) -> None:
        if stream.endless:
            self._down.push(number, item)
            if stream.method == "Watch" and isinstance(item, bytes):
                self._read_answer_of_watch(stream, item)
        else:
            stream.answer.append(item)

    def _read_answer_of_watch(self, stream: _Http2Stream, data: bytes) -> None:
        stream.partial_answer += data
        for message in _take_messages(stream.partial_answer):
            if stream.unconfirmed and grpc_confirms(message):
                self._link.client.confirmed(stream.unconfirmed.pop(0))

    def _complete(self, number: int, stream: _Http2Stream) -> None:
        self._forget(number, stream)
        if stream.endless:
            return
        end: Iterable[None] = () if stream.answer and isinstance(stream.answer[-1], list) else (None,)
        data = b"".join(item for item in stream.answer if isinstance(item, bytes))

        def deliver() -> None:
            assert stream.answer_headers is not None
            self._down.connection.send_headers(number, stream.answer_headers, end_stream=stream.bare)
            if not stream.bare:
                self._down.push(number, *stream.answer, *end)
            self._send()

        assert stream.request is not None
        self._link.client.answered(self._link, stream.request, data[5:], deliver)

    def _forget(self, number: int, stream: _Http2Stream) -> None:
        self._streams.pop(number, None)
        if stream.upstream is not None:
            self._numbers.pop(stream.upstream, None)
            self._up.forget(stream.upstream)


def _take_messages(body: bytearray) -> Iterator[bytes]:
    """Remove the complete gRPC messages from the body, and yield them."""
    while len(body) >= 5 and len(body) >= (end := 5 + int.from_bytes(body[1:5], "big")):
        message = bytes(body[5:end])
        del body[:end]
        yield message
