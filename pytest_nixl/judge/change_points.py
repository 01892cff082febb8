# SPDX-License-Identifier: Apache-2.0
"""Find the change points in a row's history: the runs from which on its bandwidth is lastingly different.

The method works on the logarithm of each run's value. Quiet rows are searched for the partition whose penalized squares
are least (Jackson et al. 2005; PELT finds the same one), noisy rows by e-divisive means (Matteson and James 2014) with
a permutation test. A change point counts only if the medians of the two sides differ by at least 5 %, and if at least
three runs follow it.

Both methods take time proportional to the number of runs, not to its square. The first searches overlapping windows of
the history, and only the middle of each window counts, where enough runs are on both sides. E-divisive means compares
distribution functions on a grid of values instead of comparing all pairs of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

import numpy

Floats: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
Levels: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]

#: The least number of runs on each side of a change point, and the least change of the median, as a share.
FEWEST_RUNS, LEAST_CHANGE = 3, 0.05

#: A row is noisy if the standard deviation of the log value between neighbouring runs is above this.
NOISY = 0.03

#: The least standard deviation assumed: without it, the smallest step in a constant history would be a change point.
_LEAST_SPREAD = 0.002

_PERMUTATIONS, _SIGNIFICANCE = 199, 0.01

#: The most runs in one window of a quiet row, and the most values in the grid on which distributions are compared.
_WINDOW, _GRID = 512, 64

#: The most positions at which the permutation test splits a history.
_PLACES = 1000


@dataclass(frozen=True)
class Step:
    """A change point of a row's history.

    :param place: the index of the first run after the change.
    :param before: the median in bytes per second before it; ``after`` is the median after it.
    """

    place: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """The median after the change divided by the median before it."""
        return self.after / self.before


def steps(values: Sequence[float], *, seed: int = 0) -> list[Step]:
    """Return the change points of a row's history, the oldest first.

    :param values: one positive number for each run, the oldest first.
    :param seed: the seed of the permutations, so that the same history always gives the same answer.
    """
    if len(values) < 2 * FEWEST_RUNS:
        return []
    logs = [math.log(value) for value in values]
    spread = _spread(logs)
    places = _cheapest(logs, spread) if spread <= NOISY else _e_divisive(logs, seed)
    return _large(values, places)


def _spread(logs: Sequence[float]) -> float:
    """Estimate the standard deviation from the median distance of neighbours, which a single step does not increase."""
    distances = [abs(b - a) for a, b in pairwise(logs)]
    return max(_LEAST_SPREAD, median(distances) / (0.6745 * math.sqrt(2)))


def _cheapest(logs: Sequence[float], spread: float) -> list[int]:
    signal = numpy.array(_without_spikes(logs, 3 * spread))
    penalty = 5 * spread**2 * math.log(len(signal))
    places: list[int] = []
    for start, end, window_cost in _windows(len(signal)):
        steps = (start + place for place in _partition(signal[start:end], penalty))
        places += [place for place in steps if place in window_cost and place - FEWEST_RUNS >= max(places, default=0)]
    return places


def _partition(signal: Floats, penalty: float) -> list[int]:
    """Return where the parts begin, but the first, whose costs have the least sum.

    The cost of a part is the sum of squared distances from its mean, and the penalty.
    """
    count = len(signal)
    sums = numpy.concatenate(([0.0], numpy.cumsum(signal - signal.mean())))
    shares = 1 / numpy.arange(count, 0, -1)  # by the length of a part, the longest first
    least, last = numpy.full(count + 1, math.inf), numpy.zeros(count + 1, dtype=int)
    least[0] = 0.0
    for end in range(FEWEST_RUNS, count + 1):
        begins = end - FEWEST_RUNS + 1
        # The sum of all squares is the same for all partitions: what the means of the parts explain is not.
        explained = (sums[end] - sums[:begins]) ** 2 * shares[count - end : count - end + begins]
        costs = least[:begins] - explained
        last[end] = begin = int(costs.argmin())
        least[end] = costs[begin] + penalty
    ends, end = [], int(last[count])
    while end:
        ends.append(end)
        end = int(last[end])
    return ends[::-1]


def _windows(count: int) -> Iterator[tuple[int, int, range]]:
    """Yield the begin and end of each window of a history, and the positions for which it decides.

    Exactly one window decides for each position.
    """
    half, quarter = _WINDOW // 2, _WINDOW // 4
    starts = range(0, max(1, count - half), half)
    for start in starts:
        first = start == 0
        last = start == starts[-1]
        end = count if last else start + _WINDOW
        begin = max(0, count - _WINDOW) if last else start
        yield begin, end, range(0 if first else start + quarter, count if last else start + quarter + half)


def _without_spikes(logs: Sequence[float], most: float) -> list[float]:
    """Clip each value to within ``most`` of the median of the five values around it."""
    levels = []
    for place, value in enumerate(logs):
        centre = median(logs[max(0, place - 2) : place + 3])
        levels.append(min(max(value, centre - most), centre + most))
    return levels


def _e_divisive(logs: Sequence[float], seed: int) -> list[int]:
    values = numpy.array(logs)
    most = int(_SIGNIFICANCE * (_PERMUTATIONS + 1))
    random = numpy.random.default_rng(seed)
    places: list[int] = []
    waiting = [(0, len(values))]
    while waiting:
        start, end = waiting.pop()
        if end - start < 2 * FEWEST_RUNS:
            continue
        levels, widths = _levels(values[start:end])
        place, _ = _best_split(levels, widths)
        # The test splits the history, and each permutation of it, at no more than _PLACES positions.
        stride = -(-(end - start) // _PLACES)
        _, energy = _best_split(levels, widths, stride)
        # Count the orders of these values that split at least as well; the observed order is one of them. Once there
        # are more than the significance allows, further permutations cannot change the answer.
        better = 1
        for _ in range(_PERMUTATIONS):
            better += _best_split(random.permutation(levels), widths, stride)[1] >= energy
            if better > most:
                break
        else:
            places.append(start + place)
            waiting += [(start, start + place), (start + place, end)]
    return sorted(places)


def _levels(values: Floats) -> tuple[Levels, Floats]:
    """Return for each run the index of the first grid value that is not below its value, and the distances between
    grid values.
    """
    grid = numpy.unique(values)
    if len(grid) > _GRID:
        grid = numpy.unique(numpy.quantile(values, numpy.linspace(0, 1, _GRID), method="nearest"))
    return numpy.searchsorted(grid, values).astype(numpy.uint8), numpy.diff(grid)


def _best_split(levels: Levels, widths: Floats, stride: int = 1) -> tuple[int, float]:
    """Return the position that splits a history into the two parts with the largest energy distance, and that distance.

    Only positions that are multiples of ``stride`` are tried. The mean distance of two values is
    the integral of F (1 - G) + G (1 - F) over their distribution functions.
    """
    count = len(levels)
    first = -(-FEWEST_RUNS // stride) * stride
    # How many of the first runs are at most each grid value. Sums of integers along rows are the fastest.
    below = numpy.cumsum(levels <= numpy.arange(len(widths), dtype=levels.dtype)[:, None], axis=1, dtype=numpy.int32)
    total, sums = below[:, -1].astype(float), below[:, first - 1 : count - FEWEST_RUNS : stride].astype(float)
    n = numpy.arange(first, count - FEWEST_RUNS + 1, stride, dtype=float)
    m = count - n
    # The integrals of F, G, F^2, G^2 and FG.
    within, cross = numpy.stack((widths, widths * total)) @ sums
    square = widths @ numpy.square(sums, out=sums)
    f, g = within / n, (total @ widths - within) / m
    ff, gg, fg = square / n**2, ((total * total) @ widths - 2 * cross + square) / m**2, (cross - square) / (n * m)
    across = f + g - 2 * fg
    first, second = 2 * (f - ff) * n / (n - 1), 2 * (g - gg) * m / (m - 1)
    energies = n * m / count * (2 * across - first - second)
    best = int(numpy.argmax(energies))
    return int(n[best]), float(energies[best])


def _large(values: Sequence[float], places: Sequence[int]) -> list[Step]:
    """Drop the smallest weak step until no step is weak.

    A step is weak if it is too small, or if fewer than three runs on a side are nearer to that side's median.
    """
    remaining = list(places)
    while True:
        ends = [0, *remaining, len(values)]
        parts = [values[a:b] for a, b in pairwise(ends)]
        steps = [
            Step(place, median(before), median(other))
            for place, (before, other) in zip(remaining, pairwise(parts), strict=True)
        ]
        weak = [
            step for step, (before, other) in zip(steps, pairwise(parts), strict=True) if _weak(step, before, other)
        ]
        if not weak:
            return steps
        remaining.remove(min(weak, key=lambda step: abs(math.log(step.ratio))).place)


def _weak(step: Step, before: Sequence[float], after: Sequence[float]) -> bool:
    middle = math.sqrt(step.before * step.after)
    shares = [
        sum((value > middle) == (level > middle) for value in part)
        for part, level in ((before, step.before), (after, step.after))
    ]
    return abs(math.log(step.ratio)) < -math.log(1 - LEAST_CHANGE) or min(shares) < FEWEST_RUNS
