# SPDX-License-Identifier: Apache-2.0
"""Functions that put one fault of concurrent use into the real NIXL of a worker."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from helpers.misuse_functions import spoil

__all__ = ["crash_in_threads", "double", "lose", "refuse_second_agent", "spoil"]


def _change_notifications(agent: Any, doubled: int) -> None:
    """Let the first notification that any agent receives arrive ``doubled`` times."""
    kind, original = type(agent), type(agent).get_new_notifs
    changed: list[int] = []

    def get_new_notifs(self: Any, *arguments: Any, **named: Any) -> Any:
        results = original(self, *arguments, **named)
        for sender, messages in results.items():
            if messages and not changed:
                changed.append(1)
                results[sender] = [*[messages[0]] * doubled, *messages[1:]]
        return results

    kind.get_new_notifs = get_new_notifs


def lose(agent: Any) -> None:
    """Lose the first notification."""
    _change_notifications(agent, 0)


def double(agent: Any) -> None:
    """Let the first notification arrive twice."""
    _change_notifications(agent, 2)


def crash_in_threads(agent: Any) -> None:
    """Let the process die if a transfer is posted by another thread than the main one."""
    kind, original = type(agent), type(agent).transfer

    def transfer(self: Any, *arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGSEGV)
        return original(self, *arguments, **named)

    kind.transfer = transfer


def refuse_second_agent(agent: Any) -> None:
    """Let the creation of a backend fail for the second agent that is created at once with others."""
    kind, original = type(agent), type(agent).create_backend
    calls: list[int] = []

    def create_backend(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("refused by the test")
        return original(self, *arguments, **named)

    kind.create_backend = create_backend
