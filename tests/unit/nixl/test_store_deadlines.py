# SPDX-License-Identifier: Apache-2.0
"""The code's own deadlines by which a fault of an object store is named, whatever the server does."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from pytest_nixl.checks.storage import check as object_store
from pytest_nixl.nixl.worker import object_stores, objects, transfer
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.nixl.worker.objects import ObjectBuffer
from pytest_nixl.nixl.worker.s3 import ObjectClient, ObjectStore

#: A fault is named within this time, in seconds.
NAMED = 30.0
#: For how long a server of these tests goes on if nobody hangs up: tests that miss it fail by other words.
LONG = 60.0


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


@contextmanager
def serving(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[ObjectClient]:
    """Let a function answer each connection until the body ends; yield a client of that server."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    talk(connection, ended)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listening.getsockname()[1]
        store = ObjectStore("http", f"127.0.0.1:{port}", "bucket", "us-east-1")
        client = ObjectClient(store, ("key", "secret"))
        try:
            yield client
        finally:
            ended.set()
            client.close()
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def drips(connection: socket.socket, ended: threading.Event) -> None:
    """Send an answer a byte at a time: no single wait of the client is long."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
    for _ in range(int(LONG / 0.05)):
        connection.sendall(b"#")
        if ended.wait(0.05):
            return


def is_silent(_: socket.socket, ended: threading.Event) -> None:
    ended.wait(LONG)


@pytest.mark.parametrize("talk", [drips, is_silent])
def test_a_server_that_does_not_end_its_answer_is_named_at_the_deadline(
    talk: Callable[[socket.socket, threading.Event], None],
) -> None:
    with serving(talk) as client:
        with pytest.raises(ObjectStoreError, match=r"http://127\.0\.0\.1:\d+ did not answer within 0\.5 s\n") as caught:
            client.probe("key", 0.5)
        assert caught.value.kind == "endpoint"
        assert "check that the server runs" in caught.value.remedy
        # It is asked nothing more, so that each later step does not wait as long again.
        with pytest.raises(ObjectStoreError, match=r"within 0\.5 s\n"):
            client.within(LONG, lambda: pytest.fail("the server was asked again"))
        client.discard("key", LONG)


def test_a_name_that_takes_long_to_resolve_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of a name server that does not answer, for which no wait of a socket counts."""
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(LONG) and [])
    client = ObjectClient(ObjectStore("http", "host.invalid:80", "bucket", "us-east-1"), ("key", "secret"))
    with pytest.raises(ObjectStoreError, match=r"http://host\.invalid:80 did not answer within 0\.5 s\n"):
        client.probe("key", 0.5)
    ended.set()
    client.close()


def test_what_is_done_in_time_keeps_its_result_and_its_error() -> None:
    with serving(is_silent) as client:
        assert client.within(LONG, lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            client.within(LONG, lambda: 1 // 0)
        assert client.within(LONG, lambda: 8) == 8


class SlowAgent:
    """A double of NIXL: each transfer ends after some polls, or never."""

    def __init__(self, polls: int) -> None:
        self._polls = polls
        self._left: dict[int, int] = {}

    def transfer(self, handle: int, notification: bytes) -> str:
        self._left[handle] = self._polls
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        self._left[handle] -= 1
        return "PROC" if self._left[handle] else "DONE"


class Watch:
    """What was asked, and an answer to the second question."""

    def __init__(self) -> None:
        self.windows = 0
        self.asked: list[float] = []

    def arrived(self) -> None:
        self.windows += 1

    def stalled(self, seconds: float) -> None:
        self.asked.append(seconds)
        if len(self.asked) == 2:
            raise ObjectStoreError("the server has a fault")


def initiator(polls: int, depth: int, watch: Watch) -> transfer.Transfers:
    handles = list(range(depth))
    deadline = time.monotonic() + LONG
    return transfer.Transfers(
        SlowAgent(polls),
        "target",
        handles,
        dict(enumerate(handles)),
        acknowledged=False,
        notify_each=False,
        deadline=deadline,
        watch=watch,
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_watch_is_asked_again_and_again_while_no_transfer_ends(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALLED_SECONDS", 0.02)
    watch = Watch()
    with pytest.raises(ObjectStoreError, match="the server has a fault"):
        initiator(-1, depth, watch).run_window(depth, transfer.stamps_for(depth))
    assert 0.02 < watch.asked[0] < watch.asked[1]
    assert watch.windows == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_watch_is_not_asked_while_transfers_end(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer needs more than one look, and all together take longer than a stall may."""
    clock = itertools.count()  # each look is a second after the one before
    started = initiator(600, depth, watch := Watch())
    double = SimpleNamespace(monotonic=lambda: next(clock), perf_counter_ns=time.perf_counter_ns)
    monkeypatch.setattr(transfer, "time", double)
    started.deadline = 10**9
    started.run_window(40, transfer.stamps_for(40))
    assert watch.asked == []
    assert watch.windows == 1


class Store(object_stores.StoreClient):
    """A double of a server without faults, whose certificate NIXL may not trust."""

    def __init__(self) -> None:
        address = object_stores.StoreFault("unreachable", "endpoint", "")
        super().__init__("s", "b", "https/s", address, object_stores.ConnectionFaults(address, address, address))
        self.content: dict[str, bytes] = {}

    def put(self, key: str, content: bytes) -> None:
        self.content[key] = content

    def get(self, key: str, offset: int, size: int) -> bytes:
        return self.content[key][offset : offset + size]

    def delete(self, key: str) -> None:
        del self.content[key]

    def close(self) -> None:
        return

    def doubt(self) -> ObjectStoreError:
        return ObjectStoreError("NIXL may not trust it", kind="tls")


class Registering:
    """A double of an agent that registers memory."""

    def register_memory(self, *_: object) -> int:
        return 1


@pytest.mark.parametrize(
    ("seconds", "block", "arrived", "doubted"),
    [
        (25.0, 1 << 20, False, True),
        (17.0, 1 << 20, False, False),  # it may only be slow
        (25.0, 1 << 20, True, False),  # NIXL has used it
        (25.0, 64 << 20, False, False),  # so many bytes may take that long
    ],
    ids=["doubted", "early", "used", "large"],
)
def test_a_certificate_is_doubted_only_if_nothing_else_explains_the_stall(
    seconds: float, block: int, arrived: bool, doubted: bool
) -> None:
    buffer = ObjectBuffer(block, Store())
    buffer.prepare(Registering(), block, 1)
    if arrived:
        buffer.arrived()
    if doubted:
        with pytest.raises(ObjectStoreError, match="may not trust"):
            buffer.stalled(seconds)
    else:
        buffer.stalled(seconds)
