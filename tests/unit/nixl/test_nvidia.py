# SPDX-License-Identifier: Apache-2.0
"""Why no GPU can be used, and how kernels are launched. The driver is a double: ``test_vram.py`` runs the kernels."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.nixl.worker.devices import WorkerGpu, nvidia, shortest
from pytest_nixl.nixl.worker.devices.nvidia import DriverDevice, _Room, driver_fault


@pytest.mark.parametrize(
    ("code", "fault", "node_exists", "visible", "reason"),
    [
        (None, "libcuda is not found\nmore", False, None, "this host has no NVIDIA driver (no /dev/nvidiactl)"),
        (100, "CUDA_ERROR_NO_DEVICE", False, None, "this host has no NVIDIA driver (no /dev/nvidiactl)"),
        (100, "CUDA_ERROR_NO_DEVICE", True, "", "CUDA_VISIBLE_DEVICES= "),
        (100, "CUDA_ERROR_NO_DEVICE", True, "7", "CUDA_VISIBLE_DEVICES=7 "),
        (101, "CUDA_ERROR_INVALID_DEVICE", True, "0,0", "CUDA_VISIBLE_DEVICES=0,0 "),
        (34, "CUDA_ERROR_STUB_LIBRARY", True, None, "the CUDA driver does not start: CUDA_ERROR_STUB_LIBRARY"),
        (100, "CUDA_ERROR_NO_DEVICE", True, None, "the CUDA driver does not start: CUDA_ERROR_NO_DEVICE"),
        (
            802,
            "CUDA_ERROR_SYSTEM_NOT_READY",
            True,
            "0",
            "the CUDA driver does not start: CUDA_ERROR_SYSTEM_NOT_READY: the fabric manager",
        ),
        (
            None,
            "libcuda is not found\nmore",
            True,
            None,
            "the driver's device node exists, but its library libcuda.so.1 is missing: libcuda is not found",
        ),
    ],
)
def test_every_reason_for_no_gpu_has_its_own_message(
    code: int | None, fault: str, node_exists: bool, visible: str | None, reason: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    sentence, remedy = driver_fault(code, fault, node_exists=node_exists, environ=environ)
    assert sentence.startswith(reason)
    assert "\n" not in sentence
    assert remedy


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (46, "run `nvidia-smi -c 0`"),
        (209, "use a newer GPU"),
        (222, "install a newer driver"),
        (802, "run `systemctl status nvidia-fabricmanager`"),
        (719, "run `nvidia-smi` and `dmesg | grep -i xid`"),
    ],
)
def test_remedy_of_a_call_that_fails_is_that_of_its_error(code: int, remedy: str) -> None:
    driver = SimpleNamespace(
        cuDevicePrimaryCtxRetain=lambda device: (code, None),
        cuGetErrorName=lambda code: (0, b"CUDA_ERROR_LAUNCH_FAILED"),
        cuGetErrorString=lambda code: (0, b"unspecified launch failure"),
    )
    with pytest.raises(NixlPluginError) as caught:
        nvidia.call(driver, "cuDevicePrimaryCtxRetain", 0)
    assert caught.value.reason.startswith("the CUDA driver's cuDevicePrimaryCtxRetain failed: CUDA_ERROR_")
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("gpus", "node_exists", "reason"),
    [
        (None, False, "this host has no NVIDIA driver (no /dev/nvidiactl)"),
        (None, True, "this worker's Python has neither NVIDIA's bindings (cuda-bindings) nor torch"),
        ([], False, "this host has no NVIDIA driver (no /dev/nvidiactl)"),
        ([], True, "torch sees no GPU"),
        (["one"], True, ""),
    ],
)
def test_without_nvidias_bindings_torch_is_used_if_it_sees_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str] | None, node_exists: bool, reason: str
) -> None:
    torch = SimpleNamespace(devices=lambda: gpus)
    module = None if gpus is None else SimpleNamespace(Torch=lambda: torch)
    monkeypatch.setitem(sys.modules, f"{nvidia.__package__}.by_torch", module)
    if reason:
        with pytest.raises(NotApplicableError) as caught:
            nvidia._torch(node_exists=node_exists)
        assert caught.value.reason == reason
    else:
        assert nvidia._torch(node_exists=node_exists) is torch


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(8, 1), (8 * 256, 1), (8 * 256 + 1, 2), (8 * 256 * 3, 3), (8 * 256 * 4096, 4096), (8 * 256 * 4097, 4096)],
)
def test_a_kernel_has_a_thread_for_each_word_up_to_the_most_blocks(size: int, blocks: int) -> None:
    launched: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> tuple[int]:
        launched.append(arguments)
        return (0,)

    driver = SimpleNamespace(cuLaunchKernel=launch, cuCtxSynchronize=lambda: (0,))
    DriverDevice(driver, WorkerGpu(0, "", "10" * 16, "0000:1a:00.0"))._launch("nixl_fill", 4096, size, 8192, 0, 0)
    [(function, *shape, arguments, extra)] = launched
    assert (function, shape, extra) == ("nixl_fill", [blocks, 1, 1, 256, 1, 1, 0, 0], 0)
    assert arguments[0] == (4096, size, 8192, 0, 0)


class AnyDriver:
    """Bindings of which each function succeeds. A double, because this machine may have no GPU."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (0, 640)


