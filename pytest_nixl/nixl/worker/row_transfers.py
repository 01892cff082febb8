# SPDX-License-Identifier: Apache-2.0
"""The transfers of a row, which move neighbouring parts of two buffers. They are prepared and released by one command.

Those of a footprint walk the buffers from one end to the other, so that no transfer finds its bytes in a cache: there
are thousands of them. Otherwise there is one for each transfer in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Made(dict[int, Any]):
    """Handles by their place, each made when it is first needed."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, place: int) -> Any:
        made = self[place] = self._make(place)
        return made


class RowTransfers:
    """The prepared transfers of neighbouring parts of two buffers.

    ``plain`` has one transfer for each part, in order. ``tagged`` has the same with a notification, by their place.

    :param agent: the raw agent of the initiator.
    :param op: ``WRITE`` or ``READ``.
    :param target: the name of the target's agent.
    :param plugin: the backend's plugin.
    :param sides: address, memory type and device of the initiator's buffer and of the target's.
    :param block: bytes of one block.
    :param batch: blocks of one transfer.
    :param transfers: the number of transfers.
    :param notification: the notification with which tagged transfers are created.
    :param tag_all: whether all tagged transfers are made now, instead of on demand.
    """

    def __init__(
        self,
        agent: Any,
        op: str,
        target: str,
        plugin: str,
        sides: list[list[Any]],
        *,
        block: int,
        batch: int,
        transfers: int,
        notification: bytes,
        tag_all: bool,
    ) -> None:
        self._agent, self._op, self._target, self._plugin = agent, op, target, plugin
        self._sides, self._block, self._batch = sides, block, batch
        self.plain = [self._prepare(place, b"") for place in range(transfers)]
        self.tagged = _Made(lambda place: self._prepare(place, notification))
        if tag_all:
            for place in range(transfers):
                self.tagged[place]

    def _prepare(self, place: int, notification: bytes) -> Any:
        local, remote = (self._agent.get_xfer_descs(self._part(place, *side), side[1]) for side in self._sides)
        return self._agent.initialize_xfer(self._op, local, remote, self._target, notification, backends=[self._plugin])

    def _part(self, place: int, address: int, memory: str, device: int) -> list[tuple[int, int, int]]:
        """Return the descriptors of the blocks of one transfer on one side."""
        blocks = range(place * self._batch, (place + 1) * self._batch)
        if memory == "OBJ":  # each block is an object, which has a number, from 1
            return [(0, self._block, number + 1) for number in blocks]
        return [(address + number * self._block, self._block, device) for number in blocks]

    def close(self) -> None:
        """Release every transfer."""
        for handle in (*self.plain, *self.tagged.values()):
            self._agent.release_xfer_handle(handle)
        self.plain.clear()
        self.tagged.clear()
