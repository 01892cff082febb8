# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's GPUs, through NVIDIA's own Python bindings of the CUDA driver, or through torch where that is what is there.

By the bindings (``cuda-bindings``, or an older ``cuda-python``) the pattern is written and compared by two kernels
(``kernels.cu``); by torch (:mod:`pytest_nixl.nixl.worker.devices.by_torch`) with its operations. Each device's primary
context is used, which the CUDA runtime, UCX and torch use as well, and it is kept until the process ends.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.nixl.worker.devices import Device, FoundDevices, Vendor, WrongBytes
from pytest_nixl.nixl.worker.pattern import tile

#: Either is there where a driver is: of a Linux host, and of Windows' own Linux.
_NODES = ("/dev/nvidiactl", "/dev/dxg")
_MODULES = ("cuda.bindings.driver", "cuda.cuda")
_THREADS, _MOST_BLOCKS = 256, 4096
_ALL = (1 << 64) - 1
_INSTALL = "pip install 'pytest-nixl[gpu]' in the Python that runs the tests"


def find() -> Vendor:
    """Return what reaches the GPUs. :raises NotApplicableError: saying why nothing does."""
    there = any(Path(node).exists() for node in _NODES)
    driver = _bindings()
    if driver is None:
        return _torch(there=there)
    try:
        code, *_ = driver.cuInit(0)
        fault = "" if not code else driver.cuGetErrorName(code)[1].decode()
    except Exception as error:  # the bindings have errors of their own where there is no libcuda, by their version
        code, fault = None, str(error) or type(error).__name__
    if fault:
        raise NotApplicableError(*why_not(code, fault, there=there, environ=os.environ))
    return CudaDriver(driver)


def _bindings() -> Any:
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _torch(*, there: bool) -> Vendor:
    try:
        from pytest_nixl.nixl.worker.devices.by_torch import Torch
    except ImportError:
        if not there:
            raise NotApplicableError(*_NO_DRIVER) from None
        raise NotApplicableError(
            "this worker's Python has neither NVIDIA's bindings (cuda-bindings) nor torch", _INSTALL
        ) from None
    found = Torch()
    if not found.devices():
        if not there:
            raise NotApplicableError(*_NO_DRIVER)
        raise NotApplicableError("torch sees none", "give the process a GPU, or install a torch that is built for CUDA")
    return found


_NO_DRIVER = (
    "this host has no NVIDIA driver (no /dev/nvidiactl)",
    "run it on a host with a GPU, and give the container its GPUs (--gpus all, nvidia.com/gpu)",
)


