# SPDX-License-Identifier: Apache-2.0
"""The charts of a report as inline SVG: bandwidth and latency over block sizes, and the history of each row.

Libraries were weighed by what each adds to a report, which is one file: uPlot 53 KB, Observable Plot with D3
490 KB, Vega-Lite with Vega 772 KB. All of them draw by script: the page would be empty in a mail or an
artifact viewer that runs none. uPlot draws on a canvas, which paper prints as a bitmap and which takes no colours from
the style sheet, so that dark and print need a second drawing. This module adds nothing but the points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from pytest_nixl.core import units
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.store.record_reader import RecordedRun

if TYPE_CHECKING:
    from pytest_nixl.report import history as row_history
else:  # it imports numpy
    row_history = lazy_module("pytest_nixl.report.history")


#: Size of a drawing in points; the page scales it to its width.
WIDTH, HEIGHT = 520.0, 300.0
_LEFT_MARGIN, _RIGHT, _TOP, _BOTTOM = 68.0, 14.0, 14.0, 46.0
#: The share of the x axis from which on a name is aligned with the right edge.
_LAST_SHARE = 0.93

Point = tuple[float, float]

#: Size of the drawing of a change in points, and the space on each side for half of a name of its axis.
_CHANGE_WIDTH, _CHANGE_HEIGHT, _CHANGE_SIDE = 240.0, 24.0, 26.0
#: The most history charts in a report. Rows with changes come first.
_MOST_HISTORIES = 200


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    :param style: a class of the style sheet: ``s0`` to ``s5``, ``floor``, ``limit``.
    :param spread: further measured values at each x, drawn as small dots.
    :param labels: the tooltip of each point; empty: no tooltips.
    """

    name: str
    points: tuple[Point, ...]
    style: str
    spread: tuple[Point, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Axis:
    """A scale from values to points.

    :param ticks: the values that are named on it.
    :param show: turns a value into its name.
    :param log: whether the scale is logarithmic.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    show: Callable[[float], str]
    log: bool = False
    title: str = ""

    def share(self, value: float) -> float:
        """Return the position of a value between the ends, from 0 to 1."""
        if self.low == self.high:
            return 0.5
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def sizes_axis(values: Sequence[float], show: Callable[[float], str]) -> Axis:
    """Return an axis of block sizes with at most six names."""
    ordered = sorted(set(values))
    step = max(1, math.ceil(len(ordered) / 6))
    return Axis(ordered[0], ordered[-1], tuple(ordered[::step]), show, log=True, title="block")


def value_axis(values: Sequence[float], show: Callable[[float], str], title: str, *, log: bool | None = None) -> Axis:
    """Return an axis for values above zero. It starts at zero, or is logarithmic if the values differ thirtyfold.

    :param log: whether it is logarithmic; None: by the values.
    """
    least, most = min(values), max(values)
    if log or (log is None and most > 30 * least):
        low, high = 10 ** math.floor(math.log10(least)), 10 ** math.ceil(math.log10(most) + 1e-9)
        ticks = tuple(low * 10**power for power in range(round(math.log10(high / low)) + 1))
        return Axis(low, high, ticks[:: max(1, len(ticks) // 6)], show, log=True, title=title)
    step = nice_step(most / 4)
    count = math.ceil(most * 1.04 / step)
    return Axis(0.0, count * step, tuple(number * step for number in range(count + 1)), show, title=title)


def nice_step(value: float) -> float:
    """Return a round number that is at least as large: 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * 0.999)


