# SPDX-License-Identifier: Apache-2.0
"""A wait on the proxy to etcd learns of each event at once. The proxy is a double that counts what it is told."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from pytest_nixl.etcd.proxy.client import ProxyClient
from pytest_nixl.etcd.proxy.request import State


class CountedPath:
    """The part of a proxy that its clients use, without a thread and without an etcd."""

    told = places = 0

    def notify(self) -> None:
        self.told += 1

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

    def told(times: int = 1) -> bool:
        nonlocal before
        found, before = path.told - before, path.told
        return found == times

    client.attach(link)
    assert told()
    first = client.arrived(link, "Put", (), lambda: sent.append("first"))
    assert told()
    assert (sent, first.sent) == (["first"], 1)
    client.answered(link, first, b"answer", lambda: sent.append("answer"))
    assert told()
    assert (sent[-1], first.state, first.answer) == ("answer", State.ANSWERED, b"answer")
    watch = client.passed("Watch", ())
    assert told()
    client.confirmed(watch)
    assert told()
    assert watch.confirmed
    client.hold()
    held = client.arrived(link, "Put", (), lambda: sent.append("held"))
    assert told()
    assert (held.state, sent[-1]) == (State.HELD, "answer")
    client.withdrawn(held)
    assert told()
    assert held.state is State.DROPPED
    client.release()
    before = path.told
    unanswered = client.arrived(link, "Put", (), lambda: None)
    assert told()
    client.withdrawn(unanswered)
    assert told()
    assert unanswered.state is State.UNANSWERED
    client.withdrawn(unanswered)
    assert told(0), "it was withdrawn before"
    client.detach(other)
    assert told()
    assert client.connections == 1
    left = client.arrived(link, "Put", (), lambda: None)
    before = path.told
    client.detach(link)
    assert told(2)
    assert (client.connections, left.state) == (0, State.UNANSWERED)


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
