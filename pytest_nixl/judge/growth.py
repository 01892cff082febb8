# SPDX-License-Identifier: Apache-2.0
"""Whether a call becomes slower with each repeat: a robust slope with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pytest_nixl.model.figure import SECONDS
from pytest_nixl.model.verdicts import Judgement, Verdict

#: The normal quantile of the slope's interval: 99 % on both sides.
_QUANTILE = 2.576


@dataclass(frozen=True)
class Slope:
    """How much a value grows with each step.

    :param value: the median of the slopes between all pairs of points.
    :param low: the lower end of the 99 % interval; ``high`` is the upper end.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], places: Sequence[float] | None = None) -> Slope:
        """Fit a slope to values.

        :param values: at least 3 values.
        :param places: the step of each value, each larger than the one before; by default 0, 1, 2, …
        """
        count = len(values)
        steps = range(count) if places is None else places
        slopes = sorted(
            (values[second] - values[first]) / (steps[second] - steps[first])
            for first in range(count)
            for second in range(first + 1, count)
        )
        spread = _QUANTILE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)  # Kendall's, as Sen gives it
        low = slopes[max(0, math.floor((len(slopes) - spread) / 2))]
        high = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))]
        return cls(median(slopes), low, high)


#: The references on each side of one that it is smoothed with.
_NEIGHBOURS = 5
#: A call that takes at least this many times its first time at the last repeat has become slower.
SLOWER = 3.0


@dataclass(frozen=True)
class Growth:
    """How the time of a call depends on the number of the repeat.

    :param slope: seconds a repeat, by Theil and Sen; ``low`` and ``high`` are the ends of its 99 % interval.
    :param first: seconds of the first repeat, by the fitted line.
    :param repeats: the number of repeats.
    """

    slope: float
    low: float
    high: float
    first: float
    repeats: int

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]], references: Sequence[Sequence[float]]) -> Growth:
        """Fit the growth to the least time of each repeat over all rounds.

        What another process takes from a repeat of one round does not count if another round made it undisturbed. If
        the whole machine becomes slower or faster meanwhile, the references do too, by which the times are scaled.

        :param rounds: the seconds of each repeat, for each round; at least 8 repeats.
        :param references: the seconds of a computation beside each repeat that is always the same, in the same shape.
        """
        smooth = _smoothed([second for reference in references for second in reference])
        usual, count = median(smooth), len(rounds[0])
        scaled = [
            [second * usual / smooth[place * count + number] for number, second in enumerate(figures)]
            for place, figures in enumerate(rounds)
        ]
        times = [min(values) for values in zip(*scaled, strict=True)]
        slope = Slope.of(times)
        first_time = median(value - slope.value * number for number, value in enumerate(times))
        return cls(slope.value, slope.low, slope.high, max(first_time, min(times) / 2), count)

    @property
    def slower(self) -> bool:
        """Whether the call has become slower beyond doubt."""
        return self.least_factor >= SLOWER

    @property
    def least_factor(self) -> float:
        """How many times the first repeat the last one takes, at least."""
        return 1 + self.low * (self.repeats - 1) / self.first

    def __str__(self) -> str:
        ends = ", ".join(f"{1e9 * end:+.0f}" for end in (self.low, self.high))
        return (
            f"{SECONDS.show(self.first)} at first, and {1e9 * self.slope:+.0f} ns a repeat over {self.repeats} repeats "
            f"(99 % interval {ends})"
        )


def _smoothed(seconds: Sequence[float]) -> list[float]:
    """Return the median of each value and its neighbours, because a single one may have been interrupted."""
    return [median(seconds[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1]) for place in range(len(seconds))]


def judge_growth(subject: str, growth: Growth, remedy: str) -> Judgement:
    """Judge whether a call becomes slower: FAIL if its last repeat takes at least three times as long as the first.

    :param subject: the call, in words.
    :param remedy: what to do if it becomes slower.
    """
    if growth.slower:
        return Judgement(
            Verdict.FAIL,
            f"{subject} becomes slower with each repeat: {growth}; the last takes at least {growth.least_factor:.1f} "
            f"times as long as the first, and the limit is {SLOWER:g} times",
            remedy,
        )
    return Judgement(Verdict.PASS, f"{subject} does not become {SLOWER:g} times slower: {growth}")
