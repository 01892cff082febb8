# SPDX-License-Identifier: Apache-2.0
"""The terminal report: what is wrong, with reasons and remedies, and the table of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pytest_nixl.core import units
from pytest_nixl.judge.run_comparison import CHECK as REGRESSION
from pytest_nixl.model.conclusion import summary_line
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import HUGE, PAGES, RowKey
from pytest_nixl.model.verdicts import GOOD, NO_BANDWIDTH, SEVERITY, Outcome, TextLine, Verdict, outcome
from pytest_nixl.report.row_table import tables
from pytest_nixl.session.selection import check_ids_by_suite

#: More results than this that do not apply are only counted, unless everything is wanted. So are the commands that
#: repeat failures of one kind: only the first is printed.
_FEW = 5
#: The most figures that the terminal shows.
MOST = 60
#: More figures than this are only counted if no bound applies to them, unless everything is wanted.
FEW = 6


def lines(
    results: Sequence[Result],
    *,
    gate: bool,
    interrupted: str = "",
    left_out: Sequence[str] = (),
    everything: bool = False,
    width: int | None = None,
) -> Iterator[TextLine]:
    """Yield what is wrong with reason and remedy, the most severe first; then the tables of rows; then the verdict.

    If something fails or warns, the verdict is also the first line.

    :param gate: whether ``--nixl-gate`` is given.
    :param interrupted: how far the run came and what ended it early; empty: it was completed.
    :param left_out: the names of the suites that were not selected, about which the verdict says nothing.
    :param everything: whether to name also each of many checks that do not apply.
    :param width: the characters of a line; None: every row has its line, with every column.
    """
    summary = summary_line(results, gate=gate, interrupted=interrupted, left_out=left_out)
    yield from wrong_lines(results, summary, gate=gate, width=width)
    yield from measured_lines(results, gate=gate, everything=everything, width=width)
    yield summary


def wrong_lines(
    results: Sequence[Result], summary: TextLine, *, gate: bool, width: int | None = None
) -> Iterator[TextLine]:
    """Yield the verdict and what is wrong, the most severe first; nothing if nothing fails or warns."""
    wrong = [group for group in _groups(results, gate) if _is_wrong(group[0], gate)]
    if wrong:
        yield summary
    for group in wrong:
        yield from _explained(group, gate, fold=width is not None)


def measured_lines(
    results: Sequence[Result], *, gate: bool, everything: bool = False, width: int | None = None
) -> Iterator[TextLine]:
    """Yield the tables of rows, the ratios, the figures, and what does not apply."""
    rows = [result for result in results if _shown(result)]
    yield from tables(rows, gate=gate, width=width)
    yield from _ratios(rows)
    yield from _cold_ratios(rows)
    yield from _raw_ratios(results)
    yield from figure_lines(results, gate=gate, everything=everything)
    good_groups = [group for group in _groups(results, gate) if not _is_wrong(group[0], gate)]
    count = sum(len(group) for group in good_groups)
    if count > _FEW and not everything:
        yield TextLine(f"{Verdict.NOT_APPLICABLE}: {count} checks; -v names them, each with its reason", Outcome.SKIP)
    else:
        for group in good_groups:
            yield from _explained(group, gate)


def _groups(results: Sequence[Result], gate: bool) -> list[list[Result]]:
    """Return the results that are not good, those of one verdict and one remedy together, the most severe first."""
    alike: dict[tuple[Verdict, str], list[Result]] = {}
    for result in results:
        if result.verdict not in GOOD:
            group = alike.setdefault((result.verdict, result.remedy), [])
            # What was found about several rows names their cause: it stands above these rows.
            group.insert(len(group) if result.row is not None or result.check != REGRESSION else 0, result)
    return sorted(alike.values(), key=lambda group: SEVERITY.index(group[0].verdict))


def _is_wrong(result: Result, gate: bool) -> bool:
    return _outcome(result, gate) in (Outcome.FAIL, Outcome.WARN)


def _shown(result: Result) -> bool:
    """Whether the table shows this result: it is of a row, and not of an external program that is not installed."""
    by_program = isinstance(result.row, RowKey) and bool(result.row.program)
    return result.row is not None and not (by_program and result.verdict is Verdict.NOT_APPLICABLE)


def _ratios(rows: Sequence[Result]) -> Iterator[TextLine]:
    """Compare the rows of each backend with those of the first backend, and with those of external programs."""
    alike: dict[RowKey, list[tuple[RowKey, float]]] = {}
    for row in rows:
        key = row.row
        if isinstance(key, RowKey) and row.summary is not None and row.verdict not in NO_BANDWIDTH:
            # Like nixlbench's rows are only those of ours with a notification each, and with its pages.
            kind = key.as_nixlbench if key.program else key
            alike.setdefault(replace(kind, backend=""), []).append((key, row.summary.bandwidth))
    for measured in alike.values():
        of_nixl = [measurement for measurement in measured if not measurement[0].program]
        # A row may be measured twice.
        pairs = [(measurement, of_nixl[0]) for measurement in of_nixl[1:] if measurement[0] != of_nixl[0][0]]
        pairs += [(mine, other) for mine in of_nixl for other in measured if _is_by_program(other[0], mine[0])]
        for (key, bandwidth), (other, reference) in pairs:
            yield TextLine(f"{key.backend} : {other.backend}  {_row_text(key)}  {bandwidth / reference:.2f}")


def _cold_ratios(rows: Sequence[Result]) -> Iterator[TextLine]:
    """Compare each row whose transfers walk a buffer with the same row in place."""
    by_key = {row.row: row for row in rows if isinstance(row.row, RowKey) and row.verdict not in NO_BANDWIDTH}
    for key, row in by_key.items():
        other = by_key.get(key.in_place) if isinstance(key, RowKey) and key.walks else None
        if other is None or row.summary is None or other.summary is None:
            continue
        cold, hot = row.summary.bandwidth, other.summary.bandwidth
        rates = f"{units.gigabytes(cold)} of {units.gigabytes(hot)} GB/s with the bytes of each transfer in the caches"
        yield TextLine(f"cold : hot  {key.backend}  {_row_text(key)}  {cold / hot:.2f}  ({rates})")


def _is_by_program(key: RowKey, nixl_row: RowKey) -> bool:
    """Whether an external program measured a row, and its backend is that of ``own``."""
    return bool(key.program) and key.plain_backend == nixl_row.backend


def _raw_ratios(results: Sequence[Result]) -> Iterator[TextLine]:
    """Compare rows with the bandwidth of a raw tool over the same transport."""
    for ratio in (ratio for result in results for ratio in result.ratios if ratio.comparable):
        raw, key = ratio.raw, ratio.row
        by = f"{units.gigabytes(raw.value)} GB/s by {raw.words} over {'+'.join(raw.transports)}"
        names = f"{key.backend} : {raw.tool}  {_row_text(key)}" if isinstance(key, RowKey) else f"{key} : {raw.tool}"
        yield TextLine(f"{names}  {ratio.value:.2f}  of {by}")


def _row_text(key: RowKey) -> str:
    """Return a row's key without the backend as text, with its pages. Other defaults are left out."""
    counts = [f"batch{key.batch}"] if key.batch != 1 else []
    counts += [f"depth{key.depth}"] if key.depth != 1 else []
    counts += [] if key.default_ranks else [key.ranks_text]
    counts += [key.variant_text] if key.variant else []
    counts += [f"{PAGES}={HUGE}"] if key.pages == HUGE else []
    return "  ".join((f"{key.op:<5}", key.memory_text, f"{units.format_size(key.block):>6}", *counts))


