# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs: their number, driver and health, and access from other GPUs and from network cards."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable

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
from pytest_nixl.checks.doctor.libraries import not_loaded
from pytest_nixl.checks.doctor.limits import amount
from pytest_nixl.core.gpu_errors import CUDA_ERRORS, NVML_ERRORS, OTHER_REMEDY, XIDS
from pytest_nixl.core.words import named, plural
from pytest_nixl.host.driver_questions import CUDA, NVML, VISIBLE_DEVICES, silent
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.gpu import NVML_FAILS, GpuFacts, Xid
from pytest_nixl.host.gpu_nic_affinity import FAR, NODE, ROOT, SWITCH, UNPLACED, Topology
from pytest_nixl.host.gpu_state import PROHIBITED
from pytest_nixl.model.nixl_releases import wheel_for
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.backends.cuda_modules import remedy

_FABRIC_REMEDY = "run `nvidia-smi nvlink -s` and `systemctl status nvidia-fabricmanager` on the host"
#: By a pattern of a GPU's name: how many NVLinks it has, from NVIDIA's data sheets. Cards with bridges are not here.
_NVLINKS = (
    (r"\bB200\b|\bH20\b|\bH200$|\bH100 80GB HBM3$", 18),
    (r"\bA100-SXM4\b", 12),
    (r"\bA800-SXM4\b", 8),
)
_GIVE_GPUS = (
    "give the container all GPUs (resource nvidia.com/gpu, `docker run --gpus all`); run `nvidia-smi` and `dmesg` on "
    "the host; reboot the host if a GPU fell off the bus; or replace the node"
)
#: CUDA_ERROR_NO_DEVICE
_NO_DEVICE = 100


def _nvml_remedy(text: str) -> str:
    remedies = (error.remedy for part, error in NVML_ERRORS.items() if part in text)
    return next(remedies, OTHER_REMEDY)


def _unreported(facts: Facts) -> str:
    """Return the remedy for a fact that NVML should report, by why it does not."""
    reason = facts.gpu.library.why
    if "not installed" in reason:
        return "run `pip install nvidia-ml-py` in the environment of pytest-nixl"
    if "not found" in reason:
        return "give the container NVML (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    if reason.startswith(NVML_FAILS):
        return "follow the remedy of gpu-driver"
    return "run `nvidia-smi -q` on the host, which prints what the driver reports of each GPU"


def _too_few(reason: str, *, expected: bool) -> Judgement:
    """Return NOT-APPLICABLE, with a remedy if the profile expects the GPUs that are missing."""
    return Judgement(Verdict.NOT_APPLICABLE, reason, "follow the remedy of gpus" if expected else "")


def _library_fault(facts: Facts) -> Judgement | None:
    """Return that the driver's library cannot be loaded although this process was given the driver's device node."""
    cuda = facts.gpu.cuda_driver
    if not cuda.library or not cuda.node:
        return None
    return failed(
        f"the driver's device node exists, but its library cannot be loaded: {cuda.library}",
        "set NVIDIA_DRIVER_CAPABILITIES=compute,utility, so that the container runtime mounts libcuda.so.1",
    )


def _cuda_fault(facts: Facts) -> Judgement | None:
    """Return why CUDA starts in no process of this host; None if it starts without CUDA_VISIBLE_DEVICES."""
    cuda = facts.gpu.cuda_driver
    if cuda.why.startswith(silent(CUDA)):
        return failed(cuda.why, OTHER_REMEDY)
    code = cuda.init if cuda.without_variable is None else cuda.without_variable
    # A container without GPUs sees the host's /proc/driver/nvidia, and has no device node.
    if not code or (code == _NO_DEVICE and not cuda.node):
        return None
    if code == _NO_DEVICE and facts.gpu.gpus and len(_without_instances(facts)) == len(facts.gpu.gpus):
        return failed("CUDA shows no GPU: all are in MIG mode and have no instance", "follow the remedy of gpus")
    error = CUDA_ERRORS.get(str(code))
    return failed(
        f"CUDA does not start: {error.title if error else f'cuInit returned {code}'}{_explained(facts)}",
        error.remedy if error else OTHER_REMEDY,
    )


