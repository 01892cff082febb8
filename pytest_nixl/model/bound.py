# SPDX-License-Identifier: Apache-2.0
"""What a profile says of the figures that it bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_nixl.model.figure import Figure


@dataclass(frozen=True)
class Bound:
    """A ``[[bound]]`` table of a profile: which figures it applies to, and the least and the most they may be.

    :param figure: the name of the figure, one of :data:`~pytest_nixl.model.figure.FIGURE_KINDS`.
    :param source: where the bound is from.
    :param labels: the accepted texts of each label that the table selects by; a label that is not there: any.
    :param at_most: in the figure's unit, as ``at_least``; None: no bound on that side.
    :param default: whether it comes from a check, and applies if no bound of the profile does.
    """

    figure: str
    source: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    at_most: float | None = None
    at_least: float | None = None
    default: bool = False

    def applies(self, figure: Figure) -> bool:
        """Whether this bound applies to a figure."""
        return figure.name == self.figure and all(
            figure.labels.get(label) in accepted for label, accepted in self.labels.items()
        )

    def shared_with(self, other: Bound) -> str:
        """Describe figures that both bounds apply to; empty: there are none."""
        if self.figure != other.figure:
            return ""
        parts = [self.figure]
        for label in {**self.labels, **other.labels}:
            mine, theirs = self.labels.get(label), other.labels.get(label)
            both = [text for text in mine or theirs or () if theirs is None or text in theirs]
            if not both:
                return ""
            parts.append(f"{label} {both[0]}")
        return ", ".join(parts)
