# SPDX-License-Identifier: Apache-2.0
"""The charts of a report: bandwidth and latency over block sizes, and the history of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from markupsafe import Markup

from pytest_nixl.core import units
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.report.svg import Axis, Series, lines, sizes_axis, value_axis
from pytest_nixl.store.record_reader import RecordedRun

if TYPE_CHECKING:
    from pytest_nixl.report import history as row_history
else:  # it imports numpy
    row_history = lazy_module("pytest_nixl.report.history")

#: The most history charts in a report. Rows with changes come first.
_MOST_HISTORIES = 200


@dataclass(frozen=True)
class ChartCard:
    """A chart with its title and its legend.

    :param drawing: the chart as SVG.
    :param legend: the lines that the legend names.
    :param remarks: further sentences below the chart.
    """

    title: str
    drawing: Markup
    legend: Sequence[Series]
    remarks: Sequence[str]


def _groups(run: RecordedRun) -> dict[RowKey, dict[str, list[tuple[int, RowSummary]]]]:
    """Return the rows with their block sizes in bytes, smallest first, by group and operation.

    The rows of a group differ only in operation and block size. Its key is theirs without these two.
    """
    groups: dict[RowKey, dict[str, list[tuple[int, RowSummary]]]] = {}
    for key, row in run.rows.items():
        if key.kv or key.pattern:
            continue  # one block size, and its own chart or matrix
        groups.setdefault(replace(key, op="", block=0), {}).setdefault(key.op, []).append((key.block, row))
    for by_op in groups.values():
        for rows in by_op.values():
            rows.sort(key=lambda point: point[0])
    # For many links at one block size the matrix is clearer than charts of one point.
    wide = {group: by_op for group, by_op in groups.items() if any(len(rows) > 1 for rows in by_op.values())}
    return wide or groups


def _name(group: RowKey) -> str:
    """Return the title of a group of rows. Default batch, depth, ranks and variant are left out."""
    extra = [f"{name} {count}" for name, count in (("batch", group.batch), ("depth", group.depth)) if count != 1]
    extra += [] if group.default_ranks else [f"ranks {group.ranks_text}"]
    extra += [f"{name} {value}" for name, value in group.variant]
    return ", ".join((f"{group.backend} {group.memory_text}", *extra))


def bandwidth(run: RecordedRun, before: RecordedRun | None = None) -> list[ChartCard]:
    """Return a card for each group of rows: bandwidth with floor, ceiling and line rate of the network card.

    :param before: the baseline, which is drawn below; None: there is none.
    """
    drawn = []
    earlier = _groups(before) if before is not None else {}
    for group, by_op in _groups(run).items():
        rows = [row for rows in by_op.values() for row in rows]
        most = max(value for _, row in rows for value in row.values)
        series = []
        sizes = sorted({float(size) for size, _ in rows})
        for number, (op, rows_of_op) in enumerate(by_op.items()):
            old = [point for point in earlier.get(group, {}).get(op, ()) if sizes[0] <= point[0] <= sizes[-1]]
            for name, style, of in ((f"{op} before", " before", old), (op, "", rows_of_op)):
                if of:
                    series.append(_line(name, of, f"s{number % 6}{style}"))
        remarks = []
        if floors := dict(sorted((float(size), row.floor) for size, row in rows if row.floor)):
            series.append(Series("floor", tuple(floors.items()), "floor"))
        for name, bound in (("ceiling", max(row.ceiling for _, row in rows)), ("line rate", _line_rate(run, rows))):
            if bound and bound <= 4 * most:
                series.append(Series(name, tuple((size, bound) for size in sizes), "limit"))
            elif bound:
                remarks.append(f"{name} {_rate(bound)}, far above")
        drawn.append((_name(group), series, remarks))
    return _cards("bandwidth", drawn, _gigabytes, "GB/s")


def _cards(
    kind: str,
    drawn: Sequence[tuple[str, Sequence[Series], Sequence[str]]],
    show: Callable[[float], str],
    unit: str,
    *,
    log: bool | None = None,
) -> list[ChartCard]:
    """Return charts over block sizes, whose values all have the same scale, so that charts can be compared.

    :param drawn: the title, the lines and the remarks of each chart.
    :param show: the name of a value on the scale.
    """
    values = [value for _, series, _ in drawn for line in series for _, value in (*line.points, *line.spread)]
    if not values:
        return []
    scale = value_axis(values, show, unit, log=log)
    cards = []
    for title, series, remarks in drawn:
        sizes = sizes_axis([size for line in series for size, _ in line.points], _size)
        cards.append(ChartCard(title, lines(sizes, scale, series, f"{kind} of {title}"), series, remarks))
    return cards


def _line(name: str, rows: Sequence[tuple[int, RowSummary]], style: str) -> Series:
    """Return the line of an operation, with its launches as dots."""
    labels = tuple(f"{name} {units.format_size(size)}: {_rate(row.bandwidth)}" for size, row in rows)
    spread = tuple((float(size), value) for size, row in rows for value in row.values if len(row.values) > 1)
    return Series(name, tuple((float(size), row.bandwidth) for size, row in rows), style, spread, labels)


def latency(run: RecordedRun) -> list[ChartCard]:
    """Return a card for each operation of each group of rows: latency percentiles of single transfers."""
    drawn: list[tuple[str, list[Series], list[str]]] = []
    for group, by_op in _groups(run).items():
        for op, rows in by_op.items():
            names = dict.fromkeys(name for _, row in rows for name in row.latencies)
            series = []
            for number, name in enumerate(names):
                points = [(float(size), row.latencies[name]) for size, row in rows if row.latencies.get(name, 0) > 0]
                if points:
                    labels = tuple(f"{name} of {_size(size)}: {time_text(seconds)}" for size, seconds in points)
                    series.append(Series(name, tuple(points), f"s{number % 6}", (), labels))
            if series:
                drawn.append((f"{_name(group)}, {op}", series, []))
    return _cards("latency", drawn, time_text, "", log=True)


def history(runs: Sequence[RecordedRun]) -> list[ChartCard]:
    """Return a card for the history of each row; rows with changes come first.

    :param runs: the runs, the oldest first.
    """
    if len(runs) < 2:
        return []
    comparable, _ = row_history.of_one_machine(runs)
    charted = sorted(
        (course for course in row_history.courses(comparable) if len(course.runs) > 1),
        key=lambda course: -len(course.steps),
    )
    cards = []
    for course in charted[:_MOST_HISTORIES]:
        values = course.values
        labels = tuple(
            f"{run.name}, {run.when:%Y-%m-%d %H:%M} UTC: {_rate(value)}"
            for run, value in zip(course.runs, values, strict=True)
        )
        points = tuple((float(place), value) for place, value in enumerate(values))
        line = Series(str(course.key), points, "s0", (), labels)
        marks = [(step.place - 0.5, f"{100 * (step.ratio - 1):+.1f} %") for step in course.steps]
        axes = _runs_axis(course.runs), value_axis(values, _gigabytes, "GB/s", log=False)
        remarks = []
        for step in course.steps:
            differences = "; ".join(str(item) for item in course.differences(step)[:3]) or "no recorded difference"
            remarks.append(f"{100 * (step.ratio - 1):+.1f} % from {course.runs[step.place].name} on ({differences})")
        cards.append(ChartCard(course.key.short, lines(*axes, [line], f"history of {course.key}", marks), [], remarks))
    return cards


def _runs_axis(runs: Sequence[RecordedRun]) -> Axis:
    """Return an axis with the dates, on which the first run of each image is named as far as there is space."""
    firsts, last_image = [], ""
    for place, run in enumerate(runs):
        if run.provenance.image.reference != last_image or not place:
            firsts.append(place)
            last_image = run.provenance.image.reference
    room = max(1, -(-len(firsts) // 4))
    names = {float(place): _tag(runs[place]) for place in firsts[::room]}
    title = f"runs, {runs[0].when:%Y-%m-%d} to {runs[-1].when:%Y-%m-%d}"
    return Axis(0.0, float(len(runs) - 1), tuple(names), lambda value: names[value], title=title)


def _tag(run: RecordedRun) -> str:
    reference = run.provenance.image.reference
    tag = reference.rpartition("/")[2].rpartition(":")[2]
    return (tag or f"{run.when:%m-%d}")[-14:]


def _line_rate(run: RecordedRun, rows: Sequence[tuple[int, RowSummary]]) -> float:
    """Return the sum of the line rates of the cards that the transports name, in bytes per second; 0: not known."""
    nics = run.provenance.host.get("nics")
    if not isinstance(nics, dict):
        return 0.0
    total = 0.0
    for name in dict.fromkeys(name.partition("/")[2] for _, row in rows for name in row.transports):
        speed = str(nics.get(name) or nics.get(f"{name}:1") or "").split()
        if len(speed) < 2 or not speed[0].replace(".", "", 1).isdecimal():
            return 0.0
        total += float(speed[0]) * (1e9 if speed[1].startswith("Gb") else 1e6) / 8
    return total


def _rate(value: float) -> str:
    return f"{units.gigabytes(value)} GB/s ({units.gigabits(value)} Gb/s)"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:g}"


def _size(value: float) -> str:
    return units.format_size(int(value))


def time_text(seconds: float) -> str:
    """Return a time with its unit and three significant digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale * 0.999:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
