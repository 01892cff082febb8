# SPDX-License-Identifier: Apache-2.0
"""What other processes took, while a row was timed, of the processors that its own processes need."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType

#: Of a processor's line of /proc/stat: user, nice, system and steal. Interrupts are the row's own as often as not.
_BUSY = (1, 2, 3, 8)


class CpuContention:
    """Counts when it is entered and when it is left: in a worker, around the timed windows.

    Only those processors count that this process may run on: of a host's 192, a pod may have two.

    :param own: processes of this host that belong to the row, besides this one.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._own = {os.getpid(), *own}
        self._start = (0.0, 0.0, 0.0)
        self._processors = own_processors()
        #: Cores that others took, on average.
        self.taken = 0.0
        #: What of that is more than the row's own processes, one core each, leave free.
        self.cores = 0.0

    def __enter__(self) -> CpuContention:
        self._start = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        busy, own, now = (end - start for end, start in zip(self._read(), self._start, strict=True))
        self.taken = max(0.0, (busy - own) / now) if now > 0 else 0.0
        self.cores = too_many(self.taken, len(self._processors), len(self._own))

    def _read(self) -> tuple[float, float, float]:
        """Seconds that all processes took, that the row's own took, and of the clock."""
        own = sum(map(_taken, self._own)) / os.sysconf("SC_CLK_TCK")
        return busy_seconds(self._processors), own, time.monotonic()


def own_processors() -> frozenset[str]:
    """Return the names, in /proc/stat, of the processors that this process may run on."""
    return frozenset(f"cpu{number}" for number in os.sched_getaffinity(0))


def busy_seconds(processors: Collection[str]) -> float:
    """Return the seconds of processor time that all processes have taken of these processors."""
    return busy_ticks(Path("/proc/stat").read_text(), processors) / os.sysconf("SC_CLK_TCK")


def busy_ticks(stat: str, processors: Collection[str]) -> int:
    """Return the ticks that these processors (``cpu0``) were busy, by the text of /proc/stat."""
    lines = (line.split() for line in stat.splitlines() if line.startswith("cpu"))
    ours = (line for line in lines if line[0] in processors)
    return sum(int(line[place]) for line in ours for place in _BUSY if place < len(line))


def too_many(taken: float, processors: int, own: int) -> float:
    """Return the cores that others took of those that ``own`` processes need, where each of these keeps one busy."""
    return max(0.0, taken - max(0, processors - own))


def _taken(pid: int) -> int:
    """Ticks that a process has taken; of one that has gone, none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
