# SPDX-License-Identifier: Apache-2.0
"""Time the control path of an agent in a worker: all that happens before and around the transfer of bytes.

Pytest calls these functions through the worker's command ``run``, with the raw agent first. Times are in seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from pytest_nixl.nixl.backends import BACKENDS, plugin_of
from pytest_nixl.nixl.worker import nixl_api

#: The least size of a region: one page.
PAGE = 4096
_OF_BURST = b"one of many"
#: When NIXL is asked for metadata once more, in seconds: it gives up a fetch if nothing is published within five.
FETCH_AGAIN_SECONDS = 6.0


def create_agents(agent: Any, *, backend: str, count: int, progress_thread: bool) -> list[float]:
    """Return how long it took to create each of ``count`` further agents with a backend; each is deleted at once."""
    times = []
    for number in range(count):
        start = time.perf_counter()
        new_agent = nixl_api.make_agent(f"{agent.name}-{number}", progress_thread=progress_thread)
        with BACKENDS[backend].creating() if backend in BACKENDS else nullcontext():
            new_agent.create_backend(plugin_of(backend))
        times.append(time.perf_counter() - start)
        del new_agent
    return times


@contextmanager
def _memory(size: int) -> Iterator[int]:
    """Give the address of this many bytes of memory, every page of which is there."""
    memory = mmap.mmap(-1, size)
    view = ctypes.c_char.from_buffer(memory)
    try:
        address = ctypes.addressof(view)
        ctypes.memset(address, 1, size)
        yield address
    finally:
        del view
        memory.close()


def _regions(address: int, count: int, size: int) -> list[tuple[int, int, int, str]]:
    return [(address + number * size, size, 0, "") for number in range(count)]


def register(agent: Any, *, count: int, size: int, repeats: int) -> list[tuple[float, float]]:
    """Register ``count`` regions of ``size`` bytes each in one call, and deregister them, ``repeats`` times.

    :returns: the times of each registration and deregistration.
    """
    times = []
    with _memory(count * size) as address:
        regions = _regions(address, count, size)
        for _ in range(repeats):
            start = time.perf_counter()
            registered = agent.register_memory(regions, "DRAM")
            middle = time.perf_counter()
            agent.deregister_memory(registered)
            times.append((middle - start, time.perf_counter() - middle))
    return times


def _reference() -> float:
    """Return how long a computation takes that is always the same, as a measure of the machine's present speed."""
    start = time.perf_counter()
    sum(range(1000))
    return time.perf_counter() - start


def accumulate(agent: Any, *, count: int, repeats: int, rounds: int) -> dict[str, list[list[list[float]]]]:
    """Register ``count`` more regions of a page each, ``repeats`` times, then deregister them; all that in each round.

    :returns: for ``registration`` and ``deregistration`` the times of each round, by the number of the call, and in the
        same shape those of a computation beside each call that is always the same.
    """
    timings: dict[str, list[list[list[float]]]] = {"registration": [[], []], "deregistration": [[], []]}
    with _memory(count * repeats * PAGE) as address:
        calls = [_regions(address + number * count * PAGE, count, PAGE) for number in range(repeats)]
        for _ in range(rounds):
            times, references, registered = [], [], []
            for regions in calls:
                references.append(_reference())
                start = time.perf_counter()
                registered.append(agent.register_memory(regions, "DRAM"))
                times.append(time.perf_counter() - start)
            timings["registration"][0].append(times)
            timings["registration"][1].append(references)
            times, references = [], []
            for registration in registered:
                references.append(_reference())
                start = time.perf_counter()
                agent.deregister_memory(registration)
                times.append(time.perf_counter() - start)
            timings["deregistration"][0].append(times)
            timings["deregistration"][1].append(references)
    return timings


#: Memory that is there until the worker ends.
_kept_alive: list[Any] = []


def _kept_memory(size: int) -> int:
    """Return the address of this many bytes of memory that stay until the worker ends."""
    memory = mmap.mmap(-1, size)
    _kept_alive.append((memory, view := ctypes.c_char.from_buffer(memory)))
    return ctypes.addressof(view)


def keep_registered(agent: Any, *, count: int) -> None:
    """Register regions of a page each, which stay registered until the worker ends."""
    agent.register_memory(_regions(_kept_memory(count * PAGE), count, PAGE), "DRAM")


