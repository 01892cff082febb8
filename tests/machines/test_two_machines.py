# SPDX-License-Identifier: Apache-2.0
"""Two ranks on two kernels: bytes move over RDMA between them, and each rank names a node or a cable that fails."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from machine import BOOT_SECONDS, Done, Job, Machine, MakeMachine

pytest_plugins = ["machine_fixtures"]

Nodes = tuple[Machine, Machine]

NAMES = ("node-a", "node-b")
#: Two cables connect the nodes: each has a network. etcd is reached over the first one.
NETWORKS = ("10.98.0", "10.97.0")
#: Seconds of a lease that a machine without KVM on a busy host does not miss.
LEASE = 40
#: The seconds beyond the lease in which the surviving rank has to end. On a quiet host it takes less than 10.
BEYOND = 600
#: Seconds that a run may take: 20 on a quiet host, ten minutes on one whose load is twenty.
RUN_SECONDS = 1500.0
SUITE = "suites/bandwidth/test_bandwidth.py --nixl-blocks=64KiB --nixl-op=WRITE"
MOVING = "tests/cluster/moving.py"

GONE = r"rank 1 on node-b \(pid \d+\) of group .* is gone: its process ended, or its lease expired"
#: What a node says that was frozen, or whose cable is cut.
LOST = (
    "INTERRUPTED: rank 0 on node-a is gone, this rank is cut off from the etcd that rank 0 serves, or this host was "
    "suspended: this member of group 'default' (rank 1, node-b, pid "
)


def cables(number: int, ports: list[int]) -> list[str]:
    """Return QEMU's arguments for the network cards ``card0`` and ``card1`` of one of two machines."""
    end, arguments = ("listen", "connect")[number], []
    for machine, port in enumerate(ports):
        card = (
            f"virtio-net-pci,netdev=cable{machine},id=card{machine},mac=52:54:00:00:0{machine}:0{number + 1},romfile="
        )
        arguments += ["-netdev", f"socket,id=cable{machine},{end}=127.0.0.1:{port}", "-device", card]
    return arguments


def is_listening(port: int) -> bool:
    """Return whether a process listens on a port, without connecting to it."""
    return re.search(rf":{port:04X} 00000000:0000 0A", Path("/proc/net/tcp").read_text()) is not None


def add_devices(machine: Machine, number: int) -> None:
    """Install the RDMA libraries in a machine that has booted, and add rxe0 and rxe1 over its ends of the cables."""
    added = [f"add_rxe rxe{device} {network}.{number + 1} eth{device}" for device, network in enumerate(NETWORKS)]
    machine.check(" && ".join(("install_rdma", *added, "one_libibverbs")))


