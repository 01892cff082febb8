# SPDX-License-Identifier: Apache-2.0
"""Compare launches of a healthy program with launches in which a call may last longer, as two runs are compared.

Both are launched in turn, ABBA, and differ only in the planted delay. The value of a launch is that of its fastest
call, which no other process interrupted. Other processes can still slow down each call of a launch: they share caches,
memory and often the core. So a loss in launches with contention counts only if a second comparison finds it again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

from pytest_nixl.core.cpu_contention import NEEDED, HostLoad, own_processors, own_seconds, too_many
from pytest_nixl.judge.regression import compare_launches
from pytest_nixl.judge.run_comparison import wants_launch
from pytest_nixl.measure.interleaved import take_turns
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.settings import COMPARED_LAUNCHES
from pytest_nixl.model.verdicts import Verdict

from .contention import spinning

#: The planted delay of each descriptor or region in seconds, and the loss up to which a launch is unchanged.
DELAY, MARGIN = 1e-6, 0.10
#: How often a planted delay is looked for on a machine whose contention hides it.
ATTEMPTS = 3
#: The number of busy loops beside each fourth comparison of a soak test.
BUSY_LOOPS = 2


@dataclass(frozen=True)
class TimedLaunches:
    """What launches measured.

    :param rates: descriptors or regions per second in the fastest call of each launch.
    :param others: for each launch the cores of those that it needed that other processes used.
    """

    rates: tuple[float, ...]
    others: tuple[float, ...]

    def __add__(self, other: TimedLaunches) -> TimedLaunches:
        return TimedLaunches(self.rates + other.rates, self.others + other.others)

    def __str__(self) -> str:
        return " ".join(f"{1e6 / rate:.3f}" for rate in self.rates)


@dataclass(frozen=True)
class DelayComparison:
    """What one comparison, or two, found.

    :param pairs: the healthy launches and the others of each comparison.
    """

    verdict: Verdict
    pairs: tuple[tuple[TimedLaunches, TimedLaunches], ...]

    def __str__(self) -> str:
        most = max(max(side.others) for pair in self.pairs for side in pair)
        each = ", then ".join(f"{other} against {healthy}" for healthy, other in self.pairs)
        return f"{self.verdict}; us each: {each}; other processes used up to {most:.1f} of the cores"


Measure = Callable[[], TimedLaunches]


def timed(launch: Callable[[], float], loops: Collection[int] = ()) -> Measure:
    """Return a function that measures one launch, and the contention meanwhile.

    :param launch: returns the descriptors or regions per second in the fastest call of a new launch.
    :param loops: the pids of busy loops that this process has started, and that do not belong to a launch.
    """

    def measure() -> TimedLaunches:
        load, start, used = HostLoad(), time.monotonic(), sum(map(own_seconds, loops))
        rate = launch()
        cores = load.others() + (sum(map(own_seconds, loops)) - used) / (time.monotonic() - start)
        return TimedLaunches((rate,), (too_many(cores, len(own_processors()), NEEDED),))

    return measure


def compare_delay(healthy: Measure, other: Measure) -> DelayComparison:
    """Compare launches in turn, as many as a comparison of runs does; with contention a loss must be found twice."""
    first = _compare(healthy, other)
    disturbed = any(cores > DISTURBED_CORES for side in first.pairs[0] for cores in side.others)
    if first.verdict is not Verdict.REGRESSED or not disturbed:
        return first
    again = _compare(healthy, other)
    verdict = again.verdict if again.verdict is Verdict.REGRESSED else Verdict.INCONCLUSIVE
    return DelayComparison(verdict, first.pairs + again.pairs)


def _compare(healthy: Measure, other: Measure) -> DelayComparison:
    def another(before: TimedLaunches, now: TimedLaunches) -> bool:
        return len(now.rates) < COMPARED_LAUNCHES or wants_launch(before.rates, now.rates, MARGIN)

    before, now = take_turns(healthy, other, TimedLaunches.__add__, another)
    return DelayComparison(compare_launches(before.rates, now.rates, MARGIN).verdict, ((before, now),))


def check_delay(
    healthy: Callable[[], float],
    other: Callable[[], float],
    *,
    delayed: bool,
    repeat: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Compare launches, and assert that the others are REGRESSED exactly if they are delayed.

    If contention hides a planted delay (INCONCLUSIVE), they are compared again, at most :data:`ATTEMPTS` times.

    :param repeat: the number of the repeat; each fourth one runs beside busy loops.
    """
    with contextlib.ExitStack() as beside:
        loops = [beside.enter_context(spinning()) for _ in range(BUSY_LOOPS * (repeat % 4 == 3))]
        comparison = compare_delay(timed(healthy, loops), timed(other, loops))
        for _ in range(ATTEMPTS - 1):
            if not delayed or comparison.verdict is not Verdict.INCONCLUSIVE:
                break
            comparison = compare_delay(timed(healthy, loops), timed(other, loops))
    with capsys.disabled():
        print(f"\n{'delayed' if delayed else 'healthy'} {repeat}, beside {len(loops)} busy loops: {comparison}")
    assert (comparison.verdict is Verdict.REGRESSED) is delayed
