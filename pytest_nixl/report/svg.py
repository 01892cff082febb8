# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG: lines over block sizes or runs, and bars of change. The style sheet has the colours.

Libraries were weighed by what each adds to a report, which is one file: uPlot 53 KB, Observable Plot with D3
490 KB, Vega-Lite with Vega 772 KB. All of them draw by script: the page would be empty in a mail or an
artifact viewer that runs none. uPlot draws on a canvas, which paper prints as a bitmap and which takes no colours from
the style sheet, so that dark and print need a second drawing. This module adds nothing but the points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from pytest_nixl.core import units

#: Size of a drawing in points; the page scales it to its width.
WIDTH, HEIGHT = 520.0, 300.0
_LEFT_MARGIN, _RIGHT, _TOP, _BOTTOM = 68.0, 14.0, 14.0, 46.0
#: The share of the x axis from which on a name is aligned with the right edge.
_LAST_SHARE = 0.93

Point = tuple[float, float]


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


#: Size of the drawing of a change in points, and the space on each side for half of a name of its axis.
_CHANGE_WIDTH, _CHANGE_HEIGHT, _CHANGE_SIDE = 240.0, 24.0, 26.0


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
