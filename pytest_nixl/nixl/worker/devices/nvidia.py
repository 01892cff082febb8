# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs, accessed through NVIDIA's Python bindings of the CUDA driver, or else through torch.

With the bindings (``cuda-bindings``, or an older ``cuda-python``), two kernels (``kernels.cu``) write and compare the
pattern. With torch (:mod:`pytest_nixl.nixl.worker.devices.by_torch`), torch's operations do. Each device's primary
context is used, like in the CUDA runtime, UCX and torch, and kept until the process ends.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_nixl.core.errors import GpuMemoryError, NixlPluginError, NotApplicableError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.texts import CUDA_ERRORS, OTHER_REMEDY
from pytest_nixl.nixl.worker.devices import Device, Vendor, WorkerGpu, WrongBytes, shortest
from pytest_nixl.nixl.worker.memory import TILE, tile

if TYPE_CHECKING:
    from pytest_nixl.nixl.worker.devices import by_torch
else:  # it imports torch
    by_torch = lazy_module("pytest_nixl.nixl.worker.devices.by_torch")

#: Device nodes of the driver on Linux and on Windows Subsystem for Linux.
_NODES = ("/dev/nvidiactl", "/dev/dxg")
_MODULES = ("cuda.bindings.driver", "cuda.cuda")
_THREADS, _MOST_BLOCKS = 256, 4096
_ALL = (1 << 64) - 1
#: What the kernel that compares returns: the number of wrong bytes and the first.
_RESULT_BYTES = 16
#: CUDA_ERROR_NO_DEVICE and CUDA_ERROR_INVALID_DEVICE: a GPU that the variable names twice is the latter.
_BY_VARIABLE = {100, 101}
#: CUDA_ERROR_OUT_OF_MEMORY
_OUT_OF_MEMORY = 2


def find() -> Vendor:
    """Return access to the GPUs.

    :raises NotApplicableError: this process can use no GPU.
    """
    node_exists = any(Path(node).exists() for node in _NODES)
    driver = _bindings()
    if driver is None:
        return _torch(node_exists=node_exists)
    try:
        code, *_ = driver.cuInit(0)
        fault = "" if not code else driver.cuGetErrorName(code)[1].decode()
    except Exception as error:  # without libcuda, the class of the error depends on the version of the bindings
        code, fault = None, str(error) or type(error).__name__
    if fault:
        raise NotApplicableError(*driver_fault(code, fault, node_exists=node_exists, environ=os.environ))
    return CudaDriver(driver)


def _bindings() -> Any:
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _torch(*, node_exists: bool) -> Vendor:
    try:
        torch_devices = by_torch.Torch()
    except ImportError:
        if not node_exists:
            raise NotApplicableError(*_NO_DRIVER) from None
        raise NotApplicableError(
            "this worker's Python has neither NVIDIA's bindings (cuda-bindings) nor torch",
            f"run `{pip_install('gpu')}` for the Python that runs the tests",
        ) from None
    if not torch_devices.devices():
        if not node_exists:
            raise NotApplicableError(*_NO_DRIVER)
        raise NotApplicableError(
            "torch sees no GPU", "give the process a GPU, or install a torch that is built for CUDA"
        )
    return torch_devices


_NO_DRIVER = (
    "this host has no NVIDIA driver (no /dev/nvidiactl)",
    "run pytest on a host with a GPU, and give the container its GPUs (`docker run --gpus all`, nvidia.com/gpu)",
)


