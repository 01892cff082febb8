# SPDX-License-Identifier: Apache-2.0
"""Two machines that two cables connect, and runs of two ranks on them."""

from __future__ import annotations

import re
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from machine import BOOT_SECONDS, Job, Machine, MakeMachine

NAMES = ("node-a", "node-b")
#: Seconds of a lease that a machine without KVM on a busy host does not miss.
LEASE = 40
#: The seconds beyond the lease in which the surviving rank has to end. On a quiet host it takes less than 10.
BEYOND = 600
#: Seconds that a run may take: 20 on a quiet host, ten minutes on one whose load is twenty.
RUN_SECONDS = 1500.0
#: Each is the network of a cable: etcd is reached over the first one.
NETWORKS = ("10.98.0", "10.97.0")
MOVING = "tests/cluster/moving.py"

Nodes = tuple[Machine, Machine]


def cables(number: int, ports: list[int]) -> list[str]:
    """Return QEMU's arguments for the network cards ``card0`` and ``card1`` of one of two machines."""
    end, arguments = ("listen", "connect")[number], []
    for each, port in enumerate(ports):
        card = f"virtio-net-pci,netdev=cable{each},id=card{each},mac=52:54:00:00:0{each}:0{number + 1},romfile="
        arguments += ["-netdev", f"socket,id=cable{each},{end}=127.0.0.1:{port}", "-device", card]
    return arguments


def is_listening(port: int) -> bool:
    """Return whether a process listens on a port, without connecting to it."""
    return re.search(rf":{port:04X} 00000000:0000 0A", Path("/proc/net/tcp").read_text()) is not None


def add_devices(machine: Machine, number: int) -> None:
    """Install the RDMA libraries in a machine that has booted, and add rxe0 and rxe1 over its ends of the cables."""
    added = [f"add_rxe rxe{each} {network}.{number + 1} eth{each}" for each, network in enumerate(NETWORKS)]
    machine.check(" && ".join(("install_rdma", *added)))


@pytest.fixture(scope="module")
def nodes(make_machine: MakeMachine) -> Nodes:
    """Two machines that two cables connect, each with rxe0 and rxe1 over its ends of the cables."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in NETWORKS]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    first = make_machine(NAMES[0], arguments=cables(0, ports))
    first.wait_until(lambda: all(map(is_listening, ports)), "its ends of the cables", BOOT_SECONDS)
    second = make_machine(NAMES[1], arguments=cables(1, ports))
    for number, machine in enumerate((first, second)):
        add_devices(machine.booted(), number)
        machine.check("one_libibverbs")
    return first, second


def start(nodes: Nodes, what: str, devices: str = "rxe0:1", transports: str = "rc") -> tuple[Job, Job]:
    """Start a run of two ranks, one on each machine; rank 0 serves the etcd."""
    options = f"--nixl-ranks=2 --nixl-etcd-listen=0.0.0.0:23790 --nixl-profile=soft-roce --nixl-lease={LEASE}s"
    jobs = [
        machine.start(
            f'cd "$PROJECT" && exec "$PYTHON" -m pytest {what} {options} --nixl-timeout=300s '
            f"--nixl-join-timeout=300s --nixl-rank={rank}",
            MASTER_ADDR=f"{NETWORKS[0]}.1", NIXL_GROUP_TOKEN="of this group", UCX_TLS=transports,
            UCX_NET_DEVICES=devices, MOVING="/out/moving",
        )
        for rank, machine in enumerate(nodes)
    ]  # fmt: skip
    return jobs[0], jobs[1]


class Moving:
    """A run that moves bytes from the first node to the second until the file ``enough`` is there."""

    def __init__(self, nodes: Nodes) -> None:
        nodes[0].check("rm -rf /out/moving && mkdir /out/moving")
        self._node = nodes[0]
        self.driver, self.peer = start(nodes, MOVING)
        self._folder = nodes[0].out / "moving"
        self.wait_for_a_transfer("the first transfer")

    def wait_for_a_transfer(self, what: str) -> float:
        """Wait for a transfer that began after this call, and return the seconds until its end.

        :param what: what is waited for, for the message.
        """
        asked = time.monotonic()
        for _ in range(2):  # the first may have begun before
            before = self._moved()
            self._node.wait_until(
                lambda before=before: self._moved() != before or self.driver.ended, what, RUN_SECONDS, self.driver
            )
            assert self._moved() != before, self.driver.output
        return time.monotonic() - asked

    def _moved(self) -> int:
        """Return when the last transfer ended, in nanoseconds of some clock; 0: none has ended."""
        begun = self._folder / "begun"
        return begun.stat().st_mtime_ns if begun.exists() else 0

    def end(self) -> list[int]:
        """Let the run end, and return the exit codes of both ranks."""
        (self._folder / "enough").touch()
        return [job.wait(RUN_SECONDS).code for job in (self.driver, self.peer)]
