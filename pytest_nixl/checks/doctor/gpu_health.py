# SPDX-License-Identifier: Apache-2.0
"""Checks of the state of GPUs: access to their memory, links, errors, and network cards near them."""

from __future__ import annotations

import re
from statistics import mode

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    has_rdma,
    no_gpu,
    not_applicable,
    passed,
    unknown,
    warned,
)
from pytest_nixl.checks.doctor.gpu import disable_mig, explained, unreported
from pytest_nixl.checks.doctor.resources import amount
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.texts import XIDS
from pytest_nixl.host.devices import FAR, NODE, ROOT, SWITCH, UNPLACED, Topology
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.gpu import Xid
from pytest_nixl.model.verdicts import Judgement, Verdict

_FABRIC_REMEDY = "run `nvidia-smi nvlink -s` and `systemctl status nvidia-fabricmanager` on the host"
#: By a pattern of a GPU's name: how many NVLinks it has, from NVIDIA's data sheets. Cards with bridges are not here.
_NVLINKS = (
    (r"\bB200\b|\bH20\b|\bH200$|\bH100 80GB HBM3$", 18),
    (r"\bA100-SXM4\b", 12),
    (r"\bA800-SXM4\b", 8),
)


def _too_few(reason: str, *, expected: bool) -> Judgement:
    """Return NOT-APPLICABLE, with a remedy if the profile expects the GPUs that are missing."""
    return Judgement(Verdict.NOT_APPLICABLE, reason, "follow the remedy of gpus" if expected else "")


@check("gpu-p2p", "Can every GPU read every other's memory?", unless=no_gpu)
def gpu_p2p(facts: Facts, expected: Requirements) -> Judgement:
    """Every GPU can read every other's memory."""
    if len(facts.gpu.gpus) < 2:
        return _too_few("this host has fewer than two GPUs", expected=expected.gpus > 1)
    pairs = facts.gpu.pairs
    if pairs.value is None:
        return unknown(f"whether GPUs can read each other's memory is unknown: {pairs.why}", unreported(facts))
    bad = [pair for pair in pairs.value if pair.status != "ok"]
    parts = {gpu.index: gpu for gpu in facts.gpu.gpus if gpu.mig}
    if bad and all(pair.one in parts or pair.other in parts for pair in bad):
        listing = named(f"GPU {index}" for index in sorted(parts))
        return warned(
            f"in {len(bad)} of {plural(len(pairs.value), 'pair')} one GPU cannot read the other's memory, because of "
            f"MIG mode: {listing}",
            f"{disable_mig(parts.values())}, if these GPUs exchange data",
        )
    linked = any(gpu.nvlinks for gpu in facts.gpu.gpus)
    if bad and not linked and len(bad) == len(pairs.value) and len({pair.status for pair in bad}) == 1:
        return not_applicable(f"no GPU of this host can read another's memory: {bad[0].status}")
    if bad:
        listing = named(f"GPU {pair.one} that of GPU {pair.other} ({pair.status})" for pair in bad)
        return failed(
            f"in {len(bad)} of {plural(len(pairs.value), 'pair')} one GPU cannot read the other's memory: {listing}"
            f"{explained(facts)}",
            f"{_FABRIC_REMEDY}; reset the GPUs"
            if linked and len(bad) == len(pairs.value)
            else "disable ACS and the IOMMU in the host's firmware and kernel, and run `nvidia-smi topo -p2p r`; "
            "in a virtual machine, use an instance type with whole GPUs",
        )
    return passed(f"all {len(pairs.value)} pairs of {len(facts.gpu.gpus)} GPUs can read each other's memory")


