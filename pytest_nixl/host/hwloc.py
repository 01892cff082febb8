# SPDX-License-Identifier: Apache-2.0
"""Read the positions of another host's GPUs and network cards from hwloc's XML (``lstopo --of xml``).

The XML contains no rates, states or drivers. This reads version 2 of the format; see hwloc's ``hwloc2.dtd``.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.host.facts import Facts, gather
from pytest_nixl.host.gpu import GpuFacts
from pytest_nixl.host.gpu_nic_affinity import Topology
from pytest_nixl.host.pci import AMAZON, EFA_DEVICES, GPU_CLASSES, NVIDIA
from pytest_nixl.host.rdma import RdmaDevice
from pytest_nixl.host.recorded_tree import FactsRoot

#: The most bytes of such a file, and how deep its elements may be nested. A host with 256 GPUs has 2 MiB and 30 levels.
_LARGEST, _DEEPEST = 64 << 20, 256
HWLOC_FORM = "the output of `lstopo --of xml` of hwloc 2"
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
    model: str
    path: str
    numa: int
    fabric: str
    others: tuple[str, ...]


def read_hwloc(path: Path) -> tuple[HwlocDevice, ...]:
    """Return every PCI device in a file.

    :raises ValueError: the file is not hwloc's XML, or contains no PCI device.
    """
    text = read_regular(path, _LARGEST, HWLOC_FORM)
    try:
        root = _root(text)
        if root.tag != "topology":
            raise ValueError(f"its root is <{root.tag}>")
        found = tuple(_below(root, "", -1))
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a topology of hwloc ({error}): expected {HWLOC_FORM}") from None
    if not found:
        raise ValueError(f"{path} contains no PCI device: expected {HWLOC_FORM} with I/O devices (--whole-io)")
    return found


def _root(text: bytes) -> ElementTree.Element:
    """Parse XML. :raises ValueError: if it is nested too deeply, which is noticed before the rest is read."""
    depth = 0
    root: ElementTree.Element | None = None
    for event, element in ElementTree.iterparse(BytesIO(text), events=("start", "end")):
        root = element if root is None else root
        depth += 1 if event == "start" else -1
        if depth > _DEEPEST:
            raise ValueError(f"its elements are nested more than {_DEEPEST} deep")
    if root is None:
        raise ValueError("it is empty")
    return root


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
    if match is None:
        raise ValueError(f"pci_type={item.attrib['pci_type']!r}")
    address = item.attrib["pci_busid"]
    infos = {info.attrib["name"]: info.attrib["value"] for info in item if info.tag == "info"}
    names = [(each.attrib["osdev_type"], each.attrib["name"]) for each in item.iter("object")
             if each.attrib.get("type") == "OSDev"]  # fmt: skip
    fabric = next((name for kind, name in names if kind == _FABRIC), "")
    return HwlocDevice(
        address=address,
        family=match[1],
        vendor=match[2],
        device=match[3],
        model=infos.get("PCIDevice", ""),
        path=f"{place}/{address}",
        numa=numa,
        fabric=fabric,
        others=tuple(name for _, name in names if name != fabric),
    )


def hwloc_facts(path: Path) -> Facts:
    """Return the facts in hwloc's XML: the GPUs and RDMA devices of a host, and their positions on the PCI bus.

    :raises ValueError: the file is not hwloc's XML, or contains no PCI device.
    """
    devices = read_hwloc(path)
    with TemporaryDirectory() as empty:
        nothing = gather(FactsRoot(empty), backends=(), etcd="", environ={})
    gpus = [each for each in devices if f"0x{each.vendor}" == NVIDIA and f"0x{each.family}" in GPU_CLASSES]
    found = tuple(
        GpuFacts(
            index, each.model, each.address, each.path, None, None, None, None, None, None, f"{path}", each.numa, ""
        )
        for index, each in enumerate(sorted(gpus, key=lambda each: each.address))
    )
    rdma = tuple(_rdma(each, f"{path}") for each in devices if each.fabric)
    gpu = replace(nothing.gpu, gpus=found)
    return replace(nothing, gpu=gpu, rdma=rdma, near=Topology.of(gpu, rdma).nearest())


def _rdma(device: HwlocDevice, source: str) -> RdmaDevice:
    efa = f"0x{device.vendor}" == AMAZON and f"0x{device.device}" in EFA_DEVICES
    kind = "efa" if efa else re.sub(r"[\d_]+$", "", device.fabric)
    return RdmaDevice(device.fabric, kind, (), "", "", device.numa, device.address, device.path, "", source)
