# SPDX-License-Identifier: Apache-2.0
"""A KV cache in a worker's buffer: it is filled with a pattern, and compared block by block with another cache's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pytest_nixl.checks.kv_cache.blocks import KvLayout, Numbers
from pytest_nixl.nixl.worker.memory import TILE, Bytes, PatternBuffer, Words, key, tile


class KvPattern:
    """The pattern of a seed at any place of a cache.

    :param seed: the number that determines the pattern, as in :mod:`pytest_nixl.nixl.worker.memory`.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tile: Words = tile(seed)

    def at(self, offset: int, size: int) -> Bytes:
        """Return ``size`` bytes of the pattern at ``offset``; both are multiples of 8.

        :raises ValueError: they are not.
        """
        if offset % 8 or size % 8:
            raise ValueError(f"{size} bytes at {offset} are not whole words of 8 bytes")
        first, count = offset // 8, size // 8
        pattern: Words = np.empty(count, dtype=np.uint64)
        done = 0
        while done < count:
            number, place = divmod(first + done, TILE)
            part = self._tile[place : place + count - done]
            np.bitwise_xor(part, np.uint64(key(self._seed, number)), out=pattern[done : done + len(part)])
            done += len(part)
        return pattern.view(np.uint8)


def fill(buffer: PatternBuffer, layout: KvLayout, seed: int, *, inverted: bool) -> None:
    """Fill every block of a cache with the pattern of ``seed``, or with its complement."""
    pattern = KvPattern(seed)
    for tensor in range(layout.tensors):
        offset = layout.offset(tensor, 0)
        data = pattern.at(offset, layout.tensor_bytes)
        buffer.write(offset, np.bitwise_not(data).data if inverted else data.data)


def compare(
    buffer: PatternBuffer, layout: KvLayout, seed: int, moves: Sequence[tuple[Numbers, Numbers]]
) -> dict[str, Any] | None:
    """Compare a cache, in every tensor, with what requests should have moved to it.

    Blocks that no request moved must still have the complement of the pattern.

    :param buffer: the cache to which the requests moved blocks.
    :param seed: the pattern of the other cache, whose complement filled this cache before the requests.
    :param moves: for each request, in their order, the numbers of the blocks here, and of the blocks they came from.
    :returns: None if all bytes are right. Otherwise the number of ``wrong_blocks`` and ``wrong_bytes``, and of the
        first wrong block its ``tensor``, ``block``, ``source`` (-1: no request moved it), the ``offset`` in the block,
        the ``expected`` and ``found`` byte, and in ``holds`` the number of the other cache's block whose bytes it has
        instead (-1: of none), and in ``unchanged`` whether it has the bytes that it had before the requests.
    """
    pattern = KvPattern(seed)
    sources = np.full(layout.blocks, -1, dtype=np.int64)
    for source, target in moves:
        sources[source] = target
    moved = np.flatnonzero(sources >= 0)
    shape = (layout.blocks, layout.block_bytes)
    wrong_blocks = wrong_bytes = 0
    first: dict[str, Any] | None = None
    for tensor in range(layout.tensors):
        offset = layout.offset(tensor, 0)
        pristine = pattern.at(offset, layout.tensor_bytes).reshape(shape)
        expected = np.bitwise_not(pristine)
        expected[moved] = pristine[sources[moved]]
        content = np.frombuffer(buffer.read(offset, layout.tensor_bytes), dtype=np.uint8).reshape(shape)
        if np.array_equal(expected, content):
            continue
        bad = np.flatnonzero((expected != content).any(axis=1))
        wrong_blocks += len(bad)
        wrong_bytes += int((expected[bad] != content[bad]).sum())
        if first is None:
            block = int(bad[0])
            place = int(np.flatnonzero(expected[block] != content[block])[0])
            same = np.flatnonzero((pristine == content[block]).all(axis=1))
            first = {
                "tensor": tensor,
                "block": block,
                "source": int(sources[block]),
                "offset": place,
                "expected": int(expected[block][place]),
                "found": int(content[block][place]),
                "holds": int(same[0]) if len(same) else -1,
                "unchanged": bool(np.array_equal(content[block], np.bitwise_not(pristine[block]))),
            }
    return None if first is None else {"wrong_blocks": wrong_blocks, "wrong_bytes": wrong_bytes, **first}