def _explained(group: Sequence[Result], gate: bool, *, fold: bool = False) -> Iterator[TextLine]:
    """Explain results of one verdict and one remedy: each reason once, the remedy, and commands to repeat.

    :param fold: whether to name many rows in one line if their reasons differ only in the row.
    """
    alike: dict[str, list[Result]] = {}
    for result in group:
        alike.setdefault(_without_row(result) if fold and len(group) > _FEW else result.reason, []).append(result)
    for reason, results in alike.items():
        # The reason of a measured row already names the row.
        named = (_name(result) for result in results if result.summary is None)
        names = ", ".join(dict.fromkeys(named))
        first = results[0]
        if reason != first.reason:
            names, rows = f"{len(results)} rows", _rows(results)
            if len(results) == 1:
                reason, names, rows = first.reason, "", ""
        else:
            rows = ""
        checks = ""
        if fold and names.count(", ") >= _FEW:
            # One cause, such as an etcd that does not answer: it stands first, and the checks under it.
            names, checks = f"{names.count(', ') + 1} checks", names
        yield TextLine(f"{first.verdict}{names and ' '}{names}: {reason}", _outcome(first, gate))
        if rows:
            yield TextLine(f"    rows: {rows}")
        if checks:
            yield TextLine(f"    checks: {checks}")
    first = group[0]
    if first.remedy:
        yield TextLine(f"    remedy: {first.remedy}")
    bad = [result for result in group if _outcome(result, gate) in (Outcome.FAIL, Outcome.WARN)]
    pages = list(dict.fromkeys(page for result in bad if (page := _page(result))))
    for page in pages if len(pages) <= _FEW or not fold else pages[:1]:
        yield TextLine(f"    about: {page}")
    if _outcome(first, gate) is Outcome.FAIL:
        for command in repeats(group):
            yield TextLine(f"    repeat: {command}")


