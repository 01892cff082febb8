# SPDX-License-Identifier: Apache-2.0
"""Functions that tests run with the raw agent in a worker, with its buffers and with arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pytest_nixl.nixl.worker.arrays import descriptor_of


class OfCuda:
    """A stand-in for an array of CuPy or torch, with only its interface."""

    def __init__(self, **values: Any) -> None:
        self.__cuda_array_interface__ = values


def describe(agent: Any, *, buffer: Any) -> list[object]:
    """Describe a buffer for NIXL by its array interface."""
    return list(descriptor_of(buffer))


def describe_part(agent: Any, *, buffer: Any, offset: int) -> list[object]:
    """Describe a part of a buffer as an array that does not report its GPU, so that the driver is asked."""
    address, size, _, _ = descriptor_of(buffer)
    part = OfCuda(shape=(size - offset,), typestr="|u1", data=(address + offset, False), version=3)
    return list(descriptor_of(part))


def sum_of(agent: Any, *, buffer: Any) -> int:
    """Use a buffer in host memory as an array."""
    return int(np.asarray(buffer).sum())


def touch(agent: Any, *, address: int) -> int:
    """Read a byte at an address from the host, which must not work in GPU memory."""
    return ctypes.c_uint8.from_address(address).value


def register_array(agent: Any) -> str:
    """Register a NumPy array with NIXL."""
    array = np.arange(4096, dtype=np.float32).reshape(64, 64)
    address, size, device, memory = descriptor_of(array)
    registered = agent.register_memory([(address, size, device, "")], memory)
    agent.deregister_memory(registered)
    return f"{memory} {size}"


def register_by_the_driver(agent: Any, *, size: int) -> int:
    """Allocate memory of the first GPU without cuda-bindings, register it with LIBFABRIC, and return its address."""
    driver, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    agent.register_memory([(address.value, size, 0, "")], "VRAM", backends=["LIBFABRIC"])
    return address.value
