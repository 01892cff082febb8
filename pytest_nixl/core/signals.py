# SPDX-License-Identifier: Apache-2.0
"""SIGTERM ends pytest as Ctrl-C does: with fixtures torn down, and the other ranks told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest


@contextmanager
def sigterm_ends_in_order() -> Iterator[None]:
    """While this lasts, SIGTERM ends the run in order. A handler that is somebody's own stays."""
    # Only the main thread may.
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    # A second one, while fixtures are torn down, ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pytest.exit("ended by SIGTERM", returncode=128 + number)
