# SPDX-License-Identifier: Apache-2.0
"""Facts of network interfaces, their addresses, and the resolver's configuration."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.host.pci import address_of
from pytest_nixl.host.recorded_tree import Fact, FactsRoot

_NET = "/sys/class/net"
_LOOPBACK_TYPE = 772


@dataclass(frozen=True)
class Nic:
    """A network interface.

    :param state: the kernel's state: ``up``, ``down``, ``lowerlayerdown``, ``unknown``.
    :param mtu: its MTU in bytes; None if unknown.
    :param rate: its line rate in bytes per second; None if its driver does not report one.
    :param addresses: its addresses with prefix lengths, such as ``10.0.0.11/16``.
    :param virtual: whether it belongs to no device (bridges, veth pairs, loopback).
    :param pci: the PCI address of its device; empty if it has none.
    """

    name: str
    state: str
    mtu: int | None
    rate: float | None
    addresses: tuple[str, ...]
    virtual: bool
    loopback: bool
    driver: str
    pci: str
    source: str

    def link_local(self) -> tuple[str, ...]:
        """Return its link-local IPv4 addresses, which other hosts cannot reach."""
        addresses = (ipaddress.ip_interface(text) for text in self.addresses)
        return tuple(str(address) for address in addresses if address.version == 4 and address.is_link_local)

    def routable(self) -> tuple[str, ...]:
        """Return its IPv4 addresses that other hosts may reach."""
        addresses = (ipaddress.ip_interface(text) for text in self.addresses)
        return tuple(
            str(address)
            for address in addresses
            if address.version == 4 and not (address.is_link_local or address.is_loopback)
        )


@dataclass(frozen=True)
class Network:
    """The network of a host.

    :param default: the name of the interface with the default route.
    :param nameservers: the name servers in /etc/resolv.conf.
    :param search: the search domains in /etc/resolv.conf.
    """

    nics: tuple[Nic, ...]
    default: Fact[str]
    nameservers: Fact[tuple[str, ...]]
    search: Fact[tuple[str, ...]]


def read_network(root: FactsRoot) -> Network:
    answer = root.ask("addresses", ask_addresses)
    resolver = root.read("/etc/resolv.conf")
    return Network(
        nics=tuple(
            _nic(root, name, answer.get(name, []))
            for name in root.entries(_NET)
            if root.read(f"{_NET}/{name}/operstate") is not None
        ),
        default=_default(root),
        nameservers=_values(resolver, "nameserver"),
        search=_values(resolver, "search"),
    )


def _nic(root: FactsRoot, name: str, addresses: list[str]) -> Nic:
    place = f"{_NET}/{name}"
    speed = root.number(f"{place}/speed")  # in Mb/s; -1 or an error if it is unknown
    device = root.resolve(f"{place}/device")
    driver = (root.resolve(f"{device}/driver") or "").rpartition("/")[2] if device else ""
    return Nic(
        name=name,
        state=root.read(f"{place}/operstate") or "unknown",
        mtu=root.number(f"{place}/mtu"),
        rate=speed * 1e6 / 8 if speed is not None and 0 < speed < 1 << 31 else None,
        addresses=tuple(addresses),
        virtual=device is None,
        loopback=root.number(f"{place}/type") == _LOOPBACK_TYPE,
        driver=driver,
        pci=address_of(device),
        source=place,
    )


def _default(root: FactsRoot) -> Fact[str]:
    path = "/proc/net/route"
    text = root.read(path)
    if text is None:
        return Fact(None, path, "it cannot be read")
    rows = [line.split() for line in text.splitlines()[1:]]
    names = [row[0] for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000"]
    return Fact.read(next(iter(names), None), path, "it has no default route")


def _values(text: str | None, keyword: str) -> Fact[tuple[str, ...]]:
    path = "/etc/resolv.conf"
    if text is None:
        return Fact(None, path, "it cannot be read")
    lines = [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [keyword]]
    return Fact(tuple(name for names in lines for name in names), path)