@check("gpu-nvlink", "Does every GPU have the same number of active NVLinks?", unless=no_gpu)
def gpu_nvlink(facts: Facts, expected: Requirements) -> Judgement:
    """Every GPU has the same number of active NVLinks."""
    links = {gpu.index: gpu.nvlinks for gpu in facts.gpu.gpus if gpu.nvlinks is not None}
    if not links:
        return _too_few("no GPU of this host reports NVLinks", expected=expected.has_gpus and not facts.gpu.gpus)
    most = max(links.values())
    fewer = [f"GPU {index} has {count}" for index, count in links.items() if count < most]
    if fewer:
        return failed(
            f"{plural(len(fewer), 'GPU')} with fewer active NVLinks than the {most} of the others: {named(fewer)}"
            f"{explained(facts)}",
            f"{_FABRIC_REMEDY}; reset the GPUs, or replace the node",
        )
    # One GPU alone, as in a virtual machine that has no other, may have none.
    full = {gpu.index: _nvlinks_of_model(gpu.name) for gpu in facts.gpu.gpus}
    lacking = [f"GPU {index} has {count} of {full[index]}" for index, count in links.items() if count < full[index]]
    if len(links) > 1 and lacking:
        judge = failed if expected.has_gpus else warned
        return judge(
            f"{plural(len(lacking), 'GPU')} with fewer active NVLinks than the model has: {named(lacking)}"
            f"{explained(facts)}",
            f"{_FABRIC_REMEDY}; reset the GPUs, or replace the node",
        )
    return passed(f"each GPU has {most} active NVLinks")


def _nvlinks_of_model(name: str) -> int:
    """Return how many NVLinks a GPU of this name has; 0 if that is not known."""
    return next((count for pattern, count in _NVLINKS if re.search(pattern, name)), 0)


@check("gpu-direct", "Can the network cards access GPU memory?", unless=no_gpu)
def gpu_direct(facts: Facts, expected: Requirements) -> Judgement:
    """Network cards access GPU memory by DMA-BUF, nvidia_peermem or EFA's own driver."""
    if not has_rdma(facts, expected):
        return not_applicable("this host has no RDMA device to access GPU memory, and the profile expects none")
    gpu = facts.gpu
    if not gpu.gpus and not expected.has_gpus:
        return not_applicable("the driver shows this process no GPU, and the profile expects none")
    if not gpu.gpus:
        return failed("this host has no GPU", "follow the remedy of gpus")
    if gpu.dma_buf.value:
        return passed("CUDA exports GPU memory as DMA-BUF")
    if gpu.peermem.value:
        return passed(f"{gpu.peermem.source.rpartition('/')[2]} is loaded")
    if facts.efa and all("NVIDIA" in device.p2p.upper() for device in facts.efa):
        return passed("EFA's driver accesses GPU memory itself (p2p: NVIDIA)")
    remedy = (
        "run `modprobe nvidia_peermem` on the host (for EFA: install an efa driver built with NVIDIA's, see "
        "/sys/class/infiniband/*/device/p2p); or install the driver's open kernel modules on kernel 5.12 or newer, "
        "which support DMA-BUF"
    )
    reason = f"{gpu.peermem.source} does not exist: nvidia_peermem is not loaded"
    if gpu.dma_buf.value is None and gpu.open.value:
        return unknown(f"{reason}, and whether CUDA exports DMA-BUF is unknown: {gpu.dma_buf.why}", remedy)
    cause = (
        "CUDA exports no DMA-BUF" if gpu.dma_buf.value is False else "the driver's kernel modules are not the open ones"
    )
    return failed(f"{reason}, and {cause}: transfers from GPU to network are copied through host memory", remedy)


@check("gdrcopy", "Is GDRCopy usable for small messages?")
def gdrcopy(facts: Facts, expected: Requirements) -> Judgement:
    """GDRCopy is usable for small messages."""
    if not facts.gpu.gpus:
        return _too_few("this host has no GPU", expected=expected.has_gpus)
    variables = facts.software.ucx_variables
    if "UCX" in expected.backends and variables and not any(name.startswith("UCX_GDR_COPY_") for name in variables):
        return not_applicable(
            "this UCX has no gdr_copy, as in NIXL's wheels, or cannot load the libgdrapi.so.2 that it needs: small "
            "messages are copied by cuda_copy, whether or not gdrdrv is loaded"
        )
    if facts.gpu.gdrcopy.value:
        return passed("gdrdrv is loaded, and /dev/gdrdrv exists")
    return warned(
        f"GDRCopy is not usable: {facts.gpu.gdrcopy.why or facts.gpu.gdrcopy.source}",
        "run `modprobe gdrdrv` on the host and give the container /dev/gdrdrv; large transfers do not need it",
    )


