# SPDX-License-Identifier: Apache-2.0
"""GPUs: all there, healthy, and reached by each other and by the network cards."""

from __future__ import annotations

from collections import Counter

from pytest_nixl.checks.doctor.check import (
    NO_GPU,
    Requirements,
    check,
    failed,
    has_gpu,
    has_rdma,
    named,
    not_applicable,
    passed,
    plural,
    unknown,
    warned,
)
from pytest_nixl.checks.doctor.limits import amount
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.gpu_nic_affinity import FAR, NODE, ROOT, SWITCH, Topology
from pytest_nixl.model.verdicts import Judgement

_NVML = (
    "pip install nvidia-ml-py beside pytest-nixl, and give the container NVML "
    "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
)
_NONE_SEEN = "no GPU is seen that could be asked"

#: What NVIDIA's documentation says to do about errors that a program cannot have made itself.
_XIDS = {
    48: ("double-bit ECC error", "reset the GPU or reboot the node"),
    63: ("a page or a row of memory was retired or remapped", "reset the GPU when it is idle"),
    64: ("a page or a row of memory could not be retired or remapped", "exchange the node"),
    74: ("NVLink error", "reset the GPUs; exchange the node where it comes again"),
    79: ("the GPU has fallen off the bus", "reboot the node; exchange it where it comes again"),
    92: ("many corrected ECC errors", "exchange the node"),
    94: ("contained ECC error", "restart the program; reset the GPU"),
    95: ("uncontained ECC error", "reset the GPU, or reboot the node"),
    119: ("the GPU's system processor does not answer", "reset the GPU, or reboot the node"),
    120: ("the GPU's system processor failed", "reset the GPU, or reboot the node"),
    140: ("unrecovered ECC error", "reset the GPU; exchange the node where it comes again"),
    145: ("NVLink error", "reset the GPUs; exchange the node where it comes again"),
}


@check("gpus", "Are there as many GPUs, and of the model, as the profile says?")
def gpus(facts: Facts, wanted: Requirements) -> Judgement:
    """Those that the driver has, beside those that hang on the bus."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    here = facts.gpu.gpus
    bus = [device for device in facts.pci if device.kind == "gpu"]
    models = Counter(gpu.name or "of unknown model" for gpu in here)
    told = ", ".join(f"{count} {name}" for name, count in models.items()) or "none"
    lost = sorted({device.address for device in bus} - {gpu.pci for gpu in here})
    if bus and facts.gpu.driver.value is None:
        return failed(
            f"{plural(len(bus), 'GPU')} on the PCI bus, and no NVIDIA driver is loaded",
            "install the driver on the host",
        )
    if wanted.gpus and len(here) != wanted.gpus:
        hanging = f"; on the bus and not with the driver: {named(lost)}" if lost and len(bus) == wanted.gpus else ""
        remedy = (
            "give the container all of them (nvidia.com/gpu, --gpus all); see `nvidia-smi` and `dmesg` of the host: "
            "a GPU that fell off the bus comes back with a reboot; or exchange the node"
        )
        return failed(
            f"{plural(len(here), 'GPU')} of the {wanted.gpus} that the profile says ({told}){hanging}", remedy
        )
    model = wanted.machine.gpu if wanted.machine is not None and wanted.gpus else ""
    others = [gpu.name for gpu in here if gpu.name and model.lower() not in gpu.name.lower()]
    if model and others:
        return failed(
            f"{plural(len(others), 'GPU')} no {model}, which the profile says: {named(dict.fromkeys(others))}",
            "take the profile of this kind of machine",
        )
    if model and not all(gpu.name for gpu in here):
        return unknown(f"{plural(len(here), 'GPU')}, and not of each is the model known that the profile says", _NVML)
    return passed(told)


@check("gpu-driver", "Does the GPUs' driver suit the container and NIXL's build?")
def gpu_driver(facts: Facts, wanted: Requirements) -> Judgement:
    """The container's NVML and CUDA are of the kernel's driver, and new enough for NIXL's CUDA."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    driver, library, cuda = facts.gpu.driver, facts.gpu.library, facts.gpu.cuda
    if driver.value is None:
        return failed(f"no NVIDIA driver is loaded ({driver.source})", "install the driver on the host")
    if "mismatch" in library.why.lower():
        return failed(
            f"the kernel's driver is {driver.value}, and the container's libraries are of another: {library.why}",
            "start the container again, or reboot the host: the driver was updated under it",
        )
    if library.value and library.value != driver.value:
        return failed(
            f"the kernel's driver is {driver.value}, and the container's libraries are of {library.value}",
            "start the container again: the driver was updated under it; remove libcuda from the image",
        )
    package = facts.software.nixl_package.value or ""
    wants = int(package[-2:]) if package[-4:-2] == "cu" and package[-2:].isdecimal() else None
    if cuda.value is None:
        return unknown(f"the driver is {driver.value}, and which CUDA it knows is not known: {cuda.why}", _NVML)
    if wants is not None and int(cuda.value.split(".")[0]) < wants:
        return failed(
            f"the driver {driver.value} knows CUDA up to {cuda.value}, and {package} is built for CUDA {wants}",
            f"install nixl-cu{cuda.value.split('.')[0]}, or a newer driver on the host",
        )
    return passed(f"driver {driver.value}, CUDA up to {cuda.value}")


