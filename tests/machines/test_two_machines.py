# SPDX-License-Identifier: Apache-2.0
"""Two ranks on two kernels: bytes move over RDMA between them, and each rank names a node or a cable that fails."""

from __future__ import annotations

import re
import time

import pytest
from machine import BOOT_SECONDS, Done, Machine
from two_nodes import BEYOND, LEASE, RUN_SECONDS, Moving, Nodes, add_devices, start

pytest_plugins = ["machine_fixtures", "two_nodes"]

SUITE = "suites/bandwidth/test_bandwidth.py --nixl-blocks=64KiB --nixl-op=WRITE"
GONE = r"rank 1 on node-b \(pid \d+\) of group .* is gone"
CUT_OFF = "rank 0 on node-a is gone, or this rank is cut off from the etcd that rank 0 serves"


def packets(machine: Machine) -> int:
    """Return the packets that a machine's device has sent and received."""
    place = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
    return sum(int(line) for line in machine.check(f"cat {place}/sent_pkts {place}/rcvd_pkts").split())


def last_words(done: Done) -> str:
    """Print the last line of a run, for the record, and return it."""
    last = done.output.splitlines()[-1]
    print(f"exit code {done.code} after {done.seconds:.0f} s: {last}")
    return last


def nothing_is_left(*machines: Machine) -> None:
    """Fail if a process or a segment of shared memory of a run is left on a machine."""
    for machine in machines:
        assert machine.run("pgrep -af '[p]ytest_nixl|[n]ixl-etcd-listen|[e]tcd-distro'").code == 1
        assert machine.check("ls -A /dev/shm") == ""


def test_bytes_move_over_rdma_between_two_kernels(nodes: Nodes) -> None:
    before = [packets(machine) for machine in nodes]
    boot_ids = {machine.check("cat /proc/sys/kernel/random/boot_id") for machine in nodes}
    assert len(boot_ids) == 2
    done = [job.wait(RUN_SECONDS) for job in start(nodes, SUITE)]
    assert [one.code for one in done] == [0, 0], done[0].output
    assert "rc_verbs/rxe0:1" in done[0].output
    assert "rank 1 on node-b" in done[0].output or "node-b" in done[1].output
    # Each row moves megabytes in packets of 1 KiB.
    assert all(packets(machine) - count > 1000 for machine, count in zip(nodes, before, strict=True))


def test_short_faults_end_no_run(nodes: Nodes) -> None:
    run = Moving(nodes)
    for what, seconds, make, mend in (
        ("frozen", 3, ("stop", {}), ("cont", {})),
        ("cut off", 3, ("set_link", {"name": "card0", "up": False}), ("set_link", {"name": "card0", "up": True})),
        ("frozen", 10, ("stop", {}), ("cont", {})),
    ):
        nodes[1].qmp(make[0], **make[1])
        time.sleep(seconds)
        nodes[1].qmp(mend[0], **mend[1])
        took = run.wait_for_a_transfer(f"a transfer after node-b was {what} for {seconds} s")
        print(f"node-b {what} for {seconds} s: transfers go on {took:.1f} s later")
    assert run.end() == [0, 0], run.driver.output
    nothing_is_left(*nodes)


@pytest.mark.soak
def test_cable_that_is_cut_for_longer_than_the_lease_is_named_by_both_ranks(nodes: Nodes) -> None:
    run = Moving(nodes)
    nodes[1].qmp("set_link", name="card0", up=False)
    cut = time.monotonic()
    try:
        done = run.driver.wait(LEASE + BEYOND), run.peer.wait(LEASE + BEYOND)
        print(f"both ranks ended {time.monotonic() - cut:.1f} s after the cut; the lease is {LEASE} s")
    finally:
        nodes[1].qmp("set_link", name="card0", up=True)
    assert re.search(GONE, last_words(done[0])), done[0].output
    assert CUT_OFF in last_words(done[1]), done[1].output
    assert [one.code for one in done] == [1, 1]
    nothing_is_left(*nodes)
    # Mended, the same command runs again.
    done = run_suite(nodes)
    assert [one.code for one in done] == [0, 0], done[0].output


def run_suite(nodes: Nodes) -> tuple[Done, Done]:
    """Run one row on both nodes, and print the last line of each rank."""
    one, other = (job.wait(RUN_SECONDS) for job in start(nodes, SUITE))
    for done in (one, other):
        last_words(done)
    return one, other


@pytest.mark.soak
def test_clocks_that_differ_by_an_hour_do_no_harm(nodes: Nodes) -> None:
    nodes[1].check("date -s '+1 hour'")
    try:
        apart = [int(machine.check("date +%s")) for machine in nodes]
        assert apart[1] - apart[0] > 3000
        done = run_suite(nodes)
    finally:
        nodes[1].check("date -s '-1 hour'")
    assert [one.code for one in done] == [0, 0], done[0].output
    assert "NIXL verdict: PASS" in done[0].output


def test_frozen_node_is_named(nodes: Nodes) -> None:
    run = Moving(nodes)
    nodes[1].qmp("stop")
    frozen = time.monotonic()
    try:
        done = run.driver.wait(LEASE + BEYOND)
    finally:
        nodes[1].qmp("cont")
    print(f"the frozen node was named {time.monotonic() - frozen:.1f} s after it froze; the lease is {LEASE} s")
    assert re.search(GONE, last_words(done)), done.output
    assert done.code == 1
    # It finds out when it goes on.
    assert run.peer.wait(LEASE + BEYOND).code != 0


@pytest.mark.soak
def test_node_that_reboots_is_named_and_takes_part_again(nodes: Nodes) -> None:
    run = Moving(nodes)
    before = nodes[1].check("cat /proc/sys/kernel/random/boot_id")
    (nodes[1].out / "ready").unlink()
    nodes[1].qmp("set-action", reboot="reset")
    nodes[1].qmp("system_reset")
    rebooted = time.monotonic()
    done = run.driver.wait(LEASE + BEYOND)
    print(f"the node that rebooted was named {time.monotonic() - rebooted:.1f} s later; the lease is {LEASE} s")
    assert re.search(GONE, last_words(done)), done.output
    assert done.code == 1
    nothing_is_left(nodes[0])
    add_devices(nodes[1].booted(BOOT_SECONDS), 1)
    assert nodes[1].check("cat /proc/sys/kernel/random/boot_id") != before
    nodes[1].check('mkdir -p /opt/verbs && ln -sf "$WHEEL_VERBS" /opt/verbs/libibverbs.so.1')
    assert [one.code for one in run_suite(nodes)] == [0, 0]


def test_node_that_loses_power_is_named(nodes: Nodes) -> None:
    run = Moving(nodes)
    nodes[1].power_off()
    lost = time.monotonic()
    done = run.driver.wait(LEASE + BEYOND)
    print(f"the lost node was named {time.monotonic() - lost:.1f} s after it lost power; the lease is {LEASE} s")
    assert re.search(GONE, last_words(done)), done.output
    assert done.code == 1
    nothing_is_left(nodes[0])
