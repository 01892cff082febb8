# SPDX-License-Identifier: Apache-2.0
"""Interfaces, addresses and names."""

from __future__ import annotations

import ipaddress
import re

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    named,
    not_applicable,
    passed,
    plural,
    unknown,
    warned,
)
from pytest_nixl.core.units import gigabits
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.network import Nic
from pytest_nixl.model.verdicts import Judgement

_NAMES_DEVICES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE")


def devices_named(facts: Facts) -> dict[str, tuple[str, ...]]:
    """Return the variables that name network devices, each with the devices, without ports: ``mlx5_0:1`` is mlx5_0."""
    found = {}
    for variable in _NAMES_DEVICES:
        text = facts.environment.get(variable)
        if text and text != "all" and not text.startswith("^"):
            found[variable] = tuple(part.strip().partition(":")[0] for part in text.split(",") if part.strip())
    return found


def _used(facts: Facts) -> list[Nic]:
    """The interfaces that traffic is meant to go over: of the default route, with an address, or named."""
    wanted = {name for names in devices_named(facts).values() for name in names}
    return [
        nic
        for nic in facts.network.nics
        if not nic.loopback
        and (nic.name in wanted or nic.name == facts.network.default.value or (not nic.virtual and nic.routable()))
    ]


@check("nics-up", "Is every interface up that traffic goes over?")
def nics_up(facts: Facts, wanted: Requirements) -> Judgement:
    """The one of the default route, those with an address, and those that a variable names."""
    used = _used(facts)
    if not used:
        return not_applicable("no interface but loopback has an address: nothing leaves this host")
    down = [nic for nic in used if nic.state not in ("up", "unknown")]
    if down:
        told = named(f"{nic.name} is {nic.state}" for nic in down)
        return failed(
            f"{plural(len(down), 'interface')} that traffic goes over: {told}",
            f"ip link set {down[0].name} up; if it stays down, look at the cable and the switch",
        )
    return passed(f"up: {named(nic.name for nic in used)}")


@check("nic-rate", "Is every interface as fast as the profile says?")
def nic_rate(facts: Facts, wanted: Requirements) -> Judgement:
    """For machines whose network cards do no RDMA; of those that do, see rdma-rate."""
    if wanted.machine is None:
        return not_applicable("the profile names no network cards")
    if wanted.rdma:
        return not_applicable("the profile's network cards do RDMA: see rdma-rate")
    rates = {nic.name: nic.rate for nic in facts.nics if nic.rate}
    if not rates:
        return unknown("no driver of an interface tells its rate", "ask `ethtool`, or whoever runs the network")
    slow = {name: rate for name, rate in rates.items() if rate < wanted.machine.nic_rate * 0.999}
    if slow:
        told = named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in slow.items())
        return failed(
            f"below the profile's {gigabits(wanted.machine.nic_rate)} Gb/s: {told}",
            "look at what was negotiated (`ethtool`), at cable and switch port",
        )
    return passed(named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in rates.items()))


@check("mtu", "Do the interfaces of one kind have one MTU?")
def mtu(facts: Facts, wanted: Requirements) -> Judgement:
    """Across ranks, comparing their facts tells; here, cards with one driver are compared."""
    kinds: dict[str, dict[str, int]] = {}
    for nic in facts.nics:
        if nic.mtu is not None and nic.driver and nic.state == "up":
            kinds.setdefault(nic.driver, {})[nic.name] = nic.mtu
    several = {driver: found for driver, found in kinds.items() if len(found) > 1}
    if not several:
        return not_applicable("there are no two interfaces of one kind to compare")
    for driver, found in several.items():
        if len(set(found.values())) > 1:
            told = named(f"{name} has {value}" for name, value in found.items())
            return failed(
                f"the interfaces of {driver} differ in MTU: {told}",
                "give them one (9001 on EC2, 9000 or 4096 elsewhere): ip link set DEVICE mtu N",
            )
    return passed(named(f"{driver}: {set(found.values()).pop()}" for driver, found in several.items()))


