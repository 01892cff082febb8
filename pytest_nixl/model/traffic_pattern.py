# SPDX-License-Identifier: Apache-2.0
"""Which ranks send bytes to which: pairs, and patterns with the rounds in which each flow is measured alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from pathlib import Path

from pytest_nixl.core.strict import printable
from pytest_nixl.core.untrusted_file import read_regular

_RULES = ("first", "ring", "all")

#: The most bytes of a file: a matrix of 1,024 ranks has a million cells.
MOST_BYTES = 16 << 20
#: The most ranks of a matrix.
MOST_RANKS = 1024
#: The most bytes of a cell.
MOST_CELL = 1 << 40
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_CELL = re.compile(r"-?([0-9]{1,18})(?:\.([0-9]{1,18}))?([A-Za-z]*)")
_MATRIX, _STORAGE = "rdma", ("read", "write")
#: The most characters of a line or a cell that a message quotes.
_QUOTED = 40
Matrix = tuple[tuple[int, ...], ...]
#: The number of ranks of a pattern in a run of one rank, whose process starts a worker for each.
LOCAL_RANKS = 4
#: The pairs of source and target of each named pattern.
_KINDS: Mapping[str, Callable[[int], Iterator[tuple[int, int]]]] = {
    "pairs": lambda ranks: ((rank, rank + ranks // 2) for rank in range(ranks // 2)),
    "incast": lambda ranks: ((rank, 0) for rank in range(1, ranks)),
    "outcast": lambda ranks: ((0, rank) for rank in range(1, ranks)),
    "alltoall": lambda ranks: permutations(range(ranks), 2),
}
#: The least number of ranks for which a named pattern says something: two flows.
_LEAST_RANKS = {"pairs": 4, "incast": 3, "outcast": 3, "alltoall": 2}


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


def read_matrix(path: str) -> Matrix:
    """Read the matrix of a file.

    :returns: a line for each source with the bytes to each target.
    :raises ValueError: the file cannot be read, or holds no such matrix. The text of the error is one sentence.
    """
    name = printable(path)
    try:
        data = read_regular(Path(path), MOST_BYTES, "a traffic matrix")
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not text: expected a traffic matrix") from None
    try:
        return parse_matrix(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def parse_matrix(text: str) -> Matrix:
    """Read a matrix from its text.

    :raises ValueError: with one sentence, which names the line.
    """
    lines = list(_lines(text))
    ranks = len(lines)
    if not lines:
        raise ValueError("it has no line of a matrix: expected a line for each source, with a size for each target")
    if ranks > MOST_RANKS:
        raise ValueError(f"it has {ranks} lines: expected at most {MOST_RANKS} ranks")
    rows = []
    for source, (number, line) in enumerate(lines):
        cells = line.split()
        if len(cells) != ranks:
            raise ValueError(
                f"line {number} has {len(cells)} cell{'' if len(cells) == 1 else 's'}, but the matrix has {ranks} "
                f"line{'' if ranks == 1 else 's'}: expected as many cells in each line as lines"
            )
        rows.append(tuple(_bytes(cell, number) for cell in cells))
        if rows[-1][source]:
            raise ValueError(f"line {number} lets rank {source} send {cells[source]} to itself: expected 0")
    if not any(map(any, rows)):
        raise ValueError("each of its cells is 0: expected a rank that sends bytes to another")
    return tuple(rows)


def _lines(matrix: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of the matrix that are not empty, each with its number in the file, from 1."""
    section = ""
    for number, line in enumerate(matrix.splitlines(), 1):
        text = line.strip()
        if text.startswith("[") and text.endswith("]"):
            section = text[1:-1].strip().lower()
            if section not in (_MATRIX, *_STORAGE):
                raise ValueError(
                    f"line {number} begins the unknown section {_shown(line)}: expected [rdma], [read] or [write]"
                )
        elif text and section not in _STORAGE:
            yield number, line


def _bytes(cell: str, line: int) -> int:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"{_shown(cell)} in line {line} is not a size: expected bytes such as 4096, or a size like 1M")
    whole, fraction, unit = match.groups()
    if unit and unit.lower() not in _UNITS:
        raise ValueError(f"{_shown(cell)} in line {line} has the unknown unit {_shown(unit)}: expected B, K, M or G")
    digits = fraction or ""
    size = int(whole + digits) * _UNITS[unit.lower() or "b"] // int("1" + "0" * len(digits))
    if cell.startswith("-") and int(whole + digits):
        raise ValueError(f"{_shown(cell)} in line {line} is negative: expected 0 or more bytes")
    if size > MOST_CELL:
        raise ValueError(f"{_shown(cell)} in line {line} is more than {MOST_CELL >> 40} TiB: expected a smaller size")
    return size


def _shown(text: str) -> str:
    return repr(printable(text.strip()[:_QUOTED]))


@dataclass(frozen=True)
class Flow:
    """The bytes that one rank sends to another.

    :param size: the bytes of one transfer.
    """

    source: int
    target: int
    size: int

    @property
    def ranks(self) -> tuple[int, int]:
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

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once, because each of the thousands of rows of a pattern is looked up by it."""
        return hash((self.name, self.ranks, self.flows))

    def __str__(self) -> str:
        return f"{self.name} of {self.ranks} ranks"


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
        kind, count = match[1], int(match[2]) if match[2] else None
        if count is not None and not _LEAST_RANKS[kind] <= count <= MOST_RANKS:
            raise ValueError(f"{text.strip()}: expected {_LEAST_RANKS[kind]} to {MOST_RANKS} ranks for {kind}")
        return cls(text.strip(), kind, count)

    def ranks_of(self, ranks: int) -> int:
        """Return how many ranks take part, the first ones of the run.

        :param ranks: the number of ranks of the run. A run of one rank starts as many workers as the pattern has ranks.
        :raises ValueError: the pattern needs more ranks, or the run has too few. The text of the error is one sentence.
        """
        count = self.wanted or (ranks if ranks > 1 else LOCAL_RANKS)
        if 1 < ranks < count:
            raise ValueError(
                f"it has {count} ranks, but the run has {ranks}: start {count} ranks, or give a smaller one"
            )
        if self.kind and count < _LEAST_RANKS[self.kind]:
            raise ValueError(f"{self.kind} needs at least {_LEAST_RANKS[self.kind]} ranks, but the run has {count}")
        return count

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


def factors(ranks: int) -> list[list[tuple[int, int]]]:
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
    rounds_of_flows: list[list[Flow]] = []
    busy: list[set[str | int]] = []
    for pairs in factors(pattern.ranks):
        for pair in (*pairs, *((other, first) for first, other in pairs)):
            if pair not in flows:
                continue
            ends: set[str | int] = {hosts[rank] if hosts else rank for rank in pair}
            place = next((number for number, taken in enumerate(busy) if not taken & ends), len(busy))
            if place == len(busy):
                rounds_of_flows.append([])
                busy.append(set())
            rounds_of_flows[place].append(flows[pair])
            busy[place] |= ends
    return [tuple(flow) for flow in rounds_of_flows]