@pytest.fixture(scope="module")
def nodes(make_machine: MakeMachine) -> Nodes:
    """Two machines that two cables connect, each with rxe0 and rxe1 over its ends of the cables."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in NETWORKS]
        for socket_of_node in sockets:
            socket_of_node.bind(("127.0.0.1", 0))
        ports = [socket_of_node.getsockname()[1] for socket_of_node in sockets]
    first = make_machine(NAMES[0], arguments=cables(0, ports))
    first.wait_until(lambda: all(map(is_listening, ports)), "its ends of the cables", BOOT_SECONDS)
    second = make_machine(NAMES[1], arguments=cables(1, ports))
    for number, machine in enumerate((first, second)):
        add_devices(machine.booted(), number)
    return first, second


def start(nodes: Nodes, tests: str, device: int = 0, transport: str = "rc") -> tuple[Job, Job]:
    """Start a run of two ranks, one on each machine, over the given cable; rank 0 serves the etcd."""
    options = f"--nixl-ranks=2 --nixl-etcd-listen=0.0.0.0:23790 --nixl-profile=soft-roce --nixl-lease={LEASE}s"
    jobs = [
        machine.start(
            f'cd "$PROJECT" && exec "$PYTHON" -m pytest {tests} {options} --nixl-timeout=300s '
            f"--nixl-join-timeout=300s --nixl-rank={rank}",
            MASTER_ADDR=f"{NETWORKS[0]}.1", NIXL_GROUP_TOKEN="of this group", UCX_TLS=transport,
            UCX_NET_DEVICES=f"rxe{device}:1", MOVING="/out/moving",
        )
        for rank, machine in enumerate(nodes)
    ]  # fmt: skip
    return jobs[0], jobs[1]


def run_suite(nodes: Nodes, device: int = 0, transport: str = "rc", suite: str = SUITE) -> tuple[Done, Done]:
    """Run one row on both nodes, over the given cable, and print the last line of each rank."""
    first, other = (job.wait(RUN_SECONDS) for job in start(nodes, suite, device, transport))
    for done in (first, other):
        last_words(done)
    return first, other


class Moving:
    """A run that moves bytes from the first node to the second until the file ``enough`` is there."""

    def __init__(self, nodes: Nodes, device: int = 0) -> None:
        nodes[0].check("rm -rf /out/moving && mkdir /out/moving")
        self._node = nodes[0]
        self.driver, self.peer = start(nodes, MOVING, device)
        self._folder = nodes[0].out / "moving"
        self.wait_for_a_transfer("the first transfer")

    def wait_for_a_transfer(self, awaited: str) -> float:
        """Wait for a transfer that began after this call, and return the seconds until its end.

        :param awaited: what is waited for, for the message.
        """
        start = time.monotonic()
        for _ in range(2):  # the first may have begun before
            before = self._moved()
            self._node.wait_until(
                lambda before=before: self._moved() != before or self.driver.ended, awaited, RUN_SECONDS, self.driver
            )
            assert self._moved() != before, self.driver.output
        return time.monotonic() - start

    def _moved(self) -> int:
        """Return when the last transfer ended, in nanoseconds of some clock; 0: none has ended."""
        begun = self._folder / "begun"
        return begun.stat().st_mtime_ns if begun.exists() else 0

    def wait(self) -> tuple[Done, Done]:
        """Wait until both ranks have ended."""
        return self.driver.wait(LEASE + BEYOND), self.peer.wait(LEASE + BEYOND)

    def end(self) -> tuple[Done, Done]:
        """Let the run end, and wait until both ranks have ended."""
        (self._folder / "enough").touch()
        return self.wait()


@contextmanager
def cut(machine: Machine, card: int) -> Iterator[None]:
    """Pull a cable out of a machine's card, and put it in again."""
    machine.qmp("set_link", name=f"card{card}", up=False)
    try:
        yield
    finally:
        machine.qmp("set_link", name=f"card{card}", up=True)


@contextmanager
def frozen(machine: Machine) -> Iterator[None]:
    """Stop a machine's processors, and let them go on."""
    machine.qmp("stop")
    try:
        yield
    finally:
        machine.qmp("cont")


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
        remaining = machine.run("pgrep -af '[p]ytest_nixl|[n]ixl-etcd-listen|[e]tcd-distro'")
        assert remaining.code == 1, remaining.output
        assert machine.check("ls -A /dev/shm") == ""


def test_bytes_move_over_rdma_between_two_kernels(nodes: Nodes) -> None:
    before = [packets(machine) for machine in nodes]
    boot_ids = {machine.check("cat /proc/sys/kernel/random/boot_id") for machine in nodes}
    assert len(boot_ids) == 2
    done = run_suite(nodes)
    assert [rank.code for rank in done] == [0, 0], done[0].output
    assert "rc_verbs/rxe0:1" in done[0].output
    assert "packets were lost" not in done[0].output
    assert "rank 1 on node-b" in done[0].output or "node-b" in done[1].output
    # Each row moves megabytes in packets of 1 KiB.
    assert all(packets(machine) - count > 1000 for machine, count in zip(nodes, before, strict=True))
    nothing_is_left(*nodes)


@pytest.mark.soak
def test_bytes_move_over_datagrams(nodes: Nodes) -> None:
    done = run_suite(nodes, transport="ud")
    assert [rank.code for rank in done] == [0, 0], done[0].output
    assert "ud_verbs/rxe0:1" in done[0].output
    assert "packets were lost" not in done[0].output


