# SPDX-License-Identifier: Apache-2.0
"""Requests of the gateway through the proxy, by HTTP/1.1. The connection is a double that keeps what it gets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.etcd.proxy.connection import Http1

ANSWER = b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nok"
REQUEST = b"POST /v3/kv/range HTTP/1.1\r\nhost: e\r\ncontent-length: 2\r\n%s\r\n{}"


class Link:
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
    link = Link()
    connection = Http1(cast(Any, link))
    connection.from_client(REQUEST % header)
    assert (link.up, link.down) == (REQUEST % header, b"")
    connection.from_server(ANSWER)
    assert link.down == (ANSWER if not closed else ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert link.closed is closed
    if not closed:
        connection.from_client(REQUEST % header)
        assert link.up == 2 * (REQUEST % header)
