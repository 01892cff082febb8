# SPDX-License-Identifier: Apache-2.0
"""Over a cable that is shaped to a known rate, what is measured is that rate, for each backend and operation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from driver import build
from hosts import Host, require_tools, two_hosts
from runs import repeats
from test_real_libfabric import link

from pytest_nixl.settings import Settings

BURST = 32 << 10
SEND = """
import socket, sys, time
with socket.create_connection(("10.99.0.2", 5001)) as s:
    block, sent, start = bytes(1 << 20), 0, time.perf_counter()
    while sent < 40 << 20:
        s.sendall(block); sent += len(block)
    s.shutdown(socket.SHUT_WR); s.recv(1)
    print(sent / (time.perf_counter() - start))
"""
RECEIVE = """
import socket
with socket.create_server(("10.99.0.2", 5001)) as listening:
    print("ready", flush=True)
    s = listening.accept()[0]
    while s.recv(1 << 20): pass
    s.sendall(b"x")
"""


def probe(hosts: tuple[Host, Host]) -> float:
    """Return the bytes per second of a plain TCP connection from one host to the other."""
    receiver = subprocess.Popen([*hosts[1].prefix, sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        return float(hosts[0].run(sys.executable, "-c", SEND))


@pytest.mark.soak
@pytest.mark.parametrize("repeat", repeats())
@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("backend", ["UCX", "LIBFABRIC"])
@pytest.mark.parametrize(("rate", "passes"), [("1gbit", True), ("800mbit", False)])
def test_delivered_bandwidth_is_that_of_the_cable(
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: str,
    op: str,
    rate: str,
    passes: bool,
    repeat: int,
) -> None:
    require_tools()
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("PYTEST_NIXL_LIBCUDA", str(build(tmp_path)))
    bits = {"1gbit": 1e9, "800mbit": 0.8e9}[rate]
    with two_hosts(rate) as hosts:
        plain = probe(hosts)
        settings = make_settings(blocks=(1 << 20,), depth=(4,), iterations=60)
        with link(settings, backend, op, hosts) as one:
            sender = hosts[0 if op == "WRITE" else 1]
            before = sender.counter("veth0", "tx_bytes")
            samples = one.measure(1 << 20, depth=4)
            sent = sender.counter("veth0", "tx_bytes") - before
    print(f"{backend} {op} at {rate}: {samples.bandwidth / 1e9:.4f} GB/s, plain TCP {plain / 1e9:.4f}")
    assert samples.corruption is None
    assert min(samples.windows) * bits / 8 >= 20 * BURST
    assert samples.bandwidth == pytest.approx(plain, rel=0.1)
    for window, bandwidth in zip(samples.windows, samples.rates, strict=True):
        assert bandwidth <= bits / 8 + BURST / window
    # The timed payload, and headers, warm-up and verification besides.
    assert (1 << 20) * sum(samples.transfers) <= sent
    floor = 0.105e9  # bytes per second: between the two rates
    assert (samples.bandwidth >= floor) is passes