def test_short_faults_end_no_run(nodes: Nodes) -> None:
    run = Moving(nodes)
    faults: list[tuple[str, Any, float]] = [
        ("was frozen for 3 s", frozen(nodes[1]), 3),
        ("was cut off for 3 s", cut(nodes[1], 0), 3),
        ("was frozen for 10 s", frozen(nodes[1]), 10),
    ]
    for label, fault, seconds in faults:
        with fault:
            time.sleep(seconds)
        took = run.wait_for_a_transfer(f"a transfer after node-b {label}")
        print(f"node-b {label}: transfers go on {took:.1f} s later")
    done = run.end()
    for rank in done:
        last_words(rank)
    assert [rank.code for rank in done] == [0, 0], done[0].output
    nothing_is_left(*nodes)


def test_frozen_node_is_named(nodes: Nodes) -> None:
    run = Moving(nodes)
    with frozen(nodes[1]):
        began = time.monotonic()
        done = run.driver.wait(LEASE + BEYOND)
        print(f"the frozen node was named {time.monotonic() - began:.1f} s after it froze; the lease is {LEASE} s")
        assert re.search(GONE, last_words(done)), done.output
        assert done.code == 1
    # It finds out when it goes on.
    late = run.peer.wait(LEASE + BEYOND)
    assert LOST in last_words(late), late.output
    assert late.code == 1
    nothing_is_left(*nodes)


@pytest.mark.soak
def test_cut_cable_is_named_by_both_ranks(nodes: Nodes) -> None:
    run = Moving(nodes)
    with cut(nodes[1], 0):
        began = time.monotonic()
        done = run.wait()
        print(f"both ranks ended {time.monotonic() - began:.1f} s after the cut; the lease is {LEASE} s")
    assert re.search(GONE, last_words(done[0])), done[0].output
    assert LOST in last_words(done[1]), done[1].output
    assert [rank.code for rank in done] == [1, 1]
    nothing_is_left(*nodes)


@pytest.mark.soak
def test_clocks_that_differ_by_an_hour_do_no_harm(nodes: Nodes) -> None:
    nodes[1].check("date -s '+1 hour'")
    try:
        apart = [int(machine.check("date +%s")) for machine in nodes]
        assert apart[1] - apart[0] > 3000
        run = Moving(nodes)
        # Both clocks jump during a run.
        nodes[0].check("date -s '+2 hours'")
        print(f"node-a's clock: transfers go on {run.wait_for_a_transfer('one after a jump'):.1f} s after its jump")
        nodes[1].check("date -s '-2 hours'")
        print(f"node-b's clock: transfers go on {run.wait_for_a_transfer('one after a jump'):.1f} s after its jump")
        done = run.end()
    finally:
        for machine in nodes:
            machine.check(f"date -s '@{time.time():.0f}'")
    for rank in done:
        last_words(rank)
    assert [rank.code for rank in done] == [0, 0], done[0].output
    assert "NIXL verdict: PASS" in done[0].output


@pytest.mark.soak
@pytest.mark.parametrize(
    "suite",
    [
        pytest.param(SUITE, id="bandwidth"),
        pytest.param("suites/kv_cache/test_requests.py --nixl-op=WRITE --nixl-kv-tokens=16", id="kv"),
        pytest.param("suites/pattern --nixl-op=WRITE --nixl-blocks=64KiB --nixl-pattern=alltoall", id="pattern"),
    ],
)
def test_row_that_loses_1_percent_of_its_packets_passes_and_names_the_device(nodes: Nodes, suite: str) -> None:
    for machine in nodes:
        machine.check("tc qdisc add dev eth1 root netem loss 1%")
    try:
        done = run_suite(nodes, device=1, suite=suite)
        print(done[0].output)
    finally:
        for machine in nodes:
            print(machine.check("tc -s qdisc show dev eth1; tc qdisc del dev eth1 root"))
    assert [rank.code for rank in done] == [0, 0], done[0].output
    output = " ".join(done[0].output.split())
    assert ", but packets were lost: " in output, output
    # The initiator is told of a gap, and the target sees it. In a pattern each node is both.
    for node, counter in (("node-a", "rcvd_seq_err"), ("node-b", "out_of_seq_request")):
        counted = r"\w+" if "pattern" in suite else counter
        assert re.search(rf"rxe1 of {node} counted [\d,]+ {counted} in [\d,]+ packets", output), output
    assert "Check the cables" in output


