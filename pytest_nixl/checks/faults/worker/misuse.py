# SPDX-License-Identifier: Apache-2.0
"""Misuse of NIXL's interface, one function each, carried out in a worker of its own because the process may crash.

Each function prepares what it needs, yields once, and then makes the call that a correct program does not make. So the
caller knows whether an error belongs to the preparation or to the misuse.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from pytest_nixl.checks.faults.worker import error_of
from pytest_nixl.nixl.worker.peer_scene import PEER, SIZE, PeerScene
from pytest_nixl.nixl.worker.transfer import StepTimeoutError

#: The number of transfer handles that the misuse ``handles-kept`` does not release.
HANDLES = 10_000

#: How many transfers ``released-in-flight`` releases: after one of ten the next transfer was done nevertheless.
RELEASES = 5
#: The misuse, and its backend, after which a transfer that misses its deadline is an outcome: the finding
#: LIBFABRIC-RELEASE-STALLS. After any other the machine may be busy.
STALLS = ("released-in-flight", "LIBFABRIC")

Misuse = Callable[["PeerScene"], Generator[None, None, None]]


def _registered_twice(scene: PeerScene) -> Generator[None, None, None]:
    regions = scene.regions(scene.source)
    scene.agent.register_memory(regions)
    yield
    scene.agent.register_memory(regions)
    scene.agent.deregister_memory(regions)
    scene.agent.deregister_memory(regions)


def _duplicate_descriptor(scene: PeerScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    scene.agent.deregister_memory(scene.regions(scene.source, scene.source))


def _deregistered_twice(scene: PeerScene) -> Generator[None, None, None]:
    regions = scene.regions(scene.source)
    scene.agent.register_memory(regions)
    scene.agent.deregister_memory(regions)
    yield
    scene.agent.deregister_memory(regions)


def _empty_region(scene: PeerScene) -> Generator[None, None, None]:
    yield
    scene.agent.deregister_memory(scene.agent.register_memory(scene.regions(scene.source, size=0)))


def _overlapping_regions(scene: PeerScene) -> Generator[None, None, None]:
    half, shifted = SIZE // 2, scene.source.address + SIZE // 4
    first = scene.regions(scene.source, size=half)
    second = scene.agent.get_reg_descs([(shifted, half, 0, "")], "DRAM")
    yield
    scene.agent.register_memory(first)
    scene.agent.register_memory(second)
    scene.agent.deregister_memory(first)
    scene.finish(scene.transfer_of([(shifted, half)], [(scene.target.address, half)]))
    scene.agent.deregister_memory(second)


def _beyond_own_region(scene: PeerScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source, size=SIZE // 2))
    yield
    scene.finish(scene.transfer_all())


def _beyond_peers_region(scene: PeerScene) -> Generator[None, None, None]:
    source = scene.buffer(2 * SIZE)
    scene.agent.register_memory(scene.regions(source, size=2 * SIZE))
    yield
    scene.finish(scene.transfer_of([(source.address, 2 * SIZE)], [(scene.target.address, 2 * SIZE)]))


def _different_lengths(scene: PeerScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    scene.finish(scene.transfer_of([(scene.source.address, SIZE)], [(scene.target.address, SIZE // 2)]))


def _empty_transfer(scene: PeerScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    scene.finish(scene.transfer_of([(scene.source.address, 0)], [(scene.target.address, 0)]))


def _overlapping_transfer(scene: PeerScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    half, step = SIZE // 2, SIZE // 4
    local, remote = ([(side.address, half), (side.address + step, half)] for side in (scene.source, scene.target))
    yield
    scene.finish(scene.transfer_of(local, remote))


def _unknown_agent(scene: PeerScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    scene.agent.remove_remote_agent("nobody")
    yield
    scene.transfer_of([(scene.source.address, SIZE)], [(scene.target.address, SIZE)], "nobody")


def _notification_to_unknown_agent(scene: PeerScene) -> Generator[None, None, None]:
    yield
    scene.agent.send_notif("nobody", b"lost")


def _index_out_of_range(scene: PeerScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    local = scene.agent.prep_xfer_dlist("", [(scene.source.address, SIZE, 0)], "DRAM")
    remote = scene.agent.prep_xfer_dlist(PEER, [(scene.target.address, SIZE, 0)], "DRAM")
    yield
    scene.agent.make_prepped_xfer("WRITE", local, [0], remote, [1])


def _large_transfers(scene: PeerScene, count: int = 1) -> list[Any]:
    """Register 64 MiB on both sides, and return handles of transfers of them that are not posted.

    Each is in flight for a while after it is posted.
    """
    source, target = scene.buffer(64 << 20), scene.buffer(64 << 20)
    for agent, buffer in ((scene.agent, source), (scene.peer, target)):
        agent.register_memory(scene.regions(buffer, size=buffer.size))
    scene.agent.add_remote_agent(scene.peer.get_agent_metadata())
    return [scene.transfer_of([(source.address, source.size)], [(target.address, target.size)]) for _ in range(count)]


def _posted_twice(scene: PeerScene) -> Generator[None, None, None]:
    (handle,) = _large_transfers(scene)
    yield
    scene.agent.transfer(handle)
    try:
        scene.agent.transfer(handle)
    finally:
        scene.wait_for(handle)  # else its handle is released in flight, which is another misuse


def _released_in_flight(scene: PeerScene) -> Generator[None, None, None]:
    handles = _large_transfers(scene, RELEASES)
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    for handle in handles:
        scene.agent.transfer(handle)
        scene.agent.release_xfer_handle(handle)
        scene.finish(scene.transfer_all())


def _released_twice(scene: PeerScene) -> Generator[None, None, None]:
    handle = _finished(scene)
    scene.agent.release_xfer_handle(handle)
    yield
    scene.agent.release_xfer_handle(handle)


def _released_handle(scene: PeerScene) -> Generator[None, None, None]:
    handle = _finished(scene)
    scene.agent.release_xfer_handle(handle)
    yield
    scene.finish(handle)


def _finished(scene: PeerScene) -> Any:
    scene.agent.register_memory(scene.regions(scene.source))
    handle = scene.transfer_all()
    scene.finish(handle)
    return handle


def _deregistered_source(scene: PeerScene) -> Generator[None, None, None]:
    regions = scene.regions(scene.source)
    scene.agent.register_memory(regions)
    handle = scene.transfer_all()
    scene.agent.deregister_memory(regions)
    yield
    scene.finish(handle)


def _handles_kept(scene: PeerScene) -> Generator[None, None, None]:
    scene.agent.register_memory(scene.regions(scene.source))
    yield
    handles = [scene.transfer_all() for _ in range(HANDLES)]
    scene.finish(handles[0])


def _cut_metadata(scene: PeerScene) -> Generator[None, None, None]:
    metadata = scene.peer.get_agent_metadata()
    yield
    scene.agent.add_remote_agent(metadata[:-1])


#: The functions by the id of the misuse.
MISUSES: dict[str, Misuse] = {
    function.__name__[1:].replace("_", "-"): function
    for function in (
        _duplicate_descriptor,
        _released_handle,
        _deregistered_source,
        _registered_twice,
        _deregistered_twice,
        _empty_region,
        _overlapping_regions,
        _beyond_own_region,
        _beyond_peers_region,
        _different_lengths,
        _empty_transfer,
        _overlapping_transfer,
        _unknown_agent,
        _notification_to_unknown_agent,
        _index_out_of_range,
        _posted_twice,
        _released_in_flight,
        _released_twice,
        _handles_kept,
        _cut_metadata,
    )
}


def carry_out(agent: Any, misuse: str, backend: str, seconds: float) -> dict[str, Any]:
    """Carry out a misuse, then move bytes to the peer and compare them.

    :param misuse: one of :data:`MISUSES`.
    :param seconds: the deadline of one transfer.
    :return: ``raised``, the class of NIXL's error, ``after``, that of the transfer after it, both empty for none, and
        ``wrong_bytes`` of that transfer. ``after`` is ``PROC`` if this is never done.
    """
    scene = PeerScene(agent, backend, seconds)
    steps = MISUSES[misuse](scene)
    next(steps)
    wrong: list[int] = []
    raised = ""
    try:
        raised = error_of(lambda: list(steps))
        after = error_of(lambda: wrong.append(scene.wrong_bytes()))
    except StepTimeoutError:
        if (misuse, backend) != STALLS:
            raise
        after = "PROC"
    return {"raised": raised, "after": after, "wrong_bytes": sum(wrong)}
