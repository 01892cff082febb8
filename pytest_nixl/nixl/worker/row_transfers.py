# SPDX-License-Identifier: Apache-2.0
"""The transfers of a row, which move neighbouring parts of two buffers. They are prepared and released by one command.

Those of a footprint walk the buffers from one end to the other, so that no transfer finds its bytes in a cache: there
are thousands of them. Otherwise there is one for each transfer in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_nixl.nixl.worker.transfer import COUNTED, Transfers


class _Prepared(dict[int, Any]):
    """Handles by their place, each made when it is first needed."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, place: int) -> Any:
        transfer = self[place] = self._make(place)
        return transfer


def prepare_row(
    agent: Any,
    op: str,
    target: str,
    plugin: str,
    sides: list[list[Any]],
    *,
    block: int,
    batch: int,
    count: int,
    depth: int,
    notify_each: bool,
    announced: bool,
    **how: Any,
) -> Transfers:
    """Prepare the transfers of a row, and return them.

    :param agent: the raw agent of the initiator.
    :param op: ``WRITE`` or ``READ``.
    :param target: the name of the target's agent.
    :param plugin: the backend's plugin.
    :param sides: address, memory type and device of the initiator's buffer and of the target's.
    :param block: bytes of one block.
    :param batch: blocks of one transfer.
    :param count: the number of transfers.
    :param how: as for :class:`Transfers`, as the others.
    """

    def part(place: int, address: int, memory: str, device: int) -> list[tuple[int, int, int]]:
        """Return the descriptors of the blocks of one transfer on one side."""
        blocks = range(place * batch, (place + 1) * batch)
        if memory == "OBJ":  # each block is an object, which has a number, from 1
            return [(0, block, number + 1) for number in blocks]
        return [(address + number * block, block, device) for number in blocks]

    def prepare(place: int, notification: bytes) -> Any:
        local, remote = (agent.get_xfer_descs(part(place, *side), side[1]) for side in sides)
        return agent.initialize_xfer(op, local, remote, target, notification, backends=[plugin])

    plain = [prepare(place, b"") for place in range(count)]
    notifying = _Prepared(lambda place: prepare(place, COUNTED if announced else b""))
    if notify_each or count == depth:  # those that walk a footprint are many, and only the last of a window notifies
        for place in range(count):
            notifying[place]
    return Transfers(agent, target, plain, notifying, depth=depth, notify_each=notify_each, announced=announced, **how)
