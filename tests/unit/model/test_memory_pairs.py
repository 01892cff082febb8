# SPDX-License-Identifier: Apache-2.0
"""The memory types and the GPUs of the two ends of a link, as an option names them."""

from __future__ import annotations

import pytest

from pytest_nixl.model.memory import DevicePair, MemoryPair


@pytest.mark.parametrize(
    ("text", "pair", "on_gpu", "stored", "with_gpus"),
    [
        (" dram:Dram ", MemoryPair("DRAM", "DRAM"), False, False, "DRAM:DRAM"),
        ("VRAM:DRAM", MemoryPair("VRAM", "DRAM"), True, False, "VRAM@3:DRAM"),
        ("DRAM:VRAM", MemoryPair("DRAM", "VRAM"), True, False, "DRAM:VRAM@12"),
        ("VRAM:FILE", MemoryPair("VRAM", "FILE"), True, True, "VRAM@3:FILE"),
        ("DRAM:OBJ", MemoryPair("DRAM", "OBJ"), False, True, "DRAM:OBJ"),
    ],
)
def test_a_pair_of_memory_types_is_read(
    text: str, pair: MemoryPair, on_gpu: bool, stored: bool, with_gpus: str
) -> None:
    read = MemoryPair.parse(text)
    assert (read, read.on_gpu, read.stored, DevicePair(3, 12).of(read)) == (pair, on_gpu, stored, with_gpus)
    assert MemoryPair.parse(str(pair)) == pair


@pytest.mark.parametrize("text", ["DRAM", "FILE:DRAM", "DRAM:HBM", ":DRAM", "DRAM:", " DRAM:DRAM:DRAM"])
def test_other_texts_are_not_a_pair_of_memory_types(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text.strip()!r} is not a pair of memory types$"):
        MemoryPair.parse(text)


def test_a_pair_of_gpus_is_read() -> None:
    texts = (" 0:9999 ", "7:12", " Auto ")
    assert [DevicePair.parse(text) for text in texts] == [DevicePair(0, 9999), DevicePair(7, 12), None]
    assert str(DevicePair(7, 12)) == "7:12"


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "1:2:3", "-1:0", "1:10000", "10000:1", " 1 :2"])
def test_other_texts_are_not_a_pair_of_gpus(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text.strip()!r} is not a pair of GPU numbers$"):
        DevicePair.parse(text)
