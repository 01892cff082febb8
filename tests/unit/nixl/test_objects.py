# SPDX-License-Identifier: Apache-2.0
"""A buffer whose bytes are objects of a store: which object has which bytes, and what is written and removed.

The store is a double that keeps its objects in a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from pytest_nixl.nixl.worker import objects
from pytest_nixl.nixl.worker.commands import Commands
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.nixl.worker.objects import ObjectBuffer

BLOCK = 64


class Store:
    """A client of a store."""

    transport = "in memory"

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.doubted: ObjectStoreError | None = None
        self.closed = False

    def probe(self, key: str) -> None:
        pass

    def doubt(self) -> ObjectStoreError | None:
        return self.doubted

    def within(self, seconds: float, act: Callable[[], object]) -> object:
        return act()

    def put(self, key: str, content: bytes) -> None:
        self.kept[key] = content

    def get(self, key: str, offset: int, size: int) -> bytes:
        if key not in self.kept:
            raise ObjectStoreError(f"no object {key}", "store it")
        return self.kept[key][offset : offset + size]

    def delete(self, key: str) -> None:
        self.kept.pop(key, None)

    def close(self) -> None:
        self.closed = True


class Agent:
    """An agent that keeps what is registered."""

    def __init__(self) -> None:
        self.registered: list[Any] = []

    def register_memory(self, regions: list[Any], memory: str) -> Any:
        self.registered.append((regions, memory))
        return self.registered[-1]

    def deregister_memory(self, registered: Any) -> None:
        self.registered.remove(registered)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def buffer(store: Store) -> ObjectBuffer:
    """A buffer of three objects."""
    object_buffer = ObjectBuffer(3 * BLOCK, store)  # type: ignore[arg-type]
    object_buffer.prepare(Agent(), BLOCK, 3)
    return object_buffer


def test_each_object_is_registered_by_its_number_from_one(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    agent, object_buffer = Agent(), ObjectBuffer(2 * BLOCK, store)  # type: ignore[arg-type]
    assert capsys.readouterr().err == "pytest-nixl: objects in memory\n"
    object_buffer.prepare(agent, BLOCK, 2)
    [(regions, memory)] = agent.registered
    assert memory == "OBJ"
    assert [region[:3] for region in regions] == [(0, BLOCK, 1), (0, BLOCK, 2)]
    assert [region[3].rpartition("/")[2] for region in regions] == ["0", "1"]
    object_buffer.prepare(agent, BLOCK // 2, 4)
    assert [len(regions) for regions, _ in agent.registered] == [4], "those before are deregistered"
    object_buffer.release(agent)
    assert agent.registered == []


def test_a_pattern_over_several_objects_is_compared_byte_by_byte(buffer: ObjectBuffer, store: Store) -> None:
    buffer.fill(7, 0, 3 * BLOCK)
    assert [len(content) for content in store.kept.values()] == [BLOCK] * 3
    assert buffer.compare(7, 0, 3 * BLOCK) is None
    last = next(key for key in store.kept if key.endswith("/2"))
    store.kept[last] = store.kept[last][:-1] + bytes([store.kept[last][-1] ^ 1])
    corruption = buffer.compare(7, 0, 3 * BLOCK)
    assert corruption is not None
    assert (corruption["wrong_bytes"], corruption["offset"]) == (1, 3 * BLOCK - 1)
    assert buffer.read(BLOCK - 1, BLOCK + 2) == b"".join(store.kept.values())[BLOCK - 1 : 2 * BLOCK + 1]
    buffer.fill(8, BLOCK, BLOCK, inverted=True)
    wrong = buffer.compare(8, BLOCK, BLOCK)
    assert wrong is not None
    assert wrong["wrong_bytes"] == BLOCK, "the complement has no right byte"


@pytest.mark.parametrize(("offset", "size"), [(1, BLOCK), (0, BLOCK - 1), (BLOCK // 2, BLOCK // 2)])
def test_only_whole_objects_are_written(buffer: ObjectBuffer, store: Store, offset: int, size: int) -> None:
    with pytest.raises(ObjectStoreError, match=r"^only whole objects can be written"):
        buffer.write(offset, bytes(size))
    assert store.kept == {}


def test_nothing_is_written_before_the_space_is_divided(store: Store) -> None:
    object_buffer = ObjectBuffer(BLOCK, store)  # type: ignore[arg-type]
    with pytest.raises(ObjectStoreError, match=r"^only whole objects can be written"):
        object_buffer.write(0, bytes(BLOCK))
    with pytest.raises(IndexError, match=f"bytes 0 to {BLOCK + 1} are not inside a buffer of {BLOCK} bytes"):
        object_buffer.fill(1, 0, BLOCK + 1)


def test_a_buffer_that_is_freed_leaves_no_object(buffer: ObjectBuffer, store: Store) -> None:
    buffer.fill(7, 0, 3 * BLOCK)
    buffer.free()
    assert (store.kept, store.closed) == ({}, True)


@pytest.mark.parametrize(
    ("seconds", "arrived", "blocks", "doubted"),
    [
        (20.0, False, (8 << 20) // BLOCK, True),
        (19.999, False, 1, False),
        (1e6, True, 1, False),
        (1e6, False, (8 << 20) // BLOCK + 1, False),
    ],
)
def test_a_small_row_that_never_moved_is_doubted_after_a_while(
    store: Store, seconds: float, arrived: bool, blocks: int, doubted: bool
) -> None:
    object_buffer = ObjectBuffer(BLOCK, store)  # type: ignore[arg-type]
    object_buffer.prepare(Agent(), BLOCK * blocks, 1)
    store.doubted = ObjectStoreError("NIXL does not trust its certificate", "set ca_bundle")
    if arrived:
        object_buffer.arrived()
    if doubted:
        with pytest.raises(ObjectStoreError, match="does not trust"):
            object_buffer.stalled(seconds)
    else:
        object_buffer.stalled(seconds)


def test_a_store_that_answers_may_be_doubted_when_a_fault_is_looked_for(buffer: ObjectBuffer, store: Store) -> None:
    buffer.fill(7, 0, 3 * BLOCK)
    worker = Commands(lambda: False)
    reference = worker.keep(buffer, "buffer")
    worker.handle("probe_objects", {"buffer": reference})
    store.doubted = ObjectStoreError("NIXL does not trust its certificate", "set ca_bundle")
    with pytest.raises(ObjectStoreError, match="does not trust"):
        worker.handle("probe_objects", {"buffer": reference})


@pytest.mark.parametrize(("looking", "detected"), [(60.0, False), (-1.0, True)])
def test_each_object_is_looked_for_while_there_is_time(
    buffer: ObjectBuffer, store: Store, monkeypatch: pytest.MonkeyPatch, looking: float, detected: bool
) -> None:
    monkeypatch.setattr(objects, "_LOOKING_SECONDS", looking)
    buffer.fill(1, 0, 3 * BLOCK)
    buffer.probe()
    store.delete(list(store.kept)[2])
    with nullcontext() if detected else pytest.raises(ObjectStoreError, match=r"no object .*/2"):
        buffer.probe()
