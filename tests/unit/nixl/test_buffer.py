# SPDX-License-Identifier: Apache-2.0
"""What a worker is asked about a buffer. The worker is a double that has the bytes, and keeps the requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.core.wire import Ref
from pytest_nixl.nixl.buffer import Buffer, PendingBuffer
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.processes.worker_process import Pending

#: The most bytes of one request: of another rank's worker they are in a value of etcd.
MOST = 1 << 19


class Memory:
    """A worker with some bytes."""

    rank = 3

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self.calls: list[tuple[Any, ...]] = []
        self.answer: Any = None

    def call(self, command: str, *, buffer: Ref | None = None, **fields: Any) -> Any:
        values = [len(value) if isinstance(value, bytes) else value for value in fields.values()]
        self.calls.append((command, buffer, *values))
        if command == "read":
            return bytes(self.bytes[fields["offset"] : fields["offset"] + fields["size"]])
        if command == "write":
            self.bytes[fields["offset"] : fields["offset"] + len(fields["data"])] = fields["data"]
        return self.answer

    def request(self, command: str, **fields: Any) -> Any:
        answer = self.call(command, **fields)
        return SimpleNamespace(result=lambda: answer, worker=self)


REF = Ref(7, "buffer")


def make(size: int, memory: str = "DRAM") -> tuple[Buffer, Memory]:
    worker = Memory(size)
    return Buffer(cast(Any, worker), REF, 1000, size, memory, 5), worker


@pytest.mark.parametrize(
    ("offset", "size", "parts"),
    [
        (0, None, [(0, MOST), (MOST, MOST), (2 * MOST, 10)]),
        (4, MOST, [(4, MOST)]),
        (4, MOST + 1, [(4, MOST), (4 + MOST, 1)]),
        (8, 0, [(8, 0)]),
    ],
)
def test_many_bytes_are_read_and_written_in_parts(offset: int, size: int | None, parts: list[tuple[int, int]]) -> None:
    buffer, worker = make(2 * MOST + 10)
    data = bytes(range(1, 252)) * 5000
    whole = data[: (len(worker.bytes) - offset) if size is None else size]
    buffer.write(whole, offset)
    assert buffer.read(offset, size) == whole
    writes = [("write", REF, *part) for part in reversed(parts)]  # what is beyond the end is refused before any other
    assert worker.calls == [*writes, *[("read", REF, *part) for part in parts]]


@pytest.mark.parametrize(
    ("memory", "fields", "descriptor"),
    [
        ("DRAM", {"offset": 8}, (1008, 56, 5)),
        ("VRAM", {"offset": 8, "size": 16}, (1008, 16, 5)),
        ("OBJ", {"offset": 32, "size": 16}, (0, 16, 3)),
    ],
)
def test_a_part_is_described_by_its_address_or_the_number_of_its_object(
    memory: str, fields: dict[str, int], descriptor: tuple[int, int, int]
) -> None:
    assert make(64, memory)[0].descriptor(**fields) == descriptor


def test_a_buffer_is_filled_and_compared_in_parts_with_a_seed_each() -> None:
    buffer, worker = make(64)
    wrong = {"wrong_bytes": 1}
    buffer.fill(9)
    buffer.fill(9, offset=8, inverted=True)
    buffer.fill_parts([(1, 2, 3), (4, 5, 6)])
    worker.answer = [wrong]
    assert buffer.compare(9, offset=8) == wrong
    assert buffer.compare(9, size=4) == wrong
    worker.answer = [None, wrong]
    assert buffer.compared(buffer.compare_parts([(1, 2, 3), (4, 5, 6)]).result(), 2) == [None, wrong]
    with pytest.raises(WorkerError) as caught:
        buffer.compare(9)
    assert caught.value.reason == "rank 3 compared 2 of 1 parts of a buffer"
    buffer.free()
    parts = [[1, 2, 3], [4, 5, 6]]
    assert worker.calls == [
        ("fill", REF, [[9, 0, 64]], False), ("fill", REF, [[9, 8, 56]], True), ("fill", REF, parts, False),
        ("compare", REF, [[9, 8, 56]]), ("compare", REF, [[9, 0, 4]]), ("compare", REF, parts),
        ("compare", REF, [[9, 0, 64]]), ("forget", None, [REF]),
    ]  # fmt: skip


@pytest.mark.parametrize(("memory", "seconds"), [("VRAM", 0.5), ("DRAM", 0.0)])
def test_only_a_buffer_of_a_gpu_waits_for_it(memory: str, seconds: float) -> None:
    buffer, worker = make(64, memory)
    worker.answer = 0.5
    assert buffer.gpu_wait() == seconds
    assert worker.calls == ([("kernel_seconds", REF)] if seconds else [])


def test_a_buffer_that_is_allocated_has_the_address_of_the_answer() -> None:
    worker = Memory(0)
    worker.answer = {"buffer": REF, "address": 1000, "device": 5}
    pending = PendingBuffer(cast(Pending, worker.request("allocate")), 64, "VRAM")
    assert pending.result() == Buffer(cast(Any, worker), REF, 1000, 64, "VRAM", 5)
