# SPDX-License-Identifier: Apache-2.0
"""The pattern that buffers are filled with: the same bytes in host memory, in a file and on a GPU.

It is a stream of 64-bit words, little endian. Word ``i`` is ``tile[i % TILE] ^ key(seed, i // TILE)``: the tile is the
beginning of the raw stream of SFC64 of the seed (alike in every NumPy), and the key is another random word for each
repetition of it. A processor makes it by one XOR a word, and a GPU every word by itself, from a tile that it is given.
TILE is a prime, so that no repetition falls on a boundary of blocks: blocks that were swapped, shifted, repeated or
left from another seed differ in all but one of 256 bytes or so.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

#: Words of 8 bytes in a tile, of 1 MiB less 8 bytes.
TILE = (1 << 17) - 1
#: Tiles that are made at once.
_TILES = 4
_ALL = (1 << 64) - 1


def tile(seed: int, words: int = TILE) -> Words:
    """Return the first ``words`` of the tile of ``seed``, or all of it."""
    found: Words = np.random.SFC64(seed).random_raw(min(words, TILE))
    return found


def key(seed: int, number: int) -> int:
    """Return what repetition ``number`` of the tile is XORed with: SplitMix64 of the seed, counted from its first."""
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _ALL
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _ALL
    return word ^ (word >> 31)


def byte_at(seed: int, offset: int) -> int:
    """Return the byte at ``offset``."""
    number, place = divmod(offset // 8, TILE)
    word = int(tile(seed, place + 1)[place]) ^ key(seed, number)
    return (word >> 8 * (offset % 8)) & 0xFF


def chunks(seed: int, size: int) -> Iterator[tuple[int, Bytes]]:
    """Yield ``size`` bytes of the pattern as (offset, bytes). Each of them is gone when the next one is asked for."""
    words = -(-size // 8)
    first = tile(seed, words)
    room: Words = np.empty(min(words, _TILES * TILE), dtype=np.uint64)
    for start in range(0, words, len(room) or 1):
        made = room[: words - start]
        for place in range(0, len(made), TILE):
            part = made[place : place + TILE]
            np.bitwise_xor(first[: len(part)], np.uint64(key(seed, (start + place) // TILE)), out=part)
        yield 8 * start, made.view(np.uint8)[: size - 8 * start]
