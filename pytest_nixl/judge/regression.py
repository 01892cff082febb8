# SPDX-License-Identifier: Apache-2.0
"""Decide by statistics whether a run is slower than another one. The unit is a launch.

A row is REGRESSED if the median of its launches fell by at least the margin and an exact one-sided test confirms it. It
is UNCHANGED if the Hodges-Lehmann interval of the ratio is within the margin. Otherwise it is INCONCLUSIVE.

For a single row the test is Mann and Whitney's. For several rows, and for all of them pooled, it is Westfall and
Young's: the launches of all rows are permuted together, and the loss of a row is compared with the largest loss of any
row in each permutation. A run without a loss is therefore called REGRESSED at most once in a hundred times, whatever
the number of its rows and the dependence between them, and a loss in a single row is still found.

That holds for two images that were measured in turn. Two runs of different times have more than their images between
them: what all rows of one run share, such as the load of its host. :func:`of_two_times` takes away what that may have
made.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.judge.floors import LEAST_SPREAD
from pytest_nixl.model.verdicts import Verdict

if TYPE_CHECKING:
    import numpy as np
    from scipy import stats
else:  # only a run that is compared needs them, and only the extra compare installs scipy
    np = lazy_module("numpy")
    stats = lazy_module("scipy.stats")

#: What identifies a row.
Key = TypeVar("Key", bound=Hashable)

#: The largest probability that a run without a loss is called REGRESSED.
FALSE_ALARMS = 0.01

#: The largest p that proves a change. A run may test twice, so each test has half of the probability.
PROOF = FALSE_ALARMS / 2

#: Two-sided confidence of an interval.
CONFIDENCE = 0.90


@dataclass(frozen=True)
class Effect:
    """The difference between two sets of launches.

    :param verdict: REGRESSED, IMPROVED, UNCHANGED or INCONCLUSIVE.
    :param ratio: the median now divided by the median before: 0.9 is a loss of 10 %.
    :param interval: the Hodges-Lehmann interval of that ratio with 90 % confidence; None: too few launches.
    :param p: the probability that launches without a change differ as much in the direction of the ratio.
    :param before: the number of launches before; ``now`` is the number now.
    """

    verdict: Verdict
    ratio: float
    interval: tuple[float, float] | None
    p: float
    before: int
    now: int

    @property
    def text(self) -> str:
        """The effect as text: ``-10.2 % (between -10.9 % and -9.6 %), 5 launches against 5, p = 0.004``."""
        between = ""
        if self.interval is not None:
            between = f" (between {change(self.interval[0])} and {change(self.interval[1])})"
        return f"{change(self.ratio)}{between}, {self.now} launches against {self.before}, p = {self.p:.2g}"

    @property
    def unprovable(self) -> bool:
        """Whether these are too few launches to prove any change, however large it is."""
        return least_p(self.before, self.now) > PROOF


def compare_launches(before: Sequence[float], now: Sequence[float], margin: float, *, p: float | None = None) -> Effect:
    """Compare the launches of a row with those of another run.

    :param before: bytes per second of each launch of the baseline; ``now`` of this run.
    :param margin: the loss up to which a row is unchanged: 0.05 is 5 %.
    :param p: the p of a test of this row among others; None: test this row alone.
    :raises ValueError: for a side without a launch, or a value that is not a finite number above zero.
    """
    if not before or not now or not all(0 < value < math.inf for value in (*before, *now)):
        raise ValueError(f"{tuple(before)} and {tuple(now)} are not launches with finite values above zero")
    ratio = median(now) / median(before)
    if p is None:
        p = _p_value(before, now, "less" if ratio < 1 else "greater")
    interval = _interval(before, now)
    verdict = Verdict.INCONCLUSIVE
    if p <= PROOF and ratio <= 1 - margin:
        verdict = Verdict.REGRESSED
    elif p <= PROOF and ratio >= 1 / (1 - margin):
        verdict = Verdict.IMPROVED
    elif interval is not None and 1 - margin <= interval[0] and interval[1] <= 1 / (1 - margin):
        verdict = Verdict.UNCHANGED
    return Effect(verdict, ratio, interval, p, len(before), len(now))


@dataclass(frozen=True)
class RegressionTest(Generic[Key]):
    """The comparison of two runs.

    :param pooled: the effect over the rows that both runs have; None: they have no row in common.
    :param rows: the effect on each row, by row key.
    :param suspects: the keys of rows that would be REGRESSED if each were the only row, but not among all rows, or if
        no other process had run during their launches.
    """

    pooled: Effect | None
    rows: Mapping[Key, Effect]
    suspects: frozenset[Key] = frozenset()

    @property
    def verdict(self) -> Verdict:
        """REGRESSED if the pool or a row is; else INCONCLUSIVE if a row is suspect; else the verdict of the pool."""
        if self.pooled is None:
            return Verdict.MISSING
        if any(effect.verdict is Verdict.REGRESSED for effect in self.rows.values()):
            return Verdict.REGRESSED
        return Verdict.INCONCLUSIVE if self.suspects else self.pooled.verdict


def compare_rows(
    before: Mapping[Key, Sequence[float]], now: Mapping[Key, Sequence[float]], margin: float
) -> RegressionTest[Key]:
    """Compare the rows that both runs have.

    :param before: bytes per second of each launch of the baseline, by row key; ``now`` of this run.
    :param margin: the loss up to which a row is unchanged: 0.05 is 5 %.
    """
    keys = [key for key in now if key in before]
    if not keys:
        return RegressionTest(None, {})
    alone = {key: compare_launches(before[key], now[key], margin) for key in keys}
    if len(keys) == 1:
        return RegressionTest(alone[keys[0]], alone)
    pool = _pool(before, now, keys)
    sides = [[*(run[key] for key in keys), pooled] for run, pooled in zip((before, now), pool, strict=True)]
    *single, together = _joint_p_values(*sides)
    rows = {key: compare_launches(before[key], now[key], margin, p=p) for key, p in zip(keys, single, strict=True)}
    suspects = (
        key
        for key, effect in rows.items()
        if alone[key].verdict is Verdict.REGRESSED and effect.verdict is not Verdict.REGRESSED
    )
    return RegressionTest(compare_launches(*pool, margin, p=together), rows, frozenset(suspects))


def of_two_times(
    combined: RegressionTest[Key], losses: RegressionTest[Key], gains: RegressionTest[Key]
) -> RegressionTest[Key]:
    """Return the comparison of two runs that were not measured in turn: what either run alone may have made is open.

    Other processes only make a launch slower. So a loss must be proven without the disturbed launches of this run, and
    that nothing was lost without those of the baseline. All rows of a run share its load, its clocks and its
    placement, so their pool shows a loss where the whole run was slower for such a reason: a loss needs a row that
    proves it.

    :param combined: the comparison of all launches.
    :param losses: the same without the disturbed launches of this run; ``gains`` without those of the baseline. Rows
        with too few others are left out.
    """
    rows = {key: _held(effect, losses.rows.get(key), gains.rows.get(key)) for key, effect in combined.rows.items()}
    pooled = combined.pooled and _held(combined.pooled, losses.pooled, gains.pooled)
    lost = {key for key, effect in rows.items() if effect.verdict is Verdict.REGRESSED}
    if pooled is not None and pooled.verdict is Verdict.REGRESSED and not lost:
        pooled = replace(pooled, verdict=Verdict.INCONCLUSIVE)
    disturbed = {key for key, effect in combined.rows.items() if effect.verdict is Verdict.REGRESSED} - lost
    return RegressionTest(pooled, rows, combined.suspects | disturbed)


def _held(effect: Effect, loss: Effect | None, gain: Effect | None) -> Effect:
    """Return an effect, INCONCLUSIVE if disturbed launches made its verdict."""
    other, alike = (loss, _LOST) if effect.verdict in _LOST else (gain, _HELD)
    return effect if other is not None and other.verdict in alike else replace(effect, verdict=Verdict.INCONCLUSIVE)


#: The verdicts of a proven loss, and those that exclude a loss of the margin.
_LOST, _HELD = {Verdict.REGRESSED}, {Verdict.UNCHANGED, Verdict.IMPROVED}


def _pool(
    before: Mapping[Key, Sequence[float]], now: Mapping[Key, Sequence[float]], keys: Sequence[Key]
) -> tuple[list[float], list[float]]:
    """Return one value for each launch of each run: the geometric mean over rows, each divided by its baseline."""
    sides = []
    for run in (before, now):
        launches = min(len(run[key]) for key in keys)
        sides.append(
            [
                math.exp(fmean(math.log(run[key][number]) - math.log(median(before[key])) for key in keys))
                for number in range(launches)
            ]
        )
    return sides[0], sides[1]


def least_p(before: int, now: int) -> float:
    """Return the smallest p that these numbers of launches can give: 0.004 for 5 against 5."""
    return 1 / math.comb(before + now, now)


def launches_for(before: int, most: int) -> int | None:
    """Return the least number of launches that can prove a change; None: more than ``most``.

    :param before: the number of launches of the baseline.
    """
    return next((now for now in range(1, most + 1) if least_p(before, now) <= PROOF), None)


def change(ratio: float) -> str:
    """Return a ratio as text for a change: ``-10.2 %``."""
    return f"{100 * (ratio - 1):+.1f} %"


def _p_value(before: Sequence[float], now: Sequence[float], alternative: str) -> float:
    """Return the exact p of Mann and Whitney's test. Equal values count against a change in either direction."""
    lower, upper = (now, before) if alternative == "less" else (before, now)
    return _p_of_order(sum(a >= b for a in lower for b in upper), len(lower), len(upper))