def _explained(facts: Facts) -> str:
    """Return a clause with what NVML says of the fabric of the GPUs, if it explains that they do not work together."""
    parts = [f"the registration of GPU {gpu.index} with the fabric {gpu.state.fabric}"
             for gpu in facts.gpu.gpus if gpu.state.fabric]  # fmt: skip
    if facts.gpu.confidential:
        parts.append("confidential computing is on, in which GPUs may not access each other's memory")
    return f"; NVML says: {named(parts)}" if parts else ""


def _without_instances(facts: Facts) -> list[GpuFacts]:
    """Return the GPUs in MIG mode that have no instance, so that no process can use them."""
    return [gpu for gpu in facts.gpu.gpus if gpu.mig and gpu.instances == 0]


def _disable_mig(gpus: Iterable[GpuFacts]) -> str:
    return f"disable MIG mode with `nvidia-smi -i {','.join(gpu.pci or str(gpu.index) for gpu in gpus)} -mig 0`"


def _not_shown(facts: Facts) -> list[GpuFacts]:
    """Return the GPUs that NVML lists, but that CUDA does not show to a process, although no variable hides them."""
    cuda = facts.gpu.cuda_driver
    listed = [gpu for gpu in facts.gpu.gpus if gpu.source == NVML]
    if cuda.init != 0 or VISIBLE_DEVICES in facts.environment.steering or any(gpu.mig for gpu in listed):
        return []
    shown = {device.pci for device in cuda.devices}
    return [gpu for gpu in listed if gpu.pci not in shown]


@check("gpus", "Does this host have the number and model of GPUs that the profile says?", unless=no_gpu)
def gpus(facts: Facts, wanted: Requirements) -> Judgement:
    """The host has the number and model of GPUs that the profile says.

    Judge the GPUs of the driver against the profile and the PCI bus.
    """
    here = facts.gpu.gpus
    bus = [device for device in facts.pci if device.kind == "gpu"]
    models = Counter(gpu.name or "of unknown model" for gpu in here)
    told = ", ".join(f"{count} {name}" for name, count in models.items()) or "none"
    lost = sorted({device.address for device in bus} - {gpu.pci for gpu in here})
    if bus and facts.gpu.driver.value is None:
        return failed(
            f"{plural(len(bus), 'GPU')} on the PCI bus, but no NVIDIA driver is loaded",
            "install the NVIDIA driver on the host",
        )
    broken = [gpu for gpu in facts.gpu.unusable if "Permission" not in gpu.error or not here]
    if broken:
        errors = named(f"GPU {gpu.index} ({gpu.error})" for gpu in broken)
        return failed(
            f"NVML cannot use {len(broken)} of {plural(len(here) + len(facts.gpu.unusable), 'GPU')}: {errors}",
            _nvml_remedy(broken[0].error),
        )
    if wanted.gpus and len(here) != wanted.gpus:
        hanging = f"; on the bus but not in the driver: {named(lost)}" if lost and len(bus) == wanted.gpus else ""
        if facts.gpu.unusable:  # none of them is broken
            hanging += f"; not given to this process: {named(f'GPU {gpu.index}' for gpu in facts.gpu.unusable)}"
        return failed(
            f"{plural(len(here), 'GPU')} instead of the {wanted.gpus} in the profile ({told}){hanging}", _GIVE_GPUS
        )
    if not here and wanted.has_gpus:
        return failed("the driver lists no GPU, and the profile's machine has one", _GIVE_GPUS)
    empty = _without_instances(facts)
    if empty:
        judge = failed if wanted.has_gpus or len(empty) == len(here) else warned
        return judge(
            f"{named(f'GPU {gpu.index} ({gpu.pci})' for gpu in empty)} in MIG mode without an instance: no process can "
            "use it",
            f"create instances with `nvidia-smi mig -i {','.join(str(gpu.index) for gpu in empty)} -cgi 0 -C`, or "
            f"{_disable_mig(empty)}",
        )
    absent = _not_shown(facts)
    if absent:
        names = named(f"GPU {gpu.index} ({', '.join(filter(None, (gpu.pci, gpu.uuid)))})" for gpu in absent)
        judge = failed if wanted.has_gpus else warned
        return judge(
            f"CUDA shows {len(here) - len(absent)} of the {plural(len(here), 'GPU')} that NVML lists, without {names}",
            "run `nvidia-smi` and `dmesg` on the host; give the container the device node of every GPU, such as "
            "/dev/nvidia0; reset the GPU, or reboot the host",
        )
    machine = wanted.machine
    model = machine.gpu if machine is not None else ""
    others = [gpu.name for gpu in here if machine is not None and gpu.name and not machine.is_model(gpu.name)]
    if model and others:
        return failed(
            f"{plural(len(others), 'GPU')} not of the profile's model {model}: {named(dict.fromkeys(others))}",
            "use the profile of this kind of machine (--nixl-profile)",
        )
    if model and not all(gpu.name for gpu in here):
        return unknown(
            f"{plural(len(here), 'GPU')}; the model of at least one is unknown, and the profile says {model}",
            _unreported(facts),
        )
    prohibited = [gpu for gpu in here if gpu.state.compute_mode == PROHIBITED]
    if prohibited:
        return failed(
            f"the compute mode of {named(f'GPU {gpu.index} ({gpu.pci})' for gpu in prohibited)} lets no process use it",
            f"run `nvidia-smi -i {','.join(gpu.pci for gpu in prohibited)} -c 0` on the host",
        )
    parts = [gpu for gpu in here if gpu.mig]
    if parts:
        names = named(f"GPU {gpu.index}" for gpu in parts)
        return warned(
            f"{told}; in MIG mode: {names}: CUDA gives a process one part of such a GPU, and two parts have "
            "neither cuda_ipc nor peer-to-peer access between them",
            f"if GPUs of this host exchange data, {_disable_mig(parts)}",
        )
    exclusive = [gpu for gpu in here if gpu.state.compute_mode]
    if exclusive and not (facts.gpu.mps or facts.environment.get("CUDA_MPS_PIPE_DIRECTORY")):
        return warned(
            f"{told}; the compute mode of {named(f'GPU {gpu.index} ({gpu.pci})' for gpu in exclusive)} lets only one "
            "process use it, and MPS does not run: transfers within one GPU need two",
            f"run `nvidia-smi -i {','.join(gpu.pci for gpu in exclusive)} -c 0` on the host, or start MPS with "
            "`nvidia-cuda-mps-control -d`",
        )
    slowed = [gpu for gpu in here if gpu.state.slowed]
    if slowed:
        names = named(f"GPU {gpu.index} ({gpu.pci}): {', '.join(gpu.state.slowed)}" for gpu in slowed)
        return warned(
            f"{told}; the clocks are slow now: {names}",
            f"check cooling and power: `nvidia-smi -i {','.join(gpu.pci for gpu in slowed)} -q -d PERFORMANCE`",
        )
    cuda, visible = facts.gpu.cuda_driver, facts.environment.values.get(VISIBLE_DEVICES)
    if visible is not None and cuda.init == 0 and len(cuda.devices) < wanted.gpus:
        told += f"; {VISIBLE_DEVICES}={visible} shows {len(cuda.devices)} of them to this process"
    return passed(told)


