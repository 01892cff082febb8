# SPDX-License-Identifier: Apache-2.0
"""Functions that put one fault of concurrent use into the real NIXL of a worker."""

from __future__ import annotations

from typing import Any


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
