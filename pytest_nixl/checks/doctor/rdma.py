# SPDX-License-Identifier: Apache-2.0
"""Checks of RDMA devices: their number, ports, rates and device nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_low, mode

from pytest_nixl.checks.doctor.check import (
    NO_RDMA,
    Requirements,
    check,
    failed,
    has_rdma,
    no_rdma,
    not_applicable,
    passed,
    unknown,
    warned,
)
from pytest_nixl.checks.doctor.libraries import not_loaded
from pytest_nixl.core.rdma_fault import GID_INDEX_REMEDY, MEMLOCK_REMEDY, NODES_REMEDY, PORT_REMEDY
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.units import gigabits
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.image import VerbsLibrary, VerbsProvider
from pytest_nixl.host.rdma import RdmaDevice, network_cards
from pytest_nixl.host.recorded_tree import NOT_RECORDED
from pytest_nixl.host.ucx_rdma import UcxRdma, VerbsAnswer
from pytest_nixl.model.verdicts import Judgement


def _no_device(facts: Facts, expected: Requirements) -> Judgement | None:
    """Return the verdict of a host without an RDMA device: FAIL if the profile expects one."""
    if facts.rdma:
        return None
    return no_rdma(facts, expected) or failed("this host has no RDMA device", "follow the remedy of rdma-devices")


def _devices(facts: Facts, expected: Requirements) -> tuple[RdmaDevice, ...]:
    """Return the EFA devices if the profile expects EFA, otherwise all RDMA devices."""
    return facts.efa if expected.efa else facts.rdma


@check("rdma-devices", "Does this host have as many RDMA devices as the profile says?")
def rdma_devices(facts: Facts, expected: Requirements) -> Judgement:
    """The host has as many RDMA devices as the profile says, each with a driver."""
    kind, present = "EFA device" if expected.efa else "RDMA device", _devices(facts, expected)
    bus = [device for device in facts.pci if device.kind == "efa" or (device.kind == "mlx" and not expected.efa)]
    unbound = [device for device in bus if not device.driver]
    if not has_rdma(facts, expected) and not unbound:
        return not_applicable(NO_RDMA)
    if unbound:
        reason = f"no driver is bound to {plural(len(unbound), 'network card')} ({named(d.address for d in unbound)})"
        module = "efa" if unbound[0].kind == "efa" else "mlx5_core and mlx5_ib"
        return failed(reason, f"load the driver on the host (modprobe {module}), and read `dmesg`")
    if expected.rdma and expected.machine is not None and len(present) != expected.machine.nics:
        more = len(present) > expected.machine.nics
        names = named(device.name for device in present) or "none"
        reason = f"{plural(len(present), kind)} instead of the {expected.machine.nics} in the profile: {names}"
        bus_clause = f"; the PCI bus has {len(bus)}" if len(bus) != len(present) else ""
        remedy = (
            "use the profile of this kind of machine (--nixl-profile)"
            if more
            else "give the pod all devices (resource vpc.amazonaws.com/efa or rdma/…) and mount /dev/infiniband; or "
            "use a profile of the devices that the pod is meant to have; or replace the node"
        )
        return failed(f"{reason}{bus_clause}", remedy)
    return passed(f"{plural(len(present), kind)}: {named(device.name for device in present)}")


#: With fewer devices none is compared with the others.
_FEWEST_COMPARED = 3
#: The fewest errors of a link that count, by counter: fewer are usual on links that work.
_MANY_ERRORS = {
    "link_downed": 10,
    "link_error_recovery": 10,
    "local_link_integrity_errors": 100,
    "port_rcv_errors": 1000,
    "rx_icrc_encapsulated": 100,
    "symbol_error": 1000,
}
#: A device has many more errors than the others if it has so many times their median.
_TIMES_THE_MEDIAN = 10


def _with_errors(devices: tuple[RdmaDevice, ...]) -> list[str]:
    """Return the devices whose links have many more errors than those of most devices, each with its worst counter."""
    counters = {}
    for counter, least in _MANY_ERRORS.items():
        usual = median_low([device.errors(counter) for device in devices])
        for device in devices:
            count = device.errors(counter)
            if count >= max(least, _TIMES_THE_MEDIAN * usual) and device.name not in counters:
                counters[device.name] = (
                    f"{device.name} has counted {count} {counter}, and half of the others at most {usual}"
                )
    return list(counters.values())


@check(
    "rdma-ports", "Is a port of every RDMA device active, and is no link much worse than the others?", unless=_no_device
)
def rdma_ports(facts: Facts, expected: Requirements) -> Judgement:
    """Every RDMA device has an active port, and no link has errors that most others do not have."""
    down = [device for device in facts.rdma if not device.active]
    if down:
        listing = named(f"{device.name} ({', '.join(port.state for port in device.ports)})" for device in down)
        remedy = "check the cable, the switch and the subnet manager (`ibstat`, `rdma link`), or replace the node"
        return failed(
            f"{len(down)} of {plural(len(facts.rdma), 'RDMA device')} without an active port: {listing}", remedy
        )
    bad = _with_errors(facts.rdma) if len(facts.rdma) >= _FEWEST_COMPARED else []
    if bad:
        return warned(
            f"the link of {len(bad)} of {plural(len(facts.rdma), 'RDMA device')} has errors that the others do not "
            f"have: {named(bad)}",
            "clean or replace its cable or transceiver, and look at its port of the switch; until then name the other "
            "devices in UCX_NET_DEVICES, or take the host out of use",
        )
    return passed(f"{plural(len(facts.rdma), 'RDMA device')}, each with an active port")


@check("rdma-rate", "Is every RDMA device as fast as the profile says, and as the others?", unless=no_rdma)
def rdma_rate(facts: Facts, expected: Requirements) -> Judgement:
    """No RDMA device is slower than the profile says, or slower than the others."""
    rates = {device.name: device.rate for device in _devices(facts, expected) if device.rate}
    if not rates:
        return unknown("no RDMA device reports its rate", "read /sys/class/infiniband/*/ports/*/rate")
    if expected.rdma and expected.machine is not None:
        slow = {name: rate for name, rate in rates.items() if rate < expected.machine.nic_rate * 0.999}
        if slow:
            listing = named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in slow.items())
            rate = gigabits(expected.machine.nic_rate)
            reason = f"{plural(len(slow), 'RDMA device')} below the profile's {rate} Gb/s"
            return failed(
                f"{reason}: {listing}", "check cable, switch port and FEC; or correct nic_rate in the profile"
            )
    usual = mode(rates.values())
    odd = {name: rate for name, rate in rates.items() if rate != usual}
    if odd:
        listing = named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in odd.items())
        reason = f"the RDMA devices have different rates: most are at {gigabits(usual)} Gb/s, {listing}"
        return warned(
            reason, "check cable and switch port of the device that differs, or leave it out with UCX_NET_DEVICES"
        )
    return passed(f"{plural(len(rates), 'RDMA device')} at {gigabits(usual)} Gb/s")


@check("uverbs-open", "Can a process open the device node of every RDMA device?", unless=_no_device)
def uverbs_open(facts: Facts, expected: Requirements) -> Judgement:
    """A process can open the device node of every RDMA device."""
    remedy = (
        "give the container the device nodes (--device=/dev/infiniband, or the device plugin's resource), and check "
        "their permissions; hide devices that the container is not meant to have"
    )
    without = [device.name for device in facts.rdma if not device.uverbs]
    if without:
        reason = f"the kernel has no uverbs node for {named(without)}: the module ib_uverbs is not loaded"
        return failed(reason, "modprobe ib_uverbs on the host")
    # One node that cannot be opened makes libfabric drop EFA (ofiwg/libfabric#12708).
    closed = [device for device in facts.rdma if device.closed]
    if closed and all("not recorded" in device.closed for device in closed):
        return unknown("the recorded tree does not say whether the device nodes can be opened", "record the tree again")
    if closed:
        listing = named(f"{device.uverbs} of {device.name} ({device.closed})" for device in closed)
        return failed(f"{len(closed)} of {plural(len(facts.rdma), 'uverbs node')} cannot be opened: {listing}", remedy)
    return passed(f"{plural(len(facts.rdma), 'uverbs node')} can be opened")


_NOT_OPENED = re.compile(r"uct_iface_open\(\w+/(\S+?):\d+\) failed: (.*)")
_SAME_RELEASE = (
    "install libibverbs and its providers from one release of rdma-core (apt: libibverbs1 ibverbs-providers), or use a "
    "NIXL that was built on this image"
)

_IWARP_REMEDY = "if its driver also speaks RoCE, as Intel's irdma does, turn RoCE on and iWARP off; else use TCP"


@dataclass(frozen=True)
class _Cause:
    """Why UCX cannot use an RDMA device, and what to do."""

    text: str
    remedy: str


@check("ucx-uses-rdma", "Can the UCX that NIXL loads use every RDMA device of this host?")
def ucx_uses_rdma(facts: Facts, expected: Requirements) -> Judgement:
    """The UCX that NIXL loads finds, opens and offers every RDMA device of the host."""
    if "UCX" not in expected.backends:
        return not_applicable("UCX is not requested")
    absent = _no_device(facts, expected) or not_loaded(facts, expected)
    if absent is not None:
        return absent
    ucx, devices = facts.software.ucx_rdma, network_cards(facts.rdma)
    if ucx is None:
        return unknown(
            "UCX was not asked about the RDMA devices: it was not loaded, its worker ended, or it was not recorded",
            "follow the remedy of backend-loads, or record the tree again",
        )
    causes = {device.name: cause for device in devices if (cause := next(_causes(device, ucx, facts), None))}
    if causes:
        first = next(iter(causes.values()))
        reason = (
            f"UCX cannot use {len(causes)} of {plural(len(devices), 'RDMA device')}, and takes TCP or another device"
        )
        listing = named(f"{name}: {cause.text}" for name, cause in causes.items())
        return failed(f"{reason}: {listing}", first.remedy)
    chosen = facts.environment.get("UCX_NET_DEVICES")
    names = {part.partition(":")[0] for part in chosen.split(",")}
    if names <= {nic.name for nic in facts.network.nics}:  # devices-there reports other names
        return warned(
            f"UCX_NET_DEVICES={chosen} leaves out every RDMA device: {named(device.name for device in devices)}",
            f"unset UCX_NET_DEVICES, or add {devices[0].name}:1",
        )
    listing = named(f"{name} ({', '.join(transports)})" for name, transports in ucx.offered.items())
    return passed(f"UCX can use {plural(len(devices), 'RDMA device')}: {listing}")


def _causes(device: RdmaDevice, ucx: UcxRdma, facts: Facts) -> Iterator[_Cause]:
    """Yield the causes why UCX cannot use a device, the one to mend first first; nothing if it can."""
    if not ucx.module:
        yield _without_module(facts)
        return
    answer = ucx.answers.get(device.name, VerbsAnswer(False, "", "", None))
    if not device.uverbs:
        yield _Cause("the kernel has no uverbs node for it: ib_uverbs is not loaded", "modprobe ib_uverbs on the host")
    elif device.closed and NOT_RECORDED not in device.closed:
        yield _Cause(f"{device.uverbs} cannot be opened: {device.closed}", NODES_REMEDY)
    elif not answer.listed:
        yield _without_provider(device, ucx, facts)
    elif answer.opened:
        yield _Cause(f"libibverbs cannot open it: {answer.opened}", NODES_REMEDY)
    if answer.registered:
        memlock = facts.host.memlock.value
        limit = memlock.soft if memlock is not None else None
        description = f" (a process may lock {limit >> 10} KiB)" if limit is not None else ""
        yield _Cause(f"1 MiB of memory cannot be registered with it: {answer.registered}{description}", MEMLOCK_REMEDY)
    interfaces = {nic.name for nic in facts.network.nics}
    elsewhere = [name for port in device.ports for name in port.interfaces if name not in interfaces]
    if elsewhere:
        yield _Cause(
            f"its network interface {named(elsewhere)} is in another network namespace",
            f"use the host's network, or move the interface here: `ip link set {elsewhere[0]} netns PID`",
        )
    failure = _not_opened(device, facts)
    if device.name in ucx.offered and not failure:
        return
    if device.iwarp:
        yield _Cause("it speaks iWARP, which UCX does not", _IWARP_REMEDY)
    if not device.active:
        states = ", ".join(port.state for port in device.ports)
        yield _Cause(f"its port is {states}", PORT_REMEDY)
    yield from _of_gids(device, facts, failure)
    if answer.shared_queues == 0:
        yield _Cause(
            "it has no shared receive queues (max_srq is 0), which UCX's rc needs",
            "load a driver that has them, or use LIBFABRIC with this device",
        )
    yield _Cause(
        f"UCX cannot open it: {failure}" if failure else "UCX does not offer it and does not say why",
        "run it again with UCX_LOG_LEVEL=debug and read the lines about this device",
    )


def _not_opened(device: RdmaDevice, facts: Facts) -> str:
    """Return UCX's words about an interface of a device that it could not open; empty if there are none."""
    ucx = facts.software.backend("UCX")
    matches = filter(None, map(_NOT_OPENED.search, ucx.said if ucx is not None else ()))
    return next((match[2] for match in matches if match[1] == device.name), "")


