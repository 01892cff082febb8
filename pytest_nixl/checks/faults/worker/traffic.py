# SPDX-License-Identifier: Apache-2.0
"""Transfers of one agent in a worker while something goes wrong: what NIXL answers, and when."""

from __future__ import annotations

import ctypes
import mmap
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.checks.faults.worker import error_of
from pytest_nixl.model import nixl_releases

#: A line of the worker's output: transfers have been completed.
FLOWS = "pytest-nixl: transfers are completed"
#: A line of the worker's output: the transfers have ended before enough of them were completed.
ENDED_EARLY = "pytest-nixl: transfers have ended early"
#: The signal that ends the loop of :func:`keep_transferring`.
FINISH = signal.SIGUSR2
#: What :func:`interrupt` says of its call if NIXL refused the transfers before it.
NOT_CALLED = "was not called"
_NAP_SECONDS = 0.0005
#: The longest time in seconds to wait for the transfers in flight after the first has ended in an error.
_REST_SECONDS = 5.0


@dataclass(frozen=True)
class Traffic:
    """The transfers of one agent, each of one region.

    :param op: ``WRITE`` or ``READ``.
    :param local: address and size in bytes of each region of this agent.
    :param remote: the same regions of the peer.
    :param peer: the name of the peer's agent.
    """

    op: str
    local: Sequence[Sequence[int]]
    remote: Sequence[Sequence[int]]
    peer: str

    def handles(self, agent: Any) -> list[Any]:
        """Return a new handle for each region."""
        return [
            agent.initialize_xfer(
                self.op,
                agent.get_xfer_descs([(*local_region, 0)], "DRAM"),
                agent.get_xfer_descs([(*remote_region, 0)], "DRAM"),
                self.peer,
            )
            for local_region, remote_region in zip(self.local, self.remote, strict=True)
        ]


def keep_transferring(agent: Any, quiet: float, limit: float, timeout: float, **traffic: Any) -> dict[str, Any]:
    """Repeat transfers until NIXL reports an error, none is completed for ``quiet`` seconds, or the loop is to end.

    :param limit: the loop ends this many seconds after the first transfers are completed, or with :data:`FINISH`.
    :param timeout: the longest time in seconds until then, during which ``quiet`` is not applied.
    :return: ``said`` (NIXL's error class, ``ERR``, ``PROC`` if none was completed for ``quiet`` seconds, or ``DONE``),
        ``completed``, ``longest``, the longest time without a completed transfer in seconds, and ``unended``, the
        number of transfers that did not end within 5 s after an error, or ``quiet`` seconds after ``DONE``.
    """
    finish: list[int] = []
    signal.signal(FINISH, lambda *_: finish.append(1))
    handles: list[Any] = []
    error = error_of(lambda: handles.extend(Traffic(**traffic).handles(agent)))
    posted: set[int] = set()
    completed, longest, announced = 0, 0.0, False
    began = last = time.monotonic()
    while not error:
        for number, handle in enumerate(handles):
            state = _state(agent.check_xfer_state if number in posted else agent.transfer, handle)
            now = time.monotonic()
            if state == "PROC":
                posted.add(number)
                continue
            posted.discard(number)
            if state != "DONE":
                error, longest = state, max(longest, now - last)
                break
            completed, longest, last = completed + 1, max(longest, now - last), now
        now = time.monotonic()
        if not announced and not error and completed >= 2 * len(handles):
            announced, began = True, now
            print(FLOWS, flush=True)
        if not error and now - last > (quiet if announced else timeout):
            error, longest = "PROC", now - last
        elif not error and (finish or now - began > (limit if announced else timeout)):
            error = "DONE"
        time.sleep(_NAP_SECONDS)
    if not announced:
        print(ENDED_EARLY, flush=True)
    unended = 0
    if error != "PROC":
        unended = _wait(agent, [handles[number] for number in posted], quiet if error == "DONE" else _REST_SECONDS)
    return {"said": error, "completed": completed, "longest": longest, "unended": unended}


