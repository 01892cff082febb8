# SPDX-License-Identifier: Apache-2.0
"""GPU memory that NIXL moves: filled with a pattern and compared with it where it is."""

from __future__ import annotations

from typing import Any

from pytest_nixl.nixl.worker.devices import device
from pytest_nixl.nixl.worker.memory import PatternBuffer
from pytest_nixl.nixl.worker.pattern import byte_at


class VramBuffer(PatternBuffer):
    """``size`` bytes of a GPU's memory.

    :param number: the GPU, as CUDA counts those that this process sees.
    :raises NotApplicableError: where there is no such GPU.
    :raises NixlPluginError: where it has not that much memory.
    """

    memory = "VRAM"

    def __init__(self, size: int, number: int) -> None:
        super().__init__(size)
        self.device = number
        self._device = device(number)
        self.address = self._device.allocate(size)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For CuPy, Numba and torch, in functions that are run beside the agent."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def activate(self) -> None:
        """Make the GPU that of this thread: NIXL and UCX expect that of who gives them its addresses."""
        self._device.activate()

    def free(self) -> None:
        """Give the memory back."""
        self._device.free(self.address)

    def fill(self, seed: int, offset: int, size: int, *, inverted: bool = False) -> None:
        """Write the pattern of ``seed``, or its complement, on the GPU."""
        self._check(offset, size)
        self._device.fill(self.address + offset, size, seed, inverted=inverted)

    def compare(self, seed: int, offset: int, size: int) -> dict[str, int] | None:
        """Compare every byte with the pattern of ``seed``, on the GPU."""
        self._check(offset, size)
        wrong = self._device.compare(self.address + offset, size, seed)
        if wrong is None:
            return None
        expected = byte_at(seed, wrong.offset)
        first = {"offset": wrong.offset, "expected": expected, "found": wrong.found}
        return {"wrong_bytes": wrong.count, "total_bytes": size, **first}

    def _get(self, offset: int, size: int) -> bytes:
        return self._device.read(self.address + offset, size)

    def _put(self, offset: int, data: memoryview) -> None:
        self._device.write(self.address + offset, data)
