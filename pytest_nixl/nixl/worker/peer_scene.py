# SPDX-License-Identifier: Apache-2.0
"""Two agents in one worker: the worker's own, and a peer that it knows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from pytest_nixl.nixl.backends import BACKENDS, plugin_of, shake_hands
from pytest_nixl.nixl.worker import nixl_api
from pytest_nixl.nixl.worker.memory import DramBuffer
from pytest_nixl.nixl.worker.transfer import StepTimeoutError

#: Bytes of each buffer.
SIZE = 64 << 10
#: The name of the peer.
PEER = "misuse-peer"
#: The notification of a transfer.
MOVED = b"moved"
_seeds = itertools.count(1)


class PeerScene:
    """An agent, and a peer in the same worker that the agent knows.

    :param agent: the raw agent.
    :param backend: the backend of both agents.
    :param seconds: the deadline of one transfer.
    """

    def __init__(self, agent: Any, backend: str, seconds: float) -> None:
        self.agent = agent
        self.seconds = seconds
        # Kept until the process ends, so that no address is used again while it is registered.
        self._buffers: list[DramBuffer] = []
        self.peer = nixl_api.make_agent(PEER, progress_thread=shake_hands([backend]))
        with BACKENDS[backend].creating():
            self.peer.create_backend(plugin_of(backend))
        self.source, self.target = self.buffer(), self.buffer()
        self.peer.register_memory(self.regions(self.target))
        self.agent.add_remote_agent(self.peer.get_agent_metadata())

    def buffer(self, size: int = SIZE) -> DramBuffer:
        """Return new memory of ``size`` bytes."""
        self._buffers.append(DramBuffer(size))
        return self._buffers[-1]

    def regions(self, *buffers: DramBuffer, size: int = SIZE) -> Any:
        """Return a list for registration with the first ``size`` bytes of each buffer."""
        return self.agent.get_reg_descs([(buffer.address, size, 0, "") for buffer in buffers], "DRAM")

    def transfer_of(
        self,
        local: Sequence[tuple[int, int]],
        remote: Sequence[tuple[int, int]],
        peer: str = PEER,
        notification: bytes = MOVED,
    ) -> Any:
        """Return the handle of a WRITE from ``(address, size)`` of this agent to those of its peer.

        :param notification: its notification.
        """
        local_list = self.agent.get_xfer_descs([(address, size, 0) for address, size in local], "DRAM")
        remote_list = self.agent.get_xfer_descs([(address, size, 0) for address, size in remote], "DRAM")
        return self.agent.initialize_xfer("WRITE", local_list, remote_list, peer, notification)

    def transfer_all(self) -> Any:
        """Return the handle of a WRITE of the whole source buffer."""
        return self.transfer_of([(self.source.address, SIZE)], [(self.target.address, SIZE)])

    def finish(self, handle: Any) -> None:
        """Post a transfer, and wait until it is done and its notification is at the peer.

        :raises StepTimeoutError: the deadline has passed.
        """
        self.agent.transfer(handle)
        self.wait_for(handle)

    def wait_for(self, handle: Any, notification: bytes = MOVED) -> None:
        """Wait until a transfer that was posted is done and its notification is at the peer.

        :raises StepTimeoutError: the deadline has passed.
        """
        deadline = time.monotonic() + self.seconds
        done = notified = False
        while not (done and notified):
            done = done or self.agent.check_xfer_state(handle) == "DONE"
            notified = notified or any(notification in messages for messages in self.peer.get_new_notifs().values())
            if time.monotonic() > deadline:
                raise StepTimeoutError(f"not finished after {self.seconds:g} s (done: {done}, notified: {notified})")
            time.sleep(0)

    def wrong_bytes(self) -> int:
        """Move new bytes between new buffers, and return how many of them are wrong at the peer."""
        source, target, seed = self.buffer(), self.buffer(), next(_seeds)
        source.fill(seed, 0, SIZE)
        target.fill(seed, 0, SIZE, inverted=True)
        self.agent.register_memory(self.regions(source))
        self.peer.register_memory(self.regions(target))
        self.agent.add_remote_agent(self.peer.get_agent_metadata())
        # A notification of its own, because that of a transfer before it may come late.
        text = b"compared"
        handle = self.transfer_of([(source.address, SIZE)], [(target.address, SIZE)], notification=text)
        self.agent.transfer(handle)
        self.wait_for(handle, text)
        comparison = target.compare(seed, 0, SIZE)
        return comparison["wrong_bytes"] if comparison else 0
