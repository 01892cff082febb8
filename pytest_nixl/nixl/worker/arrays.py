# SPDX-License-Identifier: Apache-2.0
"""Describe arrays of other libraries for NIXL, in functions that users run with the raw agent.

Supported are ``__cuda_array_interface__`` (CuPy, Numba, torch), DLPack (torch, JAX, NumPy and others) and
``__array_interface__`` (NumPy). None of those libraries is imported.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pytest_nixl.nixl.worker import devices

#: DLDeviceType in dlpack.h for host memory (kDLCPU, kDLCUDAHost, kDLROCMHost) and for GPU memory (kDLCUDA, kDLROCM,
#: kDLCUDAManaged, kDLOneAPI).
_HOST, _GPU = (1, 3, 11), (2, 10, 13, 14)


class DescribedArray(NamedTuple):
    """Memory in NIXL's terms, for ``register_memory([(address, size, device, "")], memory)``.

    :param address: in this process.
    :param size: in bytes.
    :param device: the number of the GPU; 0 for host memory.
    :param memory: ``DRAM`` or ``VRAM``.
    """

    address: int
    size: int
    device: int
    memory: str


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h, the first member of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def descriptor_of(array: Any) -> DescribedArray:
    """Describe an array for NIXL. Keep the array alive while NIXL uses it, and synchronise its stream before.

    :param array: an array with one of the three interfaces.
    :raises TypeError: the array has none of the interfaces, or is in memory that NIXL does not support.
    :raises ValueError: the array is read-only, empty, or not one contiguous block of memory.
    """
    kind = type(array).__name__
    try:
        if hasattr(array, "__cuda_array_interface__"):
            return _by_interface(array, kind, array.__cuda_array_interface__, "VRAM")
    except KeyError:  # torch describes no type that the interface has no name for, such as float8
        return descriptor_of(array.view(sys.modules["torch"].uint8))
    except RuntimeError:  # nor a tensor that requires a gradient
        raise ValueError(f"this {kind} requires a gradient: pass its detach()") from None
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _by_dlpack(array, kind)
    if hasattr(array, "__array_interface__"):
        return _by_interface(array, kind, array.__array_interface__, "DRAM")
    raise TypeError(
        f"a value of type {kind} is not an array: expected __cuda_array_interface__, DLPack or __array_interface__"
    )


def _by_interface(array: Any, kind: str, interface: dict[str, Any], memory: str) -> DescribedArray:
    address, read_only = interface["data"]
    if read_only:
        raise ValueError(f"this {kind} is read-only, but NIXL registers memory for writing: pass a copy")
    if interface.get("mask") is not None:
        raise ValueError(f"this {kind} has a mask: pass the array without the mask")
    item = np.dtype(interface["typestr"]).itemsize
    size = _block(kind, interface["shape"], interface.get("strides"), item)
    return DescribedArray(int(address), size, _device(array, int(address)) if memory == "VRAM" else 0, memory)


def _device(array: Any, address: int) -> int:
    """Return the number of an array's GPU, from the array if it reports it, otherwise from the driver."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    return devices.vendor().owner(address)


def _by_dlpack(array: Any, kind: str) -> DescribedArray:
    code = int(array.__dlpack_device__()[0])
    if code not in (*_HOST, *_GPU):
        raise TypeError(f"this {kind} is on a device of DLPack type {code}: expected host or GPU memory")
    try:
        capsule = array.__dlpack__()
    except (BufferError, RuntimeError, ValueError) as error:
        raise ValueError(f"this {kind} cannot be exported by DLPack ({error}): pass a plain, writable copy") from None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # The capsule is only read. It keeps its name, so it frees its tensor itself.
    tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    item = -(-tensor.bits * tensor.lanes // 8)
    shape = tensor.shape[: tensor.ndim]
    strides = [step * item for step in tensor.strides[: tensor.ndim]] if tensor.strides else None
    size = _block(kind, shape, strides, item)
    address = int(tensor.data or 0) + int(tensor.byte_offset)
    on_gpu = code in _GPU
    return DescribedArray(address, size, int(tensor.device_id) if on_gpu else 0, "VRAM" if on_gpu else "DRAM")


def _block(kind: str, shape: Sequence[int], strides: Sequence[int] | None, item: int) -> int:
    """Return the size in bytes of an array that is one block of memory, whatever the order of its axes."""
    size = item
    for length in shape:
        size *= length
    if not size:
        raise ValueError(f"this {kind} of shape {tuple(shape)} has no bytes")
    expected = item
    for step, length in sorted(zip(strides, shape, strict=True)) if strides is not None else ():
        if length > 1 and step != expected:
            given_strides = tuple(strides or ())
            raise ValueError(
                f"this {kind} is not one block of memory (strides {given_strides}): pass a contiguous copy"
            )
        expected *= length
    return size
