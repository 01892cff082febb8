# SPDX-License-Identifier: Apache-2.0
"""The check each-nic between two machines with two RDMA devices each: one of the four is slow, or none is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from machine import Done
from two_nodes import RUN_SECONDS, Nodes, start

pytest_plugins = ["machine_fixtures", "two_nodes"]


def each_nic(nodes: Nodes) -> Done:
    """Run the check on both nodes, and print what rank 0 prints."""
    what = "suites/bandwidth/test_nics.py --nixl-blocks=16KiB --nixl-op=WRITE"
    done, _ = (job.wait(RUN_SECONDS) for job in start(nodes, what, devices="all", transports="rc,ud"))
    print(done.output)
    return done


@pytest.fixture
def busy(nodes: Nodes) -> Iterator[None]:
    """Two busy loops in the first machine, which has two processors."""
    nodes[0].check("for _ in 1 2; do (exec -a busy-loop sh -c 'while :; do :; done') & done")
    yield
    nodes[0].check("pkill -f '^[b]usy-loop' || true")


def test_healthy_devices_pass(nodes: Nodes) -> None:
    done = each_nic(nodes)
    assert done.code == 0
    assert "NIXL verdict: PASS (1 PASS" in done.output


@pytest.mark.soak
@pytest.mark.usefixtures("busy")
def test_healthy_devices_on_a_busy_machine_pass(nodes: Nodes) -> None:
    assert each_nic(nodes).code == 0


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_slow_device_is_named_with_its_host(nodes: Nodes, slow: int) -> None:
    nodes[slow].check("tc qdisc add dev eth1 root netem rate 1mbit")
    try:
        done = each_nic(nodes)
    finally:
        nodes[slow].check("tc qdisc del dev eth1 root")
    assert done.code == 1
    assert f"rxe1:1 of node-{'ab'[slow]} (rank {slow}) moves 0.0" in done.output
    assert f"rxe1:1 of node-{'ba'[slow]} (rank {1 - slow}) moves" not in done.output
    assert "in 3 of 3 measurements" in done.output


@pytest.mark.soak
def test_device_that_cannot_reach_the_other_host_is_named(nodes: Nodes) -> None:
    nodes[1].check("tc qdisc add dev eth1 root netem loss 100%")
    try:
        done = each_nic(nodes)
    finally:
        nodes[1].check("tc qdisc del dev eth1 root")
    assert done.code == 1
    assert "fails where the others do not" in done.output
