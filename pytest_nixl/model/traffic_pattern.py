# SPDX-License-Identifier: Apache-2.0
"""Traffic patterns: which ranks send bytes to which, and the rounds in which each flow is measured alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_nixl.model.rank_pairs import RankPair
from pytest_nixl.model.traffic_matrix import MOST_RANKS, Matrix, read_matrix

#: The number of ranks of a pattern in a run of one rank, whose process starts a worker for each.
LOCAL_RANKS = 4


@dataclass(frozen=True)
class Flow:
    """The bytes that one rank sends to another.

    :param size: the bytes of one transfer.
    """

    source: int
    target: int
    size: int

    @property
    def ranks(self) -> RankPair:
        """Source and target."""
        return self.source, self.target

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


@dataclass(frozen=True)
class TrafficPattern:
    """The flows of a pattern.

    :param name: ``incast``, for example; ``matrix-`` with a digest of the sizes for a matrix of a file.
    :param ranks: the number of ranks that take part.
    """

    name: str
    ranks: int
    flows: tuple[Flow, ...]

    def __str__(self) -> str:
        return f"{self.name} of {self.ranks} ranks"


def _pairs(ranks: int) -> Iterator[RankPair]:
    half = ranks // 2
    yield from ((rank, rank + half) for rank in range(half))


def _incast(ranks: int) -> Iterator[RankPair]:
    yield from ((rank, 0) for rank in range(1, ranks))


def _outcast(ranks: int) -> Iterator[RankPair]:
    yield from ((0, rank) for rank in range(1, ranks))


def _alltoall(ranks: int) -> Iterator[RankPair]:
    yield from ((source, target) for source in range(ranks) for target in range(ranks) if source != target)


#: The pairs of source and target of each named pattern.
_KINDS: Mapping[str, Callable[[int], Iterator[RankPair]]] = {
    "pairs": _pairs,
    "incast": _incast,
    "outcast": _outcast,
    "alltoall": _alltoall,
}
#: The least number of ranks for which a named pattern says something: two flows.
_LEAST_RANKS = {"pairs": 4, "incast": 3, "outcast": 3, "alltoall": 2}


@dataclass(frozen=True)
class PatternChoice:
    """A pattern as it was asked for, for any number of ranks.

    :param text: as it was typed.
    :param kind: the name of a pattern; empty: the pattern is a matrix.
    :param wanted: the number of ranks that take part; None: all ranks of the run.
    :param matrix: the bytes from each rank to each other; empty: a named pattern.
    """

    text: str
    kind: str = ""
    wanted: int | None = None
    matrix: Matrix = ()

    @classmethod
    def parse(cls, text: str) -> PatternChoice:
        """Read the value of the option: NAME, NAME:RANKS or the path of a traffic matrix.

        :raises ValueError: if it is none of these. The text of the error is one sentence.
        """
        if not text.strip():
            raise ValueError(f"{text!r} is not a pattern")
        match = re.fullmatch(rf"({'|'.join(_KINDS)})(?::([0-9]{{1,6}}))?", text.strip())
        if match is None:
            matrix = read_matrix(text)
            return cls(text, wanted=len(matrix), matrix=matrix)
        kind, wanted = match[1], int(match[2]) if match[2] else None
        if wanted is not None and not _LEAST_RANKS[kind] <= wanted <= MOST_RANKS:
            raise ValueError(f"{text.strip()}: expected {_LEAST_RANKS[kind]} to {MOST_RANKS} ranks for {kind}")
        return cls(text.strip(), kind, wanted)

    def ranks_of(self, ranks: int) -> int:
        """Return how many ranks take part, the first ones of the run.

        :param ranks: the number of ranks of the run. A run of one rank starts as many workers as the pattern has ranks.
        :raises ValueError: the pattern needs more ranks, or the run has too few. The text of the error is one sentence.
        """
        found = self.wanted or (ranks if ranks > 1 else LOCAL_RANKS)
        if 1 < ranks < found:
            raise ValueError(
                f"it has {found} ranks, but the run has {ranks}: start {found} ranks, or give a smaller one"
            )
        if self.kind and found < _LEAST_RANKS[self.kind]:
            raise ValueError(f"{self.kind} needs at least {_LEAST_RANKS[self.kind]} ranks, but the run has {found}")
        return found

    def of(self, ranks: int, size: int) -> TrafficPattern:
        """Return the flows of the pattern.

        :param ranks: the number of ranks of the run.
        :param size: the bytes of one transfer of each flow; a matrix has its own sizes.
        :raises ValueError: as :meth:`ranks_of`.
        """
        count = self.ranks_of(ranks)
        if self.kind:
            flows = tuple(Flow(source, target, size) for source, target in _KINDS[self.kind](count))
            return TrafficPattern(self.kind, count, flows)
        cells = ((source, target) for source in range(count) for target in range(count))
        flows = tuple(Flow(*pair, self.matrix[pair[0]][pair[1]]) for pair in cells if self.matrix[pair[0]][pair[1]])
        digest = hashlib.sha256(repr(self.matrix).encode()).hexdigest()[:8]
        return TrafficPattern(f"matrix-{digest}", count, flows)

    def __str__(self) -> str:
        return self.text


def factors(ranks: int) -> list[list[RankPair]]:
    """Return rounds of pairs that share no rank, in which each two ranks meet once (the circle method).

    There are ``ranks - 1`` rounds for an even number of ranks, and ``ranks`` for an odd one.
    """
    places = ranks + ranks % 2  # one more place for an odd number: whoever meets it has no partner in that round
    rounds = []
    for number in range(places - 1):
        around = [(number + step) % (places - 1) for step in range(places - 1)]
        met = [(places - 1, around[0])] + [(around[k], around[-k]) for k in range(1, places // 2)]
        rounds.append([(min(pair), max(pair)) for pair in met if max(pair) < ranks])
    return rounds


def rounds(pattern: TrafficPattern, hosts: Sequence[str] = ()) -> list[tuple[Flow, ...]]:
    """Return rounds of flows that are measured at the same time, each as if it were alone. Each flow is in one round.

    Flows of a round share no rank, and no host either, whose processor, memory and network cards they would share. If
    each rank has a host of its own, there are at most two rounds, one for each direction, for each of the
    :func:`factors`.

    :param hosts: the host of each rank; empty: each has its own.
    """
    flows = {flow.ranks: flow for flow in pattern.flows}
    found: list[list[Flow]] = []
    busy: list[set[str | int]] = []
    for pairs in factors(pattern.ranks):
        for pair in (*pairs, *((other, one) for one, other in pairs)):
            if pair not in flows:
                continue
            ends: set[str | int] = {hosts[rank] if hosts else rank for rank in pair}
            place = next((number for number, taken in enumerate(busy) if not taken & ends), len(busy))
            if place == len(busy):
                found.append([])
                busy.append(set())
            found[place].append(flows[pair])
            busy[place] |= ends
    return [tuple(each) for each in found]
