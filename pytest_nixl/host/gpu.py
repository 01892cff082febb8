# SPDX-License-Identifier: Apache-2.0
"""Facts of GPUs, from NVML or else /proc, and the GPUs that CUDA shows to a process.

According to NVIDIA's CUDA C++ Programming Guide (environment variables), the value of ``CUDA_VISIBLE_DEVICES`` is a
list of indices or UUIDs. The beginning of a UUID is enough if it is unique. The first entry that matches no GPU ends
the list. The order of the list is the order of CUDA's numbers. A MIG instance hides every other GPU (NVIDIA's MIG User
Guide). Two rules are in neither guide but in PyTorch, which also counts devices without CUDA: a GPU that is listed
twice hides all GPUs, and a number ends at its last digit.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pytest_nixl.core.plain import from_plain
from pytest_nixl.core.sentences import plural
from pytest_nixl.host.driver_questions import CUDA, NVML, DriverQuestion, ask_cuda
from pytest_nixl.host.driver_questions import VISIBLE_DEVICES as VARIABLE
from pytest_nixl.host.nvml import query_nvml
from pytest_nixl.host.pci import numa_node
from pytest_nixl.host.recorded_tree import NOT_RECORDED, Fact, FactsRoot

_DRIVER = "/proc/driver/nvidia"
_MPS = "/tmp/nvidia-mps/control"
_NO_GPU = "this host has no GPU"
#: Kernel modules that give network cards access to GPU memory where CUDA exports no DMA-BUF.
_PEERMEM = ("nvidia_peermem", "nv_peer_mem")

ORDER = "CUDA_DEVICE_ORDER"
_NUMBER = re.compile(r"\s*([+-]?\d+)")
#: ``MIG-GPU-<UUID>/<GPU instance>/<compute instance>`` of drivers before 470; newer ones use ``MIG-<UUID>``.
_MIG_OF_GPU = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/")


@dataclass(frozen=True)
class GpuState:
    """What NVML says of a GPU. A value that the driver does not have is that of a healthy GPU.

    :param remap_pending: whether rows of its memory are replaced at its next reset.
    :param remap_failed: whether a row could not be replaced.
    :param slowed: why its clocks are slow now; empty: nothing is wrong with cooling and power.
    :param fabric: how far it is from joining the NVLink fabric; empty: it has joined, or it has no fabric.
    :param compute_mode: its compute mode; empty: several processes may use it.
    """

    remap_pending: bool = False
    remap_failed: bool = False
    slowed: tuple[str, ...] = ()
    fabric: str = ""
    compute_mode: str = ""


@dataclass(frozen=True)
class GpuFacts:
    """One GPU. Sizes are in bytes; None means unknown.

    :param index: its number in NVML's order.
    :param pci: its PCI address, such as ``0000:53:00.0``.
    :param path: its path in sysfs, which contains every PCI bridge above it.
    :param memory: the size of its memory.
    :param ecc: whether its memory corrects errors.
    :param uncorrected: uncorrectable memory errors since its last reset.
    :param bar1: the size of BAR1, the part of its memory that network cards can access at a time.
    :param persistence: whether the driver stays loaded while no process uses it.
    :param nvlinks: the number of its active NVLinks.
    :param numa: its NUMA node; -1 if the firmware does not say.
    :param uuid: its UUID in the driver (``GPU-…``); empty if unknown.
    :param capability: its compute capability without the dot, as NVML says: 90 is 9.0.
    :param mig: whether it is in MIG mode, in which CUDA gives each process a part of it.
    :param instances: the number of its MIG instances, which are such parts.
    :param state: what may explain a fault.
    """

    index: int
    name: str
    pci: str
    path: str
    memory: int | None
    ecc: bool | None
    uncorrected: int | None
    bar1: int | None
    persistence: bool | None
    nvlinks: int | None
    source: str
    numa: int
    uuid: str
    capability: int | None = None
    mig: bool | None = None
    instances: int | None = None
    state: GpuState = field(default_factory=GpuState)


@dataclass(frozen=True)
class UnusableGpu:
    """A GPU that NVML counts but cannot use; ``error`` is NVML's text."""

    index: int
    error: str


@dataclass(frozen=True)
class GpuPairFacts:
    """Whether GPU ``one`` can read the memory of GPU ``other``; ``status`` is ``ok`` or the driver's reason."""

    one: int
    other: int
    status: str


