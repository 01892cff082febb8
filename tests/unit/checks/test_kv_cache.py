# SPDX-License-Identifier: Apache-2.0
"""A KV cache is compared block by block with what requests should have moved: every fault is found and placed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_nixl.checks.kv_cache.blocks import BlockDraw, BlockOrder, KvLayout, draw
from pytest_nixl.checks.kv_cache.worker import commands
from pytest_nixl.checks.kv_cache.worker.cache import KvPattern, compare, fill
from pytest_nixl.core.wire import Ref
from pytest_nixl.nixl.worker.memory import TILE, DramBuffer, chunks

LAYOUT = KvLayout(tensors=4, blocks=12, block_bytes=1024)
SEED = 77
DRAW = BlockDraw(np.array([3, 9, 5], dtype=np.int32), np.array([0, 7, 2], dtype=np.int32))


@pytest.fixture
def moved() -> Iterator[DramBuffer]:
    """The target's cache after a WRITE of three blocks, done by hand."""
    source, target = DramBuffer(LAYOUT.size), DramBuffer(LAYOUT.size)
    fill(source, LAYOUT, SEED, inverted=False)
    fill(target, LAYOUT, SEED, inverted=True)
    for tensor in range(LAYOUT.tensors):
        for local, remote in zip(DRAW.local, DRAW.remote, strict=True):
            data = source.read(LAYOUT.offset(tensor, int(local)), LAYOUT.block_bytes)
            target.write(LAYOUT.offset(tensor, int(remote)), data)
    yield target
    source.free()
    target.free()


MOVES = [(DRAW.remote, DRAW.local)]


def test_blocks_that_were_moved_as_drawn_are_right(moved: DramBuffer) -> None:
    assert compare(moved, LAYOUT, SEED, MOVES) is None


def test_one_wrong_byte_is_found_with_tensor_block_and_offset(moved: DramBuffer) -> None:
    place = LAYOUT.offset(2, 7) + 1000
    [byte] = moved.read(place, 1)
    moved.write(place, bytes([byte ^ 1]))
    corruption = compare(moved, LAYOUT, SEED, MOVES)
    assert corruption == {
        "wrong_blocks": 1, "wrong_bytes": 1, "tensor": 2, "block": 7, "source": 9, "offset": 1000, "expected": byte,
        "found": byte ^ 1, "holds": -1, "unchanged": False,
    }  # fmt: skip


def test_two_exchanged_blocks_are_found_with_the_block_that_each_holds(moved: DramBuffer) -> None:
    first_offset, second_offset = LAYOUT.offset(1, 0), LAYOUT.offset(1, 7)
    first, second = moved.read(first_offset, LAYOUT.block_bytes), moved.read(second_offset, LAYOUT.block_bytes)
    moved.write(first_offset, second)
    moved.write(second_offset, first)
    corruption = compare(moved, LAYOUT, SEED, MOVES)
    assert corruption is not None
    assert {name: corruption[name] for name in ("wrong_blocks", "tensor", "block", "source", "holds")} == {
        "wrong_blocks": 2, "tensor": 1, "block": 0, "source": 3, "holds": 9,
    }  # fmt: skip


def test_a_block_that_was_not_moved_is_wrong(moved: DramBuffer) -> None:
    more = [(np.array([0, 7, 2, 11], dtype=np.int32), np.array([3, 9, 5, 1], dtype=np.int32))]
    corruption = compare(moved, LAYOUT, SEED, more)
    assert corruption is not None
    assert (corruption["wrong_blocks"], corruption["block"], corruption["unchanged"]) == (LAYOUT.tensors, 11, True)


def test_a_block_that_was_moved_without_a_request_is_wrong(moved: DramBuffer) -> None:
    corruption = compare(moved, LAYOUT, SEED, [(DRAW.remote[:2], DRAW.local[:2])])
    assert corruption is not None
    assert (corruption["block"], corruption["source"], corruption["holds"]) == (2, -1, 5)


def test_the_last_request_that_moved_a_block_counts(moved: DramBuffer) -> None:
    earlier = (DRAW.remote, np.array([1, 1, 1], dtype=np.int32))
    assert compare(moved, LAYOUT, SEED, [earlier, *MOVES]) is None
    assert compare(moved, LAYOUT, SEED, [*MOVES, earlier]) is not None


def test_the_pattern_of_a_cache_is_that_of_other_buffers() -> None:
    size = 8 * (2 * TILE + 100)
    whole = np.concatenate([chunk.copy() for _, chunk in chunks(SEED, size)])
    pattern = KvPattern(SEED)
    for offset, length in ((0, size), (8 * TILE - 16, 64), (16, 8), (8 * TILE, 8 * TILE + 8)):
        assert np.array_equal(pattern.at(offset, length), whole[offset : offset + length])


@pytest.mark.parametrize(("offset", "size"), [(8, 12), (4, 8), (1, 16)])
def test_parts_of_a_word_are_refused(offset: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes at {offset} are not whole words of 8 bytes"):
        KvPattern(1).at(offset, size)


@pytest.mark.parametrize("order", BlockOrder)
def test_a_drawn_request_is_compared_through_its_permutation(order: BlockOrder) -> None:
    layout = KvLayout(2, 64, 64)
    drawn = draw(layout, 20, order, 9)
    cache = DramBuffer(layout.size)
    fill(cache, layout, SEED, inverted=True)
    pattern = KvPattern(SEED)
    for tensor in range(layout.tensors):
        for local, remote in zip(drawn.local, drawn.remote, strict=True):
            cache.write(layout.offset(tensor, int(remote)), pattern.at(layout.offset(tensor, int(local)), 64).data)
    assert compare(cache, layout, SEED, [(drawn.remote, drawn.local)]) is None
    cache.free()


def test_requests_are_made_while_the_card_and_other_processes_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What watches them is a double, because other processes do nothing at a known time."""
    log: list[str] = []
    now = [100.0]

    class Watching:
        cores = 0.5

        def __init__(self, name: str) -> None:
            self._name = name

        def __enter__(self) -> str:
            log.append(f"begin {self._name}")
            return self._name

        def __exit__(self, *_: object) -> None:
            log.append(f"end {self._name}")

    def run(drawn: list[BlockDraw], timeout: float, *, in_flight: int, interval: float) -> list[float]:
        log.append(f"{len(drawn)} requests, {timeout}, {in_flight}, {interval}")
        now.append(102.5)
        return [0.25]

    monkeypatch.setattr(
        "pytest_nixl.model.device_counters.CarrierBytes.counting", lambda op: Watching(f"bytes of {op}")
    )
    monkeypatch.setattr(commands, "time", SimpleNamespace(perf_counter=lambda: now[-1]))
    monkeypatch.setattr(commands, "CpuContention", lambda pids: Watching(f"processes beside {pids}"))
    objects: Any = SimpleNamespace(get=lambda _: SimpleNamespace(layout=LAYOUT, run=run))
    draws: list[Any] = [{"count": 2, "order": "scattered", "seed": seed, "sender": 0} for seed in range(3)]
    answer: Any = commands.kv_request(objects, Ref(1, "requests"), draws, 2.0, [7], "READ", in_flight=4, interval=0.5)
    assert log == [
        "begin processes beside [7]", "begin bytes of READ", "3 requests, 2.0, 4, 0.5", "end bytes of READ",
        "end processes beside [7]",
    ]  # fmt: skip
    assert answer == {"times": [0.25], "seconds": 2.5, "counted": "bytes of READ", "contention": 0.5}