@check("gpu-p2p", "Can every GPU read every other's memory?")
def gpu_p2p(facts: Facts, wanted: Requirements) -> Judgement:
    """Without it, what goes from GPU to GPU of one host is copied through host memory."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    if len(facts.gpu.gpus) < 2:
        return not_applicable("there are no two GPUs here")
    pairs = facts.gpu.pairs
    if pairs.value is None:
        return unknown(f"which GPUs reach each other is not known: {pairs.why}", _NVML)
    bad = [pair for pair in pairs.value if pair.status != "ok"]
    if bad and len(bad) == len(pairs.value) and len({pair.status for pair in bad}) == 1:
        return not_applicable(f"GPUs of this kind do not reach each other: {bad[0].status}")
    if bad:
        told = named(f"GPU {pair.one} of GPU {pair.other} ({pair.status})" for pair in bad)
        return failed(
            f"{plural(len(bad), 'pair')} of {len(pairs.value)} cannot read the other's memory: {told}",
            "switch off ACS and the IOMMU in the host's firmware and kernel, and look at `nvidia-smi topo -p2p r`; "
            "in a virtual machine ask for an instance that has the GPUs whole",
        )
    return passed(f"all {len(pairs.value)} pairs of {len(facts.gpu.gpus)} GPUs")


@check("gpu-nvlink", "Has every GPU as many NVLinks up as the others?")
def gpu_nvlink(facts: Facts, wanted: Requirements) -> Judgement:
    """One link less is a fraction of the bandwidth less, and no error."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    links = {gpu.index: gpu.nvlinks for gpu in facts.gpu.gpus if gpu.nvlinks is not None}
    if not links:
        return not_applicable("no GPU here tells of NVLinks")
    most = max(links.values())
    fewer = [f"GPU {index} has {count}" for index, count in links.items() if count < most]
    if fewer:
        return failed(
            f"{plural(len(fewer), 'GPU')} with fewer NVLinks up than the {most} of the others: {named(fewer)}",
            "look at `nvidia-smi nvlink -s` and the fabric manager; reset the GPUs, or exchange the node",
        )
    return passed(f"{most} NVLinks are up of each GPU")


