# SPDX-License-Identifier: Apache-2.0
"""The pattern in buffers shows every error of a transfer: shifted, repeated, swapped and stale blocks."""

from __future__ import annotations

import mmap
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nixl.nixl.worker import memory
from pytest_nixl.nixl.worker.memory import _TILES, TILE, Bytes, DramBuffer, byte_at, chunks, key, tile

SEEDS = st.integers(0, (1 << 63) - 1)
#: More than two tiles, so that every part of the arithmetic is used.
SIZE = 3 << 20


def pattern(seed: int, size: int) -> Bytes:
    """Return the pattern as one array."""
    return np.concatenate([np.zeros(0, np.uint8), *(chunk.copy() for _, chunk in chunks(seed, size))])


def test_pattern_follows_its_definition_in_every_numpy() -> None:
    stream_words = pattern(7, 8 * (TILE + 2)).view(np.uint64)
    stream = np.random.SFC64(7).random_raw(TILE)
    assert int(stream_words[0]) == int(stream[0]) ^ key(7, 0)
    assert int(stream_words[TILE - 1]) == int(stream[TILE - 1]) ^ key(7, 0)
    assert int(stream_words[TILE]) == int(stream[0]) ^ key(7, 1)
    # Fixed values, because peers with other versions and the GPU must compute the same.
    assert [hex(int(number)) for number in (stream[0], key(7, 0), key(0, 0))] == [
        "0xb3a7273fa505ecf",
        "0x63cbe1e459320dd7",
        "0xe220a8397b1dcdaf",
    ]


def test_the_last_of_several_chunks_ends_with_the_pattern() -> None:
    whole = 8 * _TILES * TILE
    assert [(offset, len(part)) for offset, part in chunks(7, whole + 11)] == [(0, whole), (whole, 11)]


def test_tile_has_a_prime_number_of_words() -> None:
    assert all(TILE % divisor for divisor in range(2, int(TILE**0.5) + 1))


@given(seed=SEEDS, size=st.integers(0, SIZE), data=st.data())
@settings(max_examples=30, deadline=None)
def test_pattern_of_a_size_is_the_beginning_of_every_larger_one(seed: int, size: int, data: st.DataObject) -> None:
    whole = pattern(seed, SIZE)
    assert np.array_equal(pattern(seed, size), whole[:size])
    assert len(tile(seed, 10)) == 10
    if size:
        place = data.draw(st.integers(0, size - 1))
        assert byte_at(seed, place) == whole[place]


@pytest.mark.parametrize("shift", [1, 7, 8, 64, 4096, 65536, 1 << 20, 8 * TILE, 8 * TILE + 8])
def test_shifted_or_repeated_bytes_differ_in_every_block(shift: int) -> None:
    whole = pattern(11, SIZE)
    same = (whole[shift:] == whole[:-shift]).reshape(-1)[: (SIZE - shift) // 4096 * 4096].reshape(-1, 4096)
    # One of 256 bytes is right by chance; after a shift by a whole tile, none or all of every eighth byte.
    assert same.mean() < (0.26 if shift == 8 * TILE else 0.01)
    assert (same.sum(axis=1) < 4096 * 0.6).all(), "another block of 4 KiB in this place would not be found"


@given(seed=SEEDS, other=SEEDS)
@settings(max_examples=25, deadline=None)
def test_bytes_of_another_seed_differ(seed: int, other: int) -> None:
    if seed != other:
        assert (pattern(seed, 4096) == pattern(other, 4096)).mean() < 0.03


def test_every_byte_of_the_complement_is_wrong() -> None:
    buffer = DramBuffer(SIZE + 3)
    buffer.fill(5, 0, SIZE + 3, inverted=True)
    assert buffer.compare(5, 0, SIZE + 3) == {
        "wrong_bytes": SIZE + 3,
        "total_bytes": SIZE + 3,
        "offset": 0,
        "expected": byte_at(5, 0),
        "found": 0xFF ^ byte_at(5, 0),
    }


@given(seed=SEEDS, offset=st.integers(0, 17), size=st.integers(0, SIZE), inverted=st.booleans())
@settings(max_examples=30, deadline=None)
def test_host_memory_is_filled_with_the_pattern_and_nothing_around_it_is_written(
    seed: int, offset: int, size: int, inverted: bool
) -> None:
    buffer = DramBuffer(SIZE + 32)
    buffer.fill(seed, offset, size, inverted=inverted)
    expected = np.bitwise_not(pattern(seed, size)) if inverted else pattern(seed, size)
    actual = np.frombuffer(buffer.read(0, buffer.size), dtype=np.uint8)
    assert np.array_equal(actual[offset : offset + size], expected)
    assert not actual[:offset].any()
    assert not actual[offset + size :].any()


@given(offset=st.integers(0, 17), size=st.integers(1, SIZE), data=st.data())
@settings(max_examples=40, deadline=None)
def test_each_wrong_byte_in_host_memory_is_found(offset: int, size: int, data: st.DataObject) -> None:
    buffer = DramBuffer(SIZE + 32)
    buffer.fill(9, offset, size)
    assert buffer.compare(9, offset, size) is None
    places = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=4)) | {size - 1})
    for place in places:
        buffer.write(offset + place, bytes([0x10 ^ byte_at(9, place)]))
    assert buffer.compare(9, offset, size) == {
        "wrong_bytes": len(places),
        "total_bytes": size,
        "offset": places[0],
        "expected": byte_at(9, places[0]),
        "found": 0x10 ^ byte_at(9, places[0]),
    }


def test_a_buffer_begins_with_a_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a huge page is an odd number of pages, of which no mapping is aligned by chance."""
    monkeypatch.setattr(memory, "_HUGE_PAGE", 1009 * mmap.PAGESIZE)
    buffer = DramBuffer(3)
    assert buffer.address % (1009 * mmap.PAGESIZE) == 0
    assert buffer.read(0, 3) == bytes(3)


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (60, 5), (64, 1), (0, 65), (0, -1)])
def test_bytes_outside_of_a_buffer_are_neither_read_nor_written(offset: int, size: int) -> None:
    buffer = DramBuffer(64)
    message = rf"bytes {offset} to {offset + size} are not inside a buffer of 64 bytes"
    for attempt in (buffer.read, partial(buffer.fill, 1), partial(buffer.compare, 1)):
        with pytest.raises(IndexError, match=message):
            attempt(offset, size)
    if size > 0:
        with pytest.raises(IndexError, match=message):
            buffer.write(offset, bytes(size))
    array = np.asarray(buffer)
    assert (array.shape, str(array.dtype), array.flags.writeable) == ((64,), "uint8", True)
    array[:] = 7
    assert buffer.read(0, 64) == b"\7" * 64
    assert buffer.address == array.ctypes.data
