# SPDX-License-Identifier: Apache-2.0
"""Choose the pairs of ranks that are measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations

_RULES = ("first", "ring", "all")


@dataclass(frozen=True)
class RankPairing:
    """A choice of pairs of ranks, by a rule or by a list. Each pair is an initiator and a target.

    :param rule: ``first``, ``ring`` or ``all``; empty if the pairs are listed.
    :param listed: the listed pairs.
    """

    rule: str
    listed: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> RankPairing:
        """Read the value of the option.

        :raises ValueError: if the text is neither a rule nor a list of pairs. The text of the error is one sentence.
        """
        if text.strip().lower() in _RULES:
            return cls(text.strip().lower())
        pairs = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d{1,6}):(\d{1,6})\s*", part)
            if match is None:
                raise ValueError(f"{part.strip()!r} is not a pair of ranks")
            pair = int(match[1]), int(match[2])
            if pair[0] == pair[1]:
                raise ValueError(f"{part.strip()!r} pairs a rank with itself")
            if pair in pairs:
                raise ValueError(f"{part.strip()} is named twice")
            pairs.append(pair)
        return cls("", tuple(pairs))

    def of(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return the pairs among ``ranks`` ranks.

        The rules give each pair in one order only, because READ and WRITE move bytes in both directions. A run of one
        rank measures one pair as well: its process starts both workers.

        :raises ValueError: if a listed pair names a rank that does not exist. The text of the error is one sentence.
        """
        if ranks < 3 and self.rule:
            return ((0, 1),)
        if self.rule == "first":
            return tuple((0, rank) for rank in range(1, ranks))
        if self.rule == "ring":
            return tuple((rank, (rank + 1) % ranks) for rank in range(ranks))
        if self.rule == "all":
            return tuple(combinations(range(ranks), 2))
        for pair in self.listed:
            if max(pair) >= max(ranks, 2):
                raise ValueError(f"{pair[0]}:{pair[1]} names a rank that is not in the range 0 to {max(ranks, 2) - 1}")
        return self.listed

    def __str__(self) -> str:
        return self.rule or ",".join(f"{first}:{other}" for first, other in self.listed)