@dataclass(frozen=True)
class Xid:
    """A GPU error in the kernel's log."""

    number: int
    pci: str
    line: str


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that CUDA shows to a process, by its UUID and its PCI address; each is empty if unknown."""

    uuid: str
    pci: str


@dataclass(frozen=True)
class CudaAnswer:
    """What the CUDA driver says to a new process with the environment of this one.

    :param init: the result of ``cuInit``; None if there is no answer.
    :param devices: the GPUs that CUDA shows, in the order of CUDA's numbers.
    :param without_variable: the result of ``cuInit`` without CUDA_VISIBLE_DEVICES, if that may be why CUDA shows none.
    :param node: whether the driver's device node exists.
    :param library: why ``libcuda.so.1`` cannot be loaded; empty if it can.
    :param why: why there is no answer.
    """

    init: int | None = None
    devices: tuple[CudaDevice, ...] = ()
    without_variable: int | None = None
    node: bool = False
    library: str = ""
    why: str = ""


@dataclass(frozen=True)
class Gpus:
    """The GPUs, their driver, and how network cards access their memory.

    :param pairs: which GPUs can read each other's memory.
    :param driver: the version of the kernel's driver.
    :param open: whether the driver's kernel modules are the open ones.
    :param cuda: the newest CUDA version that the driver supports.
    :param library: the driver version of this container's NVML.
    :param dma_buf: whether CUDA exports memory as DMA-BUF.
    :param peermem: whether the kernel module nvidia_peermem is loaded.
    :param gdrcopy: whether the kernel module gdrdrv is loaded and its device node exists.
    :param xids: the GPU errors in the kernel's log.
    :param unusable: the GPUs that NVML counts but cannot use; they are not in ``gpus``.
    :param cuda_driver: what the CUDA driver says to a new process.
    :param confidential: whether confidential computing is on.
    :param mps: whether the MPS daemon has its usual pipe here.
    """

    gpus: tuple[GpuFacts, ...]
    pairs: Fact[tuple[GpuPairFacts, ...]]
    driver: Fact[str]
    open: Fact[bool]
    cuda: Fact[str]
    library: Fact[str]
    dma_buf: Fact[bool]
    peermem: Fact[bool]
    gdrcopy: Fact[bool]
    xids: Fact[tuple[Xid, ...]]
    unusable: tuple[UnusableGpu, ...] = ()
    cuda_driver: CudaAnswer = CudaAnswer()
    confidential: bool = False
    mps: bool = False


class DriverQuestions:
    """The questions to NVML and the CUDA driver, asked from now on if this host has the NVIDIA driver.

    :param root: this machine, or a recorded tree, for which nothing is asked.
    """

    def __init__(self, root: FactsRoot) -> None:
        self._root = root
        present = root.live and root.read(f"{_DRIVER}/version") is not None
        self._cuda = DriverQuestion(CUDA) if present else None
        self._nvml = DriverQuestion(NVML) if present and find_spec("pynvml") is not None else None

    def nvml(self) -> Any:
        """Return NVML's answer, or why there is none."""
        if self._nvml is not None:
            return self._nvml.answer()
        return {"why": _no_driver()} if self._cuda is None else query_nvml()

    def cuda(self) -> Any:
        """Return the CUDA driver's answer, or why there is none."""
        return {"why": _no_driver()} if self._cuda is None else ask_cuda(self._cuda)

    def close(self) -> None:
        """End the processes that still ask."""
        for question in (self._cuda, self._nvml):
            if question is not None:
                question.end()


