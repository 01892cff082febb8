# SPDX-License-Identifier: Apache-2.0
"""Which network cards are nearest to each GPU, by the bridges and the NUMA nodes that they hang on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_nixl.host.gpu import Gpus
from pytest_nixl.host.pci import bridges_shared
from pytest_nixl.host.rdma import RdmaDevice, network_cards

#: How near a card is to a GPU, the nearest first, in the words that people read.
SWITCH, ROOT, NODE, FAR = "switch", "root", "node", "far"
WORDS = {
    SWITCH: "under the same PCI switch",
    ROOT: "on the same root of the bus",
    NODE: "on another root of the bus, at the same processor",
    FAR: "across the processors",
}


@dataclass(frozen=True)
class Placed:
    """A device and where it hangs.

    :param path: every bridge above it, as sysfs has it.
    :param numa: its NUMA node; -1: the firmware does not say.
    """

    name: str
    pci: str
    path: str
    numa: int

    @property
    def root(self) -> str:
        """The root of the bus that it hangs on, such as ``pci0000:44``."""
        return self.path.split("/")[3] if self.path.count("/") > 3 else ""

    @property
    def node(self) -> str:
        """Its NUMA node in words."""
        return "no NUMA node told" if self.numa < 0 else f"NUMA node {self.numa}"


@dataclass(frozen=True)
class GpuNics:
    """A GPU and the network cards that are nearest to it.

    :param how: ``switch``: they share a bridge; ``root``: the root of the bus; ``node``: the NUMA node; ``far``: there
        is none so near, and these are all that there are, or none.
    :param own: of the nearest, those that fall to this GPU when all move bytes at once: each card to as few GPUs as
        can be. Of cards that are far none falls to anyone.
    """

    gpu: int
    devices: tuple[str, ...]
    how: str
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topology:
    """The GPUs of a host, by index, and its network cards."""

    gpus: tuple[Placed, ...]
    nics: tuple[Placed, ...]

    @classmethod
    def of(cls, gpus: Gpus, rdma: Sequence[RdmaDevice]) -> Topology:
        """Return that of facts, without adapters that move no data between hosts.

        What has no path in sysfs is left out: nothing can be said of it.
        """
        return cls(
            tuple(Placed(str(gpu.index), gpu.pci, gpu.path, gpu.numa) for gpu in gpus.gpus if gpu.path),
            tuple(Placed(nic.name, nic.pci, nic.path, nic.numa) for nic in network_cards(rdma) if nic.path),
        )

    def nearest(self) -> tuple[GpuNics, ...]:
        """Return the network cards that are nearest to each GPU, and which of them fall to it."""
        found = [nearest_to(gpu, self.nics) for gpu in self.gpus]
        near = {gpu.name: tuple(nic.name for nic in nics) for gpu, (nics, _) in zip(self.gpus, found, strict=True)}
        shares = share({gpu.name: () if how == FAR else near[gpu.name]
                        for gpu, (_, how) in zip(self.gpus, found, strict=True)})  # fmt: skip
        return tuple(
            GpuNics(int(gpu.name), near[gpu.name], how, shares[gpu.name])
            for gpu, (_, how) in zip(self.gpus, found, strict=True)
        )

    def idle(self) -> tuple[Placed, ...]:
        """Return the cards that are the nearest of no GPU."""
        used = {name for near in self.nearest() if near.how != FAR for name in near.devices}
        return tuple(nic for nic in self.nics if nic.name not in used)


def distance(one: Placed, other: Placed) -> str:
    """Return how near two devices are: ``switch``, ``root``, ``node`` or ``far``.

    What hangs on the root itself has no bridge above it: one that is shared is that of a switch or of a root port.
    """
    if bridges_shared(one.path, other.path):
        return SWITCH
    if one.root and one.root == other.root:
        return ROOT
    return NODE if one.numa == other.numa != -1 else FAR


def nearest_to(gpu: Placed, nics: Sequence[Placed]) -> tuple[tuple[Placed, ...], str]:
    """Return the cards nearest to a GPU, and how near they are; under switches, those that share the most of them."""
    order = (SWITCH, ROOT, NODE, FAR)
    how = min((distance(gpu, nic) for nic in nics), key=order.index, default=FAR)
    found = [nic for nic in nics if distance(gpu, nic) == how]
    if how == SWITCH:
        most = max(bridges_shared(gpu.path, nic.path) for nic in found)
        found = [nic for nic in found if bridges_shared(gpu.path, nic.path) == most]
    return tuple(found), how


def share(candidates: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Give each GPU its own of the cards that are candidates for it: no card idle, and none asked twice without need.

    In turn, those with the smallest choice first, each takes the one that fewest have; then, while there are any that
    nobody has, one of those.
    """
    taken: dict[str, list[str]] = {gpu: [] for gpu in candidates}
    load = {nic: 0 for nics in candidates.values() for nic in nics}
    while True:
        moved = False
        for gpu, nics in sorted(candidates.items(), key=lambda item: len(item[1])):
            free = [nic for nic in nics if not load[nic]]
            wanted = free or ([] if taken[gpu] else list(nics))
            if wanted:
                nic = min(wanted, key=lambda each: load[each])
                taken[gpu].append(nic)
                load[nic] += 1
                moved = True
        if not moved:
            break
    return {gpu: tuple(nic for nic in nics if nic in taken[gpu]) for gpu, nics in candidates.items()}