def _wait(agent: Any, handles: Sequence[Any], seconds: float) -> int:
    """Wait until transfers in flight have ended, well or not, and return how many have not."""
    waiting, deadline = list(handles), time.monotonic() + seconds
    while waiting:
        late = time.monotonic() > deadline
        waiting = [handle for handle in waiting if _state(agent.check_xfer_state, handle) == "PROC"]
        if late:
            break
        time.sleep(_NAP_SECONDS)
    return len(waiting)


def _state(ask: Callable[[Any], str], handle: Any) -> str:
    """Return the state of a transfer, or the class of NIXL's error."""
    try:
        return ask(handle)
    except Exception as error:
        if not nixl_releases.is_error(type(error).__module__):
            raise
        return type(error).__name__


def interrupt(
    agent: Any, action: str, regions: Sequence[Any], quiet: float, metadata: bytes = b"", **traffic: Any
) -> dict[str, Any]:
    """Post transfers, and withdraw something that they need before they are completed.

    :param action: one of ``remove_remote_agent``, ``release_xfer_handle`` and ``deregister_memory``; or ``replace``,
        to remove the peer and to add another agent of the same name.
    :param regions: address, size in bytes and device of this agent's registered memory.
    :param metadata: of that other agent.
    :param quiet: the longest time to wait for the transfers after that, in seconds.
    :return: ``act`` (``returned``, NIXL's error class, or :data:`NOT_CALLED` if there were no transfers), ``seconds``
        that the call took, ``in_flight`` (the number of transfers when it was made) and ``states``, how often each end
        of a transfer occurred.
    """
    about = Traffic(**traffic)
    handles: list[Any] = []
    states: dict[str, int] = {}
    if error := error_of(lambda: handles.extend(about.handles(agent))):
        return {"act": NOT_CALLED, "seconds": 0.0, "in_flight": 0, "states": {error: 1}}
    calls: dict[str, Callable[[], object]] = {
        "remove_remote_agent": lambda: agent.remove_remote_agent(about.peer),
        "release_xfer_handle": lambda: [agent.release_xfer_handle(handle) for handle in handles],
        "deregister_memory": lambda: agent.deregister_memory(
            agent.get_reg_descs([(*region, "") for region in regions], "DRAM")
        ),
        "replace": lambda: (agent.remove_remote_agent(about.peer), agent.add_remote_agent(metadata)),
    }
    posted = [_state(agent.transfer, handle) for handle in handles]
    in_flight = posted.count("PROC")
    began = time.monotonic()
    act = error_of(calls[action]) or "returned"
    seconds = time.monotonic() - began
    waiting = []
    for state, handle in zip(posted, handles, strict=True):
        if state not in ("PROC", "DONE"):  # NIXL refused to post it
            states[state] = states.get(state, 0) + 1
        elif action != "release_xfer_handle":
            waiting.append(handle)
    while waiting and time.monotonic() - began < quiet:
        for handle in list(waiting):
            if (end := _state(agent.check_xfer_state, handle)) != "PROC":
                states[end] = states.get(end, 0) + 1
                waiting.remove(handle)
        time.sleep(_NAP_SECONDS)
    if waiting:
        states["PROC"] = len(waiting)
    return {"act": act, "seconds": seconds, "in_flight": in_flight, "states": states}


def unmap(address: int, size: int) -> None:
    """Give registered memory of this worker back to the kernel, as a program that frees a tensor too early does.

    The worker must not use the buffer again, and is to be killed.

    :param address: of the first byte.
    :param size: the number of bytes; whole pages of them are given back.
    """
    page = mmap.PAGESIZE
    start = -(-address // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    if libc.munmap(start, (address + size) // page * page - start):
        raise OSError(ctypes.get_errno(), "munmap failed")