@pytest.mark.soak
@pytest.mark.parametrize("loss", [1, 20])
def test_lost_packets_are_sent_again(nodes: Nodes, loss: int) -> None:
    run = Moving(nodes, device=1)
    for machine in nodes:
        machine.check(f"tc qdisc add dev eth1 root netem loss {loss}%")
    try:
        began = time.monotonic()
        while "dropped 0" in (lost := nodes[0].check("tc -s qdisc show dev eth1")):
            run.wait_for_a_transfer("a transfer with loss")
        run.wait_for_a_transfer("a transfer after a loss")
        print(f"{loss} % lost: transfers for {time.monotonic() - began:.1f} s; {lost.splitlines()[1]}")
    finally:
        for machine in nodes:
            machine.check("tc qdisc del dev eth1 root")
    done = run.end()
    for rank in done:
        last_words(rank)
    assert [rank.code for rank in done] == [0, 0], done[0].output


@pytest.mark.soak
def test_mtu_that_differs(nodes: Nodes) -> None:
    nodes[1].check("ip link set eth1 mtu 4200")
    try:
        assert "active_mtu: 4096" in " ".join(
            nodes[1].check("env -u LD_LIBRARY_PATH ibv_devinfo -d rxe1 | grep active_mtu").split()
        )
        done = run_suite(nodes, device=1)
    finally:
        nodes[1].check("ip link set eth1 mtu 1500")
    assert [rank.code for rank in done] == [0, 0], done[0].output
    assert "rc_verbs/rxe1:1" in done[0].output


@pytest.mark.soak
def test_cut_cable_of_the_device_alone_is_no_fault_of_the_own_host(nodes: Nodes) -> None:
    run = Moving(nodes, device=1)
    with cut(nodes[1], 1):
        began = time.monotonic()
        done = run.wait()
        print(f"both ranks ended {time.monotonic() - began:.1f} s after the cut")
    for rank in done:
        last_words(rank)
        assert rank.code == 1
        assert "NIXL reported nixlRemoteDisconnectError (NIXL_ERR_REMOTE_DISCONNECT) in rank 0" in rank.output
    assert "remedy: check that the other agent's process runs, and the port and the cable of its host" in done[0].output
    nothing_is_left(*nodes)


@pytest.mark.soak
def test_interface_that_goes_down_is_named(nodes: Nodes) -> None:
    run = Moving(nodes, device=1)
    nodes[1].check("ip link set eth1 down")
    try:
        began = time.monotonic()
        done = run.wait()
        print(f"both ranks ended {time.monotonic() - began:.1f} s after the interface went down")
    finally:
        nodes[1].check("ip link set eth1 up")
    for rank in done:
        last_words(rank)
        assert rank.code == 1
        # UCX aborts the process that uses the device.
        assert re.search(r"ERROR:? bandwidth: rank 1 \(target worker, pid \d+\) was ended by SIGABRT", rank.output)
        assert "during 'serve': rxe1 went down or was removed, and UCX aborts then" in rank.output
    assert "remedy: check the cable, the switch and the subnet manager (`ibstat`, `rdma link`)" in done[0].output
    nothing_is_left(*nodes)


@pytest.mark.parametrize("fault", ["power", pytest.param("reset", marks=pytest.mark.soak)])
def test_node_that_loses_power_or_is_reset_is_named_and_takes_part_again(nodes: Nodes, fault: str) -> None:
    run = Moving(nodes)
    before = nodes[1].check("cat /proc/sys/kernel/random/boot_id")
    if fault == "reset":
        nodes[1].reset()
    else:
        nodes[1].power_off()
    lost = time.monotonic()
    done = run.driver.wait(LEASE + BEYOND)
    print(f"the lost node was named {time.monotonic() - lost:.1f} s after the fault; the lease is {LEASE} s")
    assert re.search(GONE, last_words(done)), done.output
    assert done.code == 1
    nothing_is_left(nodes[0])
    if fault == "power":
        nodes[1].power_on()
    add_devices(nodes[1].booted(), 1)
    assert nodes[1].check("cat /proc/sys/kernel/random/boot_id") != before
    assert [rank.code for rank in run_suite(nodes)] == [0, 0]
