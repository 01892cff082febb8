# SPDX-License-Identifier: Apache-2.0
"""Checks of network interfaces, addresses and host names."""

from __future__ import annotations

import ipaddress
import re

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.units import gigabits
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.network import DROPPED, REFUSED, SILENT, Nic
from pytest_nixl.model.verdicts import Judgement

_NAMES_DEVICES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE")


def devices_named(facts: Facts) -> dict[str, tuple[str, ...]]:
    """Return the names of network devices in variables, by variable, without ports: ``mlx5_0:1`` gives mlx5_0."""
    by_variable = {}
    for variable in _NAMES_DEVICES:
        text = facts.environment.get(variable)
        if text and text != "all" and not text.startswith("^"):
            by_variable[variable] = tuple(part.strip().partition(":")[0] for part in text.split(",") if part.strip())
    return by_variable


def _used(facts: Facts) -> list[Nic]:
    """Return the interfaces that carry traffic: with the default route or an address, or named by a variable."""
    chosen = {name for names in devices_named(facts).values() for name in names}
    return [
        nic
        for nic in facts.network.nics
        if not nic.loopback
        and (nic.name in chosen or nic.name == facts.network.default.value or (not nic.virtual and nic.routable()))
    ]


@check("nics-up", "Is every interface that carries traffic up?")
def nics_up(facts: Facts, expected: Requirements) -> Judgement:
    """Every interface that carries traffic is up."""
    used = _used(facts)
    if not used:
        return not_applicable("only loopback has an address: no traffic leaves this host")
    down = [nic for nic in used if nic.state not in ("up", "unknown")]
    if down:
        listing = named(f"{nic.name} is {nic.state}" for nic in down)
        return failed(
            f"{plural(len(down), 'interface')} in use not up: {listing}",
            f"run `ip link set {down[0].name} up`; if it stays down, check the cable and the switch",
        )
    return passed(f"up: {named(nic.name for nic in used)}")


@check("nic-rate", "Is every interface as fast as the profile says?")
def nic_rate(facts: Facts, expected: Requirements) -> Judgement:
    """No interface is slower than the profile says."""
    if expected.machine is None or not expected.machine.nics:
        return not_applicable("the profile describes no network cards")
    if expected.rdma:
        return not_applicable("the profile's network cards support RDMA: rdma-rate judges them")
    rates = {nic.name: nic.rate for nic in facts.nics if nic.rate}
    if not rates:
        return unknown("no interface reports its rate", "run `ethtool DEVICE`, or ask the network's administrator")
    slow = {name: rate for name, rate in rates.items() if rate < expected.machine.nic_rate * 0.999}
    if slow:
        listing = named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in slow.items())
        return failed(
            f"below the profile's {gigabits(expected.machine.nic_rate)} Gb/s: {listing}",
            "check the negotiated speed (`ethtool DEVICE`), the cable and the switch port",
        )
    return passed(named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in rates.items()))


@check("mtu", "Do all interfaces of one kind have the same MTU?")
def mtu(facts: Facts, expected: Requirements) -> Judgement:
    """Interfaces of one kind have the same MTU."""
    kinds: dict[str, dict[str, int]] = {}
    for nic in facts.nics:
        if nic.mtu is not None and nic.driver and nic.state == "up":
            kinds.setdefault(nic.driver, {})[nic.name] = nic.mtu
    several = {driver: mtus for driver, mtus in kinds.items() if len(mtus) > 1}
    if not several:
        return not_applicable("this host has no two interfaces with the same driver")
    for driver, mtus in several.items():
        if len(set(mtus.values())) > 1:
            listing = named(f"{name} has {value}" for name, value in mtus.items())
            return failed(
                f"the interfaces with driver {driver} have different MTUs: {listing}",
                "give them the same MTU (9001 on EC2, 9000 or 4096 elsewhere): `ip link set DEVICE mtu N`",
            )
    return passed(named(f"{driver}: {set(mtus.values()).pop()}" for driver, mtus in several.items()))


@check("link-local", "Do agents keep link-local addresses (169.254.0.0/16) to themselves?")
def link_local(facts: Facts, expected: Requirements) -> Judgement:
    """UCX agents advertise no address of 169.254.0.0/16."""
    # UCX before openucx/ucx#11504 advertises such addresses, which no other host can reach.
    local = {nic.name: nic.link_local() for nic in facts.network.nics if nic.link_local()}
    if not local:
        return passed("no interface has an IPv4 link-local address")
    listing = named(f"{address} of {name}" for name, addresses in local.items() for address in addresses)
    routable = [nic.name for nic in facts.network.nics if nic.routable()]
    remedy = (
        f"set UCX_NET_DEVICES={routable[0]} in the environment of every rank, and FI_TCP_IFACE likewise for LIBFABRIC "
        "over TCP; or install a newer UCX, which leaves such addresses out"
        if routable
        else "give the host an address that other hosts reach"
    )
    advertised = [text for text in facts.software.advertised if ipaddress.ip_address(text).is_link_local]
    if advertised:
        return failed(f"UCX advertises the link-local address {named(advertised)}, which no other host reaches", remedy)
    if not routable:
        return failed(
            f"every IPv4 address except loopback is link-local ({listing}), so no other host reaches this host", remedy
        )
    if not facts.software.advertised:
        return unknown(
            f"{listing} is link-local, and no UCX agent was created that would show which address UCX advertises",
            remedy,
        )
    return passed(f"UCX leaves out {listing} and advertises {named(facts.software.advertised)}")