def _of_gids(device: RdmaDevice, facts: Facts, failure: str) -> Iterator[_Cause]:
    """Yield the causes that lie in the addresses (GIDs) of a device's ports."""
    gids = {index: gid for port in device.ports for index, gid in port.gids.items()}
    index = facts.environment.get("UCX_IB_GID_INDEX")
    interfaces = named(name for port in device.ports for name in port.interfaces) or "its interface"
    if index.isdecimal() and gids and index not in gids:
        yield _Cause(
            f"UCX_IB_GID_INDEX={index} names no GID of it: it has {named(gids)}",
            GID_INDEX_REMEDY,
        )
    if not gids:
        yield _Cause("it has no GID", f"give {interfaces} an address (`ip address add …`), and read `rdma link`")
    elif failure and all(gid.startswith("fe80:") for gid in gids.values()):
        yield _Cause(
            f"its only GID is link-local ({named(gids.values())}), because {interfaces} has no address; "
            f"UCX says: {failure}",
            f"give {interfaces} an address (`ip address add …`)",
        )


def _without_module(facts: Facts) -> _Cause:
    modules = facts.environment.get("UCX_MODULES")
    if modules:
        return _Cause(f"UCX_MODULES={modules} keeps UCX from loading its RDMA module (ib)", "unset UCX_MODULES")
    return _Cause(
        "this UCX has no RDMA module (libuct_ib.so), or cannot load it",
        "use a NIXL whose UCX was built with RDMA: NIXL's wheels have it; or add libuct_ib.so to UCX's folder",
    )


