# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries as memory that NIXL can be given: for functions that users run beside the raw agent.

They are taken by ``__cuda_array_interface__`` (CuPy, Numba, torch), by DLPack (torch, JAX, NumPy and others) or by
``__array_interface__`` (NumPy): nothing of those libraries is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

#: DLDeviceType of dlpack.h that is memory of the host (kDLCPU, kDLCUDAHost, kDLROCMHost), and that of a GPU (kDLCUDA,
#: kDLROCM, kDLCUDAManaged, kDLOneAPI).
_HOST, _GPU = (1, 3, 11), (2, 10, 13, 14)


class DescribedArray(NamedTuple):
    """Memory as NIXL wants it told: ``register_memory([(address, size, device, "")], memory)``."""

    address: int
    size: int
    device: int
    memory: str


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h, which begins a DLManagedTensor."""

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
    """Return address, size in bytes, device and memory type of an array, which must stay alive while NIXL uses it.

    What was last written to it must be there: synchronise its stream before.

    :raises TypeError: where it offers none of the three interfaces, or is not in a memory that NIXL knows.
    :raises ValueError: where it is read-only, empty, or not one block of memory.
    """
    kind = type(array).__name__
    if hasattr(array, "__cuda_array_interface__"):
        return _by_interface(array, kind, array.__cuda_array_interface__, "VRAM")
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _by_dlpack(array, kind)
    if hasattr(array, "__array_interface__"):
        return _by_interface(array, kind, array.__array_interface__, "DRAM")
    raise TypeError(f"a {kind} is no array: expected __cuda_array_interface__, DLPack or __array_interface__")


def _by_interface(array: Any, kind: str, told: dict[str, Any], memory: str) -> DescribedArray:
    address, read_only = told["data"]
    if read_only:
        raise ValueError(f"this {kind} is read-only: NIXL registers memory for writing, so give it a copy")
    if told.get("mask") is not None:
        raise ValueError(f"this {kind} has a mask: give NIXL the array that it masks")
    item = np.dtype(told["typestr"]).itemsize
    size = _block(kind, told["shape"], told.get("strides"), item)
    return DescribedArray(int(address), size, _device(array, int(address)) if memory == "VRAM" else 0, memory)


def _device(array: Any, address: int) -> int:
    """The GPU of an array by its own word, else by the driver's."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    from pytest_nixl.nixl.worker.devices import vendor

    return vendor().owner(address)


def _by_dlpack(array: Any, kind: str) -> DescribedArray:
    code = int(array.__dlpack_device__()[0])
    if code not in (*_HOST, *_GPU):
        raise TypeError(f"this {kind} is on a device of DLPack's type {code}: expected memory of the host or of a GPU")
    try:
        capsule = array.__dlpack__()
    except (BufferError, RuntimeError, ValueError) as error:
        raise ValueError(f"this {kind} gives no DLPack ({error}): give NIXL a plain, writable copy") from None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # The capsule is only looked at: it keeps its name, and so gives its tensor back itself.
    tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    item = -(-tensor.bits * tensor.lanes // 8)
    shape = tensor.shape[: tensor.ndim]
    strides = [step * item for step in tensor.strides[: tensor.ndim]] if tensor.strides else None
    size = _block(kind, shape, strides, item)
    address = int(tensor.data or 0) + int(tensor.byte_offset)
    on_gpu = code in _GPU
    return DescribedArray(address, size, int(tensor.device_id) if on_gpu else 0, "VRAM" if on_gpu else "DRAM")


def _block(kind: str, shape: Sequence[int], strides: Sequence[int] | None, item: int) -> int:
    """Return the bytes of an array that is one block of memory, in whatever order its axes are."""
    size = item
    for length in shape:
        size *= length
    if not size:
        raise ValueError(f"this {kind} of shape {tuple(shape)} has no bytes")
    expected = item
    for step, length in sorted(zip(strides, shape, strict=True)) if strides is not None else ():
        if length > 1 and step != expected:
            told = tuple(strides or ())
            raise ValueError(f"this {kind} is not one block of memory (strides {told}): give NIXL a copy")
        expected *= length
    return size
