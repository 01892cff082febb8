# SPDX-License-Identifier: Apache-2.0
"""The side channel of an engine is judged by what really answers: a listening, closed, full or silent socket."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pytest_nixl.host.network import ReachedPeer, read_peers, read_side_channels
from pytest_nixl.host.recorded_tree import FactsRoot

#: The first bytes of a real ZMQ socket (libzmq 4.3).
GREETING = b"\xff" + bytes(7) + b"\x01\x7f"


@contextlib.contextmanager
def listening(backlog: int = 8) -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def saying(greeting: bytes) -> Iterator[str]:
    """A server that sends these bytes to each client, and then waits for the client to leave."""
    with listening() as (server, name):

        def serve() -> None:
            with contextlib.suppress(OSError):
                client, _ = server.accept()
                with client:
                    client.sendall(greeting)
                    client.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield name
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_each_peer_has_its_own_addresses() -> None:
    with listening() as (_, name):
        peers = read_peers(FactsRoot(), [name, "127.0.0.2", f"{63 * 'a'}.invalid:9"])
    assert peers[:2] == (ReachedPeer(name, ("127.0.0.1",), ""), ReachedPeer("127.0.0.2", ("127.0.0.2",), ""))
    assert (peers[2].addresses, peers[2].fault.partition(" (")[0]) == ((), "its name does not resolve")


@pytest.mark.parametrize("read", [read_peers, read_side_channels])
@pytest.mark.parametrize("name", ["", "a b", "a:b", "a..b", ".a", ":9", 64 * "a", f"b.{64 * 'a'}:9", "a:123456", "[x]"])
def test_a_name_that_no_resolver_takes_is_refused(
    name: str, read: Callable[[FactsRoot, list[str]], tuple[ReachedPeer, ...]]
) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))} cannot be parsed: expected HOST or HOST:PORT"):
        read(FactsRoot(), ["127.0.0.1:9", name])


def faults(*names: str) -> list[str]:
    """Return what is wrong with the side channel of each engine."""
    channels = read_side_channels(FactsRoot(), names)
    assert [(channel.name, channel.addresses) for channel in channels] == [(name, ()) for name in names]
    return [channel.fault for channel in channels]


def port(name: str) -> str:
    return name.replace(":", " port ")


def test_a_side_channel_answers_or_is_refused_or_has_no_address() -> None:
    with listening() as (_, shut):
        pass  # nothing listens there any more
    with saying(GREETING) as name:
        good, refused, unknown, default = faults(name, shut, "prefill.invalid", "127.0.0.1")
    assert (good, refused) == ("", f"{port(shut)}: connection refused, so no engine listens there")
    assert unknown.startswith("its name does not resolve (")
    assert default == "127.0.0.1 port 5600: connection refused, so no engine listens there"


def test_packets_that_are_dropped_end_the_check_after_its_time_limit() -> None:
    """The queue of the listening socket is full, so that the kernel drops the request as a firewall does."""
    with contextlib.ExitStack() as clients, listening(backlog=0) as (server, name):
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        assert faults(name) == [f"{port(name)}: no answer within 2 s"]


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request", b"\xff" + bytes(9), GREETING[:9], GREETING[1:]])
def test_an_open_port_that_sends_no_greeting_of_zmq_fails(greeting: bytes) -> None:
    """A stopped engine accepts too: the kernel does that for it. So does another program."""
    with saying(greeting) as name:
        assert faults(name) == [f"{port(name)}: connected, but no greeting of ZMQ came within 2 s"]
