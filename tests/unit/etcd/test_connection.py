# SPDX-License-Identifier: Apache-2.0
"""A connection through the proxy: HTTP/2 streams that a client withdraws or an etcd ends or resets; and HTTP/1.1.

Client, etcd and their connections are doubles, because no etcd resets a stream when a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import pytest

from pytest_nixl.etcd.proxy.connection import Http1, Http2
from pytest_nixl.etcd.proxy.request import Access, Request

ANSWER = [(":status", "200"), ("content-type", "application/grpc")]
TRAILERS = [("grpc-status", "0")]
#: How the etcd gets a request: its end comes in a part of its own, without bytes.
SENT = ["RequestReceived", "DataReceived", "DataReceived", "StreamEnded"]
#: A message of gRPC: a PutRequest of the key ``k``; a watch of it, and the answer that it was created.
PUT, WATCH, CREATED = (b"\0\0\0\0" + bytes([len(body)]) + body for body in (b"\n\1k", b"\n\3\n\1k", b"\x18\1"))
EMPTY = b"\0\0\0\0\0"


class Link:
    """The client's connection to the proxy with both ends of the bytes, and the client as the proxy sees it.

    :param held: whether requests wait until :attr:`forward` is called.
    """

    def __init__(self, *, held: bool = False) -> None:
        self.client, self.broken, self._held = self, list[str](), held
        self.withdrawn_requests: list[Request] = []
        self.passed_requests: list[Request] = []
        self.confirmed_requests: list[Request] = []
        self.answers: list[tuple[str, bytes]] = []
        self.forward: Callable[[], None] = lambda: None
        self.near = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.far = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        #: What the client and the etcd see.
        self.seen: list[Any] = []
        self.asked: list[Any] = []
        self.proxy = Http2(cast(Any, self))
        self.near.initiate_connection()
        self.far.initiate_connection()

    def to_client(self, data: bytes) -> None:
        self.seen += self.near.receive_data(data) if data else []

    def to_server(self, data: bytes) -> None:
        self.asked += self.far.receive_data(data) if data else []

    def arrived(self, link: object, method: str, accesses: tuple[Access, ...], forward: Callable[[], None]) -> Request:
        self.forward = forward
        if not self._held:
            forward()
        return Request("c", 1, method, accesses=accesses)

    def passed(self, method: str, accesses: tuple[Access, ...]) -> Request:
        self.passed_requests.append(Request("c", 1, method, accesses=accesses))
        return self.passed_requests[-1]

    def answered(self, link: object, request: Request, answer: bytes, deliver: Callable[[], None]) -> None:
        self.answers.append((request.method, answer))
        deliver()

    def withdrawn(self, request: Request) -> None:
        self.withdrawn_requests.append(request)

    def confirmed(self, request: Request) -> None:
        self.confirmed_requests.append(request)

    def ask(self, method: str, body: bytes, *, end: bool = True) -> int:
        """Send a request as the client; return its stream."""
        stream = self.near.get_next_available_stream_id()
        path = f"/etcdserverpb.KV/{method}"
        head = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "etcd")]
        self.near.send_headers(stream, head)
        self.near.send_data(stream, body, end_stream=end)
        self.send()
        return stream

    def send(self) -> None:
        """Let the proxy read what both ends have written."""
        for _ in range(2):
            self.proxy.from_client(self.near.data_to_send())
            self.proxy.from_server(self.far.data_to_send())

    def kinds(self, events: list[Any]) -> Iterator[str]:
        ours = (
            h2.events.RequestReceived, h2.events.ResponseReceived, h2.events.DataReceived, h2.events.TrailersReceived,
            h2.events.StreamEnded, h2.events.StreamReset,
        )  # fmt: skip
        return (type(event).__name__ for event in events if isinstance(event, ours))


@pytest.mark.parametrize("held", [False, True])
def test_a_request_and_its_answer_pass_whole(held: bool) -> None:
    link = Link(held=held)
    link.ask("Put", PUT)
    assert [*link.kinds(link.asked)] == ([] if held else SENT)
    if held:
        link.forward()
    assert [*link.kinds(link.asked)] == SENT
    link.far.send_headers(1, ANSWER)
    link.far.send_data(1, CREATED)
    link.far.send_headers(1, TRAILERS, end_stream=True)
    link.send()
    assert [*link.kinds(link.seen)] == ["ResponseReceived", "DataReceived", "TrailersReceived", "StreamEnded"]
    assert (link.answers, link.withdrawn_requests) == ([("Put", CREATED[5:])], [])


@pytest.mark.parametrize(("method", "body"), [("Put", PUT), ("Watch", WATCH)])
def test_an_error_of_etcd_which_is_headers_alone_ends_its_stream(method: str, body: bytes) -> None:
    link = Link()
    link.ask(method, body, end=method == "Put")
    link.far.send_headers(1, [*ANSWER, ("grpc-status", "5")], end_stream=True)
    link.send()
    assert [*link.kinds(link.seen)] == ["ResponseReceived", "StreamEnded"]


@pytest.mark.parametrize("held", [True, False])
def test_a_request_that_its_client_withdraws_is_withdrawn_from_the_etcd_too(held: bool) -> None:
    link = Link(held=held)
    stream = link.ask("Put", PUT)
    link.near.reset_stream(stream, 8)
    link.send()
    assert [request.method for request in link.withdrawn_requests] == ["Put"]
    assert [*link.kinds(link.asked)] == ([] if held else [*SENT, "StreamReset"])
    link.forward()
    assert [*link.kinds(link.asked)] == ([] if held else [*SENT, "StreamReset"]), "it is not sent afterwards"


def test_a_request_that_the_etcd_resets_is_reset_for_the_client() -> None:
    link = Link()
    link.ask("Put", PUT)
    link.far.reset_stream(1, 7)
    link.send()
    [reset] = [event for event in link.seen if isinstance(event, h2.events.StreamReset)]
    assert (reset.stream_id, int(reset.error_code or 0)) == (1, 7)
    assert [request.method for request in link.withdrawn_requests] == ["Put"]


def test_a_watch_is_confirmed_once_and_its_end_is_passed_on() -> None:
    """Its messages come in parts: a byte that says whether it is compressed, its length in four bytes, and its text."""
    link = Link()
    stream = link.ask("Watch", WATCH + WATCH[:4], end=False)
    assert len(link.passed_requests) == 1
    for part in (WATCH[4:7], WATCH[7:] + EMPTY):
        link.near.send_data(stream, part)
        link.send()
    watches = [(Access(b"k", b"k\0", False),)] * 2
    assert [request.accesses for request in link.passed_requests] == [*watches, ()]
    link.far.send_headers(1, ANSWER)
    link.far.send_data(1, CREATED[:3])
    link.send()
    assert link.confirmed_requests == []
    for part, confirmed in ((CREATED[3:5], 0), (CREATED[5:] + CREATED[:6], 1), (CREATED[6:] + CREATED, 2)):
        link.far.send_data(1, part)
        link.send()
        assert link.confirmed_requests == link.passed_requests[:confirmed]
    link.far.send_headers(1, TRAILERS, end_stream=True)
    link.send()
    assert [*link.kinds(link.seen)][-2:] == ["TrailersReceived", "StreamEnded"]
    link.near.end_stream(stream)
    link.send()
    assert link.broken == []


def test_a_connection_is_settled_with_the_first_bytes_of_the_client() -> None:
    link = Link()
    link.send()
    assert any(isinstance(event, h2.events.RemoteSettingsChanged) for event in link.seen)
    assert any(isinstance(event, h2.events.RemoteSettingsChanged) for event in link.asked)


@pytest.mark.parametrize(
    ("ends", "last"),
    [("answer", ["StreamEnded"]), ("etcd", ["StreamReset"]), ("client", []), ("late client", ["DataReceived"])],
)
def test_nothing_is_kept_of_a_stream_that_has_ended(ends: str, last: list[str]) -> None:
    """An answer larger than the client's window of 64 KiB waits in the proxy until the client reads it."""
    link = Link()
    stream = link.ask("Put", PUT)
    if ends == "client":
        link.near.reset_stream(stream, 8)
    elif ends == "etcd":
        link.far.reset_stream(1, 7)
    else:
        large = b"x" * 100_000
        link.far.send_headers(1, ANSWER)
        for start in range(0, len(large), 10_000):
            link.far.send_data(1, large[start : start + 10_000])
        link.far.send_headers(1, TRAILERS, end_stream=True)
        link.send()
        data_events = [event for event in link.seen if isinstance(event, h2.events.DataReceived)]
        assert sum(len(event.data or b"") for event in data_events) == 65535
        if ends == "answer":
            for event in data_events:
                link.near.acknowledge_received_data(event.flow_controlled_length or 0, stream)
        else:
            link.near.reset_stream(stream, 8)
    link.send()
    assert [*link.kinds(link.seen)][-1:] == last
    proxy = link.proxy
    assert (proxy._streams, proxy._numbers, proxy._up._waiting, proxy._down._waiting) == ({}, {}, {}, {})


