# SPDX-License-Identifier: Apache-2.0
"""Programs on a terminal: what they write to a pseudoterminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROWS, COLUMNS = 24, 80


def open_terminal() -> tuple[int, int]:
    """Return the two ends of a new terminal of 24 lines of 80 characters: ours, and that of a program."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    return ours, theirs


def run_on_terminal(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], seconds: float = 300
) -> tuple[int, str]:
    """Run a program on a terminal, and return its exit code and all that it wrote.

    :param seconds: the time limit.
    """
    ours, theirs = open_terminal()
    try:
        with subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
        ) as program:
            os.close(theirs)
            written = _read_all(ours, time.monotonic() + seconds)
            return program.wait(timeout=seconds), written
    finally:
        os.close(ours)


def _read_all(descriptor: int, deadline: float) -> str:
    """Read until no process has the other end open."""
    results = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"the program on the terminal has not ended; it wrote {results!r}")
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # EIO: the other end is closed
            part = b""
        if not part:
            return results.decode(errors="replace")
        results += part