def lines(x: Axis, y: Axis, series: Sequence[Series], label: str, marks: Sequence[tuple[float, str]] = ()) -> Markup:
    """Draw series over two axes.

    :param label: what the chart shows, for screen readers.
    :param marks: values of the x axis at which a vertical line is drawn, each with its tooltip.
    """
    parts = [*_grid(x, y)]
    for place, text in marks:
        at = _x(x, place)
        title = f"<title>{escape(text)}</title>"
        parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">{title}</line>')
    for curve in series:
        parts += [
            f'<circle class="dot {curve.style}" cx="{_x(x, a)}" cy="{_y(y, b)}" r="2.6">'
            f"<title>{escape(curve.name)}, one launch: {units.gigabytes(b)} GB/s</title></circle>"
            for a, b in curve.spread
        ]
        path = " ".join(f"{_x(x, a)},{_y(y, b)}" for a, b in curve.points)
        parts.append(f'<polyline class="line {curve.style}" points="{path}"/>')
        labels = curve.labels or ("",) * len(curve.points)
        if curve.labels or len(curve.points) == 1:
            parts += [
                f'<circle class="point {curve.style}" cx="{_x(x, a)}" cy="{_y(y, b)}" r="4">'
                f"<title>{escape(text)}</title></circle>"
                for (a, b), text in zip(curve.points, labels, strict=True)
            ]
    return _svg(parts, label)


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for value in y.ticks:
        at = _y(y, value)
        parts.append(f'<line class="grid" x1="{_LEFT_MARGIN}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text class="tick" text-anchor="end" x="{_LEFT_MARGIN - 8}" y="{at + 4.5}">{escape(y.show(value))}</text>'
        )
    for value in x.ticks:
        at = _x(x, value)
        parts.append(
            f'<line class="tickmark" x1="{at}" x2="{at}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM + 5}"/>'
        )
        # Half of the last name would be outside the drawing.
        anchor, place = ("end", WIDTH - 2) if x.share(value) > _LAST_SHARE else ("middle", at)
        text = escape(x.show(value))
        parts.append(f'<text class="tick" text-anchor="{anchor}" x="{place}" y="{HEIGHT - _BOTTOM + 21}">{text}</text>')
    base = HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT_MARGIN}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    parts.append(
        f'<text class="title" text-anchor="end" x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}">{escape(x.title)}</text>'
    )
    parts.append(f'<text class="title" x="4" y="{HEIGHT - 6}">{escape(y.title)}</text>')
    return parts


def _x(axis: Axis, value: float) -> float:
    return round(_LEFT_MARGIN + axis.share(value) * (WIDTH - _LEFT_MARGIN - _RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - _BOTTOM - axis.share(value) * (HEIGHT - _TOP - _BOTTOM), 1)


def _svg(parts: Sequence[str], label: str, width: float = WIDTH, height: float = HEIGHT) -> Markup:
    inner = "".join(parts)
    return Markup(f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{inner}</svg>')


def changes_axis(shares: Sequence[float]) -> Axis:
    """Return an axis of changes in percent that holds every change, of a gain up to 100 %.

    :param shares: changes: 0.05 is a gain of 5 %.
    """
    low, high = min(-0.01, *shares), min(1.0, max(0.01, *shares))
    step = nice_step(100 * (high - low) / 5)
    first, last = math.floor(100 * low / step), math.ceil(100 * high / step)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, lambda value: f"{value:+g} %" if value else "0")


def _change_x(axis: Axis, share: float) -> float:
    inner = max(0.0, min(1.0, axis.share(100 * share)))
    return round(_CHANGE_SIDE + inner * (_CHANGE_WIDTH - 2 * _CHANGE_SIDE), 1)


def change_scale(axis: Axis) -> Markup:
    """Draw the axis of the changes of a table's rows, for its heading."""
    every, zero = math.ceil(len(axis.ticks) / 5), axis.ticks.index(0)
    shown = [value for place, value in enumerate(axis.ticks) if (place - zero) % every == 0]
    parts = [
        f'<text class="tick" text-anchor="middle" x="{_change_x(axis, value / 100)}" y="17">'
        f"{escape(axis.show(value))}</text>"
        for value in shown
    ]
    return _svg(parts, f"axis from {axis.show(axis.low)} to {axis.show(axis.high)}", _CHANGE_WIDTH, _CHANGE_HEIGHT)


def change_bar(
    axis: Axis, ratio: float, interval: tuple[float, float] | None, margin: float, style: str, label: str
) -> Markup:
    """Draw a change and its interval around the zero line, with the band of changes that count as unchanged.

    :param axis: the scale of all rows of the table.
    :param ratio: the bandwidth now divided by the bandwidth before.
    :param margin: the loss up to which a row is unchanged: 0.05 is 5 %.
    :param label: the change as text.
    """
    middle = _CHANGE_HEIGHT / 2

    def at(ratio: float) -> float:
        return _change_x(axis, ratio - 1)

    low, high = at(1 - margin), at(1 / (1 - margin))
    parts = [f'<rect class="band" x="{low}" y="2" width="{round(high - low, 1)}" height="{_CHANGE_HEIGHT - 4}"/>']
    for value in axis.ticks:
        x, name = _change_x(axis, value / 100), "grid" if value else "axis"
        parts.append(f'<line class="{name}" x1="{x}" x2="{x}" y1="0" y2="{_CHANGE_HEIGHT:g}"/>')
    if interval is not None:
        start, other = at(interval[0]), at(interval[1])
        parts.append(f'<line class="interval {style}" x1="{start}" x2="{other}" y1="{middle}" y2="{middle}"/>')
    parts.append(f'<circle class="point {style}" cx="{at(ratio)}" cy="{middle}" r="4.5"/>')
    return _svg(parts, label, _CHANGE_WIDTH, _CHANGE_HEIGHT)


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
