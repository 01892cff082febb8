# SPDX-License-Identifier: Apache-2.0
"""Why no GPU can be used, and how kernels are launched. The driver is a double: ``test_vram.py`` runs the kernels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pytest_nixl.core.errors import GpuMemoryError, NixlPluginError, NotApplicableError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.texts import CUDA_ERRORS, OTHER_REMEDY
from pytest_nixl.nixl.worker import devices, vram
from pytest_nixl.nixl.worker.devices import WorkerGpu, WrongBytes, nvidia, shortest
from pytest_nixl.nixl.worker.devices.nvidia import DriverDevice, driver_fault
from pytest_nixl.nixl.worker.memory import chunks

NO_DRIVER = (
    "this host has no NVIDIA driver (no /dev/nvidiactl)",
    "run pytest on a host with a GPU, and give the container its GPUs (`docker run --gpus all`, nvidia.com/gpu)",
)
HIDDEN = "hides every GPU from this process", "unset CUDA_VISIBLE_DEVICES, or set it to the number of an existing GPU"
NO_LIBRARY = (
    "the driver's device node exists, but its library libcuda.so.1 is missing: libcuda is not found",
    "set NVIDIA_DRIVER_CAPABILITIES=compute,utility so that the container runtime mounts it",
)
UNKNOWN = "the CUDA driver does not start: CUDA_ERROR_STUB_LIBRARY", OTHER_REMEDY
NO_BINDINGS = (
    "this worker's Python has neither NVIDIA's bindings (cuda-bindings) nor torch",
    f"run `{pip_install('gpu')}` for the Python that runs the tests",
)


def started(code: str) -> tuple[str, str]:
    """Return what is said of a driver that does not start with a known error."""
    return f"the CUDA driver does not start: {CUDA_ERRORS[code].title}", CUDA_ERRORS[code].remedy


@pytest.mark.parametrize(
    ("code", "fault", "node_exists", "visible", "expected"),
    [
        (None, "libcuda is not found\nmore", False, None, NO_DRIVER),
        (100, "CUDA_ERROR_NO_DEVICE", False, None, NO_DRIVER),
        (100, "CUDA_ERROR_NO_DEVICE", True, "", (f"CUDA_VISIBLE_DEVICES= {HIDDEN[0]}", HIDDEN[1])),
        (100, "CUDA_ERROR_NO_DEVICE", False, "7", (f"CUDA_VISIBLE_DEVICES=7 {HIDDEN[0]}", HIDDEN[1])),
        (101, "CUDA_ERROR_INVALID_DEVICE", True, "0,0", (f"CUDA_VISIBLE_DEVICES=0,0 {HIDDEN[0]}", HIDDEN[1])),
        (100, "CUDA_ERROR_NO_DEVICE", True, None, started("100")),
        (34, "CUDA_ERROR_STUB_LIBRARY", True, None, UNKNOWN),
        (802, "CUDA_ERROR_SYSTEM_NOT_READY", True, "0", started("802")),
        (None, "libcuda is not found\nmore", True, "0", NO_LIBRARY),
    ],
)
def test_every_reason_for_no_gpu_has_its_own_message(
    code: int | None, fault: str, node_exists: bool, visible: str | None, expected: tuple[str, str]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert driver_fault(code, fault, node_exists=node_exists, environ=environ) == expected


@pytest.mark.parametrize("gpu", ["", "GPU 1"])
@pytest.mark.parametrize("code", [0, 46, 209, 719, 9999])
def test_a_call_that_fails_is_named_with_its_error_and_the_remedy_of_that(code: int, gpu: str) -> None:
    driver = SimpleNamespace(
        cuMemAlloc=lambda size: (code, size, "other"),
        cuMemFree=lambda: (code,),
        cuGetErrorName=lambda code: (0, b"CUDA_ERROR_%d" % code),
        cuGetErrorString=lambda code: (0, b"unspecified failure %d" % code),
    )
    if not code:
        assert [nvidia.call(driver, "cuMemAlloc", 8, gpu=gpu), nvidia.call(driver, "cuMemFree", gpu=gpu)] == [8, None]
        return
    with pytest.raises(NixlPluginError) as caught:
        nvidia.call(driver, "cuMemAlloc", 8, gpu=gpu)
    error = CUDA_ERRORS.get(str(code))
    title = error.title if error else f"CUDA_ERROR_{code} (unspecified failure {code})"
    remedy = "run `nvidia-smi` and `dmesg | grep -i xid` on the host: a GPU that had an error may need a reset"
    assert caught.value.reason == f"the CUDA driver's cuMemAlloc failed{' on GPU 1' if gpu else ''}: {title}"
    assert caught.value.remedy == (error.remedy if error else remedy)


@pytest.mark.parametrize(
    ("gpus", "node_exists", "expected"),
    [
        (None, False, NO_DRIVER),
        (None, True, NO_BINDINGS),
        ([], False, NO_DRIVER),
        ([], True, ("torch sees no GPU", "give the process a GPU, or install a torch that is built for CUDA")),
        (["one"], False, None),
    ],
)
def test_without_nvidias_bindings_torch_is_used_if_it_sees_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str] | None, node_exists: bool, expected: tuple[str, str] | None
) -> None:
    torch = SimpleNamespace(devices=lambda: gpus)
    module = None if gpus is None else SimpleNamespace(Torch=lambda: torch)
    monkeypatch.setitem(sys.modules, f"{nvidia.__package__}.by_torch", module)
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(Path, "exists", lambda path: node_exists and str(path) == "/dev/dxg")
    if expected is None:
        assert nvidia.find() is torch
        return
    with pytest.raises(NotApplicableError) as caught:
        nvidia.find()
    assert (caught.value.reason, caught.value.remedy) == expected


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


class Pointer:
    """An address as the bindings have it: a number only if it is made one."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __int__(self) -> int:
        return self._address


