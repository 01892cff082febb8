# SPDX-License-Identifier: Apache-2.0
"""Run pytest as a child process, and accept its exit code 0 only if the plugin has judged the run."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pytest_nixl.session.ending import ENDING, read_ending

_PR_SET_PDEATHSIG = 1
_NOT_JUDGED = (
    "the run ended before it was judged: pytest ended with exit code 0, but no verdict of this run has that code; a "
    "conftest.py or another plugin of pytest ended it, or an option by which pytest runs no test"
)


def run_judged(command: Sequence[str]) -> int:
    """Run pytest and return its exit code; 1 if it ends with 0 and the plugin did not judge the run.

    SIGTERM, SIGHUP and SIGINT go to pytest, unless the terminal sends it Ctrl-C itself.
    """
    with tempfile.TemporaryDirectory(prefix="nixl-ending-") as folder:
        path = Path(folder) / "ending.json"
        libc = ctypes.CDLL(None)
        child = subprocess.Popen(
            command,
            env={**os.environ, ENDING: str(path)},
            # pytest ends in order if this process is killed
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )

        def forward(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGINT or not _in_foreground():
                child.send_signal(number)

        previous = {
            number: signal.signal(number, forward)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
            if signal.getsignal(number) != signal.SIG_IGN
        }
        code = child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
        if code == 0 and read_ending(path) != 0:
            print(f"pytest-nixl run: {_NOT_JUDGED}", file=sys.stderr)
            return 1
    return 128 - code if code < 0 else code


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process and its children."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False