def why_not(code: int | None, fault: str, *, there: bool, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return why the CUDA driver is of no use, and what to do.

    :param code: what ``cuInit`` returned; None: there is no driver's library to ask.
    :param fault: the name of that, or the bindings' own words.
    :param there: whether the host's driver has its device node here.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if code is not None and int(code) == 100 and visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible} leaves this process none", "unset it, or name a GPU that is there"
    if not there:
        return _NO_DRIVER
    if code is None:
        return (
            f"there is a driver's device node here and no library of it (libcuda.so.1): {fault.splitlines()[0]}",
            "let the container runtime mount it (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        )
    return f"the CUDA driver does not start here: {fault}", "see `nvidia-smi`, and `dmesg` of the host"


class CudaDriver:
    """The GPUs, by the CUDA driver.

    :param driver: NVIDIA's module of bindings; ``cuInit`` has been called.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._devices: dict[int, DriverDevice] = {}

    @property
    def name(self) -> str:
        """The bindings and their version."""
        for package in ("cuda-bindings", "cuda-python"):
            try:
                return f"{package} {importlib.metadata.version(package)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return str(self._driver.__name__)

    def devices(self) -> list[FoundDevices]:
        """Return the GPUs that CUDA sees."""
        return [self._describe(number) for number in range(call(self._driver, "cuDeviceGetCount"))]

    def device(self, number: int) -> Device:
        """Return one of them."""
        if number not in self._devices:
            self._devices[number] = DriverDevice(self._driver, number)
        return self._devices[number]

    def owner(self, address: int) -> int:
        """Return the number of the GPU that memory is of."""
        wanted = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(call(self._driver, "cuPointerGetAttribute", wanted, address))

    def _describe(self, number: int) -> FoundDevices:
        one = call(self._driver, "cuDeviceGet", number)
        name = call(self._driver, "cuDeviceGetName", 128, one)
        # Of a part of a GPU (MIG) the second knows its own.
        uuid = "cuDeviceGetUuid_v2" if hasattr(self._driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        pci = call(self._driver, "cuDeviceGetPCIBusId", 64, one)
        return FoundDevices(
            number,
            name.split(b"\0")[0].decode(),
            bytes(call(self._driver, uuid, one).bytes).hex(),
            pci.split(b"\0")[0].decode().lower(),
        )


class DriverDevice:
    """One GPU, by the CUDA driver: its primary context, which is made when it is first needed."""

    def __init__(self, driver: Any, number: int) -> None:
        self._driver = driver
        self._number = number

    @cached_property
    def _context(self) -> Any:
        return self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", self._number))

    @cached_property
    def _functions(self) -> tuple[Any, Any]:
        code = Path(__file__).with_name("kernels.ptx").read_bytes() + b"\0"
        module = self._call("cuModuleLoadData", code)
        return tuple(self._call("cuModuleGetFunction", module, name) for name in (b"nixl_fill", b"nixl_compare"))

    def activate(self) -> None:
        """Make its context that of this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, size: int) -> int:
        """Return the address of ``size`` bytes that are zero."""
        self.activate()
        code, address = self._driver.cuMemAlloc(size)
        if code:
            name = self._driver.cuGetErrorName(code)[1].decode()
            raise NixlPluginError(
                f"GPU {self._number} gives no {size} bytes: {name}",
                "see `nvidia-smi` for what holds its memory, or ask for smaller blocks, batch or depth",
            )
        self._call("cuMemsetD8", address, 0, size)
        self._call("cuCtxSynchronize")
        return int(address)

    def free(self, address: int) -> None:
        """Give it back."""
        self.activate()
        self._call("cuMemFree", address)

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of ``size`` bytes."""
        self.activate()
        room = np.empty(size, dtype=np.uint8)
        if size:
            self._call("cuMemcpyDtoH", room.ctypes.data, address, size)
        return room.tobytes()

    def write(self, address: int, data: memoryview) -> None:
        """Write ``data``."""
        self.activate()
        given = np.frombuffer(data, dtype=np.uint8)
        if len(given):
            self._call("cuMemcpyHtoD", address, given.ctypes.data, len(given))
        self._call("cuCtxSynchronize")

    def fill(self, address: int, size: int, seed: int, *, inverted: bool) -> None:
        """Write the pattern on the GPU."""
        self.activate()
        with self._room(seed, size) as tile_address:
            self._launch(self._functions[0], address, size, tile_address, seed & _ALL, _ALL if inverted else 0)

    def compare(self, address: int, size: int, seed: int) -> WrongBytes | None:
        """Compare with the pattern on the GPU."""
        self.activate()
        with self._room(seed, size) as tile_address, _Room(self._driver, np.array([0, _ALL], np.uint64)) as found:
            self._launch(self._functions[1], address, size, tile_address, seed & _ALL, found)
            count, first = np.frombuffer(self.read(found, 16), dtype=np.uint64).tolist()
        return WrongBytes(count, first >> 8, first & 0xFF) if count else None

    def _room(self, seed: int, size: int) -> _Room:
        return _Room(self._driver, tile(seed, -(-size // 8)))

    def _launch(self, function: Any, *values: int) -> None:
        """Run a kernel over what ``values[1]`` bytes are; its arguments are all of 64 bits."""
        blocks = max(1, min(-(-values[1] // (8 * _THREADS)), _MOST_BLOCKS))
        arguments = (values, (ctypes.c_uint64,) * len(values))
        self._call("cuLaunchKernel", function, blocks, 1, 1, _THREADS, 1, 1, 0, 0, arguments, 0)
        self._call("cuCtxSynchronize")

    def _call(self, function: str, *arguments: Any) -> Any:
        return call(self._driver, function, *arguments)


class _Room:
    """Memory of the current device with a copy of ``words``, while the context lasts; it is its address."""

    def __init__(self, driver: Any, words: Any) -> None:
        self._driver = driver
        self._words = words
        self._address: Any = None

    def __enter__(self) -> int:
        self._address = call(self._driver, "cuMemAlloc", max(8, self._words.nbytes))
        if self._words.nbytes:
            call(self._driver, "cuMemcpyHtoD", self._address, self._words.ctypes.data, self._words.nbytes)
        return int(self._address)

    def __exit__(self, *_: object) -> None:
        call(self._driver, "cuMemFree", self._address)


def call(driver: Any, function: str, *arguments: Any) -> Any:
    """Call a function of the driver; return what it gives besides its code. :raises NixlPluginError: where it fails."""
    code, *found = getattr(driver, function)(*arguments)
    if code:
        words = driver.cuGetErrorString(code)[1].decode()
        raise NixlPluginError(
            f"the CUDA driver's {function} failed: {driver.cuGetErrorName(code)[1].decode()} ({words})",
            "see `nvidia-smi` and the kernel's log (`dmesg | grep -i xid`): a GPU that had an error may need a reset",
        )
    return found[0] if found else None
