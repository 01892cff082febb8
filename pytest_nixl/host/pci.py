# SPDX-License-Identifier: Apache-2.0
"""Devices on the PCI bus: which there are, and how near one is to another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os.path import commonpath

from pytest_nixl.host.recorded_tree import FactsRoot

_BUS = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

NVIDIA, AMAZON, MELLANOX = "0x10de", "0x1d0f", "0x15b3"
#: Display and 3D controllers, and Amazon's adapters that have EFA.
GPU_CLASSES = ("0x0300", "0x0302")
EFA_DEVICES = frozenset({"0xefa0", "0xefa1", "0xefa2", "0xefa3", "0xefa4"})


@dataclass(frozen=True)
class PciDevice:
    """A GPU or a network adapter on the bus.

    :param kind: ``gpu``, ``efa`` or ``mlx``.
    :param path: where it hangs: every bridge above it, as sysfs has it.
    :param driver: empty: none is bound to it.
    :param numa: -1: the firmware does not say.
    """

    address: str
    kind: str
    device: str
    path: str
    driver: str
    numa: int
    source: str


def read_pci(root: FactsRoot) -> tuple[PciDevice, ...]:
    """Return the GPUs and the network adapters that do RDMA."""
    found = []
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
            numa = root.number(f"{path}/numa_node")
            found.append(PciDevice(address, kind, device, path, driver, -1 if numa is None else numa, place))
    return tuple(found)


def _kind(vendor: str, device: str, family: str) -> str:
    if vendor == NVIDIA:
        return "gpu" if family[:6] in GPU_CLASSES else ""
    if vendor == AMAZON:
        return "efa" if device in EFA_DEVICES else ""
    return "mlx" if family[:4] == "0x02" else ""


def address_of(path: str | None) -> str:
    """Return the PCI address of the last device on a path of sysfs; empty where there is none."""
    found = _ADDRESS.findall(path or "")
    return found[-1] if found else ""


def bridges_shared(one: str, other: str) -> int:
    """Return how many bridges, from the root of the bus down, two devices have above them in common."""
    return len(_ADDRESS.findall(commonpath([one, other])))
