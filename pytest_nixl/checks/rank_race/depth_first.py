# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_nixl.checks.rank_race.events import DivergenceError, RequestEvent


@dataclass
class _Node:
    """A point at which something was chosen: what there was, what needs no trying there, and what was tried."""

    enabled: tuple[RequestEvent, ...]
    asleep: frozenset[RequestEvent]
    chosen: RequestEvent | None = None
    done: list[RequestEvent] = field(default_factory=list)

    def next(self) -> RequestEvent | None:
        return next((event for event in self.enabled if event not in self.asleep and event not in self.done), None)


class DepthFirst:
    """Chooses depth first, and leaves out what would only repeat an order that was run, by sleep sets."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self.more = True

    def choose(self, depth: int, enabled: Sequence[RequestEvent], replaced: Mapping[int, int]) -> RequestEvent | None:
        """Return what moves next; None where every order from here on was run already."""
        if depth < len(self._nodes):
            node = self._nodes[depth]
            if set(node.enabled) != set(enabled):
                raise DivergenceError(
                    f"after the same {depth} events a client asks for something else than before: "
                    f"{', '.join(map(str, enabled))}; before: {', '.join(map(str, node.enabled))}",
                    "a subject must do the same under the same order: take chance and clocks out of its keys",
                )
            # What was stored has the accesses of an earlier run's group.
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
    # Both as they were at the same point of the same run, so that their keys are of one group.
    same = next((item for item in node.enabled if item == event), event)
    return same.dependent(chosen, replaced)