@check("link-local", "Do agents give others no address of 169.254.0.0/16?")
def link_local(facts: Facts, wanted: Requirements) -> Judgement:
    """UCX took such an address for one like any other (mended by openucx/ucx#11504), and no other host gets there."""
    local = {nic.name: nic.link_local() for nic in facts.network.nics if nic.link_local()}
    if not local:
        return passed("no interface has an IPv4 link-local address")
    told = named(f"{address} of {name}" for name, addresses in local.items() for address in addresses)
    others = [nic.name for nic in facts.network.nics if nic.routable()]
    remedy = (
        f"UCX_NET_DEVICES={others[0]} in the environment of every rank" if others else "give the host an address"
    ) + ", and FI_TCP_IFACE likewise for LIBFABRIC over TCP; or a newer UCX, which leaves such addresses out"
    given = [text for text in facts.software.advertised if ipaddress.ip_address(text).is_link_local]
    if given:
        return failed(
            f"an agent of UCX gives others the link-local address {named(given)}: no other host reaches it", remedy
        )
    if not others:
        return failed(f"every IPv4 address but loopback is link-local ({told}): no other host reaches this one", remedy)
    if not facts.software.advertised:
        return unknown(f"{told} is link-local, and no agent of UCX was made that would tell which it gives", remedy)
    return passed(f"UCX leaves {told} out: it gives {named(facts.software.advertised)}")


@check("names-resolve", "Do the names resolve that ranks meet by?")
def names_resolve(facts: Facts, wanted: Requirements) -> Judgement:
    """A pod with hostNetwork has the node's resolver, which knows no Service, unless its dnsPolicy says otherwise."""
    names = [name for name in facts.etcd.names if not _is_address(name.host)]
    search = facts.network.search.value or ()
    servers = facts.network.nameservers.value or ()
    pod = facts.host.container.value == "kubernetes" or "KUBERNETES_SERVICE_HOST" in facts.environment.launcher
    outside = pod and not any(".svc." in f".{name}." for name in search)
    hint = (
        "this is a pod whose resolver is the node's (hostNetwork: true): give it dnsPolicy: ClusterFirstWithHostNet"
        if outside
        else f"look at /etc/resolv.conf (it asks {named(servers) or 'nobody'}) and at the name"
    )
    lost = [f"{name.host} ({name.fault})" for name in names if name.fault]
    if lost:
        return failed(f"no address is known for {named(lost)}", hint)
    if outside:
        return warned(
            "names of Services do not resolve in this pod: no search domain of its cluster is in /etc/resolv.conf", hint
        )
    six = [name.host for name in names if not any("." in address for address in name.addresses)]
    if six:
        return failed(
            f"{named(six)} has no IPv4 address, and NIXL's client of etcd wants one", "give the name an A record"
        )
    if not names:
        return not_applicable("no name is given for an etcd: nothing has to be resolved")
    return passed(named(f"{name.host} is {name.addresses[0]}" for name in names))


@check("peer-reachable", "Are the other hosts reached?")
def peer_reachable(facts: Facts, wanted: Requirements) -> Judgement:
    """Packets get to each host that was named, and back."""
    if not facts.peers:
        return not_applicable("no other host is named (--peer of `pytest-nixl doctor`), and this run has one rank")
    lost = [f"{peer.name}: {peer.fault}" for peer in facts.peers if peer.fault]
    if lost:
        return failed(
            f"{plural(len(lost), 'host')} of {len(facts.peers)} not reached: {named(lost)}",
            "look at the route (`ip route get`), the firewall, the security group or NetworkPolicy",
        )
    return passed(f"reached: {named(peer.name for peer in facts.peers)}")


def _is_address(host: str) -> bool:
    return re.fullmatch(r"[\d.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", host) is not None
