# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries are described for NIXL.

NumPy's arrays are real. Objects with only the interfaces stand in for CuPy, torch and JAX, which need a GPU.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.vram_functions import OfCuda

from pytest_nixl.nixl.worker import devices
from pytest_nixl.nixl.worker.arrays import descriptor_of

BLOCK = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
ADDRESS = BLOCK.ctypes.data


class OfGpu(OfCuda):
    """An array of a library that also reports its GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 3)


class OnDevice:
    """An array with only DLPack, on a device of any type."""

    def __init__(self, kind: int, number: int = 0) -> None:
        self._device = (kind, number)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self) -> object:
        return BLOCK.__dlpack__()


class OfNumpy:
    """An array like those of NumPy before DLPack."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__


@pytest.mark.parametrize(
    "array",
    [BLOCK.transpose(1, 2, 0), BLOCK.reshape(2, 1, 12), OfNumpy(BLOCK.T)],
    ids=["in another order", "with an axis of one", "old"],
)
def test_block_of_host_memory_is_described_in_any_order_of_its_axes(array: Any) -> None:
    assert descriptor_of(array) == (ADDRESS, 192, 0, "DRAM")


def test_part_that_is_one_block_is_described() -> None:
    assert descriptor_of(BLOCK[1]) == (ADDRESS + 96, 96, 0, "DRAM")


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ({"shape": (10, 10), "typestr": "<f2", "strides": None, "stream": 1, "mask": None}, (4096, 200, 3, "VRAM")),
        ({"shape": (10, 10), "typestr": "<f2", "strides": (2, 20)}, (4096, 200, 3, "VRAM")),
        # The stride of an axis of one element is never used, and may be any number.
        ({"shape": (1, 10), "typestr": "<f2", "strides": (4096, 2)}, (4096, 20, 3, "VRAM")),
    ],
)
def test_gpu_memory_is_described_by_the_cuda_array_interface(
    interface: dict[str, Any], expected: tuple[int, int, int, str]
) -> None:
    assert descriptor_of(OfGpu(data=(4096, False), version=3, **interface)) == expected


def test_memory_is_described_by_dlpack() -> None:
    for memory, kinds in (("DRAM", (1, 3, 11)), ("VRAM", (2, 10, 13))):
        for kind in kinds:
            assert descriptor_of(OnDevice(kind, 3)) == (ADDRESS, 192, 0, memory), "the device is that of the capsule"


def test_the_gpu_of_an_array_that_does_not_report_it_is_that_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "vendor", lambda: SimpleNamespace(owner=lambda address: address + 1))
    assert descriptor_of(OfCuda(shape=(4,), typestr="<f4", data=(4096, False))) == (4096, 16, 4097, "VRAM")


class OfTorch:
    """A tensor of torch in GPU memory whose type, or need of a gradient, the interface cannot describe."""

    def __init__(self, refusal: Exception) -> None:
        self._refusal = refusal

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise self._refusal

    def view(self, kind: str) -> OfGpu:
        return {"uint8": OfGpu(shape=(4, 25), typestr="|u1", data=(4096, False))}[kind]


def test_a_tensor_of_float8_is_described_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(uint8="uint8"))
    assert descriptor_of(OfTorch(KeyError("torch.float8_e4m3fn"))) == (4096, 100, 3, "VRAM")


def read_only(array: Any) -> Any:
    """Return a read-only copy."""
    array = array.copy()
    array.flags.writeable = False
    return array


STRIDED = "this ndarray is not one block of memory (strides {}): pass a contiguous copy"
READ_ONLY = "this {} is read-only, but NIXL registers memory for writing: pass a copy"
NO_ARRAY = "a value of type bytes is not an array: expected __cuda_array_interface__, DLPack or __array_interface__"


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (BLOCK[::-1], ValueError, STRIDED.format((-96, 32, 8))),
        (BLOCK[:, :, ::2], ValueError, STRIDED.format((96, 32, 16))),
        (BLOCK[:0], ValueError, "this ndarray of shape (0, 3, 4) has no bytes"),
        (read_only(BLOCK), ValueError, "this ndarray *: pass a * copy"),
        (OfGpu(shape=(4,), typestr="<f4", data=(4096, True)), ValueError, READ_ONLY.format("OfGpu")),
        (OfNumpy(read_only(BLOCK)), ValueError, READ_ONLY.format("OfNumpy")),
        (OfGpu(shape=(4,), typestr="<f4", data=(1, False), mask=BLOCK), ValueError, "this OfGpu has a mask: *"),
        (OfTorch(RuntimeError("requires grad")), ValueError, "this OfTorch requires a gradient: pass its detach()"),
        (OnDevice(4), TypeError, "this OnDevice is on a device of DLPack type 4: expected host or GPU memory"),
        (b"bytes", TypeError, NO_ARRAY),
    ],
)
def test_unsupported_array_is_refused_in_one_sentence(array: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        descriptor_of(array)
    assert fnmatchcase(str(caught.value), message)
