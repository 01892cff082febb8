# SPDX-License-Identifier: Apache-2.0
"""RDMA devices: there, up, as fast as they should be, and open to us."""

from __future__ import annotations

from collections import Counter

from pytest_nixl.checks.doctor.check import (
    NO_RDMA,
    Requirements,
    check,
    failed,
    has_rdma,
    named,
    not_applicable,
    passed,
    plural,
    unknown,
    warned,
)
from pytest_nixl.core.units import gigabits
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.rdma import RdmaDevice
from pytest_nixl.model.verdicts import Judgement


def _devices(facts: Facts, wanted: Requirements) -> tuple[RdmaDevice, ...]:
    """The devices that the profile speaks of: EFA where it says so, else all."""
    return facts.efa if wanted.efa else facts.rdma


@check("rdma-devices", "Are there as many RDMA devices as the profile says?")
def rdma_devices(facts: Facts, wanted: Requirements) -> Judgement:
    """Each has a driver that the kernel knows it by."""
    if not has_rdma(facts, wanted):
        return not_applicable(NO_RDMA)
    kind, here = "EFA device" if wanted.efa else "RDMA device", _devices(facts, wanted)
    bus = [device for device in facts.pci if device.kind == "efa" or (device.kind == "mlx" and not wanted.efa)]
    unbound = [device for device in bus if not device.driver]
    if unbound:
        reason = f"no driver is bound to {plural(len(unbound), 'network card')} ({named(d.address for d in unbound)})"
        what = "efa" if unbound[0].kind == "efa" else "mlx5_core and mlx5_ib"
        return failed(reason, f"load the module of its driver ({what}) on the host, and read `dmesg`")
    if wanted.rdma and wanted.machine is not None and len(here) != wanted.machine.nics:
        more = len(here) > wanted.machine.nics
        names = named(device.name for device in here) or "none"
        reason = f"{plural(len(here), kind)} of the {wanted.machine.nics} that the profile says: {names}"
        seen = f"; {len(bus)} hang on the PCI bus" if len(bus) != len(here) else ""
        remedy = (
            "take the profile of this kind of machine"
            if more
            else "give the pod all of them (vpc.amazonaws.com/efa or rdma/…), mount /dev/infiniband; or take a profile "
            "of what the pod is meant to have; or exchange the node"
        )
        return failed(f"{reason}{seen}", remedy)
    return passed(f"{plural(len(here), kind)}: {named(device.name for device in here)}")


@check("rdma-ports", "Is a port of every RDMA device active?")
def rdma_ports(facts: Facts, wanted: Requirements) -> Judgement:
    """A port that is not ACTIVE carries nothing, and the others are then asked for more than they can."""
    if not has_rdma(facts, wanted):
        return not_applicable(NO_RDMA)
    if not facts.rdma:
        return failed("there is no RDMA device whose port could be active", "see rdma-devices")
    down = [device for device in facts.rdma if not device.active]
    if down:
        told = named(f"{device.name} ({', '.join(port.state for port in device.ports)})" for device in down)
        remedy = "look at the cable, the switch and the subnet manager (`ibstat`, `rdma link`), or exchange the node"
        return failed(f"{plural(len(down), 'RDMA device')} of {len(facts.rdma)} without an active port: {told}", remedy)
    return passed(f"a port is active of each of {plural(len(facts.rdma), 'RDMA device')}")


@check("rdma-rate", "Is every RDMA device as fast as the profile says, and as the others?")
def rdma_rate(facts: Facts, wanted: Requirements) -> Judgement:
    """A link that was negotiated slower than its neighbours slows every transfer that is spread over all."""
    if not has_rdma(facts, wanted):
        return not_applicable(NO_RDMA)
    rates = {device.name: device.rate for device in _devices(facts, wanted) if device.rate}
    if not rates:
        return unknown("no RDMA device tells its rate", "look at /sys/class/infiniband/*/ports/*/rate")
    if wanted.rdma and wanted.machine is not None:
        slow = {name: rate for name, rate in rates.items() if rate < wanted.machine.nic_rate * 0.999}
        if slow:
            told = named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in slow.items())
            reason = f"{plural(len(slow), 'RDMA device')} below the profile's {gigabits(wanted.machine.nic_rate)} Gb/s"
            return failed(f"{reason}: {told}", "look at cable, switch port and FEC; or correct the profile's nic_rate")
    usual = Counter(rates.values()).most_common(1)[0][0]
    odd = {name: rate for name, rate in rates.items() if rate != usual}
    if odd:
        told = named(f"{name} at {gigabits(rate)} Gb/s" for name, rate in odd.items())
        reason = f"not all RDMA devices are of one rate: most are at {gigabits(usual)} Gb/s, {told}"
        return warned(reason, "look at the cable and the switch port of that one; or leave it out by UCX_NET_DEVICES")
    return passed(f"{plural(len(rates), 'RDMA device')} at {gigabits(usual)} Gb/s")


@check("uverbs-open", "Can a process open the device node of every RDMA device?")
def uverbs_open(facts: Facts, wanted: Requirements) -> Judgement:
    """One that is seen and cannot be opened makes libfabric give up EFA altogether (ofiwg/libfabric#12708)."""
    if not has_rdma(facts, wanted):
        return not_applicable(NO_RDMA)
    if not facts.rdma:
        return failed("there is no RDMA device that could be opened", "see rdma-devices")
    remedy = (
        "give the container the nodes (--device=/dev/infiniband, or the device plugin's resource), and check their "
        "permissions; hide those that it is not meant to have"
    )
    without = [device.name for device in facts.rdma if not device.uverbs]
    if without:
        reason = f"the kernel has no uverbs node for {named(without)}: the module ib_uverbs is not loaded"
        return failed(reason, "modprobe ib_uverbs on the host")
    closed = [device for device in facts.rdma if device.closed]
    if closed and all("not recorded" in device.closed for device in closed):
        return unknown("whether the nodes open was not recorded", "record the tree again")
    if closed:
        told = named(f"{device.uverbs} of {device.name} ({device.closed})" for device in closed)
        return failed(f"{plural(len(closed), 'uverbs node')} of {len(facts.rdma)} cannot be opened: {told}", remedy)
    return passed(f"{plural(len(facts.rdma), 'uverbs node')} can be opened")
