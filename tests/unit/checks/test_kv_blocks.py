# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a KV cache lie, and which blocks a request moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nixl.checks.kv_cache.blocks import REPEATS, BlockOrder, KvLayout, draw

LAYOUT = KvLayout(tensors=6, blocks=10, block_bytes=64)
ORDER = BlockOrder.SCATTERED


def test_a_tensor_is_named_by_its_layer() -> None:
    assert [LAYOUT.name(tensor) for tensor in (0, 1, 5)] == ["layer 0 K", "layer 0 V", "layer 2 V"]
    assert KvLayout(3, 1, 8, per_layer=1).name(2) == "layer 2"


@given(
    count=st.integers(1, 10),
    order=st.sampled_from([BlockOrder.SCATTERED, BlockOrder.CONTIGUOUS]),
    seed=st.integers(0, (1 << 63) - 1),
)
def test_a_draw_names_each_block_at_most_once(count: int, order: BlockOrder, seed: int) -> None:
    drawn = draw(LAYOUT, count, order, seed)
    for side in (drawn.local, drawn.remote):
        assert len(set(side.tolist())) == count
        assert set(side.tolist()) <= set(range(LAYOUT.blocks))
    if order is BlockOrder.CONTIGUOUS:
        assert np.array_equal(drawn.local, drawn.remote)
        assert np.all(np.diff(drawn.local) == 1)


@pytest.mark.parametrize("sender", [0, 1])
def test_a_block_is_sent_to_several_places(sender: int) -> None:
    layout = KvLayout(2, 1000, 8)
    drawn, scattered = (draw(layout, 10, order, 5, sender=sender) for order in (BlockOrder.REPEATED, ORDER))
    sides = drawn.local.tolist(), drawn.remote.tolist()
    assert len(set(sides[sender])) == 3
    assert sides[sender][0] == sides[sender][REPEATS - 1] != sides[sender][REPEATS]
    assert sides[1 - sender] == (scattered.local, scattered.remote)[1 - sender].tolist()


def test_both_hosts_draw_the_same_blocks_from_the_same_seed_and_others_for_each_side() -> None:
    first, second = (draw(KvLayout(2, 1000, 8), 500, ORDER, 5) for _ in range(2))
    assert np.array_equal(first.local, second.local)
    assert np.array_equal(first.remote, second.remote)
    assert not np.array_equal(first.local, first.remote)


@pytest.mark.parametrize(
    ("pieces", "count", "most"), [((1, 1), 0, 10), ((1, 1), 11, 10), ((1, 2), 6, 5), ((2, 1), 6, 5)]
)
def test_a_request_for_more_blocks_than_there_are_is_refused(pieces: tuple[int, int], count: int, most: int) -> None:
    layout = replace(LAYOUT, pieces=pieces)
    assert len(draw(layout, most, ORDER, 1).local) == most
    with pytest.raises(ValueError, match=rf"^{count} blocks cannot be drawn from a cache of {most}$"):
        draw(layout, count, ORDER, 1)