class MemoryDriver:
    """Bindings of a driver whose GPUs are the memory of this process, and whose kernels are numpy.

    :ivar log: the calls, in order, each with what it is about: sizes, or the GPU that is the current one.
    :ivar room: the bytes that may be allocated.
    """

    def __init__(self, room: int = 1 << 30) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.room = room
        self.memory: dict[int, Any] = {}
        self.full, self.copies = False, True
        self.launches: list[tuple[Any, ...]] = []

    def cuDeviceGet(self, number: int) -> tuple[int, int]:  # noqa: N802 - the driver's name, as those below
        return 0, number + 10

    def cuDevicePrimaryCtxRetain(self, handle: int) -> tuple[int, str]:  # noqa: N802
        self.log.append(("retain", handle))
        return (2 if self.full else 0), f"context of {handle}"

    def cuCtxSetCurrent(self, context: str) -> tuple[int]:  # noqa: N802
        self.log.append(("current", context))
        return (0,)

    def cuCtxSynchronize(self) -> tuple[int]:  # noqa: N802
        self.log.append(("wait",))
        return (0,)

    def cuMemAlloc(self, size: int) -> tuple[int, Pointer | None]:  # noqa: N802
        self.log.append(("allocate", size))
        if size > self.room - sum(array.nbytes for array in self.memory.values()):
            return 2, None
        array = np.full(size, 0x55, np.uint8)
        self.memory[array.ctypes.data] = array
        return 0, Pointer(array.ctypes.data)

    def cuMemFree(self, address: Pointer | int) -> tuple[int]:  # noqa: N802
        self.log.append(("free", self.memory.pop(int(address)).nbytes))
        return (0,)

    def cuMemsetD8(self, address: Pointer, value: int, size: int) -> tuple[int]:  # noqa: N802
        self.log.append(("set", value, size))
        ctypes.memset(int(address), value, size)
        return (0,)

    def cuMemcpyDtoH(self, to: int, address: int, size: int) -> tuple[int]:  # noqa: N802
        self.log.append(("read", size))
        ctypes.memmove(to, address, size)
        return (0,)

    def cuMemcpyHtoD(self, address: Pointer | int, source: int, size: int) -> tuple[int]:  # noqa: N802
        self.log.append(("write", size))
        ctypes.memmove(int(address), source, size)
        return (0 if self.copies else 209,)

    def cuModuleLoadData(self, code: bytes) -> tuple[int, str]:  # noqa: N802
        self.log.append(("load", code.endswith(b"\0")))
        return 0, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, str]:  # noqa: N802
        return 0, name.decode()

    def cuLaunchKernel(self, function: str, *values: Any) -> tuple[int]:  # noqa: N802
        (address, size, _, seed, last), _ = values[-2]
        self.log.append((function, size))
        self.launches.append((values[:-2], *values[-2]))
        memory = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)
        pattern = np.concatenate([np.zeros(0, np.uint8), *(chunk.copy() for _, chunk in chunks(seed, size))])
        if function == "nixl_fill":
            memory[:] = pattern ^ np.uint8(last & 0xFF)
        else:
            wrong = np.flatnonzero(memory != pattern)
            results = [len(wrong), int(wrong[0]) << 8 | int(memory[wrong[0]])] if len(wrong) else [0, (1 << 64) - 1]
            ctypes.memmove(last, np.array(results, np.uint64).ctypes.data, 16)
        return (0,)


