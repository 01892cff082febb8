# SPDX-License-Identifier: Apache-2.0
"""Checks of RDMA devices: their number, ports, rates and device nodes."""

from __future__ import annotations

from collections import Counter
from statistics import median_low

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
from pytest_nixl.core.units import gigabits
from pytest_nixl.core.words import named, plural
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.rdma import RdmaDevice
from pytest_nixl.model.verdicts import Judgement


def _devices(facts: Facts, wanted: Requirements) -> tuple[RdmaDevice, ...]:
    """Return the EFA devices if the profile expects EFA, otherwise all RDMA devices."""
    return facts.efa if wanted.efa else facts.rdma


@check("rdma-devices", "Does this host have as many RDMA devices as the profile says?")
def rdma_devices(facts: Facts, wanted: Requirements) -> Judgement:
    """The host has as many RDMA devices as the profile says, each with a driver.

    Judge the number of RDMA devices, and whether each card on the PCI bus has a driver.
    """
    kind, here = "EFA device" if wanted.efa else "RDMA device", _devices(facts, wanted)
    bus = [device for device in facts.pci if device.kind == "efa" or (device.kind == "mlx" and not wanted.efa)]
    unbound = [device for device in bus if not device.driver]
    if not has_rdma(facts, wanted) and not unbound:
        return not_applicable(NO_RDMA)
    if unbound:
        reason = f"no driver is bound to {plural(len(unbound), 'network card')} ({named(d.address for d in unbound)})"
        what = "efa" if unbound[0].kind == "efa" else "mlx5_core and mlx5_ib"
        return failed(reason, f"load the driver on the host (modprobe {what}), and read `dmesg`")
    if wanted.rdma and wanted.machine is not None and len(here) != wanted.machine.nics:
        more = len(here) > wanted.machine.nics
        names = named(device.name for device in here) or "none"
        reason = f"{plural(len(here), kind)} instead of the {wanted.machine.nics} in the profile: {names}"
        seen = f"; the PCI bus has {len(bus)}" if len(bus) != len(here) else ""
        remedy = (
            "use the profile of this kind of machine (--nixl-profile)"
            if more
            else "give the pod all devices (resource vpc.amazonaws.com/efa or rdma/…) and mount /dev/infiniband; or "
            "use a profile of the devices that the pod is meant to have; or replace the node"
        )
        return failed(f"{reason}{seen}", remedy)
    return passed(f"{plural(len(here), kind)}: {named(device.name for device in here)}")


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
    found = {}
    for counter, least in _MANY_ERRORS.items():
        usual = median_low([device.errors(counter) for device in devices])
        for device in devices:
            count = device.errors(counter)
            if count >= max(least, _TIMES_THE_MEDIAN * usual) and device.name not in found:
                found[device.name] = (
                    f"{device.name} has counted {count} {counter}, and half of the others at most {usual}"
                )
    return list(found.values())


@check(
    "rdma-ports", "Is a port of every RDMA device active, and is no link much worse than the others?", unless=no_rdma
)
def rdma_ports(facts: Facts, wanted: Requirements) -> Judgement:
    """Every RDMA device has an active port, and no link has errors that most others do not have.

    Judge the port states. A port that is not ACTIVE carries nothing, so the other ports are overloaded.
    """
    if not facts.rdma:
        return failed("this host has no RDMA device", "follow the remedy of rdma-devices")
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
def rdma_rate(facts: Facts, wanted: Requirements) -> Judgement:
    """No RDMA device is slower than the profile says, or slower than the others.

    Judge the rates. One slow device slows every transfer that is spread over all devices.
    """
    rates = {device.name: device.rate for device in _devices(facts, wanted) if device.rate}
    if not rates:
        return unknown("no RDMA device reports its rate", "read /sys/class/infiniband/*/ports/*/rate")
    if wanted.rdma and wanted.machine is not None:
        slow = {name: rate for name, rate in rates.items() if rate < wanted.machine.nic_rate * 0.999}
        if slow:
            listing = named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in slow.items())
            reason = f"{plural(len(slow), 'RDMA device')} below the profile's {gigabits(wanted.machine.nic_rate)} Gb/s"
            return failed(
                f"{reason}: {listing}", "check cable, switch port and FEC; or correct nic_rate in the profile"
            )
    usual = Counter(rates.values()).most_common(1)[0][0]
    odd = {name: rate for name, rate in rates.items() if rate != usual}
    if odd:
        listing = named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in odd.items())
        reason = f"the RDMA devices have different rates: most are at {gigabits(usual)} Gb/s, {listing}"
        return warned(
            reason, "check cable and switch port of the device that differs, or leave it out with UCX_NET_DEVICES"
        )
    return passed(f"{plural(len(rates), 'RDMA device')} at {gigabits(usual)} Gb/s")


@check("uverbs-open", "Can a process open the device node of every RDMA device?", unless=no_rdma)
def uverbs_open(facts: Facts, wanted: Requirements) -> Judgement:
    """A process can open the device node of every RDMA device.

    Judge the device nodes. One node that cannot be opened makes libfabric drop EFA (ofiwg/libfabric#12708).
    """
    if not facts.rdma:
        return failed("this host has no RDMA device", "follow the remedy of rdma-devices")
    remedy = (
        "give the container the device nodes (--device=/dev/infiniband, or the device plugin's resource), and check "
        "their permissions; hide devices that the container is not meant to have"
    )
    without = [device.name for device in facts.rdma if not device.uverbs]
    if without:
        reason = f"the kernel has no uverbs node for {named(without)}: the module ib_uverbs is not loaded"
        return failed(reason, "modprobe ib_uverbs on the host")
    closed = [device for device in facts.rdma if device.closed]
    if closed and all("not recorded" in device.closed for device in closed):
        return unknown("the recorded tree does not say whether the device nodes can be opened", "record the tree again")
    if closed:
        listing = named(f"{device.uverbs} of {device.name} ({device.closed})" for device in closed)
        return failed(f"{len(closed)} of {plural(len(facts.rdma), 'uverbs node')} cannot be opened: {listing}", remedy)
    return passed(f"{plural(len(facts.rdma), 'uverbs node')} can be opened")
