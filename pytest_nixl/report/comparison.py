# SPDX-License-Identifier: Apache-2.0
"""The comparison of two runs as text: a line for each common row, the differences, and the verdict over all rows."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_nixl.core import units
from pytest_nixl.judge.regression import change
from pytest_nixl.judge.run_comparison import RunComparison, change_text, failed_rows
from pytest_nixl.model.verdicts import TextLine, outcome

_COLUMNS = ("row", "GB/s before", "GB/s now", "change [90 %]", "launches", "p")


def lines(compared: RunComparison, *, gate: bool) -> Iterator[TextLine]:
    """Yield the table of rows, the differences between the runs, and the verdict over all rows.

    :param gate: whether ``--nixl-gate`` is given.
    """
    before, now, comparison = compared.before, compared.now, compared.comparison
    yield TextLine("")
    failed = failed_rows(before, now)
    yield TextLine(f"against {before.name} of {before.when:%Y-%m-%d %H:%M} UTC on {_host(compared)}")
    for item in compared.changes:
        yield TextLine(f"changed: {item}")
    cells = [
        (
            key.short,
            units.gigabytes(before.rows[key].bandwidth),
            units.gigabytes(now.rows[key].bandwidth),
            change_text(effect),
            f"{effect.now}:{effect.before}",
            f"{effect.p:.2g}",
        )
        for key, effect in comparison.rows.items()
    ]
    effects = [str(effect.verdict) for effect in comparison.rows.values()]
    outcomes = [outcome(effect.verdict, gate=False) for effect in comparison.rows.values()]
    for key, result in failed.items():
        old, new = before.rows[key], now.rows[key]
        transports = f"{'+'.join(old.transports) or 'unknown'} before, {'+'.join(new.transports) or 'unknown'} now"
        gained = change(new.bandwidth / old.bandwidth) if old.bandwidth else ""
        cells.append((key.short, units.gigabytes(old.bandwidth), units.gigabytes(new.bandwidth), gained, "", ""))
        effects.append(f"{result.verdict}{f' ({transports})' if old.transports != new.transports else ''}")
        outcomes.append(outcome(result.verdict, gate=False))
    widths = [max(len(line[place]) for line in (_COLUMNS, *cells)) for place in range(len(_COLUMNS))]
    if cells:
        yield TextLine(f"{_join(_COLUMNS, widths)}  verdict")
    for line, row_effects, ends in zip(cells, effects, outcomes, strict=True):
        yield TextLine(f"{_join(line, widths)}  {row_effects}", ends)
    pooled = f" (all rows together: {comparison.pooled.text})" if comparison.pooled is not None else ""
    # Without a row in common the verdict is that of the rows that failed.
    verdict = comparison.verdict
    if comparison.pooled is None and failed:
        verdict = next(iter(failed.values())).verdict
    yield TextLine(f"regression: {verdict}{pooled}", outcome(verdict, gate=gate))


def _host(compared: RunComparison) -> str:
    host_before, host_now = (run.provenance.host.get("name") for run in (compared.before, compared.now))
    return "this host" if host_before == host_now else f"the host {host_before}"


def _join(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *later_cells = (
        cell.ljust(width) if not place else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((first, *later_cells))
