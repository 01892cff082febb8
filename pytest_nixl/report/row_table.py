# SPDX-License-Identifier: Apache-2.0
"""The tables of rows on the terminal: a line for each row, or fewer lines if every row of a kind passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from pytest_nixl.core import units
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import TextLine, Verdict, outcome

_KEY = ("backend", "op", "memory", "block", "batch", "depth", "ranks", "variant")
_COLUMNS = (*_KEY, "GB/s", "Gb/s", "p50 us", "p99 us", "floor", "transport")
_TEXT = {"backend", "op", "memory", "variant", "transport"}
#: The order in which columns are left out of a table that is too wide. Batch and depth stay if one of them is not 1.
_LEFT_OUT = (("Gb/s",), ("batch", "depth"), ("p50 us",), ("p99 us",), ("floor",))

#: At most this many rows of a kind have a line each although all of them passed.
FEW_ROWS = 8
#: The figures of a row in a table of few lines: as many of them as the terminal is wide, the first of these that fit.
_FIGURES = (
    ("GB/s", "Gb/s", "p50 us", "p90 us", "p99 us", "floor", "ceiling"),
    ("GB/s", "Gb/s", "p50 us", "p99 us", "floor"),
    ("GB/s", "p50 us", "p99 us", "floor"),
    ("GB/s", "p50 us", "p99 us"),
    ("GB/s", "p99 us"),
    ("GB/s",),
)


def tables(rows: Sequence[Result], *, gate: bool, width: int | None = None) -> Iterator[TextLine]:
    """Yield the tables of rows. Rows with a variant are in a table of their own, because their names are long.

    :param gate: whether ``--nixl-gate`` is given.
    :param width: the characters of a line; None: every row has its line, with every column.
    """
    remaining = list(rows)
    if width is not None:
        for kind, kind_rows in _kinds(remaining).items():
            if _is_short(kind, kind_rows):
                yield from _few_lines(kind_rows, width)
                shown = set(map(id, kind_rows))  # thousands of rows, whose comparison by value takes seconds
                remaining = [row for row in remaining if id(row) not in shown]
    for varies in (False, True):
        if kind_rows := [row for row in remaining if _varies(row) is varies]:
            yield from _table(kind_rows, gate, width)


def _varies(row: Result) -> bool:
    """Whether a row has a variant in its key."""
    return isinstance(row.row, RowKey) and bool(row.row.variant)


def _kinds(rows: Sequence[Result]) -> dict[tuple[str, ...], list[Result]]:
    """Return the measured rows that passed, by backend, memory and the names in their variant."""
    kinds: dict[tuple[str, ...], list[Result]] = {}
    for row in rows:
        key = row.row
        if isinstance(key, RowKey) and row.summary is not None and row.verdict is Verdict.PASS:
            kinds.setdefault((key.backend, key.memory_text, *(name for name, _ in key.variant)), []).append(row)
    return kinds


def _is_short(kind: tuple[str, ...], rows: Sequence[Result]) -> bool:
    """Whether rows of a kind are shown in fewer lines: they are many or have long names, and each occurs once."""
    few = len(rows) <= FEW_ROWS and len(kind) == 2
    return not few and len({row.row for row in rows}) == len(rows)


def _few_lines(rows: Sequence[Result], width: int) -> Iterator[TextLine]:
    """Yield what the rows have in common, then a line for each block size, with each operation beside the others."""
    lines: dict[tuple[str, ...], dict[str, RowSummary]] = {}
    names: dict[str, list[str]] = {}
    for row in rows:
        assert isinstance(row.row, RowKey)
        assert row.summary is not None
        parts = _parts(row.row)
        for name, value in parts.items():
            names.setdefault(name, []).append(value)
        lines.setdefault(tuple(parts.values()), {})[row.row.op] = row.summary
    differing = [number for number, values in enumerate(names.values()) if len(set(values)) > 1]
    common = [_common(name, values[0]) for name, values in names.items() if len(set(values)) == 1]
    ops = list(dict.fromkeys(row.row.op for row in rows if isinstance(row.row, RowKey)))
    transports = dict.fromkeys(
        "+".join(summary.transports) or "unknown" for by_size in lines.values() for summary in by_size.values()
    )
    yield TextLine(f"{' '.join(filter(None, common))}, over {' or '.join(transports)}: {len(rows)} PASS")
    heads = [list(names)[number] for number in differing]
    for figures in _FIGURES:
        cells = [
            [*(parts[number] for number in differing), *_side_by_side(by_size, ops, figures)]
            for parts, by_size in lines.items()
        ]
        titles = [*heads, *(f"{op} {name}" if name == "GB/s" else name for op in ops for name in figures)]
        widths = [max(len(line[place]) for line in (titles, *cells)) for place in range(len(titles))]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
    for line in (titles, *cells):
        shown = (
            cell.ljust(size) if place < len(heads) and heads[place] != "block" else cell.rjust(size)
            for place, (cell, size) in enumerate(zip(line, widths, strict=True))
        )
        yield TextLine("  ".join(shown).rstrip(), None if line is titles else outcome(Verdict.PASS, gate=False))


def _parts(key: RowKey) -> dict[str, str]:
    """Return what names a row besides its operation, by the names of columns."""
    counts = {"batch": str(key.batch), "depth": str(key.depth), "ranks": "" if key.default_ranks else key.ranks_text}
    return {
        "kind": f"{key.backend} {key.memory_text}",
        "block": units.format_size(key.block),
        **counts,
        **dict(key.variant),
    }


def _common(name: str, value: str) -> str:
    """Return what all rows have in common as text; empty for a default."""
    if name in ("batch", "depth"):
        return "" if value == "1" else f"{name}{value}"
    if name in ("kind", "block"):
        return value
    return value and (f"{name} {value}" if name == "ranks" else f"{name}={value}")


def _side_by_side(summaries: Mapping[str, RowSummary], ops: Sequence[str], figures: Sequence[str]) -> list[str]:
    return [_FIGURE[name](summaries[op]) if op in summaries else "-" for op in ops for name in figures]


def _table(rows: Sequence[Result], gate: bool, width: int | None) -> Iterator[TextLine]:
    cells = [_cells(row) for row in rows]
    # The ranks are left out if there is only one pair, and the variant if no row has one.
    usual = {"ranks": {"0-1", "0-0", "-"}, "variant": {"-"}}
    shown = [n for n, name in enumerate(_COLUMNS) if name not in usual or {line[n] for line in cells} - usual[name]]
    widths = {n: max(len(line[n]) for line in [_COLUMNS, *cells]) for n in shown}
    if width is not None:
        spare = (
            width - max(len("verdict"), *(len(str(row.verdict)) for row in rows)) - sum(widths[n] + 2 for n in shown)
        )
        shown = [n for n in shown if n not in _left_out(cells, widths, spare)]
    sizes = [widths[n] for n in shown]
    yield TextLine(_join([_COLUMNS[n] for n in shown], sizes, shown) + "  verdict")
    for row, line in zip(rows, cells, strict=True):
        text = f"{_join([line[n] for n in shown], sizes, shown)}  {row.verdict}"
        yield TextLine(text, outcome(row.verdict, gate=gate))


def _left_out(cells: Sequence[Sequence[str]], widths: Mapping[int, int], spare: int) -> list[int]:
    """Return the columns to leave out so that the table fits.

    :param spare: the characters that a line has left with every column; negative: it is too long.
    """
    left_out: list[int] = []
    for names in _LEFT_OUT:
        places = [_COLUMNS.index(name) for name in names]
        if spare >= 0:
            break
        if names != ("batch", "depth") or all(line[place] in ("1", "-") for line in cells for place in places):
            left_out += places
            spare += sum(widths[place] + 2 for place in places)
    for place in left_out[::-1]:  # the last one may have been wide enough for one of the others
        if widths[place] + 2 <= spare and _COLUMNS[place] not in ("batch", "depth"):
            left_out.remove(place)
            spare -= widths[place] + 2
    return left_out


def _cells(row: Result) -> tuple[str, ...]:
    summary, key, names = row.summary, row.row, [str(row.row), *"-------"]
    if isinstance(key, RowKey):
        size = units.format_size(key.block)
        names = [key.backend, key.op, key.memory_text, size, str(key.batch), str(key.depth), key.ranks_text]
        names.append(key.variant_text or "-")
    if summary is None:
        return (*names, "-", "-", "-", "-", "-", "-")
    return (*names, *(_FIGURE[name](summary) for name in _COLUMNS[len(_KEY) :]))


def _microseconds(seconds: float) -> str:
    """Return a latency as text; a recorded run may not have it."""
    return "-" if math.isnan(seconds) else units.microseconds(seconds)


#: The text of each figure of a row.
_FIGURE: Mapping[str, Callable[[RowSummary], str]] = {
    "GB/s": lambda summary: units.gigabytes(summary.bandwidth),
    "Gb/s": lambda summary: units.gigabits(summary.bandwidth),
    "p50 us": lambda summary: _microseconds(summary.p50),
    "p90 us": lambda summary: _microseconds(summary.p90),
    "p99 us": lambda summary: _microseconds(summary.p99),
    "floor": lambda summary: units.gigabytes(summary.floor) if summary.floor else "-",
    "ceiling": lambda summary: units.gigabytes(summary.ceiling) if summary.ceiling else "-",
    "transport": lambda summary: "+".join(summary.transports) or "unknown",
}


def _join(cells: Sequence[str], widths: Sequence[int], columns: Sequence[int]) -> str:
    return "  ".join(
        cell.ljust(width) if _COLUMNS[column] in _TEXT else cell.rjust(width)
        for cell, width, column in zip(cells, widths, columns, strict=True)
    )
