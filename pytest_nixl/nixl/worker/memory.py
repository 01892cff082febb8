# SPDX-License-Identifier: Apache-2.0
"""Buffers in host memory that are filled with a pattern and compared with it byte by byte."""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from pytest_nixl.nixl.worker.pattern import TILE, Bytes, Words, chunks, tail, tiles

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