@lru_cache(maxsize=1024)
def _p_of_order(order: int, lower: int, upper: int) -> float:
    """Return the p of ``order`` pairs in which the first launch is above the second.

    :param lower: the number of launches on the first side; ``upper`` on the second.
    """
    above = [min(upper, max(0, order - number * upper)) for number in range(lower)]
    test = stats.mannwhitneyu([rank + 0.5 for rank in above], range(1, upper + 1), alternative="less", method="exact")
    return float(test.pvalue)


def _joint_p_values(before: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> list[float]:
    """Return for each row the p of its change, in the direction of the change, corrected for the number of rows.

    If rows have different numbers of launches, each gives as many as the row with the fewest.
    """
    sides = [np.log([row[: min(map(len, side))] for row in side]) for side in (before, now)]
    if any(side.shape[-1] < 2 for side in sides):
        return [1.0] * len(before)  # nothing can be proven without a spread, and one launch has none
    test = stats.permutation_test(sides, _studentized, vectorized=True, n_resamples=np.inf, axis=-1)
    # Enlarge the permuted values slightly, so that rounding cannot make the observed order rarer than itself.
    statistic, orders = np.asarray(test.statistic), np.asarray(test.null_distribution) * (1 + 1e-9)
    worst, best = orders.min(axis=1), orders.max(axis=1)
    return [float((worst <= value).mean() if value < 0 else (best >= value).mean()) for value in statistic]


def _studentized(before: Any, now: Any, axis: int) -> Any:
    """Return the difference of two means divided by its standard error. The least spread of each side is 0.2 %."""
    errors = (np.maximum(side.var(axis=axis, ddof=1), LEAST_SPREAD**2) / side.shape[axis] for side in (before, now))
    return (now.mean(axis=axis) - before.mean(axis=axis)) / np.sqrt(sum(errors))


def _interval(before: Sequence[float], now: Sequence[float]) -> tuple[float, float] | None:
    """Return the Hodges-Lehmann interval of the ratio, from the ratios of all pairs of launches."""
    place = _place(len(before), len(now))
    if place is None:
        return None
    ratios = sorted(b / a for a in before for b in now)
    return ratios[place], ratios[-1 - place]


@lru_cache(maxsize=256)
def _place(before: int, now: int) -> int | None:
    """Return the index of the sorted ratio at which the interval begins; None: too few launches."""
    place = None
    for order in range(before * now + 1):
        if _p_of_order(order, now, before) > (1 - CONFIDENCE) / 2:
            break
        place = order
    return place
