# SPDX-License-Identifier: Apache-2.0
"""The side channel of an engine is judged by what really answers: a listening, closed, full or silent socket."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.checks.doctor.network import side_channel
from pytest_nixl.host.facts import Facts, read_environment
from pytest_nixl.host.network import ReachedPeer, read_peers, read_side_channels
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Judgement, Verdict

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


def judged(*names: str) -> Judgement:
    facts = cast(
        "Facts",
        SimpleNamespace(
            side_channels=read_side_channels(FactsRoot(), names), environment=read_environment(FactsRoot(), {})
        ),
    )
    return side_channel(facts, Requirements(load_profile("loopback"), ("UCX",)))


def test_a_zmq_socket_that_listens_passes() -> None:
    with saying(GREETING) as name:
        assert judged(name) == Judgement(Verdict.PASS, f"ZMQ answers at {name}")


def test_a_closed_port_is_refused_and_the_default_address_is_the_remedy() -> None:
    with listening() as (_, name):
        pass  # nothing listens there any more
    judgement = judged(name)
    where, port = name.split(":")
    assert judgement.verdict is Verdict.FAIL
    assert (
        judgement.reason
        == f"1 of 1 side channel silent: {name}: {where} port {port}: connection refused, so no engine listens there"
    )
    assert "set VLLM_NIXL_SIDE_CHANNEL_HOST to the pod's address" in judgement.remedy


def test_packets_that_are_dropped_end_the_check_after_its_time_limit() -> None:
    """The queue of the listening socket is full, so that the kernel drops the request as a firewall does."""
    with contextlib.ExitStack() as clients, listening(backlog=0) as (server, name):
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        judgement = judged(name)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.endswith(": no answer within 2 s")
    assert judgement.remedy.startswith("allow TCP to this port in the NetworkPolicy")


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request", b"\xff" + bytes(9)])
def test_an_open_port_that_sends_no_greeting_of_zmq_fails(greeting: bytes) -> None:
    """A stopped engine accepts too: the kernel does that for it. So does another program."""
    with saying(greeting) as name:
        judgement = judged(name)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.endswith(": connected, but no greeting of ZMQ came within 2 s")
    assert "look in that engine's log" in judgement.remedy


def test_a_name_without_an_address_is_told_beside_a_side_channel_that_answers() -> None:
    with saying(GREETING) as name:
        judgement = judged(name, "prefill.invalid")
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.startswith("1 of 2 side channels silent: prefill.invalid: its name does not resolve (")
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in judgement.remedy


def test_the_default_port_is_that_of_vllm() -> None:
    [channel] = read_side_channels(FactsRoot(), ["127.0.0.1"])
    assert channel == ReachedPeer(
        "127.0.0.1", (), "127.0.0.1 port 5600: connection refused, so no engine listens there"
    )


def test_without_a_name_the_command_is_told() -> None:
    judgement = judged()
    assert judgement.verdict is Verdict.NOT_APPLICABLE
    assert "`pytest-nixl doctor --side-channel=PREFILL`" in judgement.reason
