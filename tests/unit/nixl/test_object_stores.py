# SPDX-License-Identifier: Apache-2.0
"""A client of an object store: what a failed connection means, and which objects a probe leaves.

The store is a double, because a real one neither returns wrong bytes nor fails at one request.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

from pytest_nixl.nixl.worker.object_stores import (
    ConnectionFaults,
    ObjectStoreError,
    StoreClient,
    StoreFault,
    clock_ahead,
    fault_of,
    faults_by_code,
    faults_by_status,
)

FAULTS = ConnectionFaults(*(StoreFault(kind, kind, f"remedy of {kind}") for kind in ConnectionFaults._fields))


class KeptStore(StoreClient):
    """A store in memory.

    :param fails: the requests that fail.
    :param wrong: whether it returns other bytes than were stored.
    """

    def __init__(self, *fails: str, wrong: bool = False) -> None:
        super().__init__("the server s", "bucket b", "http/s:1", StoreFault("clock", "clock", ""), FAULTS)
        self._fails, self._wrong = fails, wrong
        self.objects: dict[str, bytes] = {}
        self.log: list[str] = []
        self.sizes: list[int] = []

    def _asked(self, request: str) -> None:
        self.log.append(request)
        if request in self._fails:
            raise ObjectStoreError(f"{request} is refused")

    def put(self, key: str, content: bytes) -> None:
        self._asked("put")
        self.objects[key] = content
        self.sizes.append(len(content))

    def get(self, key: str, offset: int, size: int) -> bytes:
        self._asked("get")
        return bytes(size) if self._wrong else self.objects[key][offset : offset + size]

    def delete(self, key: str) -> None:
        self._asked("delete")
        self.objects.pop(key, None)

    def close(self) -> None:
        self.log.append("close")


@pytest.mark.parametrize(
    ("fails", "message", "log"),
    [
        (["put"], "put is refused", ["put"]),
        (["get"], "get is refused", ["put", "get", "delete"]),
        (["get", "delete"], "get is refused", ["put", "get", "delete"]),
        (["delete"], "delete is refused", ["put", "get", "delete"]),
    ],
)
def test_a_probe_that_fails_says_why_and_deletes_its_object(fails: list[str], message: str, log: list[str]) -> None:
    store = KeptStore(*fails)
    with pytest.raises(ObjectStoreError, match=message):
        store.probe("k")
    assert store.log == log


def test_other_bytes_than_were_stored_are_a_fault_of_the_server() -> None:
    store = KeptStore()
    store.probe("k")
    assert (store.log, store.objects, store.sizes) == (["put", "get", "delete"], {}, [1024])
    store = KeptStore(wrong=True)
    with pytest.raises(
        ObjectStoreError, match="the server s returned other bytes than were stored in bucket b"
    ) as caught:
        store.probe("k")
    assert (caught.value.kind, store.objects) == ("server", {})


def test_an_object_is_discarded_even_if_the_server_refuses() -> None:
    store = KeptStore("delete")
    store.discard("k", 60)
    assert store.log == ["delete"]


def test_a_server_that_took_too_long_is_asked_nothing_more() -> None:
    store, released = KeptStore(), threading.Event()
    assert store.within(60, lambda: "answer") == "answer"
    with pytest.raises(ZeroDivisionError):
        store.within(60, lambda: 1 // 0)
    with pytest.raises(ObjectStoreError, match=r"the server s did not answer within 0\.01 s") as caught:
        store.within(0.01, lambda: released.wait(60))
    assert (caught.value.kind, caught.value.remedy) == ("address", "remedy of address")
    assert store.log == []
    with pytest.raises(ObjectStoreError) as again:
        store.probe("k")
    assert again.value is caught.value
    assert store.log == []
    released.set()


def test_the_clock_of_a_server_is_compared_by_its_date() -> None:
    ahead = clock_ahead(format_datetime(datetime.now(timezone.utc) + timedelta(seconds=3600), usegmt=True))
    assert ahead is not None
    assert abs(ahead - 3600) < 60
    for date in (None, "yesterday", "Sat, 01 Jan 2022 00:00:00 -0000"):
        assert clock_ahead(date) is None, date


def test_faults_are_found_by_each_code_and_status_of_an_answer() -> None:
    first, other = StoreFault("a", "", "", ("A", "B"), (1, 2)), StoreFault("b", "", "", ("C",), (3,))
    faults = {"first": first, "other": other}
    assert faults_by_code(faults) == {"A": first, "B": first, "C": other}
    assert faults_by_status(faults) == {1: first, 2: first, 3: other}


def tls_error(kind: type[ssl.SSLError], **attributes: str) -> ssl.SSLError:
    """Return an error with what OpenSSL says of it."""
    error = kind(1, "")
    vars(error).update(attributes)
    return error


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        (socket.gaierror(-2, "Unknown name"), "has a host name that does not resolve (Unknown name)", "address"),
        (tls_error(ssl.SSLError, reason="WRONG"), "does not speak TLS (WRONG)", "no_tls"),
        (tls_error(ssl.SSLCertVerificationError, verify_message="of nobody"),
         "has a certificate that is not trusted (of nobody)", "untrusted"),
        (http.client.BadStatusLine("x"), "closed the connection or does not speak HTTP (BadStatusLine)", "address"),
        (ConnectionRefusedError(111, "Connection refused"), "cannot be reached (Connection refused)", "address"),
        (OSError("no route"), "cannot be reached (no route)", "address"),
    ],
)  # fmt: skip
def test_each_failed_connection_has_its_words_and_its_fault(error: BaseException, message: str, kind: str) -> None:
    description, fault = fault_of(error, FAULTS, 2.5)
    assert (description, fault.kind) == (message, kind)