@check("gpu-driver", "Does the GPU driver match the container's libraries and NIXL's CUDA version?", unless=no_gpu)
def gpu_driver(facts: Facts, wanted: Requirements) -> Judgement:
    """The driver has the same version as its libraries, and is new enough for NIXL's CUDA version.

    Judge whether the container's NVML and CUDA match the kernel's driver, and suffice for NIXL's CUDA version.
    """
    driver, library, cuda = facts.gpu.driver, facts.gpu.library, facts.gpu.cuda
    if driver.value is None:
        return failed(f"no NVIDIA driver is loaded ({driver.source})", "install the NVIDIA driver on the host")
    if "mismatch" in library.why.lower():
        return failed(
            f"the kernel's driver is {driver.value}, but the container's libraries have another version: {library.why}",
            _nvml_remedy(library.why),
        )
    if library.why.startswith(NVML_FAILS):
        return failed(f"driver {driver.value} is loaded, but {library.why}", _nvml_remedy(library.why))
    if library.value and library.value != driver.value:
        return failed(
            f"the kernel's driver is {driver.value}, but the container's libraries are {library.value}",
            "restart the container, because the driver was updated while it ran; remove libcuda from the image",
        )
    fault = _library_fault(facts) or _cuda_fault(facts)
    if fault is not None:
        return fault
    package = facts.software.nixl_package.value or ""
    wants = int(package[-2:]) if package[-4:-2] == "cu" and package[-2:].isdecimal() else None
    if cuda.value is None:
        return unknown(
            f"the driver is {driver.value}; which CUDA versions it supports is unknown: {cuda.why}", _unreported(facts)
        )
    wheel = wheel_for(int(cuda.value.split(".")[0]))
    if wants is not None and int(cuda.value.split(".")[0]) < wants:
        return failed(
            f"driver {driver.value} supports CUDA up to {cuda.value}, but {package} is built for CUDA {wants}",
            " or ".join(filter(None, ("install a newer driver on the host", wheel and f"install {wheel}"))),
        )
    return passed(f"driver {driver.value}, CUDA up to {cuda.value}")


