# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs: their number, model, mode and driver, and the libraries of UCX for them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    no_gpu,
    not_applicable,
    passed,
    unknown,
    warned,
)
from pytest_nixl.checks.doctor.libraries import not_loaded
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.texts import CUDA_ERRORS, NVML_ERRORS, OTHER_REMEDY
from pytest_nixl.host.driver_questions import CUDA, NVML, VISIBLE_DEVICES, silent
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.gpu import GpuFacts
from pytest_nixl.host.nvml import NVML_FAILS, PROHIBITED
from pytest_nixl.model.nixl_releases import wheel_for
from pytest_nixl.model.verdicts import Judgement
from pytest_nixl.nixl.backends.libraries import remedy

_GIVE_GPUS = (
    "give the container all GPUs (resource nvidia.com/gpu, `docker run --gpus all`); run `nvidia-smi` and `dmesg` on "
    "the host; reboot the host if a GPU fell off the bus; or replace the node"
)
#: CUDA_ERROR_NO_DEVICE
_NO_DEVICE = 100


def _nvml_remedy(text: str) -> str:
    remedies = (error.remedy for part, error in NVML_ERRORS.items() if part in text)
    return next(remedies, OTHER_REMEDY)


def unreported(facts: Facts) -> str:
    """Return the remedy for a fact that NVML should report, by why it does not."""
    reason = facts.gpu.library.why
    if "not installed" in reason:
        return "run `pip install nvidia-ml-py` in the environment of pytest-nixl"
    if "not found" in reason:
        return "give the container NVML (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    if reason.startswith(NVML_FAILS):
        return "follow the remedy of gpu-driver"
    return "run `nvidia-smi -q` on the host, which prints what the driver reports of each GPU"


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
        f"CUDA does not start: {error.title if error else f'cuInit returned {code}'}{explained(facts)}",
        error.remedy if error else OTHER_REMEDY,
    )


def explained(facts: Facts) -> str:
    """Return a clause with what NVML says of the fabric of the GPUs, if it explains that they do not work together."""
    parts = [
        f"the registration of GPU {gpu.index} with the fabric {gpu.state.fabric}"
        for gpu in facts.gpu.gpus
        if gpu.state.fabric
    ]
    if facts.gpu.confidential:
        parts.append("confidential computing is on, in which GPUs may not access each other's memory")
    return f"; NVML says: {named(parts)}" if parts else ""


def _without_instances(facts: Facts) -> list[GpuFacts]:
    """Return the GPUs in MIG mode that have no instance, so that no process can use them."""
    return [gpu for gpu in facts.gpu.gpus if gpu.mig and gpu.instances == 0]


