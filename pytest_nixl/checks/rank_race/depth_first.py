# SPDX-License-Identifier: Apache-2.0
"""Choose the next request depth first, without the orders that can make no difference (sleep sets)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_nixl.checks.rank_race.events import DivergenceError, RequestEvent


@dataclass
class _Node:
    """A point of choice: the possible events, those that need not be tried there, and those already tried."""

    enabled: tuple[RequestEvent, ...]
    asleep: frozenset[RequestEvent]
    chosen: RequestEvent | None = None
    done: list[RequestEvent] = field(default_factory=list)

    def next(self) -> RequestEvent | None:
        return next((event for event in self.enabled if event not in self.asleep and event not in self.done), None)


class DepthFirst:
    """Chooses events depth first, and skips by sleep sets what would repeat an equivalent order."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self.more = True

    def choose(self, depth: int, enabled: Sequence[RequestEvent], replaced: Mapping[int, int]) -> RequestEvent | None:
        """Return the next event; None if every order from here on was already run."""
        if depth < len(self._nodes):
            node = self._nodes[depth]
            if set(node.enabled) != set(enabled):
                raise DivergenceError(
                    f"after the same {depth} events a client sends other requests than before: "
                    f"{', '.join(map(str, enabled))}; before: {', '.join(map(str, node.enabled))}",
                    "make the subject deterministic: remove random numbers and times from its keys",
                )
            # The stored event has the keys of an earlier run's group, so return the current one.
            return next(event for event in enabled if event == node.chosen)
        asleep: frozenset[RequestEvent] = frozenset()
        if self._nodes:
            last = self._nodes[-1]
            assert last.chosen is not None
            sleeping = [*last.asleep, *last.done]
            current = {event: event for event in enabled}
            asleep = frozenset(
                event
                for event in sleeping
                if event in current and not _dependent(current[event], last.chosen, last, replaced)
            )
        node = _Node(tuple(enabled), asleep)
        node.chosen = node.next()
        self._nodes.append(node)
        return node.chosen

    def advance(self) -> None:
        """Go on to the next order."""
        while self._nodes:
            node = self._nodes[-1]
            if node.chosen is not None:
                node.done.append(node.chosen)
            node.chosen = node.next()
            if node.chosen is not None:
                return
            self._nodes.pop()
        self.more = False


def _dependent(event: RequestEvent, chosen: RequestEvent, node: _Node, replaced: Mapping[int, int]) -> bool:
    # Compare both events as of the same point of the same run, so that their keys belong to one group.
    same = next((item for item in node.enabled if item == event), event)
    return same.dependent(chosen, replaced)