@check("gpu-direct", "Can the network cards reach the GPUs' memory?")
def gpu_direct(facts: Facts, wanted: Requirements) -> Judgement:
    """By DMA-BUF, by nvidia_peermem, or, for EFA, by what its driver has of its own."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    if not has_rdma(facts, wanted):
        return not_applicable("there is no RDMA device here that could reach a GPU, and the profile names none")
    gpu = facts.gpu
    if not gpu.gpus:
        return failed("there is no GPU whose memory could be reached", "see gpus")
    if gpu.dma_buf.value:
        return passed("CUDA exports its memory as DMA-BUF")
    if gpu.peermem.value:
        return passed(f"{gpu.peermem.source.rpartition('/')[2]} is loaded")
    if facts.efa and all("NVIDIA" in device.p2p.upper() for device in facts.efa):
        return passed("EFA's driver reaches them itself (p2p: NVIDIA)")
    remedy = (
        "modprobe nvidia_peermem on the host (for EFA: the efa driver built with NVIDIA's, see "
        "/sys/class/infiniband/*/device/p2p); or the driver's open kernel modules with a "
        "kernel from 5.12 on, which have DMA-BUF"
    )
    reason = f"{gpu.peermem.source} is not there: nvidia_peermem is not loaded"
    if gpu.dma_buf.value is None and gpu.open.value:
        return unknown(f"{reason}, and whether CUDA exports DMA-BUF is not known: {gpu.dma_buf.why}", remedy)
    why = (
        "CUDA exports no DMA-BUF" if gpu.dma_buf.value is False else "the driver's kernel modules are not the open ones"
    )
    return failed(f"{reason}, and {why}: bytes from GPU to network go through host memory", remedy)


@check("gdrcopy", "Is GDRCopy there, for small messages?")
def gdrcopy(facts: Facts, wanted: Requirements) -> Judgement:
    """UCX copies small messages to GPUs by it, and slower without."""
    if not facts.gpu.gpus:
        return not_applicable("there is no GPU here")
    if facts.gpu.gdrcopy.value:
        return passed("gdrdrv is loaded, and /dev/gdrdrv is there")
    return warned(
        f"GDRCopy is not usable: {facts.gpu.gdrcopy.why or facts.gpu.gdrcopy.source}",
        "load gdrdrv on the host and give the container /dev/gdrdrv; large transfers do not need it",
    )


@check("gpu-xid", "Has the driver reported no error of a GPU since the host started?")
def gpu_xid(facts: Facts, wanted: Requirements) -> Judgement:
    """Xid errors of the kernel's log."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    xids = facts.gpu.xids
    if xids.value is None:
        return unknown(
            f"{xids.source}: {xids.why}", "run it where the kernel's log can be read, or look at `dmesg | grep Xid`"
        )
    grave = [xid for xid in xids.value if xid.number in _XIDS]
    if grave:
        told = named(f"Xid {xid.number} of {xid.pci} ({_XIDS[xid.number][0]})" for xid in grave)
        return failed(f"the driver reported {plural(len(grave), 'error')}: {told}", _XIDS[grave[-1].number][1])
    if xids.value:
        told = named(f"Xid {xid.number} of {xid.pci}" for xid in xids.value)
        return warned(
            f"the driver reported {plural(len(xids.value), 'error')} that a program may have made: {told}",
            "look it up in NVIDIA's list of Xid errors",
        )
    return passed("no Xid in the kernel's log")


