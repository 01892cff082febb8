# SPDX-License-Identifier: Apache-2.0
"""Misuse of NIXL's interface, one function each, carried out in a worker of its own because the process may crash.

Each function prepares what it needs, yields once, and then makes the call that a correct program does not make. So the
caller knows whether an error belongs to the preparation or to the misuse.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from pytest_nixl.model import nixl_releases
from pytest_nixl.nixl.backends import BACKENDS, plugin_of, shake_hands
from pytest_nixl.nixl.worker import nixl_api
from pytest_nixl.nixl.worker.memory import DramBuffer
from pytest_nixl.nixl.worker.transfer import StepTimeoutError

SIZE = 64 << 10
#: The number of transfer handles that the misuse ``handles-kept`` does not release.
HANDLES = 10_000
_PEER = "misuse-peer"
_seeds = itertools.count(1)

Misuse = Callable[["MisuseScene"], Generator[None, None, None]]


class MisuseScene:
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
        self.peer = nixl_api.make_agent(_PEER, progress_thread=shake_hands([backend]))
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
        return self.agent.get_reg_descs([(each.address, size, 0, "") for each in buffers], "DRAM")

    def transfer_of(
        self, local: Sequence[tuple[int, int]], remote: Sequence[tuple[int, int]], peer: str = _PEER
    ) -> Any:
        """Return the handle of a WRITE from ``(address, size)`` of this agent to those of its peer."""
        here = self.agent.get_xfer_descs([(address, size, 0) for address, size in local], "DRAM")
        there = self.agent.get_xfer_descs([(address, size, 0) for address, size in remote], "DRAM")
        return self.agent.initialize_xfer("WRITE", here, there, peer, b"moved")

    def transfer_all(self) -> Any:
        """Return the handle of a WRITE of the whole source buffer."""
        return self.transfer_of([(self.source.address, SIZE)], [(self.target.address, SIZE)])

    def finish(self, handle: Any) -> None:
        """Post a transfer, and wait until it is done and its notification is at the peer.

        :raises StepTimeoutError: the deadline has passed.
        """
        deadline = time.monotonic() + self.seconds
        done, told = self.agent.transfer(handle) == "DONE", False
        while not (done and told):
            done = done or self.agent.check_xfer_state(handle) == "DONE"
            told = told or bool(self.peer.get_new_notifs())
            if time.monotonic() > deadline:
                raise StepTimeoutError(f"not finished after {self.seconds:g} s (done: {done}, notified: {told})")
            time.sleep(0)

    def wrong_bytes(self) -> int:
        """Move new bytes between new buffers, and return how many of them are wrong at the peer."""
        source, target, seed = self.buffer(), self.buffer(), next(_seeds)
        source.fill(seed, 0, SIZE)
        target.fill(seed, 0, SIZE, inverted=True)
        self.agent.register_memory(self.regions(source))
        self.peer.register_memory(self.regions(target))
        self.agent.add_remote_agent(self.peer.get_agent_metadata())
        self.finish(self.transfer_of([(source.address, SIZE)], [(target.address, SIZE)]))
        found = target.compare(seed, 0, SIZE)
        return found["wrong_bytes"] if found else 0


def _registered_twice(scene: MisuseScene) -> Generator[None, None, None]:
    regions = scene.regions(scene.source)
    scene.agent.register_memory(regions)
    yield
    scene.agent.register_memory(regions)
    scene.agent.deregister_memory(regions)
    scene.agent.deregister_memory(regions)


def _duplicate_descriptor(scene: MisuseScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    scene.agent.deregister_memory(scene.regions(scene.source, scene.source))


def _deregistered_twice(scene: MisuseScene) -> Generator[None, None, None]:
    regions = scene.regions(scene.source)
    scene.agent.register_memory(regions)
    scene.agent.deregister_memory(regions)
    yield
    scene.agent.deregister_memory(regions)


def _empty_region(scene: MisuseScene) -> Generator[None, None, None]:
    yield
    scene.agent.deregister_memory(scene.agent.register_memory(scene.regions(scene.source, size=0)))


def _overlapping_regions(scene: MisuseScene) -> Generator[None, None, None]:
    half, shifted = SIZE // 2, scene.source.address + SIZE // 4
    first = scene.regions(scene.source, size=half)
    second = scene.agent.get_reg_descs([(shifted, half, 0, "")], "DRAM")
    yield
    scene.agent.register_memory(first)
    scene.agent.register_memory(second)
    scene.agent.deregister_memory(first)
    scene.finish(scene.transfer_of([(shifted, half)], [(scene.target.address, half)]))
    scene.agent.deregister_memory(second)


def _beyond_own_region(scene: MisuseScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source, size=SIZE // 2))
    yield
    scene.finish(scene.transfer_all())


def _beyond_peers_region(scene: MisuseScene) -> Generator[None, None, None]:
    source = scene.buffer(2 * SIZE)
    scene.agent.register_memory(scene.regions(source, size=2 * SIZE))
    yield
    scene.finish(scene.transfer_of([(source.address, 2 * SIZE)], [(scene.target.address, 2 * SIZE)]))


def _different_lengths(scene: MisuseScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    scene.finish(scene.transfer_of([(scene.source.address, SIZE)], [(scene.target.address, SIZE // 2)]))


def _empty_transfer(scene: MisuseScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    scene.finish(scene.transfer_of([(scene.source.address, 0)], [(scene.target.address, 0)]))


def _overlapping_transfer(scene: MisuseScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    half, step = SIZE // 2, SIZE // 4
    here, there = ([(each.address, half), (each.address + step, half)] for each in (scene.source, scene.target))
    yield
    scene.finish(scene.transfer_of(here, there))


def _unknown_agent(scene: MisuseScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    scene.agent.remove_remote_agent("nobody")
    yield
    scene.transfer_of([(scene.source.address, SIZE)], [(scene.target.address, SIZE)], "nobody")


def _notification_to_unknown_agent(scene: MisuseScene) -> Generator[None, None, None]:
    yield
    scene.agent.send_notif("nobody", b"lost")


def _index_out_of_range(scene: MisuseScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    here = scene.agent.prep_xfer_dlist("", [(scene.source.address, SIZE, 0)], "DRAM")
    there = scene.agent.prep_xfer_dlist(_PEER, [(scene.target.address, SIZE, 0)], "DRAM")
    yield
    scene.agent.make_prepped_xfer("WRITE", here, [0], there, [1])


def _posted_twice(scene: MisuseScene) -> Generator[None, None, None]:
    source, target = scene.buffer(64 << 20), scene.buffer(64 << 20)
    for agent, buffer in ((scene.agent, source), (scene.peer, target)):
        agent.register_memory(scene.regions(buffer, size=buffer.size))
    scene.agent.add_remote_agent(scene.peer.get_agent_metadata())
    handle = scene.transfer_of([(source.address, source.size)], [(target.address, target.size)])
    yield
    scene.agent.transfer(handle)
    scene.finish(handle)


def _released_twice(scene: MisuseScene) -> Generator[None, None, None]:
    handle = _finished(scene)
    scene.agent.release_xfer_handle(handle)
    yield
    scene.agent.release_xfer_handle(handle)


def _released_handle(scene: MisuseScene) -> Generator[None, None, None]:
    handle = _finished(scene)
    scene.agent.release_xfer_handle(handle)
    yield
    scene.finish(handle)


def _finished(scene: MisuseScene) -> Any:
    scene.agent.register_memory(scene.regions(scene.source))
    handle = scene.transfer_all()
    scene.finish(handle)
    return handle


def _deregistered_source(scene: MisuseScene) -> Generator[None, None, None]:
    regions = scene.regions(scene.source)
    scene.agent.register_memory(regions)
    handle = scene.transfer_all()
    scene.agent.deregister_memory(regions)
    yield
    scene.finish(handle)


def _handles_kept(scene: MisuseScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    kept = [scene.transfer_all() for _ in range(HANDLES)]
    scene.finish(kept[0])


def _cut_metadata(scene: MisuseScene) -> Generator[None, None, None]:
    metadata = scene.peer.get_agent_metadata()
    yield
    scene.agent.add_remote_agent(metadata[:-1])


#: The functions by the id of the misuse.
MISUSES: dict[str, Misuse] = {
    function.__name__[1:].replace("_", "-"): function
    for function in (
        _duplicate_descriptor, _released_handle, _deregistered_source, _registered_twice, _deregistered_twice,
        _empty_region, _overlapping_regions, _beyond_own_region, _beyond_peers_region, _different_lengths,
        _empty_transfer, _overlapping_transfer, _unknown_agent, _notification_to_unknown_agent, _index_out_of_range,
        _posted_twice, _released_twice, _handles_kept, _cut_metadata,
    )
}  # fmt: skip


def carry_out(agent: Any, misuse: str, backend: str, seconds: float) -> dict[str, Any]:
    """Carry out a misuse, then move bytes to the peer and compare them.

    :param misuse: one of :data:`MISUSES`.
    :param seconds: the deadline of one transfer.
    :return: ``raised``, the class of NIXL's error, ``after``, that of the transfer after it, both empty for none, and
        ``wrong_bytes`` of that transfer.
    """
    scene = MisuseScene(agent, backend, seconds)
    steps = MISUSES[misuse](scene)
    next(steps)
    wrong: list[int] = []
    raised = _error_of(lambda: list(steps))
    after = _error_of(lambda: wrong.append(scene.wrong_bytes()))
    return {"raised": raised, "after": after, "wrong_bytes": sum(wrong)}


def _error_of(call: Callable[[], object]) -> str:
    """Return the class of the error that NIXL raises in a call; empty for none."""
    try:
        call()
    except Exception as error:
        if not nixl_releases.is_error(type(error).__module__):
            raise
        return type(error).__name__
    return ""
