# SPDX-License-Identifier: Apache-2.0
"""Transfers whose number, bytes and times are known, to compare NIXL's telemetry with them.

Pytest calls these functions through the worker's command ``run``, with the raw agent first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_nixl.model.nixl_releases import PACKAGES
from pytest_nixl.nixl.backends.libraries import find_plugin

Region = Sequence[Any]


def _handle(agent: Any, op: str, peer: str, local: Sequence[Region], remote: Sequence[Region]) -> Any:
    """Return the handle of one transfer; a region is ``[memory type, address, size, device]``."""
    lists = [agent.get_xfer_descs([tuple(region[1:]) for region in side], side[0][0]) for side in (local, remote)]
    return agent.initialize_xfer(op, *lists, peer, b"")


def _seconds(agent: Any, handle: Any, name: str, timeout: float) -> float:
    """Post a transfer and wait for its end; return the seconds from before the post until it was seen to be complete.

    :param name: the operation, its number and the peer, for the errors.
    :raises TimeoutError: if it is not complete after ``timeout`` seconds.
    :raises RuntimeError: if it ends in another state than DONE.
    """
    began = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        if time.perf_counter() - began > timeout:
            raise TimeoutError(f"{name} was not complete within {timeout:g} s")
        state = agent.check_xfer_state(handle)
    took = time.perf_counter() - began
    if state != "DONE":
        raise RuntimeError(f"{name} ended with {state}")
    return took


def move(
    agent: Any, *, op: str, peer: str, local: list[Region], remote: list[Region], count: int, timeout: float
) -> list[dict[str, float]]:
    """Make ``count`` transfers of all regions, one after the other.

    :param timeout: the deadline of each transfer in seconds.
    :returns: of each transfer, in microseconds: ``took``, from before it was posted until it was seen to be complete;
        ``xfer`` and ``post``, as NIXL's handle says.
    """
    transfers = []
    for number in range(count):
        handle = _handle(agent, op, peer, local, remote)
        took = 1e6 * _seconds(agent, handle, f"{op} {number + 1} to {peer}", timeout)
        of_nixl = agent.get_xfer_telemetry(handle)
        transfers.append({"took": took, "xfer": float(of_nixl.xferDuration), "post": float(of_nixl.postDuration)})
        agent.release_xfer_handle(handle)
    return transfers


def time_transfers(
    agent: Any,
    *,
    op: str,
    peer: str,
    local: list[Region],
    remote: list[Region],
    count: int,
    warmup: int,
    timeout: float,
) -> list[float]:
    """Make one transfer of all regions again and again, and return how long each took, in seconds.

    :param warmup: the number of transfers before those that are returned.
    :param timeout: the deadline of each transfer in seconds.
    """
    handle = _handle(agent, op, peer, local, remote)
    seconds = []
    for number in range(warmup + count):
        seconds.append(_seconds(agent, handle, f"{op} {number + 1} to {peer}", timeout))
    agent.release_xfer_handle(handle)
    return seconds[warmup:]


def fail(
    agent: Any, *, op: str, peer: str, local: list[Region], remote: list[Region], timeout: float
) -> dict[str, str]:
    """Make a transfer that cannot succeed.

    :param timeout: how long to wait for its end, in seconds.
    :returns: ``raised``, the class of the error, empty if there was none, and ``state``, the transfer's last state.
    """
    state = ""
    try:
        handle = _handle(agent, op, peer, local, remote)
        state = agent.transfer(handle)
        deadline = time.monotonic() + timeout
        while state == "PROC" and time.monotonic() < deadline:
            state = agent.check_xfer_state(handle)
    except Exception as error:
        return {"raised": type(error).__name__, "state": state}
    return {"raised": "", "state": state}


def exporter_file(agent: Any, *, exporter: str) -> str:
    """Return the file of an exporter of this NIXL; empty if there is none where NIXL looks for it."""
    name = f"libtelemetry_exporter_{exporter}.so"
    if folder := os.environ.get("NIXL_PLUGIN_DIR"):
        return os.path.join(folder, name) if os.path.isfile(os.path.join(folder, name)) else ""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return find_plugin(os.environ, maps, PACKAGES, name) or ""
