# SPDX-License-Identifier: Apache-2.0
"""Rows whose transfers walk a buffer, with the real NIXL: every block is moved and compared, the last one too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_nixl.core.units import KIB, MIB
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.samples import Corruption
from pytest_nixl.nixl.worker.commands import CommandRefusedError, Commands
from pytest_nixl.nixl.worker.row_transfers import prepare_row
from pytest_nixl.nixl.worker.transfer import COUNTED, Transfers

DRAM = MemoryPair("DRAM", "DRAM")
FOOTPRINT = 4 * MIB
MakePairs = Callable[..., Launches]


def link(pairs: Launches, op: str = "WRITE", footprint: int = FOOTPRINT) -> Link:
    return pairs.link("UCX", op, DRAM, footprint=footprint)


#: Blocks, batches and depths of the tests that share workers.
SHARED = {"blocks": (64, 4 * KIB, 16 * KIB, 64 * KIB, 100_000), "batch": (1, 4), "depth": (1, 2, 3, 8), "duration": 0.0}


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize(
    ("block", "batch", "depth", "footprint"),
    [(64, 1, 8, MIB), (64 * KIB, 1, 1, FOOTPRINT), (16 * KIB, 4, 3, FOOTPRINT), (100_000, 1, 1, FOOTPRINT)],
)
def test_every_block_of_the_footprint_is_moved(
    shared_pairs: MakePairs, op: str, block: int, batch: int, depth: int, footprint: int
) -> None:
    row_link = link(shared_pairs(**SHARED), op, footprint)
    samples = row_link.measure(block, batch=batch, depth=depth)
    assert samples.corruption is None
    assert str(samples.key).endswith(f"/0-1/footprint={footprint // MIB}MiB")
    transfers = footprint // (block * batch)
    assert sum(samples.transfers) >= transfers, "each transfer was timed at least once"
    end = transfers * block * batch
    assert row_link.destination.size >= footprint
    far = (end - block, block)
    assert row_link.destination.read(*far) == row_link.source.read(*far)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_walk_that_ends_half_way_is_corrupt(
    shared_pairs: MakePairs, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    prepare = Link._prepare
    monkeypatch.setattr(
        Link, "_prepare", lambda self, block, batch, count, depth: prepare(self, block, batch, count // 2, depth)
    )
    samples = link(shared_pairs(**SHARED)).measure(64 * KIB, depth=depth)
    assert isinstance(samples.corruption, Corruption)
    assert samples.corruption.phase == "before the timed transfers"
    assert samples.corruption.offset == FOOTPRINT // 2
    assert samples.corruption.wrong_bytes == samples.corruption.total_bytes // 2


def test_the_timed_transfers_of_a_walk_reach_its_end(shared_pairs: MakePairs, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the timed transfers: those before and after them are not made.
    run, compare = Link._run, Link._compare

    def timed_only(self: Link, command: str, *arguments: Any, **named: Any) -> Any:
        return run(self, command, *arguments, **named) if command == "measure" else None

    def compared_after(self: Link, phase: str, seed: int, size: int) -> Corruption | None:
        return compare(self, phase, seed, size) if phase == "after the timed transfers" else None

    monkeypatch.setattr(Link, "_run", timed_only)
    monkeypatch.setattr(Link, "_compare", compared_after)
    assert link(shared_pairs(**SHARED)).measure(4 * KIB).corruption is None


@pytest.mark.long
def test_a_launch_keeps_the_footprint_and_a_transfer_alone_moves_all_of_it(make_pairs: MakePairs) -> None:
    row_link = link(make_pairs(), footprint=MIB)
    assert row_link.move(64 * KIB) is None
    row_link.relaunch()
    assert row_link.move(64 * KIB) is None
    assert row_link.destination.size >= MIB
    assert row_link.footprint == MIB


class ShownAgent:
    """An agent that shows what is prepared and released. It is a double, because a handle of NIXL shows nothing."""

    def __init__(self) -> None:
        self.released: list[Any] = []
        self.release_xfer_handle = self.released.append

    def get_xfer_descs(self, blocks: list[tuple[int, int, int]], memory: str) -> Any:
        return memory, blocks

    def initialize_xfer(self, *arguments: object, backends: list[str]) -> Any:
        return *arguments, *backends

    def row(self, **options: Any) -> Transfers:
        how: dict[str, Any] = {"depth": 2, "notify_each": False, "announced": False, "acknowledged": True, **options}
        return prepare_row(self, op="WRITE", target="t", plugin="P", sides=[[1000, "DRAM", 3], [0, "OBJ", 0]],
                           block=10, batch=2, count=2, **how)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "made_now"), [({}, True), ({"depth": 1}, False), ({"depth": 1, "notify_each": True}, True)]
)
@pytest.mark.parametrize(("announced", "tag"), [(False, b""), (True, COUNTED)])
def test_the_blocks_of_a_transfer_are_neighbours_in_memory_or_objects_by_their_numbers(
    options: dict[str, Any], made_now: bool, announced: bool, tag: bytes
) -> None:
    agent = ShownAgent()
    row = agent.row(**options, announced=announced)
    first = (("DRAM", [(1000, 10, 3), (1010, 10, 3)]), ("OBJ", [(0, 10, 1), (0, 10, 2)]))
    second = (("DRAM", [(1020, 10, 3), (1030, 10, 3)]), ("OBJ", [(0, 10, 3), (0, 10, 4)]))
    plain, tagged = ([("WRITE", *blocks, "t", tail, "P") for blocks in (first, second)] for tail in (b"", tag))
    assert row._plain == plain
    assert dict(row._notifying) == (dict(enumerate(tagged)) if made_now else {}), "others are made when one is needed"
    assert row._notifying[1] == tagged[1]
    row.release()
    assert agent.released == [*plain, *(tagged if made_now else tagged[1:])]


def test_a_row_that_is_released_is_forgotten() -> None:
    agent, commands = ShownAgent(), Commands(lambda: False)
    ref = commands.keep(agent.row(depth=1), "transfers")
    commands.handle("row_release", {"transfers": ref})
    assert len(agent.released) == 2
    with pytest.raises(CommandRefusedError, match="no longer there"):
        commands.get(ref)
