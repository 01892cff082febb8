# SPDX-License-Identifier: Apache-2.0
"""The pattern that fills buffers, with the same bytes in host memory, in a file and on a GPU.

The pattern is a stream of 64-bit little-endian words. Word ``i`` is ``tile[i % TILE] ^ key(seed, i // TILE)``. The tile
is the beginning of the raw SFC64 stream of the seed (the same in every NumPy). The key is another random word for each
repetition of the tile. A processor computes one XOR per word, and a GPU computes each word separately from a given
tile. TILE is prime, so that no repetition falls on a boundary of blocks. Blocks that are swapped, shifted, repeated or
left from another seed therefore differ in about 255 of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

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
