# SPDX-License-Identifier: Apache-2.0
"""A wait on the proxy to etcd learns of each event at once, and the rules of a client hold for its requests.

The proxy is a double that counts what it is told.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.etcd.proxy.client import ProxiedConnection, ProxyClient
from pytest_nixl.etcd.proxy.request import Request, State, gateway_method


class CountedPath:
    """The part of a proxy that its clients use, without a thread and without an etcd."""

    notified = places = 0

    def notify(self) -> None:
        self.notified += 1

    @property
    def forwarded(self) -> int:
        return self.places

    def next_place(self) -> int:
        self.places += 1
        return self.places

    @staticmethod
    def call(function: Any) -> Any:
        return function()


class CountedLink:
    """A connection of a client."""

    ended = aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_each_event_is_told_once() -> None:
    path = CountedPath()
    client: Any = ProxyClient(cast(Any, path), "one")
    link, notified = CountedLink(), list[int]()

    def count(result: Any = None) -> Any:
        notified.append(path.notified)
        return result

    count(client.attach(link))
    put = count(client.arrived(link, "Put", (), lambda: None))
    count(client.answered(link, put, b"answer", lambda: None))
    watch = count(client.passed("Watch", ()))
    count(client.confirmed(watch))
    assert (put.answer, put.answered, watch.sent, watch.confirmed) == (b"answer", 1, 2, True)
    client.hold()
    held = count(client.arrived(link, "Put", (), lambda: None))
    count(client.withdrawn(held))
    unanswered = count(client.arrived(link, "Put", (), lambda: None))
    client.release()
    assert unanswered.state is State.SENT
    count(client.withdrawn(unanswered))
    count(client.detach(CountedLink()))
    assert notified == [*range(1, 11)]
    client.withdrawn(unanswered)
    assert (path.notified, client.connections) == (10, 1), "it was withdrawn before"
    ended = count(client.arrived(link, "Put", (), lambda: None))
    count(client.detach(link))
    assert (notified[10:], client.connections) == ([11, 13], 0)
    assert [request.state for request in (put, held, unanswered, ended)] == [
        State.ANSWERED, State.DROPPED, State.UNANSWERED, State.UNANSWERED
    ]  # fmt: skip


class DelayedPath(CountedPath):
    """A path that keeps what is to be done later, with its seconds."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Any]] = []

    def later(self, seconds: float, function: Any) -> None:
        self.due.append((seconds, function))


def is_put(request: Request) -> bool:
    return request.method == "Put"


def test_a_request_waits_for_all_delays_that_match_and_not_after_its_connection() -> None:
    path, sent = DelayedPath(), list[str]()
    client = ProxyClient(cast(Any, path), "one")
    link, ended = cast(Any, CountedLink()), cast(Any, CountedLink())
    client.delay(2.0, is_put)
    client.delay(3.0)
    for owner, method in ((link, "Put"), (link, "Range"), (ended, "Txn"), (link, "Watch")):
        client.arrived(owner, method, (), partial(sent.append, method))
    assert sent == ["Watch"], "a stream passes at once"
    ended.ended = True
    for _, function in path.due:
        function()
    assert ([seconds for seconds, _ in path.due], sent[1:]) == ([5.0, 3.0, 3.0], ["Put", "Range"])
    assert [request.sent for request in client.requests] == [2, 3, 0, 1]
    client.delay(0)
    client.arrived(link, "Put", (), partial(sent.append, "at once"))
    assert sent[-1] == "at once"


def test_the_nth_request_that_matches_never_arrives() -> None:
    client, sent = ProxyClient(cast(Any, CountedPath()), "one"), list[str]()
    client.lose_request(is_put, nth=2)
    links = [cast(Any, CountedLink()) for _ in range(4)]
    for link, method in zip(links, ("Put", "Range", "Put", "Put"), strict=True):
        client.arrived(link, method, (), partial(sent.append, method))
    assert sent == ["Put", "Range", "Put"]
    assert [link.aborted for link in links] == [False, False, True, False]
    assert [request.state for request in client.requests].index(State.DROPPED) == 2
    assert client.requests[2].sent == 0


def test_a_client_that_is_cut_takes_no_connection() -> None:
    path = CountedPath()
    client, link = ProxyClient(cast(Any, path), "one"), CountedLink()
    client._cut = True
    client.attach(cast(Any, link))
    assert (client.connections, link.aborted, path.notified) == (0, True, 0)


def test_what_an_etcd_sends_after_the_end_of_a_connection_is_not_read() -> None:
    client, read = ProxyClient(cast(Any, CountedPath()), "one"), list[bytes]()
    link = ProxiedConnection(client)
    link.from_server(b"before the client has said anything")
    link._speaker = cast(Any, SimpleNamespace(from_server=read.append))
    link.from_server(b"answer")
    link.ended = True
    link.from_server(b"late")
    assert read == [b"answer"]


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("/v3/kv/range", "Range"), ("/v3beta/kv/range", "Range"), ("/v3/kv/range?pretty", "Range"),
        ("/v3/unknown", "POST /v3/unknown"), ("/health?serializable=true", "POST /health"),
    ],
)  # fmt: skip
def test_a_request_to_the_gateway_is_known_by_its_path(target: str, method: str) -> None:
    assert gateway_method("POST", target) == method
