# SPDX-License-Identifier: Apache-2.0
"""Facts of RDMA devices (InfiniBand, RoCE, EFA): ports, rates, and whether a process can open them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pytest_nixl.host.pci import address_of, numa_node
from pytest_nixl.host.recorded_tree import FactsRoot

_CLASS = "/sys/class/infiniband"
_VERBS = "/sys/class/infiniband_verbs"
#: A text in the vital product data of ConnectX adapters that manage NVLink switches.
_OF_NVLINK = "SW_MNG"
#: A port's table of addresses has up to 1024 places, the first of which are used.
_MOST_GIDS = 64
#: Counters of errors of a port's cable, transceiver and switch port, not of what other hosts or programs do.
_ERRORS = {
    "counters": (
        "link_downed",
        "link_error_recovery",
        "local_link_integrity_errors",
        "port_rcv_errors",
        "symbol_error",
    ),
    "hw_counters": ("rx_icrc_encapsulated",),
}
#: Providers of libibverbs by the driver of the card, if they are not named alike.
_PROVIDERS = {
    "bnxt_en": "bnxt_re",
    "hfi1": "hfi1verbs",
    "hns_roce_hw_v2": "hns",
    "i40e": "irdma",
    "ice": "irdma",
    "idpf": "irdma",
    "qede": "qedr",
}


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device.

    :param state: ``ACTIVE``, ``DOWN``, ``INIT`` or ``ARMED``; empty if unknown.
    :param rate: its line rate in bytes per second; None if unknown.
    :param layer: ``InfiniBand``, ``Ethernet`` or, for EFA, ``Unspecified``.
    :param gids: its addresses (GIDs) that are not empty, by their index.
    :param interfaces: the network interfaces of these addresses.
    :param errors: by counter, the errors of the link since the driver was loaded.
    """

    number: int
    state: str
    rate: float | None
    layer: str
    gids: dict[str, str]
    interfaces: tuple[str, ...]
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device.

    :param kind: the name of its provider of libibverbs, such as ``efa``, ``mlx5``, ``irdma`` or ``rxe``.
    :param uverbs: its device node, such as ``/dev/infiniband/uverbs0``; empty if the kernel has none for it.
    :param closed: why a process cannot open that node; empty if it can.
    :param numa: its NUMA node; -1 if the firmware does not say.
    :param pci: its PCI address.
    :param path: its path in sysfs, which contains every PCI bridge above it.
    :param p2p: EFA's method to access GPU memory, as its driver reports it; empty if it has none.
    :param manages_nvlink: whether its firmware says that it only manages NVLink switches.
    :param iwarp: whether it speaks iWARP, and neither InfiniBand nor RoCE.
    """

    name: str
    kind: str
    ports: tuple[Port, ...]
    uverbs: str
    closed: str
    numa: int
    pci: str
    path: str
    p2p: str
    source: str
    manages_nvlink: bool = False
    iwarp: bool = False

    @property
    def active(self) -> bool:
        """Whether one of its ports is active. A port whose driver reports no state counts as active."""
        return any(port.state in ("ACTIVE", "") for port in self.ports) or not self.ports

    def errors(self, counter: str) -> int:
        """Return what its ports have counted of one kind of error."""
        return sum(port.errors.get(counter, 0) for port in self.ports)

    @property
    def rate(self) -> float | None:
        """The line rate of its fastest port in bytes per second; None if unknown."""
        return max((port.rate for port in self.ports if port.rate), default=None)


def network_cards(devices: Sequence[RdmaDevice]) -> list[RdmaDevice]:
    """Return the devices that move data between hosts.

    Hosts with B200 GPUs have ConnectX adapters that only reach NVLink switches. If their firmware does not say so,
    they are recognised because such a host uses EFA for its data.
    """
    efa = any(device.kind == "efa" for device in devices)
    return [device for device in devices if not device.manages_nvlink and not (efa and device.kind != "efa")]


def read_rdma(root: FactsRoot) -> tuple[RdmaDevice, ...]:
    nodes = {root.read(f"{_VERBS}/{name}/ibdev"): name for name in root.entries(_VERBS) if name.startswith("uverbs")}
    names = [name for name in root.entries(_CLASS) if root.entries(f"{_CLASS}/{name}/ports")]
    paths = {name: f"/dev/infiniband/{nodes[name]}" for name in names if name in nodes}
    closed = root.ask("uverbs", lambda: {path: _try(path) for path in paths.values()})
    return tuple(_device(root, name, paths.get(name, ""), closed) for name in names)


def _device(root: FactsRoot, name: str, uverbs: str, closed: dict[str, str]) -> RdmaDevice:
    place = f"{_CLASS}/{name}"
    device = root.resolve(f"{place}/device")
    driver = (root.resolve(f"{device}/driver") or "").rpartition("/")[2] if device else ""
    return RdmaDevice(
        name=name,
        kind=_kind(name, driver),
        ports=tuple(_port(root, f"{place}/ports", number) for number in root.entries(f"{place}/ports")),
        uverbs=uverbs,
        closed=closed.get(uverbs, closed.get("why", "it was not tried")) if uverbs else "",
        numa=numa_node(root, device or ""),
        pci=address_of(device),
        path=device or "",
        p2p=(root.read(f"{device}/p2p") or "") if device else "",
        source=place,
        manages_nvlink=_OF_NVLINK in (root.read(f"{device}/vpd") or "") if device else False,
        iwarp="RNIC" in (root.read(f"{place}/node_type") or ""),  # "4: RNIC"
    )


def _kind(name: str, driver: str) -> str:
    if driver == "efa" or re.match(r"(rdmap|efa_)", name):
        return "efa"
    return _PROVIDERS.get(driver) or driver.removesuffix("_core") or re.sub(r"_?\d+$", "", name)


def _port(root: FactsRoot, folder: str, number: str) -> Port:
    place = f"{folder}/{number}"
    state = re.search(r"[A-Z]+", root.read(f"{place}/state") or "")  # "4: ACTIVE"
    rate = re.match(r"([\d.]+) Gb/sec", root.read(f"{place}/rate") or "")  # "100 Gb/sec (4X EDR)"
    gids = {}
    for index in root.entries(f"{place}/gids")[:_MOST_GIDS]:
        gid = root.read(f"{place}/gids/{index}") or ""
        if gid.strip("0:"):
            gids[index] = gid
    errors = {
        name: count
        for folder, names in _ERRORS.items()
        for name in names
        if (count := root.number(f"{place}/{folder}/{name}")) is not None
    }
    interfaces = [root.read(f"{place}/gid_attrs/ndevs/{index}") for index in gids]
    return Port(
        number=int(number) if number.isdecimal() else 0,
        state=state[0] if state else "",
        rate=float(rate[1]) * 1e9 / 8 if rate and float(rate[1]) else None,
        layer=root.read(f"{place}/link_layer") or "",
        gids=gids,
        interfaces=tuple(dict.fromkeys(filter(None, interfaces))),
        errors=errors,
    )


def _try(path: str) -> str:
    """Return why a device node cannot be opened; empty if it can."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return ""
