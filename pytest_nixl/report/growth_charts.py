# SPDX-License-Identifier: Apache-2.0
"""The charts of the endurance checks: what a worker held after each number of cycles, with the slope."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from pytest_nixl.judge.slope import Slope
from pytest_nixl.model.figure import BYTES, UNITS, Figure
from pytest_nixl.model.results import Result
from pytest_nixl.report.charts import ChartCard
from pytest_nixl.report.svg import Axis, Point, Series, lines, nice_step

_GROWTH = "growth-"
#: The least number of samples of a line.
_FEWEST = 3
_TICKS = 4
#: The least step of an axis; a record may have any values.
_LEAST_STEP = 1e-6


def growth(results: Iterable[Result]) -> list[ChartCard]:
    """Return two cards for each cycle that was repeated: the bytes, and the numbers of descriptors, threads and so on.

    What never changed is only named.
    """
    cards = []
    for result in results:
        groups: dict[str, list[Figure]] = {}
        for figure in result.measured:
            if figure.name.startswith(_GROWTH) and len(figure.samples) >= _FEWEST and figure.unit in UNITS:
                groups.setdefault(figure.unit, []).append(figure)
        for unit, figures in groups.items():
            what = "bytes" if unit == BYTES.name else "numbers"
            cards.append(_card(f"{figures[0].labels_text}: {what}", figures))
    return cards


def _card(title: str, figures: Sequence[Figure]) -> ChartCard:
    series: list[Series] = []
    still = []
    for figure in figures:
        name = figure.name.removeprefix(_GROWTH)
        first = figure.samples[0][1]
        points = tuple((place, value - first) for place, value in figure.samples)
        if not any(value for _, value in points):
            still.append(name)
            continue
        style = f"s{len(series) // 2 % 6}"
        slope = Slope.of([value for _, value in points], [place for place, _ in points])
        low, high = (_signed(figure, end) for end in (slope.low, slope.high))
        series.append(Series(name, points, style))
        words = f"{_signed(figure, slope.value)} with each cycle (99 % interval {low} to {high})"
        series.append(Series(f"{name}: {words}", _line(points, slope.value), f"{style} slope"))
    places = [place for place, _ in figures[0].samples]
    values = [value for one in series for _, value in one.points]
    y = _axis([0.0, *values], lambda value: _tick(figures[0], value), "more than at first")
    step = nice_step(places[-1] / _TICKS)
    ticks = tuple(step * number for number in range(math.ceil(places[0] / step), math.floor(places[-1] / step) + 1))
    x = Axis(places[0], places[-1], ticks, lambda value: f"{value:g}", title="cycles")
    remarks = [f"unchanged: {', '.join(still)}"] if still else []
    return ChartCard(title, lines(x, y, series, f"growth of {title}"), series, remarks)


def _line(points: Sequence[Point], slope: float) -> tuple[Point, ...]:
    """Return the ends of the line of a slope through the middle of points."""
    base = median(value - slope * place for place, value in points)
    return tuple((place, base + slope * place) for place in (points[0][0], points[-1][0]))


def _tick(figure: Figure, value: float) -> str:
    """Return a number of an axis: with its unit if there is one."""
    return _signed(figure, value) if figure.unit == BYTES.name or not value else f"{value:+g}"


def _signed(figure: Figure, value: float) -> str:
    if not value:
        return "0"
    return f"{'-' if value < 0 else '+'}{UNITS[figure.unit].show(abs(value))}"


def _axis(values: Sequence[float], show: Callable[[float], str], title: str) -> Axis:
    """Return a linear axis whose ends are the first ticks beyond the values, which may be below zero."""
    least, most = min(values), max(values)
    step = nice_step(max((most - least) / _TICKS, _LEAST_STEP)) if most > least else 1.0
    low, high = math.floor(least / step), math.ceil(most / step)
    if low == high:
        high += 1
    return Axis(low * step, high * step, tuple(number * step for number in range(low, high + 1)), show, title=title)
