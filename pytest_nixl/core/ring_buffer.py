# SPDX-License-Identifier: Apache-2.0
"""The last bytes of an output that goes on."""

from __future__ import annotations

#: The last bytes of a program's output that are kept, and the bytes of one answer (etcd accepts 1.5 MiB).
CAPACITY, ANSWER = 1 << 20, 1 << 18


class RingBuffer:
    """The last bytes of a growing output, and the number of all its bytes."""

    def __init__(self, limit: int = CAPACITY) -> None:
        self.total = 0
        self._limit = limit
        self._data = bytearray()

    def write(self, data: bytes) -> None:
        """Append data, and drop the oldest bytes above the limit."""
        self._data += data
        self.total += len(data)
        del self._data[: max(0, len(self._data) - self._limit)]

    def text(self) -> str:
        """Return the kept bytes as text."""
        return self._data.decode(errors="replace")

    def since(self, offset: int, most: int = ANSWER) -> tuple[int, bytes]:
        """Return the offset of the first returned byte and the bytes from ``offset`` on, as far as they are kept.

        :param most: the largest number of bytes to return.
        """
        first = max(offset, self.total - len(self._data))
        begin = first - (self.total - len(self._data))
        return first, bytes(self._data[begin : begin + most])
