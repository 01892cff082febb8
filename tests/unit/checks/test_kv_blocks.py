# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a KV cache lie, and which blocks a request moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.checks.kv_cache.blocks import REPEATS, BlockOrder, KvLayout, draw

LAYOUT = KvLayout(tensors=6, blocks=10, block_bytes=64)
ORDER = BlockOrder.SCATTERED


def test_a_tensor_is_named_by_its_layer() -> None:
    assert [LAYOUT.name(tensor) for tensor in (0, 1, 5)] == ["layer 0 K", "layer 0 V", "layer 2 V"]
    assert KvLayout(3, 1, 8, per_layer=1).name(2) == "layer 2"


@pytest.mark.parametrize("count", [1, 500, 1000])
@pytest.mark.parametrize("order", [BlockOrder.SCATTERED, BlockOrder.CONTIGUOUS])
def test_both_hosts_draw_the_same_blocks_each_at_most_once(order: BlockOrder, count: int) -> None:
    layout = KvLayout(2, 1000, 8)
    first, second = (draw(layout, count, order, 5) for _ in range(2))
    local, remote = first.local.tolist(), first.remote.tolist()
    assert (local, remote) == (second.local.tolist(), second.remote.tolist())
    for side in (local, remote):
        assert len({*side} & {*range(1000)}) == len(side) == count
    assert (local == remote) is (order is BlockOrder.CONTIGUOUS)
    if order is BlockOrder.CONTIGUOUS:
        assert local == [*range(local[0], local[0] + count)]


@pytest.mark.parametrize("sender", [0, 1])
def test_a_block_is_sent_to_several_places(sender: int) -> None:
    layout = KvLayout(2, 1000, 8)
    drawn, scattered = (draw(layout, 10, order, 5, sender=sender) for order in (BlockOrder.REPEATED, ORDER))
    sides = drawn.local.tolist(), drawn.remote.tolist()
    assert len(set(sides[sender])) == 3
    assert sides[sender][0] == sides[sender][REPEATS - 1] != sides[sender][REPEATS]
    assert sides[1 - sender] == (scattered.local, scattered.remote)[1 - sender].tolist()


@pytest.mark.parametrize(
    ("pieces", "count", "most"), [((1, 1), 0, 10), ((1, 1), 11, 10), ((1, 2), 6, 5), ((2, 1), 6, 5)]
)
def test_a_request_for_more_blocks_than_there_are_is_refused(pieces: tuple[int, int], count: int, most: int) -> None:
    layout = replace(LAYOUT, pieces=pieces)
    assert len(draw(layout, most, ORDER, 1).local) == most
    with pytest.raises(ValueError, match=rf"^{count} blocks cannot be drawn from a cache of {most}$"):
        draw(layout, count, ORDER, 1)