def read_gpus(root: FactsRoot, questions: DriverQuestions | None = None) -> Gpus:
    """Return the facts of GPUs.

    :param questions: the questions to the driver, asked before; None: they are asked now.
    :raises ValueError: a recorded answer is damaged.
    """
    if questions is None:
        with closing(DriverQuestions(root)) as questions:
            return read_gpus(root, questions)
    path = f"{_DRIVER}/version"
    version = root.read(path)
    number = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.[\d.]+)", version or "")
    nvml, cuda = root.ask("nvml", questions.nvml), root.ask("cuda_driver", questions.cuda)
    unsaid = nvml.get("why", "NVML does not report it")
    pairs = from_plain(tuple[GpuPairFacts, ...], nvml["pairs"]) if "pairs" in nvml else None
    gpus = _by_nvml(root, nvml) if "gpus" in nvml else _by_proc(root)
    dma_buf = root.ask("dma_buf", lambda: _dma_buf_answer(cuda) if gpus else {"why": _NO_GPU})
    peermem = next((name for name in _PEERMEM if root.exists(f"/sys/module/{name}")), None)
    no_gdrcopy = "the module gdrdrv is not loaded"
    if root.exists("/sys/module/gdrdrv"):
        present = root.exists("/dev/gdrdrv")
        no_gdrcopy = "" if present else "gdrdrv is loaded, but this container has no /dev/gdrdrv"
    return Gpus(
        gpus=gpus,
        pairs=Fact.read(pairs, "NVML", unsaid),
        driver=Fact.read(number and number[1], path, _no_driver() if version is None else "it names no version"),
        open=Fact.read(None if version is None else "Open Kernel Module" in version, path, _no_driver()),
        cuda=Fact.read(nvml.get("cuda") or None, "NVML", unsaid),
        library=Fact.read(nvml.get("driver") or None, "NVML", unsaid),
        dma_buf=Fact(dma_buf.get("supported"), "cuDeviceGetAttribute(DMA_BUF_SUPPORTED)", dma_buf.get("why", "")),
        peermem=Fact(peermem is not None, f"/sys/module/{peermem or _PEERMEM[0]}"),
        gdrcopy=Fact(not no_gdrcopy, "/dev/gdrdrv", no_gdrcopy),
        xids=_xids(root.ask("kernel_log", _ask_kernel_log)),
        unusable=from_plain(tuple[UnusableGpu, ...], nvml.get("unusable", [])),
        cuda_driver=from_plain(CudaAnswer, {name: value for name, value in cuda.items() if name != "dma_buf"}),
        confidential=nvml.get("confidential", False),
        mps=bool(gpus) and root.exists(_MPS),
    )


def _no_driver() -> str:
    return f"no NVIDIA driver is loaded: {_DRIVER}/version does not exist"


def _by_proc(root: FactsRoot) -> tuple[GpuFacts, ...]:
    gpus = []
    for number, address in enumerate(root.entries(f"{_DRIVER}/gpus")):
        place = f"{_DRIVER}/gpus/{address}"
        match = re.search(r"^Model:\s+(.*)", root.read(f"{place}/information") or "", re.MULTILINE)
        unknown = dict.fromkeys(("memory", "ecc", "uncorrected", "bar1", "persistence", "nvlinks"))
        values = {"index": number, "name": match[1] if match else "", "pci": address, "source": place, **unknown}
        gpus.append(from_plain(GpuFacts, {**values, **_placed(root, address)}))
    return tuple(gpus)


def _by_nvml(root: FactsRoot, nvml: dict[str, Any]) -> tuple[GpuFacts, ...]:
    return from_plain(
        tuple[GpuFacts, ...], [{**gpu, "source": "NVML", **_placed(root, gpu["pci"])} for gpu in nvml["gpus"]]
    )


def _placed(root: FactsRoot, address: str) -> dict[str, str | int]:
    """Return a GPU's path in sysfs, its NUMA node or -1, and its UUID; an empty text if it is unknown."""
    path = root.resolve(f"/sys/bus/pci/devices/{address}") or ""
    text = root.read(f"{_DRIVER}/gpus/{address}/information") or ""
    match = re.search(r"^GPU UUID:\s+(GPU-[0-9a-fA-F-]+)", text, re.MULTILINE)
    return {"path": path, "numa": numa_node(root, path), "uuid": match[1] if match else ""}


def _dma_buf_answer(cuda: dict[str, Any]) -> dict[str, Any]:
    if cuda.get("dma_buf") is not None:
        return {"supported": cuda["dma_buf"]}
    if "init" in cuda:
        return {"why": f"the CUDA driver cannot be asked (cuInit returned {cuda['init']})"}
    return {"why": cuda.get("why") or f"the CUDA driver cannot be asked ({cuda.get('library', NOT_RECORDED)})"}