def providers_of(kind: str, facts: Facts) -> list[VerbsProvider]:
    """Return the installed providers for a kind of device, by their names: librxe-rdmav34.so for ``rxe_eth``."""
    return [provider for provider in facts.image.providers if kind.startswith(provider.name)]


def _without_provider(device: RdmaDevice, ucx: UcxRdma, facts: Facts) -> _Cause:
    """Return why UCX's libibverbs does not list a device that the kernel has."""
    if text := ucx.other_abi.get(device.name):
        return _Cause(f"libibverbs says: {text}", "use the libibverbs and the providers of the kernel's driver release")
    copy = next((verb for verb in facts.image.verbs if _same(verb.path, ucx.libibverbs)), None)
    providers = providers_of(device.kind, facts)
    where = f"UCX's libibverbs ({ucx.libibverbs})"
    if not providers:
        installed = named(sorted({provider.name for provider in facts.image.providers})) or "none"
        return _Cause(
            f"no provider of libibverbs is installed for it (installed are: {installed})",
            "install the providers (apt: ibverbs-providers), then ask again: a wheel's libibverbs may not find them",
        )
    listing = named(provider.path for provider in providers)
    if copy is not None and copy.abi and all(provider.abi != copy.abi for provider in providers):
        return _Cause(
            f"{where} needs a provider of interface {copy.abi}, and the installed one is {listing}", _SAME_RELEASE
        )
    copies = [provider for provider in providers if provider.library and not _same(provider.library, ucx.libibverbs)]
    if copies:
        folder = os.path.dirname(copies[0].path)
        return _Cause(
            f"its provider {copies[0].path} registers in {copies[0].library}, another copy than {where}",
            f"make them one copy: `mkdir -p /opt/verbs && ln -sf {ucx.libibverbs} /opt/verbs/libibverbs.so.1 && "
            f"export LD_LIBRARY_PATH=/opt/verbs:{folder}`, or use a NIXL that was built on this image",
        )
    return _Cause(
        f"{where} does not find its provider {listing}",
        f"add the provider's folder: `export LD_LIBRARY_PATH={os.path.dirname(providers[0].path)}`",
    )


def registers_in(provider: VerbsProvider, copy: VerbsLibrary) -> bool:
    """Return whether a provider links to this copy of libibverbs; also if it is not known to which it does."""
    return not provider.library or _same(provider.library, copy.path)


def _same(first: str, second: str) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)
