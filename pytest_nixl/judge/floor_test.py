# SPDX-License-Identifier: Apache-2.0
"""What several launches of a row say together: is it above its floor, and what floor do good runs give?

A launch, with a new pair of workers, is the unit: its value is the median over its windows. Windows of one launch are
correlated, and say nothing of the spread between launches.
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
from pytest_nixl.model.verdicts import Verdict

K = TypeVar("K", bound=Hashable)

FEWEST_LAUNCHES, MOST_LAUNCHES = 3, 7

#: One launch decides where it is this many times the floor, or this part of it: no row is so far off by chance.
FAR = 4.0

#: Of the launches this share must be on the side of the verdict.
AGREEING_LAUNCHES = 0.75

#: Standard deviations of the log value: no spread is taken for less than the first; above the second, five launches.
LEAST_SPREAD, WIDE_SPREAD = 0.002, 0.03
FEWEST_WIDE_LAUNCHES = 5


# Student's t, 99.5 % quantile, for 1 to 6 degrees of freedom, by scipy.stats.t.ppf(.995, df) of SciPy 1.17.
_T995 = (63.656741, 9.924843, 5.840909, 4.604095, 4.032143, 3.707428)

#: A floor from good runs is at most this part of their median, and this many MAD below it.
LEARNED_SHARE, LEARNED_MADS = 0.95, 5.0


@dataclass(frozen=True)
class FloorDecision:
    """What launches say of a floor.

    :param verdict: PASS, FAIL or INCONCLUSIVE; None: not yet, another launch is needed.
    :param reason: one sentence's end: ``mean 1.2 GB/s ...``.
    :param launches: how many there were.
    :param interval: bytes per second between which the row's value is, with 99 % confidence; None: one launch has none.
    """

    verdict: Verdict | None
    reason: str
    launches: int
    interval: tuple[float, float] | None = None


def decide_floor(
    values: Sequence[float], floor: float, *, others: Sequence[float] = (), budget: int = MOST_LAUNCHES
) -> FloorDecision:
    """Decide from what each launch delivered whether the row is above ``floor``; all are bytes per second.

    y is the log of a value and h = t(.995, k - 1) * max(sd, 0.2 %) / sqrt(k). PASS if mean - h is above the floor's log
    and at least three quarters of the launches are above it; FAIL is its mirror. From 3 launches on; from 5 on where sd
    is over 3 %; after ``budget`` launches INCONCLUSIVE. A single launch decides where it is 4 times the floor or a
    quarter of it.

    Other processes make a row slower, and never faster than it is: a launch beside which they took more than 0.3 of a
    core does not count for FAIL. Where the other launches do not decide that alone, more are needed.

    :param others: cores that other processes took of those that each launch needed; empty: not known, taken for none.
    :raises ValueError: for a value or floor that is not a number above zero, no value, or more than 7.
    """
    if not 1 <= len(values) <= MOST_LAUNCHES:
        raise ValueError(f"{len(values)} launches: expected 1 to {MOST_LAUNCHES}")
    if not all(0 < number < math.inf for number in (floor, *values)):
        raise ValueError(f"{(floor, *values)} are not all finite numbers above zero")
    decision = _decide(values, floor, budget)
    if decision.verdict is Verdict.PASS or not others or max(others) <= DISTURBED_CORES:
        return decision
    quiet = [value for value, cores in zip(values, others, strict=True) if cores <= DISTURBED_CORES]
    alone = _decide(quiet, floor, budget) if quiet else None
    if alone is not None and alone.verdict is Verdict.FAIL:
        return alone
    busy = len(values) - len(quiet)
    took = f"others took up to {max(others):.1f} of the cores that the row needs"
    words = f"{decision.reason}, but beside {busy} of {len(values)} {took}"
    return _undecided(len(values), words, budget, decision.interval)


def _decide(values: Sequence[float], floor: float, budget: int) -> FloorDecision:
    k = len(values)
    if k == 1 and (values[0] >= FAR * floor or values[0] <= floor / FAR):
        verdict = Verdict.PASS if values[0] > floor else Verdict.FAIL
        factor = values[0] / floor if verdict is Verdict.PASS else floor / values[0]
        side = "above" if verdict is Verdict.PASS else "below"
        return FloorDecision(verdict, f"one launch is enough: it is {factor:.3g} times {side} the floor", k)
    if k < FEWEST_LAUNCHES:
        return _undecided(k, f"{k} of at least {FEWEST_LAUNCHES} launches", budget)
    logs = [math.log(value) for value in values]
    centre, spread = mean(logs), stdev(logs)
    half = _T995[k - 2] * max(spread, LEAST_SPREAD) / math.sqrt(k)
    interval = (math.exp(centre - half), math.exp(centre + half))
    words = f"{k} launches, spread {100 * spread:.2g} %, between {_rate(interval[0])} and {_rate(interval[1])}"
    if spread > WIDE_SPREAD and k < FEWEST_WIDE_LAUNCHES:
        return _undecided(k, f"{words}: over 3 % it takes {FEWEST_WIDE_LAUNCHES}", budget, interval)
    above = sum(value > floor for value in values)
    if interval[0] > floor and above >= AGREEING_LAUNCHES * k:
        return FloorDecision(Verdict.PASS, f"{words}: above the floor", k, interval)
    if interval[1] < floor and sum(value < floor for value in values) >= AGREEING_LAUNCHES * k:
        return FloorDecision(Verdict.FAIL, f"{words}: below the floor", k, interval)
    return _undecided(k, f"{words}, and the floor is among them, {above} launches above it", budget, interval)


def _undecided(k: int, words: str, budget: int, interval: tuple[float, float] | None = None) -> FloorDecision:
    if k < min(budget, MOST_LAUNCHES):
        return FloorDecision(None, words, k, interval)
    return FloorDecision(Verdict.INCONCLUSIVE, f"{words}; no launch is left", k, interval)


def _rate(value: float) -> str:
    return f"{units.gigabytes(value)} GB/s"


@dataclass(frozen=True)
class LearnedFloor:
    """What good runs of a row give.

    :param floor: bytes per second; None: fewer than three runs agree, or they scatter so that no floor is left.
    :param median: of the runs that are no outliers; ``mad`` is their median absolute deviation.
    :param outliers: the runs, by their place from 0, that are far from the others and were left out.
    """

    floor: float | None
    median: float
    mad: float
    runs: int
    outliers: tuple[int, ...]


def learn(values_by_key: Mapping[K, Sequence[float]]) -> dict[K, LearnedFloor]:
    """Return for each row what floor its runs give: min(0.95 median, median - 5 MAD); values are bytes per second.

    A run that is further from the median of all than both 5 % of it and 5 MAD is an outlier: named and left out.

    :raises ValueError: for a row with no run, or a value that is not a number above zero.
    """
    return {key: _learn(key, values) for key, values in values_by_key.items()}


def _learn(key: object, values: Sequence[float]) -> LearnedFloor:
    if not values:
        raise ValueError(f"{key}: no run")
    if not all(0 < value < math.inf for value in values):
        raise ValueError(f"{key}: {tuple(values)} are not all finite numbers above zero")
    centre = median(values)
    near = [abs(value - centre) <= _margin(centre, _mad(values)) for value in values]
    kept = list(compress(values, near))
    centre, mad = median(kept), _mad(kept)
    floor = centre - _margin(centre, mad)
    return LearnedFloor(
        floor=floor if len(kept) >= FEWEST_LAUNCHES and floor > 0 else None,
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
