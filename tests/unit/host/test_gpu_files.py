# SPDX-License-Identifier: Apache-2.0
"""Facts of GPUs and of their driver, from the driver's files, the kernel's log and the answers of NVML and CUDA."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_sysfs import Asking, root_of

from pytest_nixl.host import gpu
from pytest_nixl.host.gpu import GpuFacts, GpuState, Xid, read_gpus
from pytest_nixl.host.recorded_tree import NOT_RECORDED, Fact

SILENT = {"why": "it did not answer"}
CARD = "/sys/devices/pci0000:00/0000:00:01.0/0000:47:00.0"
DRIVER = "/proc/driver/nvidia"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build"
NVML_GPU: dict[str, Any] = {
    "index": 0, "name": "H100", "pci": "0000:47:00.0", "memory": 80, "ecc": True, "uncorrected": 0, "bar1": 128,
    "persistence": True, "nvlinks": 18, "state": {"slowed": ["hardware slowdown"]},
}  # fmt: skip


def test_the_driver_and_its_gpus_are_read_from_nvml_or_its_files(tmp_path: Path) -> None:
    information = "No Model: x\nModel: \t\t NVIDIA H100\nNo GPU UUID: GPU-1\nGPU UUID: \t GPU-9a1c\nBus Location: \t x"
    files: dict[str, Any] = {
        f"{DRIVER}/version": f"Kernel Module  odd\n{OPEN}", f"{DRIVER}/gpus/0000:47:00.0/information": information,
        "/sys/bus/pci/devices/0000:47:00.0": f"->{CARD}", f"{CARD}/numa_node": 1, "/sys/module/nv_peer_mem/x": 1,
        "/sys/module/gdrdrv/x": 1, "/dev/gdrdrv": "", "/tmp/nvidia-mps/control": "",
    }  # fmt: skip
    log = {
        "lines": [
            "NVRM: Xid (PCI:0000:4A:00): 79, it is lost",
            "NVRM: odd",
            "NVRM: Xid (PCI:): 1",
            "NVRM: Xid (PCI:0000:47:00): odd",
        ]
    }
    nvml = {"gpus": [NVML_GPU], "driver": "570.1", "cuda": "12.8", "pairs": [], "confidential": True,
            "unusable": [{"index": 1, "error": "GPU is lost"}]}  # fmt: skip
    gpus = read_gpus(root_of(tmp_path / "a", files, nvml=nvml, kernel_log=log, dma_buf={"supported": True},
                             cuda_driver={"init": 0, "node": True, "devices": [], "dma_buf": True}))  # fmt: skip
    placed: dict[str, Any] = {"path": CARD, "numa": 1, "uuid": "GPU-9a1c"}
    assert gpus.gpus == (
        GpuFacts(**{**NVML_GPU, "state": GpuState(slowed=("hardware slowdown",)), "source": "NVML", **placed}),
    )  # fmt: skip
    assert (gpus.driver, gpus.open) == (Fact("570.133.20", f"{DRIVER}/version"), Fact(True, f"{DRIVER}/version"))
    assert (gpus.cuda, gpus.library, gpus.pairs) == (Fact("12.8", "NVML"), Fact("570.1", "NVML"), Fact((), "NVML"))
    assert gpus.dma_buf == Fact(True, "cuDeviceGetAttribute(DMA_BUF_SUPPORTED)")
    assert (gpus.peermem, gpus.gdrcopy) == (Fact(True, "/sys/module/nv_peer_mem"), Fact(True, "/dev/gdrdrv"))
    assert gpus.xids == Fact((Xid(79, "0000:4a:00", log["lines"][0]),), "the kernel's log (/dev/kmsg)")
    assert ([(gpu.index, gpu.error) for gpu in gpus.unusable], gpus.confidential, gpus.mps) == (
        [(1, "GPU is lost")], True, True,
    )  # fmt: skip
    files[f"{DRIVER}/version"] = CLOSED
    # A GPU that sleeps has no UUID in this file.
    files[f"{DRIVER}/gpus/0000:48:00.0/information"] = "GPU UUID: \t GPU-????????-????"
    by_proc = read_gpus(
        root_of(tmp_path / "b", files, nvml=SILENT, kernel_log=SILENT, dma_buf=SILENT, cuda_driver=SILENT)
    )
    unknown: dict[str, Any] = dict.fromkeys(("memory", "ecc", "uncorrected", "bar1", "persistence", "nvlinks"))
    place = f"{DRIVER}/gpus/0000:47:00.0"
    assert by_proc.gpus == (
        GpuFacts(index=0, name="NVIDIA H100", pci="0000:47:00.0", source=place, **unknown, **placed),
        GpuFacts(
            index=1, name="", pci="0000:48:00.0", source=place.replace("47", "48"), path="", numa=0, uuid="", **unknown
        ),
    )
    assert (by_proc.driver, by_proc.open) == (Fact("535.104.05", f"{DRIVER}/version"), Fact(False, f"{DRIVER}/version"))
    assert (by_proc.cuda, by_proc.library, by_proc.pairs) == (Fact(None, "NVML", "it did not answer"),) * 3
    assert by_proc.xids == Fact(None, "the kernel's log (/dev/kmsg)", "it did not answer")
    assert by_proc.cuda_driver.why == "it did not answer"


def test_a_host_without_a_driver_says_so(tmp_path: Path) -> None:
    gpus = read_gpus(root_of(tmp_path / "tree", {"/sys/module/gdrdrv/x": 1}, kernel_log=SILENT))
    absent = f"no NVIDIA driver is loaded: {DRIVER}/version does not exist"
    assert (gpus.gpus, gpus.driver, gpus.open, gpus.mps) == (
        (), Fact(None, f"{DRIVER}/version", absent), Fact(None, f"{DRIVER}/version", absent), False,
    )  # fmt: skip
    assert gpus.peermem == Fact(False, "/sys/module/nvidia_peermem")
    assert gpus.gdrcopy == Fact(False, "/dev/gdrdrv", "gdrdrv is loaded, but this container has no /dev/gdrdrv")
    assert gpus.cuda == Fact(None, "NVML", NOT_RECORDED)


@pytest.mark.parametrize(
    ("cuda", "supported", "reason"),
    [
        ({"init": 0, "dma_buf": True}, True, ""),
        ({"init": 0, "dma_buf": False}, False, ""),
        ({"init": 100}, None, "the CUDA driver cannot be asked (cuInit returned 100)"),
        ({"init": 0, "dma_buf": None}, None, "the CUDA driver cannot be asked (cuInit returned 0)"),
        ({"why": "it hangs"}, None, "it hangs"),
        ({"library": "no libcuda"}, None, "the CUDA driver cannot be asked (no libcuda)"),
        ({}, None, f"the CUDA driver cannot be asked ({NOT_RECORDED})"),
        (None, None, "this host has no GPU"),
    ],
)
def test_whether_cuda_exports_memory_is_what_its_driver_answers(
    tmp_path: Path, cuda: dict[str, Any] | None, supported: bool | None, reason: str
) -> None:
    gpus = {} if cuda is None else {"gpus": [NVML_GPU]}
    root_of(tmp_path, {}, kernel_log=SILENT, nvml=gpus, cuda_driver=cuda or {})
    facts = read_gpus(Asking(tmp_path, "dma_buf"))
    assert facts.dma_buf == Fact(supported, "cuDeviceGetAttribute(DMA_BUF_SUPPORTED)", reason)


LOG = "the kernel's log (/dev/kmsg)"
XID = "NVRM: Xid (PCI:0000:47:00): 79, it is lost"


def xids(folder: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[], int]) -> Fact[tuple[Xid, ...]]:
    """Return the errors in the kernel's log. :param opened: what opening it returns or raises; a double."""
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened() if path == "/dev/kmsg" else real(path, *rest))
    root_of(folder, {})
    return read_gpus(Asking(folder, "kernel_log")).xids