GPU = WorkerGpu(1, "H", "10" * 16, "0000:1a:00.0")
NAME = "GPU 1 (0000:1a:00.0, GPU-10101010-1010-1010-1010-101010101010)"
SHOW = "run `nvidia-smi -i 0000:1a:00.0` to see which processes use its memory"
CURRENT = ("current", "context of 11")


def test_each_use_of_a_gpu_makes_it_the_current_one_and_gives_its_room_back() -> None:
    driver = MemoryDriver()
    device = DriverDevice(driver, GPU)
    address = device.allocate(20)
    assert isinstance(address, int)
    reserved = [("allocate", 3 * 8 + 16), ("free", 3 * 8 + 16)]
    begin = [("retain", 11), CURRENT, ("allocate", 20)]
    assert driver.log == [*begin, *reserved, ("set", 0, 20), ("wait",)]
    room, counters = [("allocate", 24), ("write", 24)], [("allocate", 16), ("write", 16)]
    for use, log in (
        (lambda: device.write(address, memoryview(b"abc")), [("write", 3), ("wait",)]),
        (lambda: device.write(address, memoryview(b"")), [("wait",)]),
        (lambda: device.read(address, 4), [("read", 4)]),
        (lambda: device.read(address, 0), []),
        (lambda: device.fill(address, 20, 7, inverted=False),
         [*room, ("load", True), ("nixl_fill", 20), ("wait",), ("free", 24)]),
        (lambda: device.compare(address, 20, 7),
         [*room, *counters, ("nixl_compare", 20), ("wait",), CURRENT, ("read", 16), ("free", 16), ("free", 24)]),
        (device.kernel_seconds, [("allocate", 8), ("write", 8), *[("nixl_fill", 8), ("wait",)] * 5, ("free", 8)]),
        (lambda: device.free(address), [("free", 20)]),
    ):  # fmt: skip
        driver.log.clear()
        use()
        assert driver.log == [CURRENT, *log]
    assert driver.memory == {}


