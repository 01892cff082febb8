# SPDX-License-Identifier: Apache-2.0
"""Memory in a worker, as pytest sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pytest_nixl.core.wire import Ref
from pytest_nixl.processes.worker_errors import SAME_VERSION, WorkerError
from pytest_nixl.processes.worker_process import Pending, Worker

#: The seed of a pattern, and the offset and the size in bytes of the part of a buffer that has it.
Part = tuple[int, int, int]
#: The most bytes in one request or answer: those of another rank's worker are in a value of etcd, in base64.
_PART_BYTES = 1 << 19


def _starts(length: int) -> Sequence[int]:
    return range(0, length, _PART_BYTES) if length > _PART_BYTES else (0,)


@dataclass(frozen=True)
class Buffer:
    """Memory in a worker.

    :param worker: the worker that has allocated it.
    :param ref: the reference to the buffer in the worker.
    :param address: its address in that process; 0 for a file.
    :param size: in bytes.
    :param memory: ``DRAM``, ``VRAM``, ``FILE`` or ``OBJ``.
    :param device: the number of the GPU, or the descriptor of the file; 0 in host memory.
    """

    worker: Worker
    ref: Ref
    address: int
    size: int
    memory: str
    device: int

    def descriptor(self, offset: int = 0, size: int | None = None) -> tuple[int, int, int]:
        """Return ``(address, length, device)`` of a part of the buffer, for ``get_xfer_descs``.

        :param offset: in bytes.
        :param size: in bytes; None for the rest of the buffer.
        """
        length = self.size - offset if size is None else size
        if self.memory == "OBJ":  # each object has a number, from 1
            return (0, length, offset // length + 1)
        return (self.address + offset, length, self.device)

    def fill(self, seed: int, *, offset: int = 0, size: int | None = None, inverted: bool = False) -> Pending:
        """Start to fill the buffer with a pattern; ``.result()`` of the returned request waits for the end.

        :param seed: the number that determines the pattern.
        :param offset: in bytes.
        :param size: in bytes; None for the rest of the buffer.
        :param inverted: whether to write the pattern's complement, in which every byte is wrong.
        """
        length = self.size - offset if size is None else size
        return self.fill_parts([(seed, offset, length)], inverted=inverted)

    def fill_parts(self, parts: Sequence[Part], *, inverted: bool = False) -> Pending:
        """Start to fill parts of the buffer, each with a pattern of its own, like :meth:`fill`."""
        return self.worker.request("fill", buffer=self.ref, parts=[list(part) for part in parts], inverted=inverted)

    def compare(self, seed: int, *, offset: int = 0, size: int | None = None) -> dict[str, int] | None:
        """Compare every byte with the pattern of ``seed``.

        :param offset: in bytes.
        :param size: in bytes; None for the rest of the buffer.
        :returns: None if all bytes are right; otherwise ``wrong_bytes``, ``total_bytes``, and ``offset``, ``expected``
            and ``found`` of the first wrong byte.
        """
        length = self.size - offset if size is None else size
        [corruption] = self.compared(self.compare_parts([(seed, offset, length)]).result(), 1)
        return corruption

    def compare_parts(self, parts: Sequence[Part]) -> Pending:
        """Start to compare parts of the buffer; pass the result to :meth:`compared`."""
        return self.worker.request("compare", buffer=self.ref, parts=[list(part) for part in parts])

    def compared(self, found: list[dict[str, int] | None], parts: int) -> list[dict[str, int] | None]:
        """Return the answer to :meth:`compare_parts`: what :meth:`compare` returns, for each part.

        :param parts: the number of parts.
        :raises WorkerError: the worker did not compare that many.
        """
        if len(found) != parts:
            rank = self.worker.rank
            raise WorkerError(f"rank {rank} compared {len(found)} of {parts} parts of a buffer", SAME_VERSION)
        return found

    def gpu_wait(self) -> float:
        """Return the seconds that the buffer's GPU takes for a kernel over 8 bytes; 0 if it is not in VRAM.

        It is long while other processes use the GPU: the processes on one GPU take turns.
        """
        return float(self.worker.call("kernel_seconds", buffer=self.ref)) if self.memory == "VRAM" else 0.0

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Return ``size`` bytes at ``offset``; by default the whole buffer."""
        length = self.size - offset if size is None else size
        parts = ((offset + start, min(_PART_BYTES, length - start)) for start in _starts(length))
        return b"".join(cast(bytes, self.worker.call("read", buffer=self.ref, offset=at, size=n)) for at, n in parts)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Write ``data`` to the buffer at ``offset`` (in bytes)."""
        for start in reversed(_starts(len(data))):  # so that data beyond the buffer's end is refused as a whole
            self.worker.call("write", buffer=self.ref, offset=offset + start, data=data[start : start + _PART_BYTES])

    def free(self) -> None:
        """Free the memory. Call it once, after all its registrations are deregistered."""
        self.worker.call("forget", objects=[self.ref])


@dataclass(frozen=True)
class PendingBuffer:
    """A buffer that a worker allocates meanwhile.

    :param request: the request to allocate it.
    :param size: in bytes.
    :param memory: ``DRAM``, ``VRAM``, ``FILE`` or ``OBJ``.
    """

    request: Pending
    size: int
    memory: str

    def result(self) -> Buffer:
        """Wait for the buffer.

        :raises WorkerError: the memory cannot be allocated.
        """
        answer = self.request.result()
        return Buffer(
            self.request.worker, answer["buffer"], answer["address"], self.size, self.memory, answer["device"]
        )
