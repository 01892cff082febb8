# SPDX-License-Identifier: Apache-2.0
"""Decide from several launches whether a row is above its floor, and derive a floor from good runs.

The unit is a launch (a fresh pair of workers), and its value is the median over its windows. Single windows are not
used, because the windows of one launch are correlated and do not show the spread between launches.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import mean, median, stdev
from typing import TypeVar

from pytest_nixl.core import units
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.settings import MOST_LAUNCHES
from pytest_nixl.model.verdicts import Verdict

K = TypeVar("K", bound=Hashable)

FEWEST_LAUNCHES = 3

#: One launch decides if it is at least this many times the floor, or at most the floor divided by this.
FAR_FACTOR = 4.0

#: The share of the launches that must be on the verdict's side of the floor.
AGREEING_LAUNCHES = 0.75

#: Standard deviations of the log value: the least one assumed, and the one above which five launches are needed.
LEAST_SPREAD, WIDE_SPREAD = 0.002, 0.03
FEWEST_WIDE_LAUNCHES = 5


# Student's t, 99.5 % quantile, for 1 to 6 degrees of freedom, by scipy.stats.t.ppf(.995, df) of SciPy 1.17.
_T995 = (63.656741, 9.924843, 5.840909, 4.604095, 4.032143, 3.707428)

#: A learned floor is at most this share of the median of good runs, and at least this many MAD below the median.
LEARNED_SHARE, LEARNED_MADS = 0.95, 5.0


def decide_floor(
    values: Sequence[float], floor: float, *, contention: Sequence[float] = (), budget: int = MOST_LAUNCHES
) -> tuple[Verdict | None, str]:
    """Decide from the bandwidth of each launch whether a row is above its floor.

    Let y be the logarithm of a launch's value, k the number of launches, and
    h = t(.995, k - 1) * max(sd, 0.2 %) / sqrt(k). The verdict is PASS if mean(y) - h is above log(floor) and at least
    three quarters of the launches are above the floor. FAIL is the mirror image. A verdict needs 3 launches, or 5 if sd
    is above 3 %. After ``budget`` launches the verdict is INCONCLUSIVE. A single launch decides if it is at least
    4 times the floor or at most a quarter of it.

    Other processes can only make a row slower. So a launch during which they took more than 0.3 core that the row
    needed does not count for FAIL. If they took less, the process that limits the row may have lost all of it. FAIL
    therefore needs launches during which they took at most s, and which are below the floor times 1 - s by the test
    above; and three quarters of all launches must be below the floor. If no s decides, another launch is needed.

    :param values: bytes per second of each launch, 1 to 7 of them.
    :param floor: bytes per second.
    :param contention: the cores of each launch that other processes used; empty: not known, assumed to be none.
    :param budget: the most launches to measure.
    :returns: PASS, FAIL or INCONCLUSIVE, or None if another launch is needed; and the numbers of the decision, as the
        end of a sentence.
    :raises ValueError: for a value or floor that is not a finite number above zero, or not 1 to 7 values.
    """
    if not 1 <= len(values) <= MOST_LAUNCHES:
        raise ValueError(f"{len(values)} launches: expected 1 to {MOST_LAUNCHES}")
    if not all(0 < number < math.inf for number in (floor, *values)):
        raise ValueError(f"{(floor, *values)} are not all finite numbers above zero")
    verdict, description = _decide(values, floor, budget)
    if verdict is Verdict.PASS or not contention:
        return verdict, description
    launches = list(zip(values, contention, strict=True))
    for most in sorted({cores for cores in contention if cores <= DISTURBED_CORES}):
        calm = [value for value, cores in launches if cores <= most]
        if len(calm) < min(FEWEST_LAUNCHES, len(values)) or _below(values, floor) < AGREEING_LAUNCHES * len(values):
            continue
        if _decide(calm, floor * (1 - most), budget)[0] is Verdict.FAIL:
            calm_description = _decide(calm, floor, budget)[1]
            left_out = f"without {len(values) - len(calm)} that other processes slowed: " if calm != [*values] else ""
            return Verdict.FAIL, f"{left_out}{calm_description}"
    busy = sum(cores > DISTURBED_CORES for cores in contention)
    if not busy and verdict is not Verdict.FAIL:
        return verdict, description
    took = f"other processes used up to {max(contention):.2g} of this row's cores"
    disturbed = f"; in {busy} of {len(values)} launches {took}" if busy else f", but {took}, which may be why"
    return _undecided(len(values), f"{description.removesuffix(_LAST)}{disturbed}", budget)


def _below(values: Sequence[float], floor: float) -> int:
    return sum(value < floor for value in values)


def _decide(values: Sequence[float], floor: float, budget: int) -> tuple[Verdict | None, str]:
    k = len(values)
    if k == 1 and (values[0] >= FAR_FACTOR * floor or values[0] <= floor / FAR_FACTOR):
        verdict = Verdict.PASS if values[0] > floor else Verdict.FAIL
        factor = values[0] / floor if verdict is Verdict.PASS else floor / values[0]
        side = "above" if verdict is Verdict.PASS else "below"
        return verdict, f"one launch decides: it is {side} the floor by a factor of {factor:.3g}"
    if k < FEWEST_LAUNCHES:
        return _undecided(k, f"{k} of the {FEWEST_LAUNCHES} launches needed at least", budget)
    low, high, spread = interval(values)
    description = f"{k} launches, spread {_percent(spread)}, between {_rate(low)} and {_rate(high)}"
    if spread > WIDE_SPREAD and k < FEWEST_WIDE_LAUNCHES:
        return _undecided(k, f"{description}: a spread over 3 % needs {FEWEST_WIDE_LAUNCHES} launches", budget)
    above = sum(value > floor for value in values)
    if low > floor and above >= AGREEING_LAUNCHES * k:
        return Verdict.PASS, f"{description}: above the floor"
    if high < floor and _below(values, floor) >= AGREEING_LAUNCHES * k:
        return Verdict.FAIL, f"{description}: below the floor"
    return _undecided(k, f"{description}: {above} of {k} are above the floor, which decides nothing", budget)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 99 % confidence interval of a row's bandwidth, and the standard deviation of the log value.

    :param values: bytes per second of each launch, 2 to 7 of them.
    """
    logs = [math.log(value) for value in values]
    centre, spread = mean(logs), stdev(logs)
    half = _T995[len(logs) - 2] * max(spread, LEAST_SPREAD) / math.sqrt(len(logs))
    return math.exp(centre - half), math.exp(centre + half), spread


