# SPDX-License-Identifier: Apache-2.0
"""The transfers of a row that walk a buffer from one end to the other, so that no transfer finds its bytes in a cache.

They are prepared in the worker, because there are thousands of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from pytest_nixl.core.wire import Ref


class _Made(dict[int, Any]):
    """Handles by their place in the walk, each made when it is first needed."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, place: int) -> Any:
        made = self[place] = self._make(place)
        return made


class Walk:
    """The prepared transfers of neighbouring parts of two buffers.

    ``plain`` has one transfer for each part, in order. ``tagged`` has the same with a notification, made on demand.

    :param agent: the raw agent of the initiator.
    :param op: ``WRITE`` or ``READ``.
    :param target: the name of the target's agent.
    :param plugin: the backend's plugin.
    :param sides: address, memory type and device of the initiator's buffer and of the target's.
    :param block: bytes of one block.
    :param batch: blocks of one transfer.
    :param transfers: the number of transfers.
    :param notification: the notification with which tagged transfers are created.
    :param tag_each: whether every transfer of a window is tagged, so that all of these are made now.
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
        tag_each: bool,
    ) -> None:
        self._agent, self._op, self._target, self._plugin = agent, op, target, plugin
        self._sides, self._block, self._batch = sides, block, batch
        self.plain = [self._prepare(place, b"") for place in range(transfers)]
        self.tagged = _Made(lambda place: self._prepare(place, notification))
        if tag_each:
            for place in range(transfers):
                self.tagged[place]

    def _prepare(self, place: int, notification: bytes) -> Any:
        agent, block = self._agent, self._block
        first = place * self._batch
        local, remote = (
            agent.get_xfer_descs(
                [(address + (first + number) * block, block, device) for number in range(self._batch)], memory
            )
            for address, memory, device in self._sides
        )
        return agent.initialize_xfer(self._op, local, remote, self._target, notification, backends=[self._plugin])

    def close(self) -> None:
        """Release every transfer."""
        for handle in (*self.plain, *self.tagged.values()):
            self._agent.release_xfer_handle(handle)
        self.plain.clear()
        self.tagged.clear()


class WalkCommands(ABC):
    """The commands ``walk_prepare`` and ``walk_release`` of a worker."""

    @abstractmethod
    def keep(self, value: Any, kind: str) -> Ref: ...

    @abstractmethod
    def get(self, ref: Ref) -> Any: ...

    def do_walk_prepare(self, agent: Ref, **how: Any) -> Ref:
        """Prepare the transfers of a walk; the arguments are those of :class:`Walk`."""
        return self.keep(Walk(self.get(agent), **how), "walk")

    def do_walk_release(self, walk: Ref) -> None:
        """Release the transfers of a walk."""
        self.get(walk).close()