@check("ucx-cuda", "Does UCX find the libraries that its CUDA modules need?", unless=no_gpu)
def ucx_cuda(facts: Facts, wanted: Requirements) -> Judgement:
    """UCX finds every library that its CUDA modules need.

    Judge the libraries of UCX's CUDA modules. Without them, UCX takes GPU memory for host memory.
    """
    if "UCX" not in wanted.backends:
        return not_applicable("UCX is not requested")
    absent = not_loaded(facts, wanted)
    if absent is not None:
        return absent
    fault = _library_fault(facts)
    if fault is not None:
        return fault
    found = facts.software.backend("UCX")
    if found is None or not found.plugin:
        return unknown("the libraries of UCX were not examined", "follow the remedy of backend-loads")
    if found.cuda_lacks:
        return failed(f"{found.cuda_lacks}; UCX takes GPU memory for host memory", remedy(found.cuda_lacks))
    if found.cuda_runtime:
        return passed(
            f"workers load {found.cuda_runtime}, which the loader does not find: a program that does not import torch "
            f"needs {os.path.dirname(found.cuda_runtime)} in LD_LIBRARY_PATH"
        )
    return passed("UCX's CUDA modules find all libraries that they need")


@check("gpu-p2p", "Can every GPU read every other's memory?", unless=no_gpu)
def gpu_p2p(facts: Facts, wanted: Requirements) -> Judgement:
    """Every GPU can read every other's memory.

    Judge peer-to-peer access. Without it, transfers between GPUs of one host are copied through host memory.
    """
    if len(facts.gpu.gpus) < 2:
        return _too_few("this host has fewer than two GPUs", expected=wanted.gpus > 1)
    pairs = facts.gpu.pairs
    if pairs.value is None:
        return unknown(f"whether GPUs can read each other's memory is unknown: {pairs.why}", _unreported(facts))
    bad = [pair for pair in pairs.value if pair.status != "ok"]
    parts = {gpu.index: gpu for gpu in facts.gpu.gpus if gpu.mig}
    if bad and all(pair.one in parts or pair.other in parts for pair in bad):
        listing = named(f"GPU {index}" for index in sorted(parts))
        return warned(
            f"in {len(bad)} of {plural(len(pairs.value), 'pair')} one GPU cannot read the other's memory, because of "
            f"MIG mode: {listing}",
            f"{_disable_mig(parts.values())}, if these GPUs exchange data",
        )
    linked = any(gpu.nvlinks for gpu in facts.gpu.gpus)
    if bad and not linked and len(bad) == len(pairs.value) and len({pair.status for pair in bad}) == 1:
        return not_applicable(f"no GPU of this host can read another's memory: {bad[0].status}")
    if bad:
        listing = named(f"GPU {pair.one} that of GPU {pair.other} ({pair.status})" for pair in bad)
        return failed(
            f"in {len(bad)} of {plural(len(pairs.value), 'pair')} one GPU cannot read the other's memory: {listing}"
            f"{_explained(facts)}",
            f"{_FABRIC_REMEDY}; reset the GPUs"
            if linked and len(bad) == len(pairs.value)
            else "disable ACS and the IOMMU in the host's firmware and kernel, and run `nvidia-smi topo -p2p r`; "
            "in a virtual machine, use an instance type with whole GPUs",
        )
    return passed(f"all {len(pairs.value)} pairs of {len(facts.gpu.gpus)} GPUs can read each other's memory")


