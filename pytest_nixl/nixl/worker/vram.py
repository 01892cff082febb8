# SPDX-License-Identifier: Apache-2.0
"""Buffers in GPU memory that are filled with a pattern and compared with it on the GPU."""

from __future__ import annotations

from typing import Any

from pytest_nixl.nixl.worker.devices import device
from pytest_nixl.nixl.worker.memory import PatternBuffer, byte_at


class VramBuffer(PatternBuffer):
    """A buffer in GPU memory.

    :param size: in bytes.
    :param number: the GPU, as CUDA numbers the GPUs that this process sees.
    :raises NotApplicableError: this process does not see this GPU.
    :raises NixlPluginError: the GPU does not have enough free memory.
    """

    memory = "VRAM"

    def __init__(self, size: int, number: int) -> None:
        super().__init__(size)
        self.device = number
        self._device = device(number)
        self.address = self._device.allocate(size)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface for CuPy, Numba and torch, in functions that are run with the raw agent."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def activate(self) -> None:
        """Make this GPU the current one of this thread, which NIXL and UCX need to use its addresses."""
        self._device.activate()

    def free(self) -> None:
        self._device.free(self.address)

    def fill(self, seed: int, offset: int, size: int, *, inverted: bool = False) -> None:
        self._check(offset, size)
        self._device.fill(self.address + offset, size, seed, inverted=inverted)

    def compare(self, seed: int, offset: int, size: int) -> dict[str, int] | None:
        """Compare every byte with the pattern of ``seed`` on the GPU; return None, or the number of wrong bytes and the
        first one.
        """
        self._check(offset, size)
        wrong = self._device.compare(self.address + offset, size, seed)
        if wrong is None:
            return None
        expected = byte_at(seed, wrong.offset)
        first = {"offset": wrong.offset, "expected": expected, "found": wrong.found}
        return {"wrong_bytes": wrong.count, "total_bytes": size, **first}

    def kernel_seconds(self) -> float:
        """Return the seconds that the GPU takes for a kernel over 8 bytes."""
        return self._device.kernel_seconds()

    def _get(self, offset: int, size: int) -> bytes:
        return self._device.read(self.address + offset, size)

    def _put(self, offset: int, data: memoryview) -> None:
        self._device.write(self.address + offset, data)
