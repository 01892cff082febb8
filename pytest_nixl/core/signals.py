# SPDX-License-Identifier: Apache-2.0
"""Let SIGTERM end pytest like Ctrl-C: fixtures are torn down, and the other ranks are told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest


@contextmanager
def sigterm_ends_in_order() -> Iterator[None]:
    """Within this context, SIGTERM ends the run like Ctrl-C. A handler that is already installed is kept."""
    # Only the main thread may set a signal handler.
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    # A second SIGTERM during the teardown of fixtures ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pytest.exit("ended by SIGTERM", returncode=128 + number)
