# SPDX-License-Identifier: Apache-2.0
"""The code's own deadlines by which a fault of an object store is named, whatever the server does."""

from __future__ import annotations

import socket
import threading

import pytest
from helpers.raw_server import Answer, dripping, serving

from pytest_nixl.checks.storage import check as object_store
from pytest_nixl.nixl.worker import object_stores, objects, transfer
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.nixl.worker.s3 import ObjectClient, ObjectStore

#: A fault is named within this time, in seconds.
NAMED = 30.0


def test_no_sum_of_deadlines_is_longer_than_a_fault_may_take() -> None:
    check, client = object_store, object_stores.SECONDS
    # The check: a server that never answers; one that stops while NIXL waits; one that answers slowly, then stops.
    assert check.ASK_SECONDS + client < NAMED
    assert check.SECONDS + check.LAST_SECONDS < NAMED
    assert client + check.LEAST_SECONDS + check.LAST_SECONDS <= NAMED
    # Parameters are tried while NIXL goes on: two of them, after the other client has asked.
    assert check.ASK_SECONDS + 2 * check.TRIAL_SECONDS <= check.SECONDS
    # A row: a server that stops during a transfer, and one that NIXL does not trust.
    assert transfer.STALLED_SECONDS + client < NAMED
    assert objects._DOUBT_SECONDS + transfer.STALLED_SECONDS < NAMED


@pytest.mark.parametrize(
    "answer",
    [dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"#"), dripping(b"", b"")],
    ids=["in drops", "silent"],
)
def test_a_server_that_does_not_end_its_answer_is_named_at_the_deadline(answer: Answer) -> None:
    """No single wait of the client for an answer in drops is long."""
    with serving(answer) as endpoint:
        store = ObjectStore("http", f"127.0.0.1:{endpoint.port}", "bucket", "us-east-1")
        client = ObjectClient(store, ("key", "secret"))
        with pytest.raises(ObjectStoreError, match=r"http://127\.0\.0\.1:\d+ did not answer within 0\.5 s\n") as caught:
            client.probe("key", 0.5)
        assert caught.value.kind == "endpoint"
        assert "check that the server runs" in caught.value.remedy
    client.close()


def test_a_name_that_takes_long_to_resolve_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of a name server that does not answer, for which no wait of a socket counts."""
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(60) and [])
    client = ObjectClient(ObjectStore("http", "host.invalid:80", "bucket", "us-east-1"), ("key", "secret"))
    with pytest.raises(ObjectStoreError, match=r"http://host\.invalid:80 did not answer within 0\.5 s\n"):
        client.probe("key", 0.5)
    ended.set()
    client.close()