@check("gpu-ecc", "Has no GPU's memory an error that could not be corrected?")
def gpu_ecc(facts: Facts, wanted: Requirements) -> Judgement:
    """Since each was last reset."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    counts = {gpu.index: gpu.uncorrected for gpu in facts.gpu.gpus if gpu.uncorrected is not None}
    if not counts:
        if any(gpu.ecc is False for gpu in facts.gpu.gpus):
            return not_applicable("ECC is switched off")
        return unknown("no GPU tells of errors of its memory", _NVML)
    bad = [f"GPU {index} has {count}" for index, count in counts.items() if count]
    if bad:
        return failed(
            f"errors of memory that could not be corrected: {named(bad)}", "reset the GPU, or exchange the node"
        )
    return passed(f"none of {plural(len(counts), 'GPU')}")


@check("gpu-bar1", "Can the bus reach all of every GPU's memory?")
def gpu_bar1(facts: Facts, wanted: Requirements) -> Judgement:
    """A network card reaches a GPU's memory through its BAR1, and no more than that at once."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    known = [gpu for gpu in facts.gpu.gpus if gpu.bar1 is not None and gpu.memory is not None]
    if not known:
        return unknown("no GPU tells the size of its BAR1", _NVML)
    small = [gpu for gpu in known if (gpu.bar1 or 0) < (gpu.memory or 0) // 2]
    if small:
        told = named(f"GPU {gpu.index}: {amount(gpu.bar1 or 0)} of {amount(gpu.memory or 0)}" for gpu in small)
        return warned(
            f"the bus reaches a part of the memory only: {told}",
            "switch on 'above 4G decoding' and 'resizable BAR' in the host's firmware",
        )
    return passed(f"BAR1 of {plural(len(known), 'GPU')} is as large as the memory")


@check("gpu-persistence", "Does the driver stay loaded while nobody uses a GPU?")
def gpu_persistence(facts: Facts, wanted: Requirements) -> Judgement:
    """Without it the first use of a GPU takes seconds."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    known = {gpu.index: gpu.persistence for gpu in facts.gpu.gpus if gpu.persistence is not None}
    if not known:
        return unknown("no GPU tells whether the driver stays loaded", _NVML)
    off = [f"GPU {index}" for index, on in known.items() if not on]
    if off:
        return warned(f"the driver is unloaded while nobody uses {named(off)}", "start nvidia-persistenced on the host")
    return passed("persistence mode is on")


@check("gpu-nics", "Has every GPU the network cards beside it that the profile says?")
def gpu_nics(facts: Facts, wanted: Requirements) -> Judgement:
    """A card under another switch, or on another NUMA node, is reached across the processors."""
    if not has_gpu(facts, wanted):
        return not_applicable(NO_GPU)
    if not has_rdma(facts, wanted):
        return not_applicable("there is no RDMA device here that could be beside a GPU, and the profile names none")
    if not facts.near or not facts.rdma:
        return unknown("the PCI paths of GPUs and network cards cannot be compared", "look at `nvidia-smi topo -m`")
    # Virtual machines have no switches: what is beside a GPU hangs on the same root of the bus.
    beside = {near.gpu: len(near.devices) if near.how in (SWITCH, ROOT) else 0 for near in facts.near}
    each = wanted.machine.nics_per_gpu if wanted.machine is not None else None
    remedy = "give the pod the cards beside its GPUs, or take another profile; see `nvidia-smi topo -m`"
    topology = Topology.of(facts.gpu, facts.rdma)
    cards = {device.name for device in (facts.efa if wanted.efa else facts.rdma)}
    all_there = wanted.machine is not None and 0 < wanted.machine.nics <= len(topology.nics)
    idle = [f"{nic.name} ({nic.node})" for nic in topology.idle() if nic.name in cards]
    if each is not None:
        fewer = {gpu: count for gpu, count in beside.items() if count < each}
        if fewer:
            told = named(f"GPU {gpu} has {count}" for gpu, count in fewer.items())
            others = f"; beside no GPU: {named(idle)}" if idle else ""
            reason = f"fewer network cards beside a GPU on the bus than the {each} of the profile: {told}{others}"
            return failed(reason, remedy)
    node = {gpu.name: gpu.node for gpu in topology.gpus}
    far = [f"GPU {near.gpu} ({node[str(near.gpu)]})" for near in facts.near if near.how == FAR]
    if far and all_there:
        # Such a machine has no card there that could be given to the pod.
        few = plural(len(topology.nics), "network card")
        return passed(
            f"the machine has {few}, and all are here: across the processors from {named(far)}: "
            f"{named(nic.name for nic in topology.nics)}"
        )
    if far:
        if len(topology.nics) == 1:
            remedy = (
                "give the pod GPUs at the processor of that card, or a card beside these GPUs if the host has one; see "
                "`nvidia-smi topo -m`"
            )
        return warned(f"every network card is across the processors from {named(far)}", remedy)
    apart = [f"GPU {near.gpu}" for near in facts.near if near.how == NODE]
    if apart:
        return passed(f"the network cards nearest to {named(apart)} hang at the same processor, on another root")
    return passed(f"{plural(Counter(beside.values()).most_common(1)[0][0], 'network card')} beside each GPU on the bus")
