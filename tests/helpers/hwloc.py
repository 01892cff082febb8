# SPDX-License-Identifier: Apache-2.0
"""Read the PCI devices of real hosts from hwloc's XML in ``fixtures/topology``, of which ``fake_sysfs`` makes trees."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: ``PCI class [vendor:device] [subsystem] revision``, as in ``0302 [10de:2330] [10de:16c1] a1``.
_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]")
#: hwloc's ``osdev_type`` of an RDMA device.
_FABRIC = "3"


@dataclass(frozen=True)
class HwlocDevice:
    """A PCI device in hwloc's XML.

    :param address: its PCI address, such as ``0000:53:00.0``.
    :param family: its PCI class, such as ``0302``.
    :param vendor: its PCI vendor id, such as ``10de``.
    :param device: its PCI device id, such as ``2330``.
    :param path: the path that sysfs would give it.
    :param numa: its NUMA node; -1 if it has none.
    :param fabric: the name of its RDMA device; empty if it has none.
    :param others: the names of its other devices in the operating system, such as network interfaces.
    """

    address: str
    family: str
    vendor: str
    device: str
    path: str
    numa: int
    fabric: str
    others: tuple[str, ...]


def read_hwloc(path: Path) -> tuple[HwlocDevice, ...]:
    """Return every PCI device in a file."""
    return tuple(_below(ElementTree.parse(path).getroot(), "", -1))


def _below(parent: ElementTree.Element, place: str, numa: int) -> Iterator[HwlocDevice]:
    nodes = [item for item in parent if item.attrib.get("type") == "NUMANode"]
    numa = int(nodes[0].attrib["os_index"]) if nodes else numa
    for item in parent:
        kind = item.attrib.get("type")
        if kind == "PCIDev":
            yield _device(item, place, numa)
        elif kind == "Bridge" and item.attrib["bridge_type"] == "0-1":
            domain, _, buses = item.attrib["bridge_pci"].partition(":")
            yield from _below(item, f"/sys/devices/pci{domain}:{buses[1:3]}", numa)
        elif kind == "Bridge":
            yield from _below(item, f"{place}/{item.attrib['pci_busid']}", numa)
        elif kind is not None:
            yield from _below(item, place, numa)


def _device(item: ElementTree.Element, place: str, numa: int) -> HwlocDevice:
    match = _TYPE.match(item.attrib["pci_type"])
    assert match is not None, item.attrib
    address = item.attrib["pci_busid"]
    names = {node.attrib["name"]: node.attrib["osdev_type"] for node in item.iter("object")
             if node.attrib.get("type") == "OSDev"}  # fmt: skip
    fabric = next((name for name, kind in names.items() if kind == _FABRIC), "")
    remainder = tuple(name for name in names if name != fabric)
    return HwlocDevice(address, match[1], match[2], match[3], f"{place}/{address}", numa, fabric, remainder)
