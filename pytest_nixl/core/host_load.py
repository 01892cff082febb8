# SPDX-License-Identifier: Apache-2.0
"""Measure whether other processes kept this host so busy during a test that a missed deadline proves nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_nixl.core.cpu_contention import busy_seconds, own_processors, too_many

#: The number of processors that a test's own processes need: one for the initiator, one for the target.
NEEDED = 2
#: The host counts as busy if other processes take at least this many of those cores, on average.
BUSY_CORES = 0.5


class HostLoad:
    """The CPU time that other processes have used since this object was created.

    This process and its descendants do not count as other processes.
    """

    def __init__(self) -> None:
        self._processors = own_processors()
        self._start = self._read()

    def others(self) -> float:
        """Return how many of the cores that this process may run on other processes have used, on average."""
        busy, own, now = (end - start for end, start in zip(self._read(), self._start, strict=True))
        return max(0.0, (busy - own) / now) if now > 0 else 0.0

    def words(self) -> str:
        """Return a sentence about the CPU time of other processes; empty if the host was not busy or it is unknown."""
        try:
            taken = self.others()
        except OSError:
            return ""
        if too_many(taken, len(self._processors), NEEDED) < BUSY_CORES:
            return ""
        return f"other processes used {taken:.1f} of this host's {len(self._processors)} processors during the test"

    def _read(self) -> tuple[float, float, float]:
        """Return the CPU seconds of all processes, the CPU seconds of own processes, and the clock in seconds."""
        return busy_seconds(self._processors), own_seconds(os.getpid()), time.monotonic()


def own_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including descendants that have ended."""
    return sum(map(_ticks, {pid, *_descendants(pid)})) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> Iterator[int]:
    """Yield the pids of all descendants; nothing if the kernel does not list them."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue  # the thread has ended
        for child in children:
            yield child
            yield from _descendants(child)


def _ticks(pid: int) -> int:
    """Return the CPU ticks of a process and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))