@check("names-resolve", "Do the host names in etcd's addresses resolve?")
def names_resolve(facts: Facts, expected: Requirements) -> Judgement:
    """The host names in etcd's addresses resolve, also in a pod with hostNetwork."""
    names = [name for name in facts.etcd.names if not _is_address(name.host)]
    search = facts.network.search.value or ()
    servers = facts.network.nameservers.value or ()
    pod = facts.host.container.value == "kubernetes" or "KUBERNETES_SERVICE_HOST" in facts.environment.launcher
    outside = pod and not any(".svc." in f".{name}." for name in search)
    hint = (
        "this pod uses the node's resolver (hostNetwork: true): set dnsPolicy: ClusterFirstWithHostNet in its spec"
        if outside
        else f"correct the name, or the name servers in /etc/resolv.conf ({named(servers) or 'it has none'})"
    )
    lost = [f"{name.host} ({name.fault})" for name in names if name.fault]
    if lost:
        return failed(f"no address found for {named(lost)}", hint)
    if outside:
        return warned(
            "names of Services do not resolve in this pod: /etc/resolv.conf has no search domain of the cluster", hint
        )
    six = [name.host for name in names if not any(map(_is_ipv4, name.addresses))]
    if six:
        return failed(
            f"{named(six)} has no IPv4 address, and NIXL's etcd client needs one", "give the name an A record"
        )
    if not names:
        return not_applicable("no etcd address has a host name: there is nothing to resolve")
    return passed(named(f"{name.host} is {next(filter(_is_ipv4, name.addresses))}" for name in names))


@check("peer-reachable", "Can this host reach the other hosts?")
def peer_reachable(facts: Facts, expected: Requirements) -> Judgement:
    """The host reaches every other host."""
    if not facts.peers:
        return not_applicable("no other host is named (`pytest-nixl doctor --peer=HOST`), and this run has one rank")
    lost = [f"{peer.name}: {peer.fault}" for peer in facts.peers if peer.fault]
    if lost:
        return failed(
            f"{len(lost)} of {plural(len(facts.peers), 'host')} not reached: {named(lost)}",
            "check the route (`ip route get HOST`), the firewall, the security group and the NetworkPolicy",
        )
    return passed(f"reached: {named(peer.name for peer in facts.peers)}")


#: What to do if a side channel does not answer, by words of the reason.
_SIDE_CHANNEL = {
    REFUSED: (
        "in that engine's pod set VLLM_NIXL_SIDE_CHANNEL_HOST to the pod's address (fieldRef: status.podIP), because "
        "its default, localhost, listens for that pod only; `ss -ltn` in that pod shows what listens at which port"
    ),
    DROPPED: (
        "allow TCP to this port in the NetworkPolicy, the security group and the firewall; and check that the address "
        "is the pod's own (`kubectl get pod -o wide`)"
    ),
    SILENT: (
        "look in that engine's log for what it waits for, or whether it has stopped; if another program listens there, "
        "correct VLLM_NIXL_SIDE_CHANNEL_PORT"
    ),
}


@check("side-channel", "Does the NIXL side channel of the other engine answer?")
def side_channel(facts: Facts, expected: Requirements) -> Judgement:
    """The NIXL side channel of the other vLLM engine answers."""
    if not facts.side_channels:
        return not_applicable("no side channel is named (in decode's pod: `pytest-nixl doctor --side-channel=PREFILL`)")
    silent = [f"{engine.name}: {engine.fault}" for engine in facts.side_channels if engine.fault]
    if silent:
        remedies = (remedy for text, remedy in _SIDE_CHANNEL.items() if any(text in fault for fault in silent))
        return failed(
            f"{len(silent)} of {plural(len(facts.side_channels), 'side channel')} silent: {named(silent)}",
            next(remedies, "correct the name or the address: it is what prefill has in VLLM_NIXL_SIDE_CHANNEL_HOST"),
        )
    return passed(f"ZMQ answers at {named(engine.name for engine in facts.side_channels)}")


def _is_ipv4(address: str) -> bool:
    return "." in address


def _is_address(host: str) -> bool:
    return re.fullmatch(r"[\d.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", host) is not None