def test_the_pattern_of_gpu_memory_is_compared_and_its_first_wrong_byte_is_known() -> None:
    device = DriverDevice(MemoryDriver(), GPU)
    address = device.allocate(1000)
    assert device.read(address, 1000) == bytes(1000)
    device.fill(address, 1000, 7, inverted=False)
    assert device.compare(address, 1000, 7) is None
    [whole] = [chunk.tobytes() for _, chunk in chunks(7, 1000)]
    assert device.read(address, 1000) == whole
    device.write(address + 300, memoryview(bytes([whole[300] ^ 1, whole[301] ^ 1])))
    assert device.compare(address, 1000, 7) == WrongBytes(2, 300, whole[300] ^ 1)
    device.fill(address, 1000, 7, inverted=True)
    assert device.compare(address, 1000, 7) == WrongBytes(1000, 0, whole[0] ^ 0xFF)


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(8, 1), (8 * 256, 1), (8 * 256 + 1, 2), (8 * 256 * 3, 3), (8 * 256 * 4096, 4096), (8 * 256 * 4097, 4096)],
)
def test_a_kernel_has_a_thread_for_each_word_up_to_the_most_blocks(size: int, blocks: int) -> None:
    driver = MemoryDriver()
    device = DriverDevice(driver, GPU)
    device.fill(device.allocate(size), size, 7, inverted=True)
    [(shape, (_, launched, _, seed, mask), kinds)] = driver.launches
    assert (shape, launched, seed, mask) == ((blocks, 1, 1, 256, 1, 1, 0, 0), size, 7, (1 << 64) - 1)
    assert kinds == (ctypes.c_uint64,) * 5


def test_the_room_of_a_copy_that_fails_is_given_back() -> None:
    driver = MemoryDriver()
    device = DriverDevice(driver, GPU)
    address = device.allocate(16)
    driver.copies = False
    with pytest.raises(NixlPluginError, match=rf"^the CUDA driver's cuMemcpyHtoD failed on {re.escape(NAME)}: "):
        device.fill(address, 16, 7, inverted=False)
    assert list(driver.memory) == [address]
    device.fill(address, 0, 7, inverted=False)
    assert driver.log[-5:] == [("allocate", 8), ("load", True), ("nixl_fill", 0), ("wait",), ("free", 8)]


@pytest.mark.parametrize(("room", "size", "fits"), [(23, 24, False), (63, 24, False), (64, 24, True), (66, 25, True)])
def test_a_buffer_on_a_gpu_leaves_room_for_the_pattern(room: int, size: int, fits: bool) -> None:
    driver = MemoryDriver(room + (8 if size == 25 else 0))
    device = DriverDevice(driver, GPU)
    if fits:
        assert device.allocate(size)
        return
    with pytest.raises(GpuMemoryError) as caught:
        device.allocate(size)
    assert caught.value.reason == f"{NAME} cannot allocate {size} bytes: CUDA_ERROR_OUT_OF_MEMORY"
    assert caught.value.remedy == f"{SHOW}, or use smaller blocks, batch or depth"
    assert driver.memory == {}


def test_a_gpu_without_memory_for_a_context_is_named_with_who_uses_it() -> None:
    driver = MemoryDriver()
    driver.full = True
    with pytest.raises(GpuMemoryError) as caught:
        DriverDevice(driver, GPU).activate()
    assert caught.value.reason == (
        f"{NAME} has no memory left for a CUDA context, because other processes use it: CUDA_ERROR_OUT_OF_MEMORY"
    )
    assert caught.value.remedy == f"{SHOW}, and end them, or choose another GPU"


@pytest.mark.parametrize(
    ("packages", "name"),
    [
        ({"cuda-bindings": "13.0", "cuda-python": "12.0"}, "cuda-bindings 13.0"),
        ({"cuda-python": "12.0"}, "cuda-python 12.0"),
        ({}, "cuda.x"),
    ],
)
def test_the_bindings_are_named_by_their_package(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], name: str
) -> None:
    def version(package: str) -> str:
        if package not in packages:
            raise importlib.metadata.PackageNotFoundError
        return packages[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    driver = nvidia.CudaDriver(SimpleNamespace(
        __name__="cuda.x", cuPointerGetAttribute=lambda attribute, address: (0, f"{attribute}{address}"),
        CUpointer_attribute=SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=4), cuDeviceGet=lambda number: (0, 0),
        cuDeviceGetName=lambda *_: (0, b"H"), cuDeviceGetPCIBusId=lambda *_: (0, b"p"),
        cuDeviceGetUuid=lambda _: (0, SimpleNamespace(bytes=bytes(16))),
    ))  # fmt: skip
    assert (driver.name, driver.owner(2)) == (name, 42)
    assert driver.device(0) is driver.device(0)