def reasons(group: Sequence[Result]) -> list[str]:
    """Return the reasons of results of one verdict and one remedy: many rows of one cause are one sentence."""
    alike: dict[str, list[Result]] = {}
    for result in group:
        alike.setdefault(_without_row(result) if len(group) > _FEW else result.reason, []).append(result)
    return [
        f"{len(results)} rows: {reason} ({_rows(results)})"
        if len(results) > 1 and reason != results[0].reason
        else results[0].reason or str(results[0].row or results[0].check)
        for reason, results in alike.items()
    ]


def repeats(group: Sequence[Result]) -> list[str]:
    """Return the commands that repeat results: of many, the first."""
    commands = list(dict.fromkeys(result.repeat for result in group if result.repeat))
    return commands[: _FEW if len(commands) <= _FEW else 1]


def _without_row(result: Result) -> str:
    """Return the reason of a measured row without the row's name, which is its beginning."""
    key = result.row
    if isinstance(key, RowKey) and result.summary is not None:
        name, separator, reason = result.reason.partition(": ")
        if separator and name.startswith(f"{key.backend} {key.op} "):
            return reason
    return result.reason


def _rows(results: Sequence[Result]) -> str:
    """Return the names of rows, those of one operation and memory together with their block sizes."""
    sizes: dict[str, list[str]] = {}
    for result in results:
        if isinstance(result.row, RowKey):
            key = result.row
            name = key.short.replace(f" {units.format_size(key.block)}", "", 1)
            sizes.setdefault(name, []).append(units.format_size(key.block))
    return "; ".join(f"{name} {' '.join(row_sizes)}" for name, row_sizes in sizes.items())


def _name(result: Result) -> str:
    return result.finding or (str(result.row) if _shown(result) else result.check)


def _page(result: Result) -> str:
    """Return the command that prints what is known of a finding or a check of the suites; empty for a user's own."""
    if result.finding:
        return f"pytest-nixl explain {result.finding}"
    has_page = any(result.check in checks for checks in check_ids_by_suite().values())
    return f"pytest-nixl explain {result.check}" if has_page else ""


def _outcome(result: Result, gate: bool) -> Outcome:
    return outcome(result.verdict, gate=gate)


def figure_rows(results: Iterable[Result]) -> list[tuple[tuple[str, str, str, str], Result]]:
    """Return name, labels, value and limit of each figure, and the result of the check that measured it."""
    return [
        ((figure.name, figure.labels_text, figure.show(figure.value), figure.limit_text or "-"), result)
        for result in results
        for figure in result.measured
    ]


def figure_lines(results: Iterable[Result], *, gate: bool, everything: bool = True) -> Iterator[TextLine]:
    """Yield the table of figures for the terminal. It has a column of limits if a bound applies to one of them.

    :param gate: whether ``--nixl-gate`` is given.
    :param everything: whether to show also each of many figures without a bound.
    """
    rows = figure_rows(results)
    free = [row for row in rows if row[0][3] == "-"]
    folded = len(free) > FEW and not everything
    if folded:
        rows = [row for row in rows if row[0][3] != "-"]
    if rows:
        yield from _figure_table(rows, gate)
    if folded:
        yield TextLine(f"{len(free)} figures without a bound were recorded; -v shows them")


def _figure_table(rows: Sequence[tuple[tuple[str, str, str, str], Result]], gate: bool) -> Iterator[TextLine]:
    limited = any(cells[3] != "-" for cells, _ in rows)
    shown = rows[:MOST]
    heads = ("figure", "of", "value", "bound")
    widths = [max(len(cells[n]) for cells in (heads, *(cells for cells, _ in shown))) for n in range(4)]

    def line(cells: tuple[str, ...]) -> str:
        texts = [cells[0].ljust(widths[0]), cells[1].ljust(widths[1]), cells[2].rjust(widths[2])]
        if limited:
            texts.append(cells[3].ljust(widths[3]))
        return "  ".join(texts).rstrip()

    yield TextLine(line(heads))
    for cells, result in shown:
        yield TextLine(line(cells), outcome(result.verdict, gate=gate))
    if len(rows) > MOST:
        yield TextLine(f"and {len(rows) - MOST} more figures: --nixl-report=FILE.html shows all of them")