def _xids(answer: dict[str, Any]) -> Fact[tuple[Xid, ...]]:
    source = "the kernel's log (/dev/kmsg)"
    if "lines" not in answer:
        return Fact(None, source, answer["why"])
    xids = []
    for line in answer["lines"]:
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", line)
        if match:
            xids.append(Xid(int(match[2]), match[1].lower(), line))
    return Fact(tuple(xids), source)


def _ask_kernel_log() -> dict[str, Any]:
    """Return the lines of the kernel's log that report an Xid; no other line is kept."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return {"why": f"the kernel's log cannot be read ({error.strerror}): it needs CAP_SYSLOG"}
    lines = []
    try:
        while True:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:
                continue  # the record was overwritten; the next read returns the oldest that is left
            text = record.decode(errors="replace")
            if "NVRM: Xid" in text:
                lines.append(text.partition(";")[2].splitlines()[0])
    except OSError as error:
        if error.errno != errno.EAGAIN:
            return {"why": f"the kernel's log cannot be read ({error.strerror})"}
    finally:
        os.close(log)
    return {"lines": lines}


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that CUDA shows to a process, in the order of CUDA's numbers.

    :param gpus: the GPUs; None for a GPU that CUDA shows but that cannot be identified, such as a MIG instance.
    :param why: why a GPU is hidden or cannot be identified; empty if all are shown.
    """

    gpus: tuple[GpuFacts | None, ...]
    why: str = ""


def visible(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> VisibleGpus:
    """Return the GPUs that CUDA shows to a process.

    :param gpus: all GPUs of the host, in NVML's order.
    :param environ: the environment variables of the process.
    """
    text = environ.get(VARIABLE)
    order = _order(gpus, environ)
    if text is None:
        return VisibleGpus(tuple(order), _unordered(gpus, environ))
    if text.strip() == "":
        return VisibleGpus((), f"{VARIABLE} is empty: CUDA shows no GPU")
    if text.startswith("MIG-"):
        return _instance(gpus, text)
    by_uuid = text.startswith("GPU-")
    indices: list[int] = []
    stopped = ""
    for part in text.split(","):
        index = _of_uuid(gpus, part) if by_uuid else _of_number(gpus, part)
        if index is None:
            stopped = part.strip()
            break
        if index in indices:
            return VisibleGpus((), f"{VARIABLE}={text} names one GPU twice ({part.strip()}), so CUDA shows no GPU")
        indices.append(index)
    reason = ""
    if stopped or len(indices) < len(gpus):
        ended = f": the list ends at {stopped!r}, which matches no GPU" if stopped else ""
        reason = f"{VARIABLE}={text} shows {len(indices)} of this host's {plural(len(gpus), 'GPU')}{ended}"
    if by_uuid:
        return VisibleGpus(tuple(gpus[index] for index in indices), reason)
    return VisibleGpus(tuple(order[index] for index in indices), reason or _unordered(gpus, environ))


def _order(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> list[GpuFacts | None]:
    """Return the GPUs in CUDA's order: by PCI address if requested, else fastest first, which is unknown (None)."""
    if environ.get(ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) < 2:
        ordered = sorted(gpus, key=lambda gpu: gpu.pci)
        return [*ordered]
    return [None] * len(gpus)


def _unordered(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> str:
    if not gpus or None not in _order(gpus, environ):
        return ""
    return f"this host's GPUs are of different models, which CUDA numbers by speed: set {ORDER}=PCI_BUS_ID"


def _of_number(gpus: Sequence[GpuFacts], part: str) -> int | None:
    match = _NUMBER.match(part)
    index = int(match[1]) if match else -1
    return index if 0 <= index < len(gpus) else None


def _of_uuid(gpus: Sequence[GpuFacts], part: str) -> int | None:
    name = part.strip().lower()
    matches = [index for index, gpu in enumerate(gpus) if name != "gpu-" and gpu.uuid.lower().startswith(name)]
    return matches[0] if len(matches) == 1 else None


def _instance(gpus: Sequence[GpuFacts], text: str) -> VisibleGpus:
    """Return the first MIG instance of the list; CUDA shows at most one."""
    first = text.split(",")[0].strip()
    match = _MIG_OF_GPU.match(first)
    parent = _of_uuid(gpus, match[1]) if match else None
    reason = f"{VARIABLE}={first} names a MIG instance, and CUDA shows only that"
    return VisibleGpus((gpus[parent] if parent is not None else None,), reason)