def test_the_vendor_is_looked_for_until_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [NotApplicableError("no driver"), "the GPUs"]

    def find() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(nvidia, "find", find)
    devices.vendor.cache_clear()
    with pytest.raises(NotApplicableError, match="no driver"):
        devices.vendor()
    assert [cast(Any, devices.vendor()) for _ in range(2)] == ["the GPUs"] * 2
    devices.vendor.cache_clear()


@pytest.mark.parametrize(("count", "number", "message"), [(1, 1, "only GPU 0"), (2, 2, "only GPUs 0 to 1"), (2, 1, "")])
def test_a_gpu_that_this_process_does_not_see_is_named(
    monkeypatch: pytest.MonkeyPatch, count: int, number: int, message: str
) -> None:
    gpus: Any = SimpleNamespace(devices=lambda: [GPU] * count, device=lambda number: f"GPU {number}")
    monkeypatch.setattr(devices, "vendor", lambda: gpus)
    if message:
        with pytest.raises(NotApplicableError, match=f"there is no GPU {number}: this process sees {message}"):
            devices.device(number)
    else:
        assert cast(Any, devices.device(number)) == "GPU 1"


def test_a_buffer_in_gpu_memory_asks_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MemoryDriver()
    monkeypatch.setattr(vram, "device", {1: DriverDevice(driver, GPU)}.__getitem__)
    buffer = vram.VramBuffer(64, 1)
    assert (buffer.memory, buffer.device, len(driver.memory)) == ("VRAM", 1, 1)
    assert buffer.address in driver.memory
    buffer.fill(7, 8, 32)
    whole = b"".join(chunk.tobytes() for _, chunk in chunks(7, 32))
    assert buffer.read(0, 64) == bytes(8) + whole + bytes(24)
    assert buffer.compare(7, 8, 32) is None
    buffer.write(10, b"over")
    wrong = sum(first != second for first, second in zip(b"over", whole[2:6], strict=True))
    corruption = {"wrong_bytes": wrong, "total_bytes": 32, "offset": 2, "expected": whole[2], "found": b"over"[0]}
    assert buffer.compare(7, 8, 32) == corruption
    assert buffer.kernel_seconds() > 0
    with pytest.raises(IndexError):
        buffer.fill(7, 60, 5)
    buffer.free()
    assert driver.memory == {}


def test_a_driver_that_starts_is_used_and_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = AnyDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cast(Any, driver))
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert isinstance(nvidia.find(), nvidia.CudaDriver)

    def refuse(flags: int) -> tuple[int]:
        raise RuntimeError("libcuda is not found\nmore")

    driver.cuGetErrorName = lambda code: (0, b"CUDA_ERROR_%d" % code)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for init, expected in (
        (lambda flags: (100,), (f"CUDA_VISIBLE_DEVICES=7 {HIDDEN[0]}", HIDDEN[1])),
        (lambda flags: (9999 + flags,), ("the CUDA driver does not start: CUDA_ERROR_9999", OTHER_REMEDY)),
        (refuse, NO_LIBRARY),
    ):
        driver.cuInit = init
        with pytest.raises(NotApplicableError) as caught:
            nvidia.find()
        assert (caught.value.reason, caught.value.remedy) == expected


def test_a_gpu_is_as_busy_as_the_shortest_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.0]
    kernels = iter((9.0, 4.0, 2.5, 3.0, 8.0))
    monkeypatch.setattr("pytest_nixl.nixl.worker.devices.time", SimpleNamespace(perf_counter=lambda: sum(times)))
    assert shortest(lambda: times.append(next(kernels))) == 2.5
