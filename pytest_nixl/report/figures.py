# SPDX-License-Identifier: Apache-2.0
"""The table of the figures that a run measured, with the bounds that apply to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import TextLine, outcome

#: The most figures that the terminal shows.
MOST = 60
#: More figures than this are only counted if no bound applies to them, unless everything is wanted.
FEW = 6


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
        yield from _table(rows, gate)
    if folded:
        yield TextLine(f"{len(free)} figures without a bound were recorded; -v shows them")


def _table(rows: Sequence[tuple[tuple[str, str, str, str], Result]], gate: bool) -> Iterator[TextLine]:
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
