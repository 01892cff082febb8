# SPDX-License-Identifier: Apache-2.0
"""Facts of GPUs and network adapters on the PCI bus."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os.path import commonpath

from pytest_nixl.host.recorded_tree import FactsRoot

_BUS = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

NVIDIA, AMAZON, MELLANOX = "0x10de", "0x1d0f", "0x15b3"
#: PCI classes of display and 3D controllers.
GPU_CLASSES = ("0x0300", "0x0302")
#: PCI device ids of Amazon's EFA adapters.
EFA_DEVICES = frozenset({"0xefa0", "0xefa1", "0xefa2", "0xefa3", "0xefa4"})


@dataclass(frozen=True)
class PciDevice:
    """A GPU or a network adapter on the bus.

    :param address: its PCI address, such as ``0000:53:00.0``.
    :param kind: ``gpu``, ``efa`` or ``mlx``.
    :param path: its path in sysfs, which contains every PCI bridge above it.
    :param driver: the name of its driver; empty if it has none.
    :param numa: its NUMA node; -1 if the firmware does not say.
    """

    address: str
    kind: str
    device: str
    path: str
    driver: str
    numa: int
    source: str


def read_pci(root: FactsRoot) -> tuple[PciDevice, ...]:
    """Return the GPUs and the network adapters with RDMA."""
    devices = []
    for address in root.entries(_BUS):
        place = f"{_BUS}/{address}"
        path = root.resolve(place)
        if path is None:
            continue
        vendor = root.read(f"{path}/vendor")
        if vendor not in (NVIDIA, AMAZON, MELLANOX):
            continue
        device, family = root.read(f"{path}/device") or "", root.read(f"{path}/class") or ""
        kind = _kind(vendor, device, family)
        if kind:
            driver = (root.resolve(f"{path}/driver") or "").rpartition("/")[2]
            devices.append(PciDevice(address, kind, device, path, driver, numa_node(root, path), place))
    return tuple(devices)


def _kind(vendor: str, device: str, family: str) -> str:
    if vendor == NVIDIA:
        return "gpu" if family[:6] in GPU_CLASSES else ""
    if vendor == AMAZON:
        return "efa" if device in EFA_DEVICES else ""
    return "mlx" if family[:4] == "0x02" else ""


def numa_node(root: FactsRoot, path: str) -> int:
    """Return the NUMA node of a device; -1 if the firmware does not say, and the host has more than one.

    :param path: the device's path in sysfs; empty if it has none.
    """
    number = root.number(f"{path}/numa_node") if path else None
    if number is not None and number >= 0:
        return number
    nodes = [name[4:] for name in root.entries("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    return int((nodes or ["0"])[0]) if len(nodes) < 2 else -1


def address_of(path: str | None) -> str:
    """Return the PCI address of the last device in a path of sysfs; empty if there is none."""
    addresses = _ADDRESS.findall(path or "")
    return addresses[-1] if addresses else ""


def bridges_shared(first: str, second: str) -> int:
    """Count the PCI bridges that two devices share above them, from the PCI root down.

    :param first: the path of one device in sysfs.
    :param second: the path of the other device in sysfs.
    """
    return len(_ADDRESS.findall(commonpath([first, second])))
