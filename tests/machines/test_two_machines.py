# SPDX-License-Identifier: Apache-2.0
"""Two ranks on two kernels: bytes move over RDMA between them, and the rank of a node that freezes or dies is named."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest
from machine import BOOT_SECONDS, Job, Machine, MakeMachine

pytest_plugins = ["machine_fixtures"]

NAMES = ("node-a", "node-b")
#: Seconds of a lease that a machine without KVM on a busy host does not miss.
LEASE = 40
#: The seconds beyond the lease in which the surviving rank has to end. On a quiet host it takes less than 10.
BEYOND = 600
#: Seconds that a run may take: 20 on a quiet host, ten minutes on one whose load is twenty.
RUN_SECONDS = 1500.0
SUITE = "suites/bandwidth/test_bandwidth.py --nixl-blocks=64KiB --nixl-op=WRITE"
MOVING = "tests/cluster/moving.py"


def cable(number: int, port: int) -> list[str]:
    """Return QEMU's arguments for the network card of one of two machines that a cable connects."""
    end = ("listen", "connect")[number]
    card = f"virtio-net-pci,netdev=cable,id=card,mac=52:54:00:00:00:0{number + 1},romfile="
    return ["-netdev", f"socket,id=cable,{end}=127.0.0.1:{port}", "-device", card]


def is_listening(port: int) -> bool:
    """Return whether a process listens on a port, without connecting to it."""
    return re.search(rf":{port:04X} 00000000:0000 0A", Path("/proc/net/tcp").read_text()) is not None


@pytest.fixture(scope="module")
def nodes(make_machine: MakeMachine) -> tuple[Machine, Machine]:
    """Two machines that a cable connects, each with rxe0 over its end of the cable."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first = make_machine(NAMES[0], arguments=cable(0, port))
    first.wait_until(lambda: is_listening(port), "its end of the cable", BOOT_SECONDS)
    second = make_machine(NAMES[1], arguments=cable(1, port))
    for number, machine in enumerate((first, second), 1):
        machine.booted().check(f"install_rdma && add_rxe rxe0 10.98.0.{number} eth0 && one_libibverbs")
    return first, second


def start(nodes: tuple[Machine, Machine], what: str) -> tuple[Job, Job]:
    """Start a run of two ranks, one on each machine; rank 0 serves the etcd."""
    options = f"--nixl-ranks=2 --nixl-etcd-listen=0.0.0.0:23790 --nixl-profile=soft-roce --nixl-lease={LEASE}s"
    jobs = [
        machine.start(
            f'cd "$PROJECT" && exec "$PYTHON" -m pytest {what} {options} --nixl-timeout=300s '
            f"--nixl-join-timeout=300s --nixl-rank={rank}",
            MASTER_ADDR="10.98.0.1", NIXL_GROUP_TOKEN="of this group", UCX_TLS="rc", UCX_NET_DEVICES="rxe0:1",
            MOVING="/out/moving",
        )
        for rank, machine in enumerate(nodes)
    ]  # fmt: skip
    return jobs[0], jobs[1]


def packets(machine: Machine) -> int:
    """Return the packets that a machine's device has sent and received."""
    place = "/sys/class/infiniband/rxe0/ports/1/hw_counters"
    return sum(int(line) for line in machine.check(f"cat {place}/sent_pkts {place}/rcvd_pkts").split())


def begin_to_move(nodes: tuple[Machine, Machine]) -> tuple[Job, Job]:
    """Start a run that moves bytes until the file ``enough`` is there; return when it does."""
    nodes[0].check("rm -rf /out/moving && mkdir /out/moving")
    jobs = start(nodes, MOVING)
    begun = nodes[0].out / "moving" / "begun"
    nodes[0].wait_until(lambda: begun.exists() or jobs[0].ended, "the first transfer", RUN_SECONDS, jobs[0])
    assert begun.exists(), jobs[0].output
    return jobs


def test_bytes_move_over_rdma_between_two_kernels(nodes: tuple[Machine, Machine]) -> None:
    before = [packets(machine) for machine in nodes]
    boot_ids = {machine.check("cat /proc/sys/kernel/random/boot_id") for machine in nodes}
    assert len(boot_ids) == 2
    done = [job.wait(RUN_SECONDS) for job in start(nodes, SUITE)]
    assert [one.code for one in done] == [0, 0], done[0].output
    assert "rc_verbs/rxe0:1" in done[0].output
    assert "rank 1 on node-b" in done[0].output or "node-b" in done[1].output
    # Each row moves megabytes in packets of 1 KiB.
    assert all(packets(machine) - count > 1000 for machine, count in zip(nodes, before, strict=True))


def test_frozen_node_is_named(nodes: tuple[Machine, Machine]) -> None:
    driver, peer = begin_to_move(nodes)
    nodes[1].qmp("stop")
    frozen = time.monotonic()
    try:
        done = driver.wait(LEASE + BEYOND)
    finally:
        nodes[1].qmp("cont")
    print(f"the frozen node was named {time.monotonic() - frozen:.1f} s after it froze; the lease is {LEASE} s")
    assert done.code != 0
    assert re.search(r"rank 1 on node-b \(pid \d+\) of group .* is gone", done.output), done.output
    # It finds out when it goes on.
    assert peer.wait(LEASE + BEYOND).code != 0


def test_node_that_loses_power_is_named(nodes: tuple[Machine, Machine]) -> None:
    driver, _ = begin_to_move(nodes)
    nodes[1].power_off()
    lost = time.monotonic()
    done = driver.wait(LEASE + BEYOND)
    print(f"the lost node was named {time.monotonic() - lost:.1f} s after it lost power; the lease is {LEASE} s")
    assert done.code != 0
    assert re.search(r"rank 1 on node-b \(pid \d+\) of group .* is gone", done.output), done.output
    # Nothing of the run is left on the survivor.
    assert nodes[0].run("pgrep -f '[p]ytest_nixl|[n]ixl-etcd-listen'").code == 1