#: What a row says that has made all of its launches.
_LAST = "; no further launch is made"


def _undecided(k: int, description: str, budget: int) -> tuple[Verdict | None, str]:
    return (None, description) if k < min(budget, MOST_LAUNCHES) else (Verdict.INCONCLUSIVE, f"{description}{_LAST}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _rate(value: float) -> str:
    return f"{units.gigabytes(value)} GB/s"


@dataclass(frozen=True)
class LearnedFloor:
    """The floor of a row by good runs.

    :param floor: bytes per second; None: fewer than three runs agree, or their spread leaves no floor above zero.
    :param median: bytes per second: the median of the runs without outliers.
    :param mad: bytes per second: their median absolute deviation.
    :param runs: the number of runs, with outliers.
    :param outliers: the indices of the runs that are far from the others and were left out.
    """

    floor: float | None
    median: float
    mad: float
    runs: int
    outliers: tuple[int, ...]


def learn(values_by_key: Mapping[K, Sequence[float]]) -> dict[K, LearnedFloor]:
    """Return the floor of each row by its runs: min(0.95 median, median - 5 MAD).

    A run is an outlier, and is left out, if its distance from the median of all is more than 5 % of the median and more
    than 5 MAD.

    :param values_by_key: for each row, bytes per second of each run.
    :raises ValueError: for a row without a run, or a value that is not a finite number above zero.
    """
    return {key: _learn(key, values) for key, values in values_by_key.items()}


def _learn(key: object, values: Sequence[float]) -> LearnedFloor:
    if not values:
        raise ValueError(f"{key}: no run")
    if not all(0 < value < math.inf for value in values):
        raise ValueError(f"{key}: {tuple(values)} are not all finite numbers above zero")
    centre = median(values)
    near = [abs(value - centre) <= _margin(centre, _mad(values)) for value in values]
    typical = list(compress(values, near))
    centre, mad = median(typical), _mad(typical)
    floor = centre - _margin(centre, mad)
    return LearnedFloor(
        floor=floor if len(typical) >= FEWEST_LAUNCHES and floor > 0 else None,
        median=centre,
        mad=mad,
        runs=len(values),
        outliers=tuple(place for place, good in enumerate(near) if not good),
    )


def _margin(centre: float, mad: float) -> float:
    return max((1 - LEARNED_SHARE) * centre, LEARNED_MADS * mad)


def _mad(values: Sequence[float]) -> float:
    centre = median(values)
    return median(abs(value - centre) for value in values)
