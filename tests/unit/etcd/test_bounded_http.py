# SPDX-License-Identifier: Apache-2.0
"""Broken or malicious servers: each request ends soon, with one sentence that names the endpoint.

The server is a test double, because a real etcd sends none of these answers.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable

import pytest
from helpers.raw_server import Answer, dripping, serving

from pytest_nixl.etcd import bounded_http
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import TransactionResult, get_prefix, txn
from pytest_nixl.etcd.watch import Watched
from pytest_nixl.host.etcd import read_etcd
from pytest_nixl.host.recorded_tree import FactsRoot

HEADER = {"cluster_id": "1", "member_id": "2", "revision": "3", "raft_term": "4"}
#: Timeout of a request in seconds, and the time in which a test must end even on a busy machine.
TIMEOUT, OVER = 0.5, 60.0


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """Return one complete answer."""
    lines = [f"HTTP/1.1 {status}", "Connection: close", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def plain(value: object) -> Answer:
    """Return an answer with a JSON body."""
    return lambda: [http(json.dumps(value).encode())]


def endless(start: bytes, part: bytes) -> Answer:
    """Return an endless answer that is sent as fast as it is read."""
    return lambda: itertools.chain([start], itertools.repeat(part))


def packed() -> Iterable[bytes]:
    """One GiB of spaces, compressed to one MiB."""
    return [http(gzip.compress(b" " * (1 << 20)) * 1024, "Content-Encoding: gzip")]


STATUS = b"HTTP/1.1 200 OK\r\n"
CHUNKED = STATUS + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "an endless body": endless(STATUS + b"\r\n", b" " * 65536),
    "a chunk of endless size": endless(CHUNKED, b"0" * 65536),
    "a huge length": endless(STATUS + b"Content-Length: 999999999999999999\r\n\r\n", b" " * 65536),
    "endless interim answers": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "an endless error": endless(b"HTTP/1.1 500 Broken\r\n\r\n", b"\xe9" * 65536),
    "a body in drops": dripping(STATUS + b"Content-Length: 100000\r\n\r\n", b" "),
    "headers in drops": dripping(STATUS + b"X: ", b"y"),
}
MALFORMED = {
    "a header only": plain({"header": HEADER}),
    "nulls": plain({"header": HEADER, **dict.fromkeys(("kvs", "count", "ID", "TTL", "succeeded", "responses"))}),
    "wrong types": plain({"header": HEADER, "kvs": {"a": 1}, "count": [], "ID": {}, "TTL": [], "responses": 7}),
    "infinite numbers": lambda: [http(b'{"header": {"revision": 1e999}, "count": 1e999, "ID": 1e999, "TTL": 1e999}')],
    "no UTF-8": lambda: [http(b'{"header": "\xff\xfe"}')],
    "a packed bomb": packed,
    "a list for an error": lambda: [http(b'["code"]', status="500 Broken")],
    "another place": lambda: [http(b"", "Location: /v3/again", status="307 Temporary Redirect")],
    "an error with control characters": lambda: [
        http(json.dumps({"code": 2, "message": "\x1b[31m" + "long\r\n" * 10_000}).encode(), status="500 \x1b[31mred")
    ],
}
#: Requests that read their answers in different ways.
REQUESTS: dict[str, Callable[[EtcdClient], object]] = {
    "status": lambda client: client.status(),
    "get": lambda client: client.get("/a"),
    "get_prefix": lambda client: client.get_prefix("/a"),
    "count_prefix": lambda client: client.count_prefix("/a"),
    "put": lambda client: client.put("/a", b""),
    "delete": lambda client: client.delete("/a"),
    "lease": lambda client: client.lease(5),
    "transaction": lambda client: TransactionResult.of(client.transaction(txn([], [get_prefix("/a")]))).range_result(0),
    "create": lambda client: client.create("/a", b""),
    "watch": lambda client: list(client.watch(Watched("/a", 1), seconds=TIMEOUT)),
}


def sentence(error: EtcdError, endpoint: Endpoint) -> None:
    """Assert that an error is one sentence that names the endpoint, with a remedy."""
    assert str(endpoint) in error.reason
    assert error.reason.isprintable()
    assert len(error.reason) < 500
    assert error.remedy
    assert error.detail.isprintable()


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_answer_is_abandoned(kind: str) -> None:
    with serving(ENDLESS[kind]) as endpoint, connect([endpoint], timeout=TIMEOUT) as client:
        start = time.monotonic()
        with pytest.raises(EtcdError) as caught:
            client.lease(5)
        assert time.monotonic() - start < OVER
        assert caught.value.cause in ("timeout", "not-etcd", "closed")
        sentence(caught.value, endpoint)


def test_a_slow_answer_is_reported_with_its_size_so_far() -> None:
    with serving(ENDLESS["a body in drops"]) as endpoint, connect([endpoint], timeout=TIMEOUT) as client:
        with pytest.raises(EtcdError, match=r"0\.5 s \(\d+ bytes\)") as caught:
            client.status()
        assert caught.value.cause == "timeout"


def test_an_answer_that_is_too_large_is_not_read_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "LARGEST_ANSWER", 1 << 20)
    with serving(ENDLESS["an endless body"]) as endpoint, connect([endpoint], timeout=60) as client:
        with pytest.raises(EtcdError, match="its answer is larger than 1 MiB") as caught:
            client.status()
        assert caught.value.cause == "not-etcd"


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_answer_is_reported_in_one_sentence(kind: str, request_name: str) -> None:
    with serving(MALFORMED[kind]) as endpoint, connect([endpoint], timeout=TIMEOUT) as client:
        start = time.monotonic()
        try:
            message = REQUESTS[request_name](client)
        except EtcdError as error:
            sentence(error, endpoint)
        else:
            # A header alone is a valid answer of an etcd without keys; a status may contain anything.
            empty = {"a header only": ("get", "get_prefix", "count_prefix", "put", "delete", "create", "watch"),
                     "nulls": ("put", "delete"), "wrong types": ("put", "delete"), "no UTF-8": ("watch",)}  # fmt: skip
            assert request_name in (*empty.get(kind, ()), "status")
            assert not message or request_name == "status"
        assert time.monotonic() - start < OVER


def test_an_answer_that_says_that_it_is_not_packed_is_read() -> None:
    answer = http(json.dumps({"header": HEADER}).encode(), "Content-Encoding:  IDENTITY ")
    with serving(lambda: [answer]) as endpoint, connect([endpoint], timeout=60) as client:
        assert client.get("/a") is None


def test_a_malformed_answer_is_reported_with_the_request() -> None:
    with serving(MALFORMED["a header only"]) as endpoint, connect([endpoint], timeout=60) as client:
        with pytest.raises(EtcdError, match="/v3/lease/grant") as caught:
            client.lease(5)
        assert caught.value.cause == "not-etcd"
    with serving(MALFORMED["a packed bomb"]) as endpoint, connect([endpoint], timeout=60) as client:
        with pytest.raises(EtcdError, match="its answer is compressed"):
            client.get("/a")


def test_the_size_limit_applies_to_each_message_of_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "LARGEST_ANSWER", 1 << 20)
    event = {"kv": {"key": "L2E=", "mod_revision": "1", "value": "A" * 4 * (100 << 10)}}
    message = json.dumps({"result": {"header": HEADER, "watch_id": "1", "events": [event]}}).encode() + b"\n"
    whole = STATUS + b"\r\n" + message * 10
    with serving(lambda: [whole, b"x" * (2 << 20)]) as endpoint, connect([endpoint], timeout=60) as client:
        events = []
        with pytest.raises(EtcdError, match="its answer is larger than 1 MiB"):
            for watch_event in client.watch(Watched("/a", 1), seconds=60):
                events.append(watch_event)
        assert len(events) == 10


@pytest.mark.parametrize("token", [None, 5, "", "a b", "a\r\nX: y", "a" * 8193, ["a"]])
def test_an_invalid_token_is_not_sent(token: object) -> None:
    with serving(plain({"header": HEADER, "token": token})) as endpoint:
        with connect([endpoint], user="root", password="s3cret", timeout=60) as client:
            with pytest.raises(EtcdError, match="/v3/auth/authenticate") as caught:
                client.get("/a")
            assert "s3cret" not in str(caught.value)


PASSWORD = 'Sw0rd"fish;1'


REFUSED = {"code": 2, "message": f"refused {PASSWORD} of {json.dumps({'name': 'me', 'password': PASSWORD})}"}


@pytest.mark.parametrize("body", [REFUSED, {}])
def test_an_error_that_repeats_the_password_is_shown_without_it(body: dict[str, object]) -> None:
    """It is in the message, which has the request as JSON, and in the reason, which is shown if there is no message."""
    answer = http(json.dumps(body).encode(), status=f"500 refused {PASSWORD}")
    with serving(lambda: [answer]) as endpoint, connect([endpoint], user="me", password=PASSWORD) as client:
        with pytest.raises(EtcdError, match=r"refused \*\*\*") as caught:
            client.get("/x")
    assert not re.search("fish|Sw0rd", str(caught.value))


@pytest.mark.long
def test_the_clock_of_a_server_that_never_ends_is_not_told() -> None:
    healthy = plain({"header": HEADER, "version": "3.5.1"})
    with serving(healthy, to_get=ENDLESS["headers in drops"]) as endpoint:
        start = time.monotonic()
        facts = read_etcd(FactsRoot(), str(endpoint), "the test")
        assert facts.version.value == "3.5.1"
        assert facts.clock.value is None
        assert time.monotonic() - start < OVER