@check("gpu-nvlink", "Does every GPU have the same number of active NVLinks?", unless=no_gpu)
def gpu_nvlink(facts: Facts, wanted: Requirements) -> Judgement:
    """Every GPU has the same number of active NVLinks.

    Compare the GPUs' active NVLinks. A missing NVLink reduces bandwidth and raises no error.
    """
    links = {gpu.index: gpu.nvlinks for gpu in facts.gpu.gpus if gpu.nvlinks is not None}
    if not links:
        return _too_few("no GPU of this host reports NVLinks", expected=wanted.has_gpus and not facts.gpu.gpus)
    most = max(links.values())
    fewer = [f"GPU {index} has {count}" for index, count in links.items() if count < most]
    if fewer:
        return failed(
            f"{plural(len(fewer), 'GPU')} with fewer active NVLinks than the {most} of the others: {named(fewer)}"
            f"{_explained(facts)}",
            f"{_FABRIC_REMEDY}; reset the GPUs, or replace the node",
        )
    # One GPU alone, as in a virtual machine that has no other, may have none.
    full = {gpu.index: _nvlinks_of_model(gpu.name) for gpu in facts.gpu.gpus}
    lacking = [f"GPU {index} has {count} of {full[index]}" for index, count in links.items() if count < full[index]]
    if len(links) > 1 and lacking:
        judge = failed if wanted.has_gpus else warned
        return judge(
            f"{plural(len(lacking), 'GPU')} with fewer active NVLinks than the model has: {named(lacking)}"
            f"{_explained(facts)}",
            f"{_FABRIC_REMEDY}; reset the GPUs, or replace the node",
        )
    return passed(f"each GPU has {most} active NVLinks")


def _nvlinks_of_model(name: str) -> int:
    """Return how many NVLinks a GPU of this name has; 0 if that is not known."""
    return next((count for pattern, count in _NVLINKS if re.search(pattern, name)), 0)


