# SPDX-License-Identifier: Apache-2.0
"""The history of each row over the runs of a store, with its change points and the differences at each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_nixl.core import units
from pytest_nixl.judge.change_points import FEWEST_RUNS, Step, steps
from pytest_nixl.judge.regression import change
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Outcome, TextLine
from pytest_nixl.store.provenance import Change, changes, other_machine
from pytest_nixl.store.record_reader import RecordedRun


@dataclass(frozen=True)
class RowHistory:
    """The history of a row.

    :param runs: the runs that have the row, the oldest first.
    :param steps: its change points.
    """

    key: RowKey
    runs: tuple[RecordedRun, ...]
    steps: tuple[Step, ...]

    @property
    def values(self) -> tuple[float, ...]:
        """Bytes per second of each run."""
        return tuple(run.rows[self.key].bandwidth for run in self.runs)

    def differences(self, step: Step) -> list[Change]:
        """Return the differences between the last run before a change point and the first run after it."""
        before, after = self.runs[step.place - 1], self.runs[step.place]
        differences = changes(before.provenance, after.provenance)
        transports = ["+".join(run.rows[self.key].transports) for run in (before, after)]
        return [*differences, Change("transport", *transports)] if transports[0] != transports[1] else differences


def courses(runs: Sequence[RecordedRun]) -> list[RowHistory]:
    """Return the history of every row.

    :param runs: the runs, the oldest first.
    """
    keys = dict.fromkeys(key for run in runs for key in run.rows)
    histories = []
    for key in keys:
        having = tuple(run for run in runs if key in run.rows)
        values = [run.rows[key].bandwidth for run in having]
        histories.append(RowHistory(key, having, tuple(steps(values))))
    return histories


def of_one_machine(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs of the same kind of machine as the newest one, and one sentence for each run left out."""
    if not runs:
        return [], []
    newest, comparable, notes = runs[-1], [], []
    for run in runs:
        if different := other_machine(run.provenance, newest.provenance):
            notes.append(f"left out: {run.source} was measured on another kind of machine ({different[0]})")
        else:
            comparable.append(run)
    return comparable, notes


def lines(runs: Sequence[RecordedRun], histories: Sequence[RowHistory]) -> Iterator[TextLine]:
    """Yield a line for each row, and lines for each change point of it.

    :param runs: all runs, the oldest first.
    :param histories: the history of each row.
    """
    if not runs:
        yield TextLine("no run")
        return
    yield TextLine(f"{len(runs)} runs from {runs[0].when:%Y-%m-%d %H:%M} to {runs[-1].when:%Y-%m-%d %H:%M} UTC")
    for course in histories:
        values = course.values
        text = f"{course.key}: {len(values)} runs, {units.gigabytes(values[0])} to {units.gigabytes(values[-1])} GB/s"
        if len(values) < 2 * FEWEST_RUNS:
            yield TextLine(f"{text}; finding a change needs at least {2 * FEWEST_RUNS} runs")
            continue
        yield TextLine(f"{text}, {len(course.steps) or 'no'} change{'' if len(course.steps) == 1 else 's'}")
        for step in course.steps:
            run = course.runs[step.place]
            figures = f"{units.gigabytes(step.before)} to {units.gigabytes(step.after)} GB/s"
            bad = Outcome.FAIL if step.ratio < 1 else None
            yield TextLine(
                f"    {change(step.ratio)} ({figures}) from {run.name} of {run.when:%Y-%m-%d %H:%M} UTC on", bad
            )
            different = course.differences(step)
            for item in different:
                yield TextLine(f"        {item}")
            if not different:
                yield TextLine("        no recorded difference: check what is not recorded, such as other jobs")
