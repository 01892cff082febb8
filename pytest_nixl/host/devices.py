# SPDX-License-Identifier: Apache-2.0
"""The devices of a host that checks of single devices need, and the network adapters nearest to each GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.plain import from_plain, to_plain
from pytest_nixl.host.gpu import GpuFacts, Gpus, read_gpus
from pytest_nixl.host.pci import bridges_shared
from pytest_nixl.host.rdma import RdmaDevice, network_cards, read_rdma
from pytest_nixl.host.recorded_tree import FactsRoot

#: The distances between a GPU and a network card, nearest first, and their descriptions.
SWITCH, ROOT, NODE, UNPLACED, FAR = "switch", "root", "node", "unplaced", "far"
DESCRIPTIONS = {
    SWITCH: "under the same PCI switch",
    ROOT: "on the same root of the bus",
    NODE: "on another root of the bus, at the same processor",
    UNPLACED: "on another root of the bus; the firmware does not say at which processor",
    FAR: "across the processors",
}
#: Of these distances no card is near.
NOT_NEAR = (UNPLACED, FAR)

#: The variable that names the network cards that UCX may use, each as ``name:port``.
UCX_CARDS = "UCX_NET_DEVICES"


@dataclass(frozen=True)
class Placed:
    """A PCI device and its position.

    :param name: the index of a GPU, or the name of a network card.
    :param pci: its PCI address.
    :param path: its path in sysfs, which contains every PCI bridge above it.
    :param numa: its NUMA node; -1 if the firmware does not say.
    """

    name: str
    pci: str
    path: str
    numa: int

    @property
    def root(self) -> str:
        """Its PCI root, such as ``pci0000:44``; empty if unknown."""
        return self.path.split("/")[3] if self.path.count("/") > 3 else ""

    @property
    def node(self) -> str:
        """Its NUMA node as text."""
        return "unknown NUMA node" if self.numa < 0 else f"NUMA node {self.numa}"


@dataclass(frozen=True)
class GpuNics:
    """A GPU and its nearest network cards.

    :param gpu: the index of the GPU.
    :param devices: the names of the nearest cards.
    :param how: what GPU and cards share: ``switch`` a PCI bridge, ``root`` the PCI root, ``node`` the NUMA node,
        ``far`` nothing, and ``unplaced`` nothing that is known (``devices`` are then all such cards of the host).
    :param own: the nearest cards that this GPU uses when all GPUs transfer at the same time, so that as few GPUs as
        possible share a card; empty if ``how`` is one of :data:`NOT_NEAR`.
    """

    gpu: int
    devices: tuple[str, ...]
    how: str
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topology:
    """The positions of a host's GPUs and network cards."""

    gpus: tuple[Placed, ...]
    nics: tuple[Placed, ...]

    @classmethod
    def of(cls, gpus: Gpus, rdma: Sequence[RdmaDevice]) -> Topology:
        """Return the topology of the given devices.

        Adapters that do not move data between hosts are left out, and so are devices without a path in sysfs.
        """
        return cls(
            tuple(Placed(str(gpu.index), gpu.pci, gpu.path, gpu.numa) for gpu in gpus.gpus if gpu.path),
            tuple(Placed(nic.name, nic.pci, nic.path, nic.numa) for nic in network_cards(rdma) if nic.path),
        )

    def nearest(self) -> tuple[GpuNics, ...]:
        """Return the nearest network cards of each GPU."""
        nearest = [nearest_to(gpu, self.nics) for gpu in self.gpus]
        near = {gpu.name: tuple(nic.name for nic in nics) for gpu, (nics, _) in zip(self.gpus, nearest, strict=True)}
        shares = share(
            {
                gpu.name: () if how in NOT_NEAR else near[gpu.name]
                for gpu, (_, how) in zip(self.gpus, nearest, strict=True)
            }
        )
        return tuple(
            GpuNics(int(gpu.name), near[gpu.name], how, shares[gpu.name])
            for gpu, (_, how) in zip(self.gpus, nearest, strict=True)
        )

    def idle(self) -> tuple[Placed, ...]:
        """Return the network cards that are not among the nearest of any GPU."""
        used = {name for near in self.nearest() if near.how not in NOT_NEAR for name in near.devices}
        return tuple(nic for nic in self.nics if nic.name not in used)


def distance(first: Placed, second: Placed) -> str:
    """Return the distance of two devices.

    A shared bridge is that of a switch or of a root port, because the root itself is not a bridge.
    """
    if bridges_shared(first.path, second.path):
        return SWITCH
    if first.root and first.root == second.root:
        return ROOT
    if -1 in (first.numa, second.numa):
        return UNPLACED
    return NODE if first.numa == second.numa else FAR


def nearest_to(gpu: Placed, nics: Sequence[Placed]) -> tuple[tuple[Placed, ...], str]:
    """Return the cards nearest to a GPU and their distance; of cards with shared bridges, those that share the most."""
    order = (SWITCH, ROOT, NODE, UNPLACED, FAR)
    how = min((distance(gpu, nic) for nic in nics), key=order.index, default=FAR)
    nearest = [nic for nic in nics if distance(gpu, nic) == how]
    if how == SWITCH:
        most = max(bridges_shared(gpu.path, nic.path) for nic in nearest)
        nearest = [nic for nic in nearest if bridges_shared(gpu.path, nic.path) == most]
    return tuple(nearest), how


def share(candidates: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Distribute network cards over GPUs so that no card is idle, and GPUs share a card only if there are too few.

    The GPUs take turns, those with the fewest candidates first. Each takes the candidate that the fewest GPUs have;
    further rounds distribute the cards that no GPU has.

    :param candidates: the names of the cards that each GPU may use, by GPU.
    :return: the names of the cards that each GPU shall use, by GPU.
    """
    taken: dict[str, list[str]] = {gpu: [] for gpu in candidates}
    load = {nic: 0 for nics in candidates.values() for nic in nics}
    while True:
        moved = False
        for gpu, nics in sorted(candidates.items(), key=lambda item: len(item[1])):
            free = [nic for nic in nics if not load[nic]]
            usable = free or ([] if taken[gpu] else list(nics))
            if usable:
                nic = min(usable, key=load.__getitem__)
                taken[gpu].append(nic)
                load[nic] += 1
                moved = True
        if not moved:
            break
    return {gpu: tuple(nic for nic in nics if nic in taken[gpu]) for gpu, nics in candidates.items()}


@dataclass(frozen=True)
class HostDevices:
    """The RDMA devices and GPUs of a host.

    :param name: the host's name; empty: not known.
    :param chosen: UCX_NET_DEVICES there; empty if it is not set.
    """

    name: str
    rdma: tuple[RdmaDevice, ...]
    gpus: tuple[GpuFacts, ...]
    chosen: str

    @classmethod
    def here(cls) -> HostDevices:
        """Return those of this host."""
        root = FactsRoot()
        return cls(socket.gethostname(), read_rdma(root), read_gpus(root).gpus, os.environ.get(UCX_CARDS, ""))

    def plain(self) -> dict[str, Any]:
        """Return them as JSON values."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def of(cls, plain: dict[str, Any]) -> HostDevices:
        """Restore them from the values of :meth:`plain`. :raises ValueError: the values are none."""
        return from_plain(cls, plain, exact=True)
