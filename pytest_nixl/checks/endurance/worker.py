# SPDX-License-Identifier: Apache-2.0
"""Repeat what an agent does over hours, and report what the process holds after each series of repeats.

Both agents are in this worker, so that each sample covers both sides of a connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_nixl.nixl.backends import BACKENDS, plugin_of, shake_hands
from pytest_nixl.nixl.worker import nixl_api
from pytest_nixl.nixl.worker.peer_scene import SIZE, PeerScene

_SELF = Path("/proc/self")
#: How the names of shared memory begin in the list of mappings: POSIX, anonymous files, System V.
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV")


class _Mallinfo2(ctypes.Structure):
    """The C structure ``mallinfo2``: each member is a size or a count."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def held(process: Path = _SELF) -> dict[str, float]:
    """Return what this process holds, after it gave back what it can.

    :param process: the folder in which the kernel shows this process.
    :return: ``heap`` (bytes in use by ``malloc``; it is missing if the C library cannot tell), ``memory`` (bytes of
        anonymous memory, in swap too), and the numbers of ``descriptors`` other than sockets, ``sockets``, ``threads``
        and ``shared-memory`` files that are mapped.
    """
    gc.collect()
    library = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library than glibc
        library.malloc_trim(0)
    usage = _heap(library)
    links = [_link(process / "fd" / name) for name in os.listdir(process / "fd")]
    sockets = sum(link.startswith("socket:") for link in links)
    return {
        **usage,
        "memory": _anonymous(process),
        "descriptors": len(links) - sockets,
        "sockets": sockets,
        "threads": len(os.listdir(process / "task")),
        "shared-memory": _shared_files(process),
    }


def _heap(library: ctypes.CDLL) -> dict[str, float]:
    """Return the bytes in use by ``malloc``, exactly; empty with a glibc before 2.33, which has no ``mallinfo2``."""
    try:
        function = library.mallinfo2
    except AttributeError:
        return {}
    function.restype = _Mallinfo2
    usage = function()
    return {"heap": float(usage.uordblks + usage.hblkhd)}


def _anonymous(process: Path) -> float:
    """Return the bytes of anonymous memory in RAM and in swap."""
    try:
        lines, prefixes = (process / "smaps_rollup").read_text().splitlines(), ("Anonymous:", "Swap:")
    except OSError:  # a kernel before 4.14
        lines, prefixes = (process / "status").read_text().splitlines(), ("RssAnon:", "VmSwap:")
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith(prefixes))


def _shared_files(process: Path) -> int:
    """Return how many files of shared memory are mapped, each counted once."""
    fields = [line.split(None, 5) for line in (process / "maps").read_text().splitlines()]
    return len({(field[3], field[4]) for field in fields if len(field) > 5 and field[5].startswith(_SHARED)})


def _link(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # the descriptor by which the folder was listed
        return ""


Cycle = Callable[["CycleScene"], None]
_clock = time.perf_counter


class CycleScene(PeerScene):
    """An agent with registered memory, and a peer in the same worker.

    :param agent: the raw agent.
    :param backend: the backend of both agents.
    :param seconds: the deadline of one transfer.
    """

    def __init__(self, agent: Any, backend: str, seconds: float) -> None:
        super().__init__(agent, backend, seconds)
        self.backend = backend
        self.numbers = itertools.count(1)
        self.spare = self.buffer()
        agent.register_memory(self.regions(self.source))


def _transfer(scene: CycleScene) -> None:
    """Prepare, post and release a transfer with a notification."""
    handle = scene.transfer_all()
    scene.finish(handle)
    scene.agent.release_xfer_handle(handle)


def _connection(scene: CycleScene) -> None:
    """Load the peer's metadata, move bytes, and remove the peer."""
    scene.agent.add_remote_agent(scene.peer.get_agent_metadata())
    _transfer(scene)
    scene.agent.remove_remote_agent(scene.peer.name)


def _registration(scene: CycleScene) -> None:
    """Register memory, and deregister it."""
    scene.agent.deregister_memory(scene.agent.register_memory(scene.regions(scene.spare)))


def _publication(scene: CycleScene) -> None:
    """Publish metadata to etcd, and remove it. NIXL carries both out later, in a thread."""
    scene.agent.send_local_metadata()
    scene.agent.invalidate_local_metadata()


def _agent(scene: CycleScene) -> None:
    """Create an agent with a backend, let it move bytes to the peer, and delete it."""
    name, usual = f"{scene.agent.name}-child-{next(scene.numbers)}", scene.agent
    agent = nixl_api.make_agent(name, progress_thread=shake_hands([scene.backend]))
    with BACKENDS[scene.backend].creating():
        agent.create_backend(plugin_of(scene.backend))
    regions = agent.register_memory(scene.regions(scene.source))
    agent.add_remote_agent(scene.peer.get_agent_metadata())
    scene.agent = agent
    try:
        _transfer(scene)
    finally:
        scene.agent = usual
    agent.deregister_memory(regions)
    agent.remove_remote_agent(scene.peer.name)


#: The cycles by their name in figures.
CYCLES: dict[str, Cycle] = {
    "transfer": _transfer,
    "connection": _connection,
    "registration": _registration,
    "publication": _publication,
    "agent": _agent,
}
_scenes: dict[str, CycleScene] = {}


def repeat(agent: Any, cycle: str, backend: str, count: int, seconds: float, label: str = "") -> dict[str, float]:
    """Repeat a cycle, and return what the process holds then.

    :param cycle: one of :data:`CYCLES`.
    :param count: how often; the first call also prepares what the cycles need.
    :param seconds: the deadline of one transfer.
    :param label: the label in etcd under which the agent publishes at the end, so that the caller can wait for it.
    :return: that of :func:`~pytest_nixl.checks.endurance.worker.held`, the bytes of ``metadata`` of both
        agents, the ``seconds`` of the fastest cycle, and those of a ``reference`` computation that is always the same.
    """
    if agent.name not in _scenes:
        _scenes[agent.name] = CycleScene(agent, backend, seconds)
        if cycle == "connection":
            agent.remove_remote_agent(_scenes[agent.name].peer.name)
    scene, run = _scenes[agent.name], CYCLES[cycle]
    fastest = reference = float("inf")
    for _ in range(count):
        start = _clock()
        sum(range(1000))
        middle = _clock()
        run(scene)
        fastest, reference = min(fastest, _clock() - middle), min(reference, middle - start)
    if label:
        agent.send_partial_agent_metadata(scene.regions(scene.source, size=SIZE), False, label=label)
    metadata = sum(len(exporter.get_agent_metadata()) for exporter in (agent, scene.peer))
    return {**held(), "metadata": metadata, "seconds": fastest, "reference": reference}
