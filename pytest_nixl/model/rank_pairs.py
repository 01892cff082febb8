# SPDX-License-Identifier: Apache-2.0
"""Which pairs of ranks are measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations

RankPair = tuple[int, int]

PAIRING_FORM = "first (rank 0 with each other one), ring (each rank with the next one), all, or pairs such as 0:1,2:3"
_KINDS = ("first", "ring", "all")


@dataclass(frozen=True)
class RankPairing:
    """A choice of pairs, initiator and target: by a rule, or listed one by one.

    :param kind: ``first``, ``ring``, ``all``; empty: those that are listed.
    """

    kind: str
    listed: tuple[RankPair, ...] = ()

    @classmethod
    def parse(cls, text: str) -> RankPairing:
        """Read one. :raises ValueError: where it is none."""
        if text.strip().lower() in _KINDS:
            return cls(text.strip().lower())
        pairs = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d{1,6}):(\d{1,6})\s*", part)
            if match is None:
                raise ValueError(f"{part.strip()!r} is no pair of ranks")
            pair = int(match[1]), int(match[2])
            if pair[0] == pair[1]:
                raise ValueError(f"{part.strip()!r} pairs a rank with itself")
            if pair in pairs:
                raise ValueError(f"{part.strip()} is named twice")
            pairs.append(pair)
        return cls("", tuple(pairs))

    def of(self, ranks: int) -> tuple[RankPair, ...]:
        """Return the pairs among so many ranks. READ and WRITE go both ways, so no pair is there in both orders.

        With one rank, whose process starts its one peer itself, it is that pair.

        :raises ValueError: where one that is listed has a rank too many: one sentence.
        """
        if ranks < 3 and self.kind:
            return ((0, 1),)
        if self.kind == "first":
            return tuple((0, rank) for rank in range(1, ranks))
        if self.kind == "ring":
            return tuple((rank, (rank + 1) % ranks) for rank in range(ranks))
        if self.kind == "all":
            return tuple(combinations(range(ranks), 2))
        for pair in self.listed:
            if max(pair) >= max(ranks, 2):
                raise ValueError(f"{pair[0]}:{pair[1]} names a rank that is not among 0 to {max(ranks, 2) - 1}")
        return self.listed

    def __str__(self) -> str:
        return self.kind or ",".join(f"{one}:{other}" for one, other in self.listed)