@check("gpu-direct", "Can the network cards access GPU memory?", unless=no_gpu)
def gpu_direct(facts: Facts, wanted: Requirements) -> Judgement:
    """Network cards access GPU memory by DMA-BUF, nvidia_peermem or EFA's own driver.

    Judge whether DMA-BUF, nvidia_peermem or EFA's own driver gives network cards access to GPU memory.
    """
    if not has_rdma(facts, wanted):
        return not_applicable("this host has no RDMA device to access GPU memory, and the profile expects none")
    gpu = facts.gpu
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
def gdrcopy(facts: Facts, wanted: Requirements) -> Judgement:
    """GDRCopy is usable for small messages.

    Judge GDRCopy, which a UCX that is built with it uses to copy small messages to GPUs faster.
    """
    if not facts.gpu.gpus:
        return _too_few("this host has no GPU", expected=wanted.has_gpus)
    variables = facts.software.ucx_variables
    if "UCX" in wanted.backends and variables and not any(name.startswith("UCX_GDR_COPY_") for name in variables):
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
def gpu_xid(facts: Facts, wanted: Requirements) -> Judgement:
    """The kernel's log has no Xid error.

    Judge the Xid errors in the kernel's log.
    """
    xids = facts.gpu.xids
    if xids.value is None:
        return unknown(
            f"{xids.source}: {xids.why}",
            "run this command where the kernel's log can be read, or run `dmesg | grep Xid` on the host",
        )
    known = [(xid, XIDS[str(xid.number)]) for xid in xids.value if str(xid.number) in XIDS]
    grave = [(xid, error) for xid, error in known if not error.corrected and not _harmless(xid)]
    if grave:
        listing = named(f"Xid {xid.number} of {xid.pci} ({error.title}{_action(xid)})" for xid, error in grave)
        return failed(f"the driver reported {plural(len(grave), 'error')}: {listing}", grave[-1][1].remedy)
    others = [xid for xid in xids.value if str(xid.number) not in XIDS]
    reasons = []
    if others:
        listing = named(f"Xid {xid.number} of {xid.pci}" for xid in others)
        reasons.append(f"the driver reported {plural(len(others), 'error')} that a program may have caused: {listing}")
    if known:
        listing = named(f"Xid {xid.number} of {xid.pci} ({error.title}{_action(xid)})" for xid, error in known)
        reasons.append(f"the driver reported {listing}")
    if reasons:
        remedy = known[-1][1].remedy if known else "look the number up in NVIDIA's list of Xid errors"
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
def gpu_ecc(facts: Facts, wanted: Requirements) -> Judgement:
    """No GPU has an uncorrectable memory error.

    Judge the uncorrectable ECC errors since each GPU's last reset.
    """
    counts = {gpu.index: gpu.uncorrected for gpu in facts.gpu.gpus if gpu.uncorrected is not None}
    if not counts:
        if any(gpu.ecc is False for gpu in facts.gpu.gpus):
            return not_applicable("ECC is disabled")
        return unknown("no GPU reports memory errors", _unreported(facts))
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
def gpu_bar1(facts: Facts, wanted: Requirements) -> Judgement:
    """BAR1 of every GPU covers its memory.

    Judge the size of BAR1, the window through which a network card accesses a GPU's memory.
    """
    known = [gpu for gpu in facts.gpu.gpus if gpu.bar1 is not None and gpu.memory is not None]
    if not known:
        return unknown("no GPU reports the size of its BAR1", _unreported(facts))
    small = [gpu for gpu in known if (gpu.bar1 or 0) < (gpu.memory or 0) // 2]
    if small:
        listing = named(f"GPU {gpu.index}: {amount(gpu.bar1 or 0)} of {amount(gpu.memory or 0)}" for gpu in small)
        return warned(
            f"BAR1 covers only a part of the memory: {listing}",
            "enable 'above 4G decoding' and 'resizable BAR' in the host's firmware",
        )
    smaller = [gpu for gpu in known if (gpu.bar1 or 0) < (gpu.memory or 0)]
    if smaller:
        listing = named(f"GPU {gpu.index}: {amount(gpu.bar1 or 0)} of {amount(gpu.memory or 0)}" for gpu in smaller)
        return passed(f"BAR1 covers at least half of the memory: {listing}")
    return passed(f"BAR1 of {plural(len(known), 'GPU')} is as large as the memory")


@check("gpu-persistence", "Does the driver stay loaded while no process uses a GPU?", unless=no_gpu)
def gpu_persistence(facts: Facts, wanted: Requirements) -> Judgement:
    """The driver stays loaded while no process uses a GPU.

    Judge persistence mode. Without it, the first use of a GPU takes seconds.
    """
    known = {gpu.index: gpu.persistence for gpu in facts.gpu.gpus if gpu.persistence is not None}
    if not known:
        return unknown("no GPU reports its persistence mode", _unreported(facts))
    off = [f"GPU {index}" for index, on in known.items() if not on]
    if off:
        return warned(
            f"persistence mode is off: the driver unloads while no process uses {named(off)}",
            "start nvidia-persistenced on the host",
        )
    return passed("persistence mode is on for every GPU")


@check("gpu-nics", "Does every GPU have as many network cards near it as the profile says?", unless=no_gpu)
def gpu_nics(facts: Facts, wanted: Requirements) -> Judgement:
    """Every GPU has as many network cards near it as the profile says.

    Judge the positions on the PCI bus. Traffic to a card on another NUMA node passes through both processors.
    """
    if not has_rdma(facts, wanted):
        return not_applicable("this host has no RDMA device to be near a GPU, and the profile expects none")
    if not facts.near or not facts.rdma:
        return unknown("the PCI paths of GPUs and network cards cannot be compared", "run `nvidia-smi topo -m`")
    # Virtual machines show no PCI switches: a card near a GPU has the same PCI root there.
    beside = {near.gpu: len(near.devices) if near.how in (SWITCH, ROOT) else 0 for near in facts.near}
    each = wanted.machine.nics_per_gpu if wanted.machine is not None else None
    remedy = "run `nvidia-smi topo -m` and give the pod the network cards near its GPUs, or use another profile"
    topology = Topology.of(facts.gpu, facts.rdma)
    cards = {device.name for device in (facts.efa if wanted.efa else facts.rdma)}
    all_there = wanted.machine is not None and 0 < wanted.machine.nics <= len(topology.nics)
    idle = [f"{nic.name} ({nic.node})" for nic in topology.idle() if nic.name in cards]
    if each is not None:
        fewer = {gpu: count for gpu, count in beside.items() if count < each}
        if fewer:
            listing = named(f"GPU {gpu} has {count}" for gpu, count in fewer.items())
            suffix = f"; near no GPU: {named(idle)}" if idle else ""
            reason = f"fewer network cards near a GPU than the profile's {each}: {listing}{suffix}"
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
            f"how far {named(unplaced)} are from the network cards is unknown: the firmware does not say at which "
            "processor they are",
            "run `nvidia-smi topo -m`; in a virtual machine, use an image or instance type that shows its NUMA nodes",
        )
    apart = [f"GPU {near.gpu}" for near in facts.near if near.how == NODE]
    if apart:
        return passed(f"the network cards nearest to {named(apart)} are at the same processor, on another PCI root")
    return passed(f"{plural(Counter(beside.values()).most_common(1)[0][0], 'network card')} near each GPU")
