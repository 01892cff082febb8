# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time that other processes took: while a row was timed (contention), or during a test, so that a
missed deadline proves nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")
#: Columns of a processor's line in /proc/stat: user, nice, system and steal. Interrupts often belong to the row itself.
_BUSY = (1, 2, 3, 8)


class CpuContention:
    """A context manager for a worker that measures contention during the timed windows.

    Only processors that this process may run on count: a pod may have two of a host's 192.

    :param own_pids: the pids of other processes on this host that belong to the row.
    :param needed: how many of the row's processes each keep a core busy; 0: all.
    """

    def __init__(self, own_pids: Iterable[int] = (), needed: int = 0) -> None:
        self._own = {os.getpid(), *own_pids}
        self._needed = needed or len(self._own)
        self._start = (0.0, 0.0, 0.0)
        self._processors = allowed_processors()
        #: The cores that other processes took, on average.
        self.taken = 0.0
        #: The part of :attr:`taken` that the row's own processes needed, if each keeps one core busy.
        self.cores = 0.0

    def __enter__(self) -> CpuContention:
        self._start = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        busy, own_time, now = (end - start for end, start in zip(self._read(), self._start, strict=True))
        self.taken = max(0.0, (busy - own_time) / now) if now > 0 else 0.0
        self.cores = too_many(self.taken, len(self._processors), self._needed)

    def _read(self) -> tuple[float, float, float]:
        """Return the CPU seconds of all processes, the CPU seconds of the row's processes, and the clock in seconds."""
        own_time = sum(_ticks(pid, children=False) for pid in self._own) / os.sysconf("SC_CLK_TCK")
        return busy_seconds(self._processors), own_time, time.monotonic()


def allowed_processors() -> frozenset[str]:
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


def too_many(taken: float, processors: int, own_cores: int) -> float:
    """Return how many of the cores that the own processes need, one each, other processes took.

    :param taken: the cores that other processes took, on average.
    :param processors: the number of processors.
    :param own_cores: the number of own processes.
    """
    return max(0.0, taken - max(0, processors - own_cores))


#: The number of processors that a test's own processes need: one for the initiator, one for the target.
NEEDED = 2
#: The host counts as busy if other processes take at least this many of those cores, on average.
BUSY_CORES = 0.5


class HostLoad:
    """The CPU time that other processes have used since this object was created.

    This process and its descendants do not count as other processes.
    """

    def __init__(self) -> None:
        self._processors = allowed_processors()
        self._start = self._read()

    @property
    def seconds(self) -> float:
        """The seconds since this object was created."""
        return time.monotonic() - self._start[2]

    def others(self) -> float:
        """Return how many of the cores that this process may run on other processes have used, on average."""
        busy, own_time, now = (end - start for end, start in zip(self._read(), self._start, strict=True))
        return max(0.0, (busy - own_time) / now) if now > 0 else 0.0

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
        return busy_seconds(self._processors), cpu_seconds(os.getpid()), time.monotonic()


def cpu_seconds(pid: int, proc: Path = _PROC) -> float:
    """Return the CPU seconds of a process and its descendants, including descendants that have ended.

    :param proc: the folder of the processes.
    """
    pids = {pid, *_descendants(pid, proc)}
    return sum(_ticks(process, proc, children=True) for process in pids) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int, proc: Path) -> Iterator[int]:
    """Yield the pids of all descendants; nothing if the kernel does not list them."""
    try:
        tasks = list((proc / f"{pid}/task").glob("*/children"))
    except OSError:
        return  # the process has ended
    for path in tasks:
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue  # the thread has ended
        for child in children:
            yield child
            yield from _descendants(child, proc)


def _ticks(pid: int, proc: Path = _PROC, *, children: bool) -> int:
    """Return the CPU ticks of a process, and with ``children`` of those that it has waited for; 0 if it has ended."""
    try:
        fields = (proc / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11 : 15 if children else 13]))