HTTP1_ANSWER = b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nok"
HTTP1_REQUEST = b"POST /v3/kv/range HTTP/1.1\r\nhost: e\r\ncontent-length: 2\r\n%s\r\n{}"


class Http1Link:
    """A connection through the proxy, and its client."""

    def __init__(self) -> None:
        self.down, self.up, self.closed = b"", b"", False
        self.client = self

    def arrived(self, link: object, method: str, accesses: object, forward: Callable[[], None]) -> Any:
        forward()
        return SimpleNamespace(method=method, stream=False)

    def answered(self, link: object, request: object, body: bytes, deliver: Callable[[], None]) -> None:
        deliver()

    def to_client(self, data: bytes) -> None:
        self.down += data

    def to_server(self, data: bytes) -> None:
        self.up += data

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("header", "closed"), [(b"", False), (b"connection: keep-alive\r\n", False), (b"connection: close\r\n", True)]
)
def test_a_connection_is_closed_after_an_answer_if_the_client_asks_for_it(header: bytes, closed: bool) -> None:
    link = Http1Link()
    connection = Http1(cast(Any, link))
    connection.from_client(HTTP1_REQUEST % header)
    assert (link.up, link.down) == (HTTP1_REQUEST % header, b"")
    connection.from_server(HTTP1_ANSWER)
    assert link.down == (
        HTTP1_ANSWER if not closed else HTTP1_ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    )
    assert link.closed is closed
    if not closed:
        connection.from_client(HTTP1_REQUEST % header)
        assert link.up == 2 * (HTTP1_REQUEST % header)
