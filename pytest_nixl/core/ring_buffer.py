# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

#: Bytes of a program's output that are kept, at most: the last ones. And those of one answer: etcd takes 1.5 MiB.
KEPT, ANSWER = 1 << 20, 1 << 18


class RingBuffer:
    """The last bytes of an output that goes on, and the number of all."""

    def __init__(self, limit: int = KEPT) -> None:
        self.total = 0
        self._limit = limit
        self._data = bytearray()

    def write(self, data: bytes) -> None:
        """Take what follows."""
        self._data += data
        self.total += len(data)
        del self._data[: max(0, len(self._data) - self._limit)]

    def text(self) -> str:
        """Return what is kept, as text."""
        return self._data.decode(errors="replace")

    def since(self, offset: int, most: int = ANSWER) -> tuple[int, bytes]:
        """Return bytes from ``offset``, or from the first that is still there, and where they begin."""
        first = max(offset, self.total - len(self._data))
        begin = first - (self.total - len(self._data))
        return first, bytes(self._data[begin : begin + most])
