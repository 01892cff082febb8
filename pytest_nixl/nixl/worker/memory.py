# SPDX-License-Identifier: Apache-2.0
"""Buffers in host memory that are filled with a pattern and compared with it byte by byte.

The pattern has the same bytes in host memory, in a file and on a GPU: a stream of 64-bit little-endian words. Word
``i`` is ``tile[i % TILE] ^ key(seed, i // TILE)``. The tile is the beginning of the raw SFC64 stream of the seed (the
same in every NumPy). The key is another random word for each repetition of the tile. A processor computes one XOR per
word, and a GPU computes each word separately from a given tile. TILE is prime, so that no repetition falls on a
boundary of blocks. Blocks that are swapped, shifted, repeated or left from another seed therefore differ in about 255
of 256 bytes.
"""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

#: The number of 8-byte words in a tile, which has 1 MiB less 8 bytes.
TILE = (1 << 17) - 1
#: The number of tiles that are computed at a time.
_TILES = 4
_ALL = (1 << 64) - 1


def tile(seed: int, word_count: int = TILE) -> Words:
    """Return the first ``word_count`` words of the tile of ``seed``, at most the whole tile. Do not write them."""
    return _tile(seed, min(word_count, TILE))


@lru_cache(maxsize=1)  # between two windows one pattern is compared and written again and again
def _tile(seed: int, word_count: int) -> Words:
    tile_words: Words = np.random.SFC64(seed).random_raw(word_count)
    tile_words.flags.writeable = False
    return tile_words


def key(seed: int, number: int) -> int:
    """Return the word that is XORed with repetition ``number`` of the tile: SplitMix64 of the seed, counted from 0."""
    state = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _ALL
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _ALL
    return state ^ (state >> 31)