def driver_fault(code: int | None, fault: str, *, node_exists: bool, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return why the CUDA driver cannot be used, and a remedy.

    :param code: the result of ``cuInit``; None if the driver's library is missing.
    :param fault: the name of that result, or the message of the bindings.
    :param node_exists: whether the driver's device node exists.
    :param environ: the environment variables.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if code is not None and int(code) in _BY_VARIABLE and visible is not None:
        return (
            f"CUDA_VISIBLE_DEVICES={visible} hides every GPU from this process",
            "unset CUDA_VISIBLE_DEVICES, or set it to the number of an existing GPU",
        )
    if not node_exists:
        return _NO_DRIVER
    if code is None:
        return (
            f"the driver's device node exists, but its library libcuda.so.1 is missing: {fault.splitlines()[0]}",
            "set NVIDIA_DRIVER_CAPABILITIES=compute,utility so that the container runtime mounts it",
        )
    error = CUDA_ERRORS.get(str(int(code)))
    if error is not None:
        return f"the CUDA driver does not start: {error.title}", error.remedy
    return f"the CUDA driver does not start: {fault}", OTHER_REMEDY


class CudaDriver:
    """The GPUs, accessed through the CUDA driver.

    :param driver: NVIDIA's module of bindings, in which ``cuInit`` has been called.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._devices: dict[int, DriverDevice] = {}

    @property
    def name(self) -> str:
        """The package of the bindings and its version."""
        for package in ("cuda-bindings", "cuda-python"):
            try:
                return f"{package} {importlib.metadata.version(package)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        name: str = self._driver.__name__
        return name

    def devices(self) -> list[WorkerGpu]:
        """Return the GPUs that CUDA sees."""
        return [self._describe(number) for number in range(call(self._driver, "cuDeviceGetCount"))]

    def device(self, number: int) -> Device:
        """Return one GPU."""
        if number not in self._devices:
            self._devices[number] = DriverDevice(self._driver, self._describe(number))
        return self._devices[number]

    def owner(self, address: int) -> int:
        """Return the number of the GPU to which an address belongs."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(call(self._driver, "cuPointerGetAttribute", attribute, address))

    def _describe(self, number: int) -> WorkerGpu:
        handle = call(self._driver, "cuDeviceGet", number)
        name = call(self._driver, "cuDeviceGetName", 128, handle)
        # The second version returns the UUID of a MIG instance.
        uuid = "cuDeviceGetUuid_v2" if hasattr(self._driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        pci = call(self._driver, "cuDeviceGetPCIBusId", 64, handle)
        return WorkerGpu(
            number,
            name.split(b"\0")[0].decode(),
            bytes(call(self._driver, uuid, handle).bytes).hex(),
            pci.split(b"\0")[0].decode().lower(),
        )


class DriverDevice:
    """One GPU, accessed through the CUDA driver; its primary context is retained when first needed.

    :param gpu: CUDA's number of it, which only this process uses, and the names by which the whole host knows it.
    """

    def __init__(self, driver: Any, gpu: WorkerGpu) -> None:
        self._driver = driver
        self._number = gpu.number
        self._name = f"GPU {gpu.number} ({gpu.pci}, GPU-{uuid.UUID(gpu.uuid)})"
        self._show_users = f"run `nvidia-smi -i {gpu.pci}` to see which processes use its memory"

    @cached_property
    def _context(self) -> Any:
        code, context = self._driver.cuDevicePrimaryCtxRetain(self._call("cuDeviceGet", self._number))
        if int(code) == _OUT_OF_MEMORY:
            raise GpuMemoryError(
                f"{self._name} has no memory left for a CUDA context, because other processes use it: "
                "CUDA_ERROR_OUT_OF_MEMORY",
                f"{self._show_users}, and end them, or choose another GPU",
            )
        _check(self._driver, "cuDevicePrimaryCtxRetain", code, self._name)
        return context

    @cached_property
    def _functions(self) -> tuple[Any, Any]:
        code = Path(__file__).with_name("kernels.ptx").read_bytes() + b"\0"
        module = self._call("cuModuleLoadData", code)
        return tuple(self._call("cuModuleGetFunction", module, name) for name in (b"nixl_fill", b"nixl_compare"))

    def activate(self) -> None:
        """Make this GPU's context the current one of this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, size: int) -> int:
        self.activate()
        address = self.reserve(size)
        try:  # what fill and compare allocate must fit in addition
            self._call("cuMemFree", self.reserve(8 * min(-(-size // 8), TILE) + _RESULT_BYTES))
        except GpuMemoryError:
            self._call("cuMemFree", address)
            raise self._full(size) from None
        self._call("cuMemsetD8", address, 0, size)
        self._call("cuCtxSynchronize")
        return int(address)

    def reserve(self, size: int) -> Any:
        """Allocate ``size`` bytes of any content, and return the driver's object for their address.

        :raises GpuMemoryError: the GPU does not have enough free memory.
        """
        code, address = self._driver.cuMemAlloc(size)
        if int(code) == _OUT_OF_MEMORY:
            raise self._full(size)
        _check(self._driver, "cuMemAlloc", code, self._name)
        return address

    def _full(self, size: int) -> GpuMemoryError:
        return GpuMemoryError(
            f"{self._name} cannot allocate {size} bytes: CUDA_ERROR_OUT_OF_MEMORY",
            f"{self._show_users}, or use smaller blocks, batch or depth",
        )

    def free(self, address: int) -> None:
        self.activate()
        self._call("cuMemFree", address)

    def read(self, address: int, size: int) -> bytes:
        self.activate()
        room = np.empty(size, dtype=np.uint8)
        if size:
            self._call("cuMemcpyDtoH", room.ctypes.data, address, size)
        return room.tobytes()

    def write(self, address: int, data: memoryview) -> None:
        self.activate()
        source = np.frombuffer(data, dtype=np.uint8)
        if len(source):
            self._call("cuMemcpyHtoD", address, source.ctypes.data, len(source))
        self._call("cuCtxSynchronize")

    def fill(self, address: int, size: int, seed: int, *, inverted: bool) -> None:
        """Write the pattern on the GPU."""
        self.activate()
        with self._room(seed, size) as tile_address:
            self._launch(self._functions[0], address, size, tile_address, seed, _ALL if inverted else 0)

    def compare(self, address: int, size: int, seed: int) -> WrongBytes | None:
        """Compare with the pattern on the GPU."""
        self.activate()
        with self._room(seed, size) as tile_address, _Room(self, np.array([0, _ALL], np.uint64)) as counters:
            self._launch(self._functions[1], address, size, tile_address, seed, counters)
            count, first = np.frombuffer(self.read(counters, _RESULT_BYTES), dtype=np.uint64).tolist()
        return WrongBytes(count, first >> 8, first & 0xFF) if count else None

    def kernel_seconds(self) -> float:
        """Return the seconds of the shortest of some kernels over 8 bytes."""
        self.activate()
        with _Room(self, np.zeros(1, np.uint64)) as counter:
            return shortest(lambda: self._launch(self._functions[0], counter, 8, counter, 0, 0))

    def _room(self, seed: int, size: int) -> _Room:
        return _Room(self, tile(seed, -(-size // 8)))

    def _launch(self, function: Any, *values: int) -> None:
        """Run a kernel over ``values[1]`` bytes; all its arguments have 64 bits."""
        blocks = max(1, min(-(-values[1] // (8 * _THREADS)), _MOST_BLOCKS))
        arguments = (values, (ctypes.c_uint64,) * len(values))
        self._call("cuLaunchKernel", function, blocks, 1, 1, _THREADS, 1, 1, 0, 0, arguments, 0)
        self._call("cuCtxSynchronize")

    def _call(self, function: str, *arguments: Any) -> Any:
        return call(self._driver, function, *arguments, gpu=self._name)


class _Room:
    """A context manager for device memory with a copy of ``array``; its value is the address."""

    def __init__(self, device: DriverDevice, array: Any) -> None:
        self._device = device
        self._words = array
        self._address: Any = None

    def __enter__(self) -> int:
        self._address = self._device.reserve(max(8, self._words.nbytes))
        try:
            if self._words.nbytes:
                self._device._call("cuMemcpyHtoD", self._address, self._words.ctypes.data, self._words.nbytes)
        except BaseException:
            self.__exit__()
            raise
        return int(self._address)

    def __exit__(self, *_: object) -> None:
        self._device._call("cuMemFree", self._address)


def call(driver: Any, function: str, *arguments: Any, gpu: str = "") -> Any:
    """Call a function of the driver, and return its first result after the code.

    :param gpu: the GPU that it is about, for the error.
    :raises NixlPluginError: the function returned an error code.
    """
    code, *outputs = getattr(driver, function)(*arguments)
    _check(driver, function, code, gpu)
    return outputs[0] if outputs else None


def _check(driver: Any, function: str, code: Any, gpu: str) -> None:
    if code:
        failed = f"the CUDA driver's {function} failed{gpu and f' on {gpu}'}"
        error = CUDA_ERRORS.get(str(int(code)))
        if error is not None:
            raise NixlPluginError(f"{failed}: {error.title}", error.remedy)
        description = driver.cuGetErrorString(code)[1].decode()
        raise NixlPluginError(
            f"{failed}: {driver.cuGetErrorName(code)[1].decode()} ({description})",
            "run `nvidia-smi` and `dmesg | grep -i xid` on the host: a GPU that had an error may need a reset",
        )
