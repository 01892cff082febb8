# SPDX-License-Identifier: Apache-2.0
"""Measure contention: the CPU time that other processes took while a row was timed."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType

#: Columns of a processor's line in /proc/stat: user, nice, system and steal. Interrupts often belong to the row itself.
_BUSY = (1, 2, 3, 8)


class CpuContention:
    """A context manager for a worker that measures contention during the timed windows.

    Only processors that this process may run on count: a pod may have two of a host's 192.

    :param own: the pids of other processes on this host that belong to the row.
    :param needed: how many of the row's processes each keep a core busy; 0: all.
    """

    def __init__(self, own: Iterable[int] = (), needed: int = 0) -> None:
        self._own = {os.getpid(), *own}
        self._needed = needed or len(self._own)
        self._start = (0.0, 0.0, 0.0)
        self._processors = own_processors()
        #: The cores that other processes took, on average.
        self.taken = 0.0
        #: The part of :attr:`taken` that the row's own processes needed, if each keeps one core busy.
        self.cores = 0.0

    def __enter__(self) -> CpuContention:
        self._start = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        busy, own, now = (end - start for end, start in zip(self._read(), self._start, strict=True))
        self.taken = max(0.0, (busy - own) / now) if now > 0 else 0.0
        self.cores = too_many(self.taken, len(self._processors), self._needed)

    def _read(self) -> tuple[float, float, float]:
        """Return the CPU seconds of all processes, the CPU seconds of the row's processes, and the clock in seconds."""
        own = sum(map(_taken, self._own)) / os.sysconf("SC_CLK_TCK")
        return busy_seconds(self._processors), own, time.monotonic()


def own_processors() -> frozenset[str]:
    """Return the names in /proc/stat, such as ``cpu0``, of the processors that this process may run on."""
    return frozenset(f"cpu{number}" for number in os.sched_getaffinity(0))


def busy_seconds(processors: Collection[str]) -> float:
    """Return the CPU seconds that all processes have used on these processors since the host started."""
    return busy_ticks(Path("/proc/stat").read_text(), processors) / os.sysconf("SC_CLK_TCK")


def busy_ticks(stat: str, processors: Collection[str]) -> int:
    """Return the ticks that these processors were busy.

    :param stat: the text of /proc/stat.
    :param processors: names such as ``cpu0``.
    """
    lines = (line.split() for line in stat.splitlines() if line.startswith("cpu"))
    ours = (line for line in lines if line[0] in processors)
    return sum(int(line[place]) for line in ours for place in _BUSY if place < len(line))


def too_many(taken: float, processors: int, own: int) -> float:
    """Return how many of the cores that the own processes need, one each, other processes took.

    :param taken: the cores that other processes took, on average.
    :param processors: the number of processors.
    :param own: the number of own processes.
    """
    return max(0.0, taken - max(0, processors - own))


def _taken(pid: int) -> int:
    """Return the CPU ticks of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