@check("gpu-xid", "Is the kernel's log free of GPU errors (Xid) since the host started?", unless=no_gpu)
def gpu_xid(facts: Facts, expected: Requirements) -> Judgement:
    """The kernel's log has no Xid error."""
    xids = facts.gpu.xids
    if xids.value is None:
        return unknown(
            f"{xids.source}: {xids.why}",
            "run this command where the kernel's log can be read, or run `dmesg | grep Xid` on the host",
        )
    documented = [(xid, XIDS[str(xid.number)]) for xid in xids.value if str(xid.number) in XIDS]
    grave = [(xid, error) for xid, error in documented if not error.corrected and not _harmless(xid)]
    if grave:
        listing = named(f"Xid {xid.number} of {xid.pci} ({error.title}{_action(xid)})" for xid, error in grave)
        return failed(f"the driver reported {plural(len(grave), 'error')}: {listing}", grave[-1][1].remedy)
    unnamed = [xid for xid in xids.value if str(xid.number) not in XIDS]
    reasons = []
    if unnamed:
        listing = named(f"Xid {xid.number} of {xid.pci}" for xid in unnamed)
        reasons.append(f"the driver reported {plural(len(unnamed), 'error')} that a program may have caused: {listing}")
    if documented:
        listing = named(f"Xid {xid.number} of {xid.pci} ({error.title}{_action(xid)})" for xid, error in documented)
        reasons.append(f"the driver reported {listing}")
    if reasons:
        remedy = documented[-1][1].remedy if documented else "look the number up in NVIDIA's list of Xid errors"
        return warned("; ".join(reasons), remedy)
    return passed("the kernel's log has no Xid error")


def _harmless(xid: Xid) -> bool:
    """Return whether the driver says of this error of an NVLink, or of this recovery, that nothing need be done."""
    return "Nonfatal" in xid.line or "0x0 (None)" in _action(xid)


def _action(xid: Xid) -> str:
    """Return the recovery that the driver names in an Xid 154, such as ``: 0x1 (GPU Reset Required)``."""
    match = re.search(r"recovery action changed.* to (0x\w+ \(.*\))", xid.line)
    return f": {match[1]}" if match else ""


@check("gpu-ecc", "Is the memory of every GPU free of uncorrectable errors?", unless=no_gpu)
def gpu_ecc(facts: Facts, expected: Requirements) -> Judgement:
    """No GPU has an uncorrectable memory error."""
    counts = {gpu.index: gpu.uncorrected for gpu in facts.gpu.gpus if gpu.uncorrected is not None}
    if not counts:
        if any(gpu.ecc is False for gpu in facts.gpu.gpus):
            return not_applicable("ECC is disabled")
        return unknown("no GPU reports memory errors", unreported(facts))
    bad = [f"GPU {index} has {count}" for index, count in counts.items() if count]
    if bad:
        return failed(f"uncorrectable memory errors: {named(bad)}", "reset the GPU, or replace the node")
    broken = [f"GPU {gpu.index} ({gpu.pci})" for gpu in facts.gpu.gpus if gpu.state.remap_failed]
    if broken:
        return failed(f"a row of the memory of {named(broken)} could not be replaced", "replace the node")
    pending = [gpu for gpu in facts.gpu.gpus if gpu.state.remap_pending]
    if pending:
        names = named(f"GPU {gpu.index} ({gpu.pci})" for gpu in pending)
        return warned(
            f"rows of the memory of {names} are replaced at the next reset",
            f"reset it while no program uses it: `nvidia-smi --gpu-reset -i {','.join(gpu.pci for gpu in pending)}`",
        )
    return passed(f"{plural(len(counts), 'GPU')} without uncorrectable memory errors")