def test_the_log_of_the_kernel_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with reader, writer:
        reader.setblocking(False)
        for record in ("6,1,2,-;eth0: up", f"4,2,3,-;{XID}\n SUBSYSTEM=pci\n", f"4,3,4,-;{XID}; again"):
            writer.send(record.encode())
        read, overwritten = os.read, iter([BrokenPipeError()])

        def read_record(descriptor: int, size: int) -> bytes:
            for error in overwritten:
                raise error
            return read(descriptor, size)

        monkeypatch.setattr(os, "read", read_record)
        facts = xids(tmp_path, monkeypatch, lambda: os.dup(reader.fileno()))
    assert facts == Fact((Xid(79, "0000:47:00", XID), Xid(79, "0000:47:00", f"{XID}; again")), LOG)


def test_a_log_that_cannot_be_read_is_unknown_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise PermissionError(1, "Operation not permitted")

    reason = "the kernel's log cannot be read (Operation not permitted): it needs CAP_SYSLOG"
    assert xids(tmp_path / "a", monkeypatch, refuse) == Fact(None, LOG, reason)
    folder = os.open(tmp_path, os.O_RDONLY)
    reason = "the kernel's log cannot be read (Is a directory)"
    assert xids(tmp_path / "b", monkeypatch, lambda: folder) == Fact(None, LOG, reason)


ABSENT = {"why": f"no NVIDIA driver is loaded: {DRIVER}/version does not exist"}


@pytest.mark.parametrize(
    ("version", "live", "package", "nvml", "cuda", "ended"),
    [
        ("570", True, True, "asked NVML", {"x": "asked the CUDA driver"}, ["the CUDA driver", "NVML"]),
        ("570", True, False, "asked here", {"x": "asked the CUDA driver"}, ["the CUDA driver"]),
        (None, True, True, ABSENT, ABSENT, []),
        ("570", False, True, ABSENT, ABSENT, []),
    ],
    ids=["driver", "without NVML's package", "no driver", "recorded"],
)
def test_only_the_driver_of_this_host_is_asked(
    monkeypatch: pytest.MonkeyPatch, version: str | None, live: bool, package: bool, nvml: Any, cuda: Any, ended: Any
) -> None:
    ends: list[str] = []

    def question(subject: str) -> Any:
        return SimpleNamespace(answer=lambda: f"asked {subject}", end=lambda: ends.append(subject))

    monkeypatch.setattr(gpu, "DriverQuestion", question)
    monkeypatch.setattr(gpu, "ask_cuda", lambda question: {"x": question.answer()})
    monkeypatch.setattr(gpu, "query_nvml", lambda: "asked here")
    monkeypatch.setattr(gpu, "find_spec", lambda name: (package and name == "pynvml") or None)
    root: Any = SimpleNamespace(live=live, read=lambda path: version if path == f"{DRIVER}/version" else None)
    questions = gpu.DriverQuestions(root)
    assert (questions.nvml(), questions.cuda()) == (nvml, cuda)
    questions.close()
    assert ends == ended


def test_a_host_without_a_driver_asks_neither_nvml_nor_cuda(tmp_path: Path) -> None:
    asked: Any = SimpleNamespace(nvml=lambda: {"why": "no NVML"}, cuda=lambda: {"why": "no CUDA"})
    root_of(tmp_path, {}, kernel_log=SILENT)
    facts = read_gpus(Asking(tmp_path, "nvml"), asked)
    assert (facts.library, facts.cuda_driver.why) == (Fact(None, "NVML", "no NVML"), NOT_RECORDED)
