# SPDX-License-Identifier: Apache-2.0
"""Whether other processes kept this host so busy, while a test ran, that a missed deadline proves nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_nixl.core.cpu_contention import busy_seconds, own_processors, too_many

#: Processors that a test's own processes need at a time: those of an initiator and a target.
NEEDED = 2
#: Cores that other processes have to take of those, on average, for the host to be called busy.
BUSY_CORES = 0.5


class HostLoad:
    """Counts from when it is made. What this process and its descendants take does not count."""

    def __init__(self) -> None:
        self._processors = own_processors()
        self._start = self._read()

    def others(self) -> float:
        """Return the cores that other processes took, on average, of those that this process may run on."""
        busy, own, now = (end - start for end, start in zip(self._read(), self._start, strict=True))
        return max(0.0, (busy - own) / now) if now > 0 else 0.0

    def words(self) -> str:
        """Say what other processes took; empty where they left enough, or nobody can tell."""
        try:
            taken = self.others()
        except OSError:
            return ""
        if too_many(taken, len(self._processors), NEEDED) < BUSY_CORES:
            return ""
        return f"other processes used {taken:.1f} of this host's {len(self._processors)} processors meanwhile"

    def _read(self) -> tuple[float, float, float]:
        """Seconds that all processes took, that our own took, and of the clock."""
        return busy_seconds(self._processors), own_seconds(os.getpid()), time.monotonic()


def own_seconds(pid: int) -> float:
    """Return the seconds that a process and its descendants took, with those that have ended."""
    return sum(map(_ticks, {pid, *_descendants(pid)})) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> Iterator[int]:
    """Yield children, their children, and so on; none where this kernel does not list them."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue  # it has ended meanwhile
        for child in children:
            yield child
            yield from _descendants(child)


def _ticks(pid: int) -> int:
    """Ticks that a process took, and its children that it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))