@check("gpu-bar1", "Does every GPU's BAR1 cover its memory?", unless=no_gpu)
def gpu_bar1(facts: Facts, expected: Requirements) -> Judgement:
    """BAR1 of every GPU covers its memory."""
    measured = [gpu for gpu in facts.gpu.gpus if gpu.bar1 is not None and gpu.memory is not None]
    if not measured:
        return unknown("no GPU reports the size of its BAR1", unreported(facts))
    small = [gpu for gpu in measured if (gpu.bar1 or 0) < (gpu.memory or 0) // 2]
    if small:
        listing = named(f"GPU {gpu.index}: {amount(gpu.bar1 or 0)} of {amount(gpu.memory or 0)}" for gpu in small)
        return warned(
            f"BAR1 covers only a part of the memory: {listing}",
            "enable 'above 4G decoding' and 'resizable BAR' in the host's firmware",
        )
    smaller = [gpu for gpu in measured if (gpu.bar1 or 0) < (gpu.memory or 0)]
    if smaller:
        listing = named(f"GPU {gpu.index}: {amount(gpu.bar1 or 0)} of {amount(gpu.memory or 0)}" for gpu in smaller)
        return passed(f"BAR1 covers at least half of the memory: {listing}")
    return passed(f"BAR1 of {plural(len(measured), 'GPU')} is as large as the memory")


@check("gpu-persistence", "Does the driver stay loaded while no process uses a GPU?", unless=no_gpu)
def gpu_persistence(facts: Facts, expected: Requirements) -> Judgement:
    """The driver stays loaded while no process uses a GPU."""
    modes = {gpu.index: gpu.persistence for gpu in facts.gpu.gpus if gpu.persistence is not None}
    if not modes:
        return unknown("no GPU reports its persistence mode", unreported(facts))
    off = [f"GPU {index}" for index, on in modes.items() if not on]
    if off:
        return warned(
            f"persistence mode is off: the driver unloads while no process uses {named(off)}",
            "start nvidia-persistenced on the host",
        )
    return passed("persistence mode is on for every GPU")


@check("gpu-nics", "Does every GPU have as many network cards near it as the profile says?", unless=no_gpu)
def gpu_nics(facts: Facts, expected: Requirements) -> Judgement:
    """Every GPU has as many network cards near it as the profile says."""
    if not has_rdma(facts, expected):
        return not_applicable("this host has no RDMA device to be near a GPU, and the profile expects none")
    if not facts.near or not facts.rdma:
        return unknown("the PCI paths of GPUs and network cards cannot be compared", "run `nvidia-smi topo -m`")
    # Virtual machines show no PCI switches: a card near a GPU has the same PCI root there.
    near_counts = {near.gpu: len(near.devices) if near.how in (SWITCH, ROOT) else 0 for near in facts.near}
    per_gpu = expected.machine.nics_per_gpu if expected.machine is not None else None
    remedy = "run `nvidia-smi topo -m` and give the pod the network cards near its GPUs, or use another profile"
    topology = Topology.of(facts.gpu, facts.rdma)
    cards = {device.name for device in (facts.efa if expected.efa else facts.rdma)}
    all_there = expected.machine is not None and 0 < expected.machine.nics <= len(topology.nics)
    idle = [f"{nic.name} ({nic.node})" for nic in topology.idle() if nic.name in cards]
    if per_gpu is not None:
        fewer = {gpu: count for gpu, count in near_counts.items() if count < per_gpu}
        if fewer:
            listing = named(f"GPU {gpu} has {count}" for gpu, count in fewer.items())
            suffix = f"; near no GPU: {named(idle)}" if idle else ""
            reason = f"fewer network cards near a GPU than the profile's {per_gpu}: {listing}{suffix}"
            return failed(reason, remedy)
    node = {gpu.name: gpu.node for gpu in topology.gpus}
    far = [f"GPU {near.gpu} ({node[str(near.gpu)]})" for near in facts.near if near.how == FAR]
    if far and all_there:
        # This kind of machine has no nearer card that could be given to the pod.
        few = plural(len(topology.nics), "network card")
        return passed(
            f"all of this machine's {few} are present; {named(far)} can reach them only through another processor: "
            f"{named(nic.name for nic in topology.nics)}"
        )
    if far:
        if len(topology.nics) == 1:
            remedy = (
                "run `nvidia-smi topo -m`; give the pod GPUs at the processor of that card, or a card near these GPUs "
                "if the host has one"
            )
        return warned(f"{named(far)} can reach every network card only through another processor", remedy)
    unplaced = [f"GPU {near.gpu}" for near in facts.near if near.how == UNPLACED]
    if unplaced:
        return warned(
            f"the distance of {named(unplaced)} from the network cards is unknown: the firmware does not say at which "
            "processor each is",
            "run `nvidia-smi topo -m`; in a virtual machine, use an image or instance type that shows its NUMA nodes",
        )
    apart = [f"GPU {near.gpu}" for near in facts.near if near.how == NODE]
    if apart:
        return passed(f"the network cards nearest to {named(apart)} are at the same processor, on another PCI root")
    return passed(f"{plural(mode(near_counts.values()), 'network card')} near each GPU")