def disable_mig(gpus: Iterable[GpuFacts]) -> str:
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
def gpus(facts: Facts, expected: Requirements) -> Judgement:
    """The host has the number and model of GPUs that the profile says."""
    listed = facts.gpu.gpus
    bus = [device for device in facts.pci if device.kind == "gpu"]
    models = Counter(gpu.name or "of unknown model" for gpu in listed)
    listing = ", ".join(f"{count} {name}" for name, count in models.items()) or "none"
    lost = sorted({device.address for device in bus} - {gpu.pci for gpu in listed})
    if bus and facts.gpu.driver.value is None:
        return failed(
            f"{plural(len(bus), 'GPU')} on the PCI bus, but no NVIDIA driver is loaded",
            "install the NVIDIA driver on the host",
        )
    broken = [gpu for gpu in facts.gpu.unusable if "Permission" not in gpu.error or not listed]
    if broken:
        errors = named(f"GPU {gpu.index} ({gpu.error})" for gpu in broken)
        return failed(
            f"NVML cannot use {len(broken)} of {plural(len(listed) + len(facts.gpu.unusable), 'GPU')}: {errors}",
            _nvml_remedy(broken[0].error),
        )
    if expected.gpus and len(listed) != expected.gpus:
        hanging = f"; on the bus but not in the driver: {named(lost)}" if lost and len(bus) == expected.gpus else ""
        if facts.gpu.unusable:  # none of them is broken
            hanging += f"; not given to this process: {named(f'GPU {gpu.index}' for gpu in facts.gpu.unusable)}"
        return failed(
            f"{plural(len(listed), 'GPU')} instead of the {expected.gpus} in the profile ({listing}){hanging}",
            _GIVE_GPUS,
        )
    if not listed and expected.has_gpus:
        return failed("the driver lists no GPU, and the profile's machine has one", _GIVE_GPUS)
    empty = _without_instances(facts)
    if empty:
        judge = failed if expected.has_gpus or len(empty) == len(listed) else warned
        return judge(
            f"{named(f'GPU {gpu.index} ({gpu.pci})' for gpu in empty)} in MIG mode without an instance: no process can "
            "use it",
            f"create instances with `nvidia-smi mig -i {','.join(str(gpu.index) for gpu in empty)} -cgi 0 -C`, or "
            f"{disable_mig(empty)}",
        )
    absent = _not_shown(facts)
    if absent:
        names = named(f"GPU {gpu.index} ({', '.join(filter(None, (gpu.pci, gpu.uuid)))})" for gpu in absent)
        judge = failed if expected.has_gpus else warned
        return judge(
            f"CUDA shows {len(listed) - len(absent)} of the {plural(len(listed), 'GPU')} that NVML lists, "
            f"without {names}",
            "run `nvidia-smi` and `dmesg` on the host; give the container the device node of every GPU, such as "
            "/dev/nvidia0; reset the GPU, or reboot the host",
        )
    machine = expected.machine
    model = machine.gpu if machine is not None else ""
    strangers = [gpu.name for gpu in listed if machine is not None and gpu.name and not machine.is_model(gpu.name)]
    if model and strangers:
        return failed(
            f"{plural(len(strangers), 'GPU')} not of the profile's model {model}: {named(dict.fromkeys(strangers))}",
            "use the profile of this kind of machine (--nixl-profile)",
        )
    if model and not all(gpu.name for gpu in listed):
        return unknown(
            f"{plural(len(listed), 'GPU')}; the model of at least one is unknown, and the profile says {model}",
            unreported(facts),
        )
    prohibited = [gpu for gpu in listed if gpu.state.compute_mode == PROHIBITED]
    if prohibited:
        return failed(
            f"the compute mode of {named(f'GPU {gpu.index} ({gpu.pci})' for gpu in prohibited)} lets no process use it",
            f"run `nvidia-smi -i {','.join(gpu.pci for gpu in prohibited)} -c 0` on the host",
        )
    parts = [gpu for gpu in listed if gpu.mig]
    if parts:
        names = named(f"GPU {gpu.index}" for gpu in parts)
        return warned(
            f"{listing}; in MIG mode: {names}: CUDA gives a process one part of such a GPU, and two parts have "
            "neither cuda_ipc nor peer-to-peer access between them",
            f"if GPUs of this host exchange data, {disable_mig(parts)}",
        )
    exclusive = [gpu for gpu in listed if gpu.state.compute_mode]
    if exclusive and not (facts.gpu.mps or facts.environment.get("CUDA_MPS_PIPE_DIRECTORY")):
        return warned(
            f"{listing}; the compute mode of {named(f'GPU {gpu.index} ({gpu.pci})' for gpu in exclusive)} lets only "
            "one process use it, and MPS does not run: transfers within one GPU need two",
            f"run `nvidia-smi -i {','.join(gpu.pci for gpu in exclusive)} -c 0` on the host, or start MPS with "
            "`nvidia-cuda-mps-control -d`",
        )
    slowed = [gpu for gpu in listed if gpu.state.slowed]
    if slowed:
        names = named(f"GPU {gpu.index} ({gpu.pci}): {', '.join(gpu.state.slowed)}" for gpu in slowed)
        return warned(
            f"{listing}; the clocks are slow now: {names}",
            f"check cooling and power: `nvidia-smi -i {','.join(gpu.pci for gpu in slowed)} -q -d PERFORMANCE`",
        )
    cuda, visible = facts.gpu.cuda_driver, facts.environment.values.get(VISIBLE_DEVICES)
    if visible is not None and cuda.init == 0 and len(cuda.devices) < expected.gpus:
        listing += f"; {VISIBLE_DEVICES}={visible} shows {len(cuda.devices)} of them to this process"
    return passed(listing)


@check("gpu-driver", "Does the GPU driver match the container's libraries and NIXL's CUDA version?", unless=no_gpu)
def gpu_driver(facts: Facts, expected: Requirements) -> Judgement:
    """The driver has the same version as its libraries, and is new enough for NIXL's CUDA version."""
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
            f"the driver is {driver.value}; which CUDA versions it supports is unknown: {cuda.why}", unreported(facts)
        )
    wheel = wheel_for(int(cuda.value.split(".")[0]))
    if wants is not None and int(cuda.value.split(".")[0]) < wants:
        return failed(
            f"driver {driver.value} supports CUDA up to {cuda.value}, but {package} is built for CUDA {wants}",
            " or ".join(filter(None, ("install a newer driver on the host", wheel and f"install {wheel}"))),
        )
    return passed(f"driver {driver.value}, CUDA up to {cuda.value}")


@check("ucx-cuda", "Does UCX find the libraries that its CUDA modules need?", unless=no_gpu)
def ucx_cuda(facts: Facts, expected: Requirements) -> Judgement:
    """UCX finds every library that its CUDA modules need."""
    if "UCX" not in expected.backends:
        return not_applicable("UCX is not requested")
    absent = not_loaded(facts, expected)
    if absent is not None:
        return absent
    fault = _library_fault(facts)
    if fault is not None:
        return fault
    ucx = facts.software.backend("UCX")
    if ucx is None or not ucx.plugin:
        return unknown("the libraries of UCX were not examined", "follow the remedy of backend-loads")
    if ucx.cuda_lacks:
        return failed(f"{ucx.cuda_lacks}; UCX takes GPU memory for host memory", remedy(ucx.cuda_lacks))
    if ucx.cuda_runtime:
        return passed(
            f"workers load {ucx.cuda_runtime}, which the loader does not find: a program that does not import torch "
            f"needs {os.path.dirname(ucx.cuda_runtime)} in LD_LIBRARY_PATH"
        )
    return passed("UCX's CUDA modules find all libraries that they need")
