# SPDX-License-Identifier: Apache-2.0
"""A loss in launches that other processes disturbed counts only if a second comparison finds it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import pytest
from helpers.contention import spinning
from helpers.delay_comparison import Measure, TimedLaunches, compare_delay, timed

from pytest_nixl.core.cpu_contention import own_processors, own_seconds
from pytest_nixl.core.polling import wait_until
from pytest_nixl.model.settings import COMPARED_LAUNCHES
from pytest_nixl.model.verdicts import Verdict

FAST, SLOW = [100.0 + number for number in range(COMPARED_LAUNCHES)], [50.0 + number for number in range(7)]
QUIET, BUSY = 0.0, 1.0


def launches(rates: Iterable[float], others: float) -> Measure:
    results: Iterator[float] = iter(rates)
    return lambda: TimedLaunches((next(results),), (others,))


@pytest.mark.long
def test_a_loss_in_quiet_launches_is_found_at_once() -> None:
    comparison = compare_delay(launches(FAST, QUIET), launches(SLOW, QUIET))
    assert (comparison.verdict, len(comparison.pairs)) == (Verdict.REGRESSED, 1)


@pytest.mark.long
def test_a_loss_in_disturbed_launches_that_is_there_again_is_found() -> None:
    comparison = compare_delay(launches(FAST + FAST, BUSY), launches(SLOW[:5] + SLOW, QUIET))
    assert (comparison.verdict, len(comparison.pairs)) == (Verdict.REGRESSED, 2)


@pytest.mark.parametrize("again", [FAST, [200.0 + number for number in range(7)]], ids=["unchanged", "improved"])
def test_a_loss_in_disturbed_launches_that_is_not_there_again_is_inconclusive(again: list[float]) -> None:
    comparison = compare_delay(launches(FAST + FAST, QUIET), launches(SLOW[:5] + again, BUSY))
    assert (comparison.verdict, len(comparison.pairs)) == (Verdict.INCONCLUSIVE, 2)


def test_disturbed_launches_without_a_loss_are_not_repeated() -> None:
    comparison = compare_delay(launches(FAST, BUSY), launches(FAST, BUSY))
    assert (comparison.verdict, len(comparison.pairs)) == (Verdict.UNCHANGED, 1)


def test_busy_loops_beside_a_launch_are_seen() -> None:
    with contextlib.ExitStack() as beside:
        loops = [beside.enter_context(spinning()) for _ in own_processors()]

        def launch() -> float:
            until = sum(map(own_seconds, loops)) + 0.2
            wait_until(lambda: sum(map(own_seconds, loops)) > until, "the loops to use 0.2 s", seconds=120)
            return 1.0

        (remainder,) = timed(launch, loops)().others
    assert remainder > 0
