# SPDX-License-Identifier: Apache-2.0
"""A wait on the proxy to etcd learns of each event at once, and the rules of a client hold for its requests.

The proxy is a double that counts what it is told.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.etcd.proxy.client import ProxiedConnection, ProxyClient, ProxyError
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
    client = ProxyClient(cast(Any, path), "one")
    link, other = cast(Any, CountedLink()), cast(Any, CountedLink())
    sent: list[str] = []
    before = 0

    def notified(times: int = 1) -> bool:
        nonlocal before
        events, before = path.notified - before, path.notified
        return events == times

    client.attach(link)
    assert notified()
    first = client.arrived(link, "Put", (), lambda: sent.append("first"))
    assert notified()
    assert (sent, first.sent) == (["first"], 1)
    client.answered(link, first, b"answer", lambda: sent.append("answer"))
    assert notified()
    assert (sent[-1], first.state, first.answer) == ("answer", State.ANSWERED, b"answer")
    watch = client.passed("Watch", ())
    assert notified()
    client.confirmed(watch)
    assert notified()
    assert watch.confirmed
    client.hold()
    held = client.arrived(link, "Put", (), lambda: sent.append("held"))
    assert notified()
    assert (held.state, sent[-1]) == (State.HELD, "answer")
    client.withdrawn(held)
    assert notified()
    assert held.state is State.DROPPED
    client.release()
    before = path.notified
    unanswered = client.arrived(link, "Put", (), lambda: None)
    assert notified()
    client.withdrawn(unanswered)
    assert notified()
    assert unanswered.state is State.UNANSWERED
    client.withdrawn(unanswered)
    assert notified(0), "it was withdrawn before"
    client.detach(other)
    assert notified()
    assert client.connections == 1
    release = client.arrived(link, "Put", (), lambda: None)
    before = path.notified
    client.detach(link)
    assert notified(2)
    assert (client.connections, release.state) == (0, State.UNANSWERED)


def test_the_answer_of_a_request_that_matches_is_lost() -> None:
    client, link = ProxyClient(cast(Any, CountedPath()), "one"), cast(Any, CountedLink())
    client.lose_answer(lambda request: request.method == "Txn", nth=2)
    for method, state in (("Put", State.ANSWERED), ("Txn", State.ANSWERED), ("Txn", State.ANSWER_LOST)):
        delivered: list[str] = []
        request = client.arrived(link, method, (), lambda: None)
        client.answered(link, request, b"", partial(delivered.append, method))
        assert request.state is state
        assert bool(delivered) is (state is State.ANSWERED)
    assert link.aborted


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


def test_held_requests_are_released_or_dropped_and_a_lost_answer_is_lost_once() -> None:
    client, sent = ProxyClient(cast(Any, CountedPath()), "one"), list[str]()
    link = cast(Any, CountedLink())
    client.hold(is_put)
    first, second, third = (client.arrived(link, "Put", (), partial(sent.append, name)) for name in "abc")
    assert client.arrived(link, "Range", (), lambda: None).state is State.SENT
    assert (client.held, [request.sent for request in client.requests]) == ((first, second, third), [0, 0, 0, 1])
    client.lose_answer(lambda request: request is second)
    assert client.release_if_held(second)
    assert not client.release_if_held(second)
    with pytest.raises(ProxyError, match="it is not held: one 2: Put"):
        client.release(second)
    assert (sent, second.state, second.sent) == (["b"], State.SENT, 2)
    client.answered(link, second, b"", partial(sent.append, "answer"))
    assert (second.state, link.aborted) == (State.ANSWER_LOST, True)
    client.drop(third)
    assert (third.state, client.held) == (State.DROPPED, (first,))
    client.release()
    client.answered(link, first, b"", partial(sent.append, "answer"))
    assert (sent, first.state) == (["b", "a", "answer"], State.ANSWERED)
    assert client.arrived(link, "Put", (), lambda: None).state is State.SENT, "no request is held any more"


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
