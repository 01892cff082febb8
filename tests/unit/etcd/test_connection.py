# SPDX-License-Identifier: Apache-2.0
"""A connection through the proxy: HTTP/2 streams that a client withdraws or an etcd ends or resets.

Client, etcd and their connections are doubles, because no etcd resets a stream when a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import pytest

from pytest_nixl.etcd.proxy.connection import Http2
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

    @property
    def kept(self) -> list[object]:
        """What the proxy keeps of streams."""
        sides = self.proxy._up, self.proxy._down
        return [*self.proxy._streams, *self.proxy._numbers, *(stream for side in sides for stream in side._waiting)]

    def kinds(self, events: list[Any]) -> Iterator[str]:
        ours = (
            h2.events.RequestReceived, h2.events.ResponseReceived, h2.events.DataReceived, h2.events.TrailersReceived,
            h2.events.StreamEnded, h2.events.StreamReset,
        )  # fmt: skip
        return (type(event).__name__ for event in events if isinstance(event, ours))


def test_a_held_request_is_sent_at_its_release() -> None:
    link = Link(held=True)
    link.ask("Put", PUT)
    assert [*link.kinds(link.asked)] == []
    link.forward()
    assert [*link.kinds(link.asked)] == SENT


@pytest.mark.parametrize(("method", "body"), [("Put", PUT), ("Watch", WATCH)])
def test_an_error_of_etcd_which_is_headers_alone_ends_its_stream(method: str, body: bytes) -> None:
    link = Link()
    link.ask(method, body, end=method == "Put")
    link.far.send_headers(1, [*ANSWER, ("grpc-status", "5")], end_stream=True)
    link.send()
    assert [*link.kinds(link.seen)] == ["ResponseReceived", "StreamEnded"]
    assert link.kept == []


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
    assert link.kept == []


def test_a_request_that_the_etcd_resets_is_reset_for_the_client() -> None:
    link = Link()
    link.ask("Put", PUT)
    link.far.reset_stream(1, 7)
    link.send()
    [reset] = [event for event in link.seen if isinstance(event, h2.events.StreamReset)]
    assert (reset.stream_id, int(reset.error_code or 0), link.kept) == (1, 7, [])
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


@pytest.mark.parametrize(("reads", "last"), [(True, "StreamEnded"), (False, "DataReceived")])
def test_an_answer_waits_until_its_client_reads_it_or_withdraws(reads: bool, last: str) -> None:
    """It is larger than the client's window of 64 KiB."""
    link = Link()
    stream = link.ask("Put", PUT)
    link.far.send_headers(1, ANSWER)
    for _ in range(10):
        link.far.send_data(1, b"x" * 10_000)
    link.far.send_headers(1, TRAILERS, end_stream=True)
    link.send()
    parts = [event for event in link.seen if isinstance(event, h2.events.DataReceived)]
    assert sum(len(part.data or b"") for part in parts) == 65535
    if reads:
        for part in parts:
            link.near.acknowledge_received_data(part.flow_controlled_length or 0, stream)
    else:
        link.near.reset_stream(stream, 8)
    link.send()
    assert [*link.kinds(link.seen)][-1] == last
    assert link.kept == []
