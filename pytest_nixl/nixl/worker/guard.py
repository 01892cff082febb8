# SPDX-License-Identifier: Apache-2.0
"""A process that ends the children of a worker's programs after the worker has ended.

The kernel ends a worker's programs with the worker, but not the children of those programs, for example of a script.
"""

from __future__ import annotations

import contextlib
import os
import signal


class ProgramGuard:
    """End the watched process groups when this process has ended, for any reason. Create it before any thread."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        if os.fork() == 0:
            try:
                os.setsid()
                _keep_only(reading)
                _watch(reading)
            finally:
                os._exit(0)
        os.close(reading)

    def watch(self, group: int) -> None:
        """End this process group when this process has ended."""
        os.write(self._writing, b"+%d\n" % group)

    def forget(self, group: int) -> None:
        """Stop watching a process group, because it has ended."""
        os.write(self._writing, b"-%d\n" % group)


def _keep_only(descriptor: int) -> None:
    """Close all other descriptors, so that pytest sees the worker's socket close when the worker ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def _watch(reading: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            group = int(line[1:])
            if line.startswith(b"+"):
                groups.add(group)
            else:
                groups.discard(group)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