def byte_at(seed: int, offset: int) -> int:
    """Return the byte of the pattern at ``offset``."""
    number, place = divmod(offset // 8, TILE)
    random_word = int(np.random.SFC64(seed).random_raw(place + 1)[place]) ^ key(seed, number)
    return (random_word >> 8 * (offset % 8)) & 0xFF


def chunks(seed: int, size: int) -> Iterator[tuple[int, Bytes]]:
    """Yield ``size`` bytes of the pattern as (offset, bytes). The next item overwrites the bytes of the last one."""
    word_count = -(-size // 8)
    first = tile(seed, word_count)
    room: Words = np.empty(min(word_count, _TILES * TILE), dtype=np.uint64)
    for start in range(0, word_count, len(room) or 1):
        chunk = room[: word_count - start]
        for place in range(0, len(chunk), TILE):
            part = chunk[place : place + TILE]
            np.bitwise_xor(first[: len(part)], np.uint64(key(seed, (start + place) // TILE)), out=part)
        yield 8 * start, chunk.view(np.uint8)[: size - 8 * start]


def tiles(seed: int, size: int) -> Iterator[tuple[int, Words, np.uint64]]:
    """Yield the whole words of ``size`` bytes of the pattern as (offset, tile, key), whose XOR they are."""
    word_count = size // 8
    first = tile(seed, word_count)
    for number, start in enumerate(range(0, word_count, TILE)):
        yield 8 * start, first[: word_count - start], np.uint64(key(seed, number))


def tail(seed: int, size: int) -> Bytes:
    """Return what of ``size`` bytes of the pattern follows the last whole word: 0 to 7 bytes."""
    return np.array([byte_at(seed, place) for place in range(size // 8 * 8, size)], dtype=np.uint8)


_HUGE_PAGE = 2 << 20


class PatternBuffer(ABC):
    """A buffer of ``size`` bytes that is filled with a pattern and compared with it.

    ``memory``, ``address`` and ``device`` describe it for NIXL. Subclasses define ``_get`` and ``_put`` to access it.
    """

    memory: str
    address: int
    device: int

    def __init__(self, size: int) -> None:
        self.size = size

    def activate(self) -> None:
        """Prepare this thread before NIXL gets the address."""
        return

    @abstractmethod
    def free(self) -> None:
        """Free the memory or the file."""

    def fill(self, seed: int, offset: int, size: int, *, inverted: bool = False) -> None:
        """Write the pattern of ``seed``, or its complement, in which every byte is wrong."""
        for start, chunk in chunks(seed, size):
            self.write(offset + start, np.bitwise_not(chunk).data if inverted else chunk.data)

    def compare(self, seed: int, offset: int, size: int) -> dict[str, int] | None:
        """Compare every byte with the pattern of ``seed``; return None, or the number of wrong bytes and the first."""
        wrong = _Comparison(size)
        for start, chunk in chunks(seed, size):
            # A copy, so that the compared bytes are the reported ones even if another process writes at the same time.
            wrong.add(start, np.frombuffer(self.read(offset + start, len(chunk)), dtype=np.uint8), chunk)
        return wrong.found

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of ``size`` bytes at ``offset``."""
        self._check(offset, size)
        return self._get(offset, size)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write ``data`` at ``offset``."""
        self._check(offset, len(data))
        self._put(offset, memoryview(data))

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise IndexError(f"bytes {offset} to {offset + size} are not inside a buffer of {self.size} bytes")

    @abstractmethod
    def _get(self, offset: int, size: int) -> bytes: ...

    @abstractmethod
    def _put(self, offset: int, data: memoryview) -> None: ...


class _Comparison:
    """The number of wrong bytes, and the first of them; ``found`` is None while there is none.

    :param total: the number of compared bytes.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self.found: dict[str, int] | None = None

    def add(self, start: int, actual: Bytes, expected: Bytes) -> None:
        """Compare the bytes at offset ``start`` with the expected ones."""
        if np.array_equal(actual, expected):
            return
        places = np.flatnonzero(actual != expected)
        if self.found is None:
            place = int(places[0])
            first = {"offset": start + place, "expected": int(expected[place]), "found": int(actual[place])}
            self.found = {"wrong_bytes": 0, "total_bytes": self._total, **first}
        self.found["wrong_bytes"] += len(places)


class DramBuffer(PatternBuffer):
    """A buffer in private host memory; every page is touched.

    :param size: in bytes.
    :param huge: whether to ask the kernel for huge pages, if it has them. Else the pages are those of ``malloc``.
    """

    memory = "DRAM"
    device = 0

    def __init__(self, size: int, *, huge: bool = True) -> None:
        super().__init__(size)
        # Aligned whole huge pages, because otherwise the bandwidth of a small block would depend on the buffer's size.
        length = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        pages = mmap.mmap(-1, length + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        everything: Bytes = np.frombuffer(pages, dtype=np.uint8)
        start = -everything.ctypes.data % _HUGE_PAGE
        self._bytes = everything[start : start + size]
        self._bytes.fill(0)
        self.address = self._bytes.ctypes.data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The interface for NumPy, in functions that are run with the raw agent."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def free(self) -> None:
        """Return the memory to the kernel."""
        self._bytes = self._bytes[:0].copy()

    def fill(self, seed: int, offset: int, size: int, *, inverted: bool = False) -> None:
        self._check(offset, size)
        target = self._bytes[offset : offset + size]
        mask = np.uint64((1 << 64) - 1 if inverted else 0)
        for start, tile, key in tiles(seed, size):  # in place: each byte is written once and nothing is copied
            np.bitwise_xor(tile, key ^ mask, out=target[start : start + 8 * len(tile)].view(np.uint64))
        last_bytes = tail(seed, size)
        target[size - len(last_bytes) :] = np.bitwise_not(last_bytes) if inverted else last_bytes

    def compare(self, seed: int, offset: int, size: int) -> dict[str, int] | None:
        self._check(offset, size)
        target, wrong = self._bytes[offset : offset + size], _Comparison(size)
        room: Words = np.empty(min(size // 8, TILE), dtype=np.uint64)
        for start, tile, key in tiles(seed, size):
            # The bytes are read once, so that the compared ones are reported even if another process writes them.
            read = np.bitwise_xor(target[start : start + 8 * len(tile)].view(np.uint64), tile, out=room[: len(tile)])
            if not (read == key).all():
                wrong.add(start, (read ^ tile).view(np.uint8), (tile ^ key).view(np.uint8))
        last_bytes = tail(seed, size)
        wrong.add(size - len(last_bytes), target[size - len(last_bytes) :].copy(), last_bytes)
        return wrong.found

    def _get(self, offset: int, size: int) -> bytes:
        return self._bytes[offset : offset + size].tobytes()

    def _put(self, offset: int, data: memoryview) -> None:
        np.copyto(self._bytes[offset : offset + len(data)], np.frombuffer(data, dtype=np.uint8))
