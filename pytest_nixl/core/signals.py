# SPDX-License-Identifier: Apache-2.0
"""Let SIGTERM and SIGHUP end pytest like Ctrl-C: fixtures are torn down, and the other ranks are told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

#: The signals that end a run in order: of a batch system, and of a terminal or an ssh that is gone.
_IN_ORDER = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def sigterm_ends_in_order() -> Iterator[Callable[[], None]]:
    """Within this context, SIGTERM and SIGHUP end the run like Ctrl-C. A handler that is already installed is kept.

    So is ``nohup``, which ignores SIGHUP. Code that was interrupted may have swallowed the exception, as pytest does
    with that of a module that it imports. So the context is a function, which raises it again if a signal has come.
    """
    # Only the main thread may set a signal handler.
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _IN_ORDER if main and signal.getsignal(number) == signal.SIG_DFL]
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        # A second signal of its kind during the teardown of fixtures ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        came.append(number)
        end_if_signalled()

    def end_if_signalled() -> None:
        if came:
            pytest.exit(f"ended by {signal.Signals(came[0]).name}", returncode=128 + came[0])

    for number in ours:
        signal.signal(number, end)
    try:
        yield end_if_signalled
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def ending_text(error: BaseException) -> str:
    """Describe in one line what ended a run, such as ``Ctrl-C (SIGINT)``."""
    if isinstance(error, pytest.exit.Exception):
        text = str(error.msg)
    elif type(error) is KeyboardInterrupt:
        text = str(error) or "Ctrl-C (SIGINT)"
    elif isinstance(error, KeyboardInterrupt):  # a subclass, with a message of its own
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__
