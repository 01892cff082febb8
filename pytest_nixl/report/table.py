# SPDX-License-Identifier: Apache-2.0
"""The terminal report: the table of rows, and the reasons and remedies of results that are not PASS."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_nixl.core import units
from pytest_nixl.model.conclusion import Conclusion, summary_line
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_source import backend_of, program_of
from pytest_nixl.model.verdicts import GOOD, Outcome, TextLine, Verdict, outcome

_KEY = ("backend", "op", "memory", "block", "batch", "depth", "ranks")
_COLUMNS = (*_KEY, "GB/s", "Gb/s", "p50 us", "p99 us", "floor", "transport")
_TEXT = {"backend", "op", "memory", "transport"}

#: A row with one of these verdicts has no bandwidth to compare.
_NO_BANDWIDTH = (Verdict.CORRUPT, Verdict.WRONG_TRANSPORT, Verdict.IMPLAUSIBLE, Verdict.ERROR)


def lines(
    results: Sequence[Result], *, gate: bool, interrupted: str = "", left_out: Sequence[str] = ()
) -> Iterator[TextLine]:
    """Yield the table of rows, then each result that is not PASS with reason and remedy, then the verdict.

    :param gate: whether ``--nixl-gate`` is given.
    :param interrupted: how far the run came and what ended it early; empty: it was completed.
    :param left_out: the names of the suites that were not selected, about which the verdict says nothing.
    """
    rows = [result for result in results if _shown(result)]
    if rows:
        yield from _table(rows, gate)
        yield from _ratios(rows)
    yield from _raw_ratios(results)
    alike: dict[tuple[Verdict, str], list[Result]] = {}
    for result in results:
        if result.verdict not in GOOD:
            alike.setdefault((result.verdict, result.remedy), []).append(result)
    for group in alike.values():
        yield from _explained(group, gate)
    conclusion = Conclusion.of(results, gate=gate, interrupted=interrupted)
    summary = summary_line(results, gate=gate, interrupted=interrupted, left_out=left_out)
    yield TextLine(summary, conclusion.outcome)


def _shown(result: Result) -> bool:
    """Whether the table shows this result: it is of a row, and not of an external program that is not installed."""
    by_program = bool(program_of(result.row.partition("/")[0]))
    return bool(result.row) and not (by_program and result.verdict is Verdict.NOT_APPLICABLE)


def _table(rows: Sequence[Result], gate: bool) -> Iterator[TextLine]:
    cells = [_cells(row) for row in rows]
    ranks = _COLUMNS.index("ranks")
    # The ranks are left out if there is only one pair.
    shown = [n for n in range(len(_COLUMNS)) if n != ranks or {line[n] for line in cells} - {"0-1", "0-0"}]
    widths = [max(len(line[n]) for line in [_COLUMNS, *cells]) for n in shown]
    yield TextLine(_join([_COLUMNS[n] for n in shown], widths, shown) + "  verdict")
    for row, line in zip(rows, cells, strict=True):
        yield TextLine(f"{_join([line[n] for n in shown], widths, shown)}  {row.verdict}", _outcome(row, gate))


def _ratios(rows: Sequence[Result]) -> Iterator[TextLine]:
    """Compare the rows of each backend with those of the first backend, and with those of external programs."""
    by_rest: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        if row.figures is not None and row.verdict not in _NO_BANDWIDTH:
            backend, rest = row.row.split("/", 1)
            by_rest.setdefault(rest, []).append((backend, row.figures.bandwidth))
    for rest, found in by_rest.items():
        own = [each for each in found if not program_of(each[0])]
        pairs = [(each, own[0]) for each in own[1:] if each[0] != own[0][0]]  # a row may be measured twice
        pairs += [(mine, other) for mine in own for other in found if _is_by_program(other[0], mine[0])]
        for (backend, bandwidth), (other, reference) in pairs:
            yield TextLine(f"{backend} : {other}  {_rest(rest)}  {bandwidth / reference:.2f}")


def _is_by_program(backend: str, own: str) -> bool:
    """Whether an external program measured this backend, and it is the same backend as ``own``."""
    return bool(program_of(backend)) and backend_of(backend) == own


def _raw_ratios(results: Sequence[Result]) -> Iterator[TextLine]:
    """Compare rows with the bandwidth of a raw tool over the same transport."""
    for ratio in (ratio for result in results for ratio in result.ratios if ratio.comparable):
        backend, rest = ratio.row.split("/", 1)
        raw = ratio.raw
        by = f"{units.gigabytes(raw.value)} GB/s by {raw.words} over {'+'.join(raw.transports)}"
        yield TextLine(f"{backend} : {raw.tool}  {_rest(rest)}  {ratio.value:.2f}  of {by}")


def _rest(key: str) -> str:
    """Return a row's key after the backend as text. Default counts and ranks are left out."""
    op, memory, block, batch, depth, ranks = key.split("/")
    usual = ("batch1", "depth1", "0-1", "0-0")
    counts = "".join(f"  {count}" for count in (batch, depth, ranks) if count not in usual)
    return f"{op:<5}  {memory}  {block:>6}{counts}"


def _cells(row: Result) -> tuple[str, ...]:
    backend, op, memory, block, batch, depth, ranks = row.row.split("/")
    key = (backend, op, memory, block, batch.removeprefix("batch"), depth.removeprefix("depth"), ranks)
    figures = row.figures
    if figures is None:
        return (*key, "-", "-", "-", "-", "-", "-")
    return (
        *key,
        units.gigabytes(figures.bandwidth),
        units.gigabits(figures.bandwidth),
        _microseconds(figures.p50),
        _microseconds(figures.p99),
        units.gigabytes(figures.floor) if figures.floor else "-",
        "+".join(figures.transports) or "unknown",
    )


def _microseconds(seconds: float) -> str:
    """Return a latency as text; a recorded run may not have it."""
    return "-" if math.isnan(seconds) else units.microseconds(seconds)


def _join(cells: Sequence[str], widths: Sequence[int], columns: Sequence[int]) -> str:
    return "  ".join(
        cell.ljust(width) if _COLUMNS[column] in _TEXT else cell.rjust(width)
        for cell, width, column in zip(cells, widths, columns, strict=True)
    )


def _explained(group: Sequence[Result], gate: bool) -> Iterator[TextLine]:
    """Explain results of one verdict and one remedy: each reason once, the remedy, and one command to repeat."""
    alike: dict[str, list[Result]] = {}
    for result in group:
        alike.setdefault(result.reason, []).append(result)
    for reason, results in alike.items():
        # The reason of a measured row already names the row.
        named = (_name(result) for result in results if result.figures is None)
        names = ", ".join(dict.fromkeys(named))
        yield TextLine(f"{results[0].verdict}{names and ' '}{names}: {reason}", _outcome(results[0], gate))
    first = group[0]
    if first.remedy:
        yield TextLine(f"    remedy: {first.remedy}")
    if first.repeat and _outcome(first, gate) is Outcome.FAIL:
        yield TextLine(f"    repeat: {first.repeat}")


def _name(result: Result) -> str:
    return result.finding or (result.row if _shown(result) else "") or result.check


def _outcome(result: Result, gate: bool) -> Outcome:
    return outcome(result.verdict, gate=gate)
