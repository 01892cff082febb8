# SPDX-License-Identifier: Apache-2.0
"""What other processes of this host took of its processors while a row was timed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

#: Of the first line of /proc/stat: user, nice, system and steal. Interrupts are the row's own as often as not.
_BUSY = (1, 2, 3, 8)


class Others:
    """Counts when it is entered and when it is left: in a worker, around the timed windows.

    :param own: processes of this host that belong to the row, besides this one.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._own = {os.getpid(), *own}
        self._start = (0.0, 0.0, 0.0)
        #: Cores that others took, on average.
        self.cores = 0.0

    def __enter__(self) -> Others:
        self._start = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        busy, own, now = (end - start for end, start in zip(self._read(), self._start, strict=True))
        self.cores = max(0.0, (busy - own) / now) if now > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Seconds that all processes took, that the row's own took, and of the clock."""
        return busy_seconds(), sum(map(_taken, self._own)) / os.sysconf("SC_CLK_TCK"), time.monotonic()


def busy_seconds() -> float:
    """Return the seconds of processor time that all processes of this host have taken."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return sum(int(line[place]) for place in _BUSY if place < len(line)) / os.sysconf("SC_CLK_TCK")


def _taken(pid: int) -> int:
    """Ticks that a process has taken; of one that has gone, none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
