# SPDX-License-Identifier: Apache-2.0
"""A KV cache is compared block by block with what requests should have moved: every fault is found and placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
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
EARLIER = (DRAW.remote, np.array([1, 1, 1], dtype=np.int32))
FURTHER = [(np.array([0, 7, 2, 11], dtype=np.int32), np.array([3, 9, 5, 1], dtype=np.int32))]
BLOCK = LAYOUT.block_bytes


def flip(cache: DramBuffer) -> None:
    """Change one byte of block 7 in tensor 2."""
    place = LAYOUT.offset(2, 7) + 1000
    cache.write(place, bytes([cache.read(place, 1)[0] ^ 1]))


def exchange(cache: DramBuffer) -> None:
    """Exchange blocks 0 and 7 in tensor 1."""
    first, second = (LAYOUT.offset(1, block) for block in (0, 7))
    data = cache.read(first, BLOCK)
    cache.write(first, cache.read(second, BLOCK))
    cache.write(second, data)


def leave(cache: DramBuffer) -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    ("fault", "moves", "wrong"),
    [
        (leave, MOVES, None),
        (leave, [EARLIER, *MOVES], None),  # the last request that moved a block counts
        (leave, [*MOVES, EARLIER], {"wrong_blocks": 12, "tensor": 0, "block": 0, "source": 1, "holds": 3}),
        (flip, MOVES, {"wrong_blocks": 1, "wrong_bytes": 1, "tensor": 2, "block": 7, "source": 9, "offset": 1000}),
        (exchange, MOVES, {"wrong_blocks": 2, "tensor": 1, "block": 0, "source": 3, "holds": 9}),
        # A block that was not moved, and one that was moved without a request.
        (leave, FURTHER, {"wrong_blocks": 4, "tensor": 0, "block": 11, "source": 1, "offset": 0, "unchanged": True}),
        (leave, [(DRAW.remote[:2], DRAW.local[:2])],
         {"wrong_blocks": 4, "tensor": 0, "block": 2, "source": -1, "holds": 5}),
    ],
)  # fmt: skip
def test_blocks_are_right_if_they_were_moved_as_drawn_and_the_first_wrong_one_is_placed(
    fault: Callable[[DramBuffer], None],
    moves: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]],
    wrong: dict[str, Any] | None,
    moved: DramBuffer,
) -> None:
    fault(moved)
    corruption = compare(moved, LAYOUT, SEED, moves)
    if wrong is None or corruption is None:
        assert corruption == wrong
        return
    assert (
        corruption["found"] == moved.read(LAYOUT.offset(wrong["tensor"], wrong["block"]) + corruption["offset"], 1)[0]
    )
    assert corruption["expected"] ^ corruption["found"] in ({1} if fault is flip else range(1, 256))
    placed = {"holds": -1, "unchanged": False, **wrong}
    assert {name: corruption[name] for name in placed} == placed


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
