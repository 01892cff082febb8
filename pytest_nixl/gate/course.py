# SPDX-License-Identifier: Apache-2.0
"""A row's course over runs: where its bandwidth changed and stayed changed.

On the log of each run's value. Quiet rows by PELT (Killick, Fearnhead and Eckley 2012, as the library ruptures has it),
noisy ones by e-divisive means (Matteson and James 2014) with a permutation test. What either finds counts only where
the medians on both sides differ by 5 %, and where three runs came after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

#: Runs on each side of a change, at least; the change of a median that counts.
FEWEST_RUNS, LEAST_CHANGE = 3, 0.05

#: Standard deviation of the log value between neighbouring runs: above it a row is noisy.
NOISY = 0.03

#: No row is quieter than this: of a constant course every step would be one.
_LEAST_SPREAD = 0.002

_PERMUTATIONS, _SIGNIFICANCE = 199, 0.01


@dataclass(frozen=True)
class Step:
    """A change of a row's course: the place of the first run after it, and the medians on both sides."""

    place: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """The median after by the median before."""
        return self.after / self.before


def steps(values: Sequence[float], *, seed: int = 0) -> list[Step]:
    """Find where a course changed, the oldest first. ``values`` are of one row, a positive number for each run.

    :param seed: of the permutations, so that one course has one answer.
    """
    if len(values) < 2 * FEWEST_RUNS:
        return []
    logs = [math.log(value) for value in values]
    spread = _spread(logs)
    places = _pelt(logs, spread) if spread <= NOISY else _e_divisive(logs, seed)
    return _large(values, places)


def _spread(logs: Sequence[float]) -> float:
    """The standard deviation as neighbours tell it, which a step does not widen: by the median of their distances."""
    distances = [abs(b - a) for a, b in pairwise(logs)]
    return max(_LEAST_SPREAD, median(distances) / (0.6745 * math.sqrt(2)))


def _pelt(logs: Sequence[float], spread: float) -> list[int]:
    import numpy
    import ruptures

    signal = numpy.array(_without_spikes(logs, 3 * spread))
    penalty = 5 * spread**2 * math.log(len(signal))
    found = ruptures.Pelt(model="l2", min_size=FEWEST_RUNS, jump=1).fit(signal).predict(pen=penalty)
    return [int(place) for place in found[:-1]]


def _without_spikes(logs: Sequence[float], most: float) -> list[float]:
    """Draw in each value that is further than ``most`` from the median of the five around it."""
    found = []
    for place, value in enumerate(logs):
        centre = median(logs[max(0, place - 2) : place + 3])
        found.append(min(max(value, centre - most), centre + most))
    return found


def _e_divisive(logs: Sequence[float], seed: int) -> list[int]:
    import numpy

    values = numpy.array(logs)
    distances = numpy.abs(values[:, None] - values[None, :])
    random = numpy.random.default_rng(seed)
    found: list[int] = []
    waiting = [(0, len(values))]
    while waiting:
        start, end = waiting.pop()
        inner = distances[start:end, start:end]
        place, energy = _best_split(inner)
        if place is None:
            continue
        # How many orders of the same values split as well: the one that was seen is among them.
        better = 1
        for _ in range(_PERMUTATIONS):
            order = random.permutation(end - start)
            better += _best_split(inner[numpy.ix_(order, order)])[1] >= energy
        if better / (_PERMUTATIONS + 1) <= _SIGNIFICANCE:
            found.append(start + place)
            waiting += [(start, start + place), (start + place, end)]
    return sorted(found)


def _best_split(distances: object) -> tuple[int | None, float]:
    """Return where two parts of a course are furthest apart by their energy distance, and how far that is."""
    import numpy

    d = numpy.asarray(distances)
    count = len(d)
    best: tuple[int | None, float] = (None, -math.inf)
    for place in range(FEWEST_RUNS, count - FEWEST_RUNS + 1):
        n, m = place, count - place
        across = d[:n, n:].mean()
        first, second = d[:n, :n].sum() / (n * (n - 1)), d[n:, n:].sum() / (m * (m - 1))
        energy = n * m / count * float(2 * across - first - second)
        if energy > best[1]:
            best = (place, energy)
    return best


def _large(values: Sequence[float], places: Sequence[int]) -> list[Step]:
    """Drop the smallest step again and again, until each is large enough and three runs on both sides are its own."""
    kept = list(places)
    while True:
        ends = [0, *kept, len(values)]
        parts = [values[a:b] for a, b in pairwise(ends)]
        found = [
            Step(place, median(one), median(other)) for place, (one, other) in zip(kept, pairwise(parts), strict=True)
        ]
        weak = [step for step, (one, other) in zip(found, pairwise(parts), strict=True) if _weak(step, one, other)]
        if not weak:
            return found
        kept.remove(min(weak, key=lambda step: abs(math.log(step.ratio))).place)


def _weak(step: Step, before: Sequence[float], after: Sequence[float]) -> bool:
    middle = math.sqrt(step.before * step.after)
    own = [sum((value > middle) == (level > middle) for value in part)
           for part, level in ((before, step.before), (after, step.after))]  # fmt: skip
    return abs(math.log(step.ratio)) < -math.log(1 - LEAST_CHANGE) or min(own) < FEWEST_RUNS
