# SPDX-License-Identifier: Apache-2.0
"""The blocks of a KV cache that one request moves: how the cache lies in memory, which blocks are drawn, and how NIXL
is asked for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.model.worker_commands import Count

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:  # pytest imports this module too, and has no need for numpy
    np = lazy_module("numpy")

#: Numbers of blocks or of descriptors. NIXL takes them as 32-bit integers.
Numbers: TypeAlias = "npt.NDArray[np.int32]"


class BlockOrder(Enum):
    """How the blocks of a request lie in the cache."""

    #: Random block numbers, drawn separately for each side, as a paged allocator gives them.
    SCATTERED = "scattered"
    #: The same run of neighbouring blocks on both sides, which NIXL can merge into one descriptor for each tensor.
    CONTIGUOUS = "contiguous"
    #: As scattered, but each block that is sent goes to several places, as a prefix that several requests share.
    REPEATED = "repeated"


class KvMethod(Enum):
    """How the transfer of a request is made."""

    #: ``prep_xfer_dlist`` of the whole cache once, ``make_prepped_xfer`` of block numbers for each request.
    PREPPED = "prepped"
    #: The same, but the descriptors of the cache are given as one row for each tensor. NIXL 1.5.0 and later take them.
    STRIDED = "strided"
    #: ``initialize_xfer`` of the request's descriptors.
    INITIALIZED = "initialized"


@dataclass(frozen=True)
class KvLayout:
    """A KV cache in one buffer: ``tensors`` equal parts, each of ``blocks`` blocks of ``block_bytes`` bytes.

    One descriptor moves one of these blocks. If the tensor-parallel sizes of the two sides differ, a block here is what
    one descriptor moves: a whole block of the side with fewer heads, and one of several pieces of a block of the other.

    :param tensors: the number of tensors: layers times two (keys and values), or layers for a cache with one tensor.
    :param blocks: the number of blocks of each tensor.
    :param block_bytes: the size in bytes of one block of one tensor.
    :param per_layer: the tensors of one layer: 2 or 1.
    :param pieces: how many of these blocks a block of the initiator is, and a block of the target.
    :param ranges: the number of equal ranges of blocks, one for each request in flight, so that no two requests in
        flight move the same block.
    """

    tensors: Count
    blocks: Count
    block_bytes: Count
    per_layer: Count = 2
    pieces: tuple[Count, Count] = (1, 1)
    ranges: Count = 1

    @property
    def tensor_bytes(self) -> int:
        """The size of one tensor in bytes."""
        return self.blocks * self.block_bytes

    @property
    def size(self) -> int:
        """The size of the whole cache in bytes."""
        return self.tensors * self.tensor_bytes

    @property
    def range_blocks(self) -> int:
        """The number of blocks of each tensor in one range."""
        return self.blocks // self.ranges

    def offset(self, tensor: int, block: int) -> int:
        """Return the offset in bytes of a block of a tensor."""
        return tensor * self.tensor_bytes + block * self.block_bytes

    def name(self, tensor: int) -> str:
        """Return the name of a tensor: ``layer 3 K``; without K and V if a layer has one tensor."""
        layer, part = divmod(tensor, self.per_layer)
        return f"layer {layer} {'KV'[part]}" if self.per_layer == 2 else f"layer {layer}"

    def descriptors(self, blocks: Numbers) -> Numbers:
        """Return the numbers of the descriptors of these blocks in every tensor, tensor by tensor."""
        starts = np.arange(self.tensors, dtype=np.int32) * np.int32(self.blocks)
        offsets: Numbers = (starts[:, None] + blocks[None, :]).ravel()
        return offsets


@dataclass(frozen=True)
class BlockDraw:
    """The block numbers of one request, the same in every tensor.

    :param local: block numbers in the initiator's cache.
    :param remote: block numbers in the target's cache; a request pairs ``local[i]`` with ``remote[i]``.
    """

    local: Numbers
    remote: Numbers

    def moved(self, blocks: int) -> BlockDraw:
        """Return the same draw in another range, ``blocks`` blocks behind this one."""
        number = self.local.dtype.type(blocks)
        return BlockDraw(self.local + number, self.remote + number) if blocks else self


@dataclass(frozen=True)
class KvCorruption:
    """Blocks of a KV cache that differ from what was sent.

    :param phase: when they were compared, in words.
    :param where: tensor, block and offset of the first wrong byte, in words.
    :param holds: which block's bytes are there instead, in words; empty: those of no block.
    """

    phase: str
    wrong_blocks: int
    wrong_bytes: int
    where: str
    expected: int
    found: int
    holds: str

    def __str__(self) -> str:
        return (
            f"{self.wrong_bytes} bytes in {self.wrong_blocks} blocks are wrong {self.phase}, the first at "
            f"{self.where}: expected 0x{self.expected:02x}, found 0x{self.found:02x}{self.holds and '; '}{self.holds}"
        )


#: In how many places of the receiving cache a block arrives, if blocks are sent repeatedly.
REPEATS = 4


def draw(layout: KvLayout, count: int, order: BlockOrder, seed: int, *, sender: int = 0) -> BlockDraw:
    """Draw the blocks of one request from the first range. Equal arguments give equal blocks, on every host.

    On a side whose blocks are several pieces, the request moves the same piece of every block that is drawn: the heads
    of one rank of the other side.

    :param count: the number of blocks of each tensor.
    :param seed: the number that determines the draw.
    :param sender: the side from which blocks move: 0 the initiator (WRITE), 1 the target (READ).
    :raises ValueError: ``count`` is not between 1 and the number of blocks of a tensor in a range.
    """
    pools = tuple(layout.range_blocks // pieces for pieces in layout.pieces)
    if not 0 < count <= min(pools):
        raise ValueError(f"{count} blocks cannot be drawn from a cache of {min(pools)}")
    numbers = np.random.Generator(np.random.PCG64(seed))
    if order is BlockOrder.CONTIGUOUS:
        first = int(numbers.integers(min(pools) - count + 1))
        drawn = (np.arange(first, first + count, dtype=np.int32),) * 2
    else:
        drawn = tuple(numbers.permutation(pool)[:count].astype(np.int32) for pool in pools)  # type: ignore[assignment]
    if order is BlockOrder.REPEATED:
        sent = drawn[sender][np.arange(count) // REPEATS]
        drawn = (sent, drawn[1]) if sender == 0 else (drawn[0], sent)
    local, remote = (
        blocks * np.int32(pieces) + np.int32(numbers.integers(pieces)) if pieces > 1 else blocks
        for blocks, pieces in zip(drawn, layout.pieces, strict=True)
    )
    return BlockDraw(local, remote)
