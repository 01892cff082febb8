# SPDX-License-Identifier: Apache-2.0
"""The pattern with torch's operations, in torch's host memory, as in images without NVIDIA's bindings.

Run it with ``tox -e torch``. CI does not install torch, which is too large.
"""

from __future__ import annotations

import pytest
import torch

from pytest_nixl.nixl.worker.arrays import descriptor_of
from pytest_nixl.nixl.worker.devices.by_torch import TorchDevice
from pytest_nixl.nixl.worker.memory import TILE, DramBuffer


@pytest.mark.parametrize("size", [1, 7, 8, 4096, 65537, 8 * TILE, 16 * TILE + 3])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_torch_writes_and_compares_the_same_pattern_as_the_processor(size: int, offset: int) -> None:
    device, dram = TorchDevice(torch.device("cpu")), DramBuffer(size + 16)
    address, seed = device.allocate(size + 16), (1 << 63) - size
    for inverted in (True, False):
        device.fill(address + offset, size, seed, inverted=inverted)
        dram.fill(seed, offset, size, inverted=inverted)
        assert device.read(address, size + 16) == dram.read(0, size + 16)
    assert device.compare(address + offset, size, seed) is None
    for place in {size - 1, size // 2, 0}:
        was = device.read(address + offset + place, 1)[0]
        device.write(address + offset + place, memoryview(bytes([was ^ 0x40])))
        dram.write(offset + place, bytes([was ^ 0x40]))
    wrong, first_wrong = device.compare(address + offset, size, seed), dram.compare(seed, offset, size)
    assert wrong is not None
    assert first_wrong is not None
    assert (wrong.count, wrong.offset, wrong.found) == (
        first_wrong["wrong_bytes"],
        first_wrong["offset"],
        first_wrong["found"],
    )
    device.free(address)
    with pytest.raises(IndexError, match="1 bytes at 0x"):
        device.read(address, 1)


def test_arrays_of_torch_are_described() -> None:
    tensor = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert descriptor_of(tensor) == (tensor.data_ptr(), 30, 0, "DRAM")
    assert descriptor_of(tensor.t()) == (tensor.data_ptr(), 30, 0, "DRAM")
    with pytest.raises(ValueError, match="is not one block of memory"):
        descriptor_of(tensor[:, 1:])
    with pytest.raises(ValueError, match="DLPack"):
        descriptor_of(torch.zeros(3, requires_grad=True))