def test_names_of_gpus_are_read_without_the_zeros_after_them() -> None:
    driver: Any = AnyDriver()
    driver.cuDeviceGetCount = lambda: (0, 2)
    driver.cuDeviceGet = lambda number: (0, number + 10)
    driver.cuDeviceGetName = lambda size, handle: (0, b"GPU of %d" % handle + bytes(size - 9))
    driver.cuDeviceGetPCIBusId = lambda size, handle: (0, b"0000:1A:%d.0" % handle + bytes(size - 12))
    driver.cuDeviceGetUuid_v2 = lambda handle: (0, SimpleNamespace(bytes=[handle] * 16))
    first = WorkerGpu(0, "GPU of 10", "0a" * 16, "0000:1a:10.0")
    assert nvidia.CudaDriver(driver).devices() == [first, WorkerGpu(1, "GPU of 11", "0b" * 16, "0000:1a:11.0")]


def test_the_time_of_a_kernel_is_in_seconds() -> None:
    gpu = WorkerGpu(0, "", "10" * 16, "0000:1a:00.0")
    assert 0 < DriverDevice(AnyDriver(), gpu).kernel_seconds() < 60


def test_a_driver_that_starts_is_used_and_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = AnyDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cast(Any, driver))
    assert isinstance(nvidia.find(), nvidia.CudaDriver)
    for name, result in {"cuInit": (999,), "cuGetErrorName": (0, b"CUDA_ERROR_UNKNOWN")}.items():
        setattr(driver, name, lambda *_, result=result: result)
    with pytest.raises(NotApplicableError, match=r"no NVIDIA driver|does not start: CUDA_ERROR_UNKNOWN"):
        nvidia.find()


def test_a_gpu_is_as_busy_as_the_shortest_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.0]
    kernels = iter((9.0, 4.0, 2.5, 3.0, 8.0))
    monkeypatch.setattr("pytest_nixl.nixl.worker.devices.time", SimpleNamespace(perf_counter=lambda: sum(times)))
    assert shortest(lambda: times.append(next(kernels))) == 2.5


@pytest.mark.parametrize(("size", "fails"), [(0, False), (4, False), (16, False), (16, True)])
def test_room_on_a_device_holds_the_words_and_is_given_back(size: int, fails: bool) -> None:
    """The driver is a double, because the stand-in of ``test_vram.py`` cannot fail at one copy."""
    calls: list[tuple[object, ...]] = []

    def driver(function: str, *arguments: object) -> None:
        calls.append((function, *arguments))
        if fails and function == "cuMemcpyHtoD":
            raise RuntimeError("no copy")

    def reserve(size: int) -> int:
        calls.append(("reserve", size))
        return 640

    device: Any = SimpleNamespace(_call=driver, reserve=reserve)
    array = SimpleNamespace(nbytes=size, ctypes=SimpleNamespace(data=7))
    with pytest.raises(RuntimeError, match="no copy") if fails else nullcontext(), _Room(device, array) as address:
        assert address == 640
    copied = [("cuMemcpyHtoD", 640, 7, size)] if size else []
    assert calls == [("reserve", max(8, size)), *copied, ("cuMemFree", 640)]
