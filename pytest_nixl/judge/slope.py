# SPDX-License-Identifier: Apache-2.0
"""The slope of a series by Theil and Sen, which single outliers do not move, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

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