def export(agent: Any, *, count: int, repeats: int) -> dict[str, Any]:
    """Register regions of a page each, and return the metadata with the times that its exports took.

    No later export has regions at the same addresses: over RDMA an agent that knows one registration of a region
    refuses another (``NIXL_ERR_NOT_ALLOWED``), because its remote key differs.
    """
    registered = agent.register_memory(_regions(_kept_memory(max(count, 1) * PAGE), count, PAGE), "DRAM")
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        metadata = agent.get_agent_metadata()
        times.append(time.perf_counter() - start)
    agent.deregister_memory(registered)
    return {"seconds": times, "metadata": metadata}


def load(agent: Any, *, metadata: bytes, repeats: int) -> list[float]:
    """Return how long it took to load another agent's metadata, each time after it was forgotten."""
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        name = agent.add_remote_agent(metadata)
        times.append(time.perf_counter() - start)
        if number + 1 < repeats:
            agent.remove_remote_agent(name.decode() if isinstance(name, bytes) else name)
    return times


def find(agent: Any, *, names: list[str], timeout: float) -> list[str]:
    """Fetch the metadata of other agents from etcd, wait until all is loaded, and return the names of those missing."""
    for name in names:
        agent.fetch_remote_metadata(name)
    start = time.monotonic()
    missing, again = list(names), start + FETCH_AGAIN_SECONDS
    while missing and time.monotonic() < start + timeout:
        if agent.check_remote_metadata(missing[0]):
            del missing[0]
        elif time.monotonic() >= again:
            missing = _unknown(agent, missing)
            for name in missing:
                agent.fetch_remote_metadata(name)
            again = time.monotonic() + FETCH_AGAIN_SECONDS
        else:
            time.sleep(0.0005)
    return _unknown(agent, missing)


def _unknown(agent: Any, names: list[str]) -> list[str]:
    return [name for name in names if not agent.check_remote_metadata(name)]


def connect_and_write(
    agent: Any, *, target: str, local: list[int], remote: list[int], repeats: int, timeout: float
) -> dict[str, Any]:
    """Connect to another agent, which runs :func:`answer` to a burst of one, then write to it ``repeats`` times.

    :param local: address, size and device of the memory to write from; ``remote``: of that to write to.
    :returns: the time of ``make_connection``, and of each transfer from post to completion.
    """
    start = time.perf_counter()
    agent.make_connection(target)
    connected = time.perf_counter() - start
    memory = [agent.get_xfer_descs([tuple(region)], "DRAM") for region in (local, remote)]
    handle = agent.initialize_xfer("WRITE", *memory, target, b"")
    times: list[float] = []
    deadline = time.monotonic() + timeout
    for _ in range(repeats):
        start = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TimeoutError(f"transfer {len(times) + 1} to {target} was not complete in time")
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"transfer {len(times) + 1} to {target} ended with {state}")
        times.append(time.perf_counter() - start)
    agent.release_xfer_handle(handle)
    agent.send_notif(target, _OF_BURST)
    return {"connect": connected, "transfers": times}


def _arrived(agent: Any, deadline: float, waits_for: str) -> list[bytes]:
    """Return the notifications that have arrived, at least one."""
    while True:
        if messages_so_far := [message for messages in agent.get_new_notifs().values() for message in messages]:
            return messages_so_far
        if time.monotonic() > deadline:
            raise TimeoutError(f"no notification arrived from {waits_for} in time")


def answer(agent: Any, *, peer: str, burst: int, timeout: float) -> None:
    """Answer each single notification of a peer with one, then all of a burst with one."""
    deadline = time.monotonic() + timeout
    received = 0
    while received < burst:
        for message in _arrived(agent, deadline, peer):
            if message == _OF_BURST:
                received += 1
            else:
                agent.send_notif(peer, b"answer")
    agent.send_notif(peer, b"all")


def notify(agent: Any, *, peer: str, single: int, seconds: float, burst: int, timeout: float) -> dict[str, Any]:
    """Send notifications to a peer that runs :func:`answer`.

    :param single: the most single notifications, which end after ``seconds``; at least 10 are sent.
    :returns: ``round_trips``, the time of each single one until its answer was there, and ``burst``, the time from the
        first of the burst until the answer to all of it was there.
    """
    began = time.monotonic()
    times: list[float] = []
    while len(times) < single and (len(times) < 10 or time.monotonic() < began + seconds):
        start = time.perf_counter()
        agent.send_notif(peer, b"question")
        _arrived(agent, began + timeout, peer)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(burst):
        agent.send_notif(peer, _OF_BURST)
    _arrived(agent, began + timeout, peer)
    return {"round_trips": times, "burst": time.perf_counter() - start}
