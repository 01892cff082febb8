# SPDX-License-Identifier: Apache-2.0
"""The slope by Theil and Sen, and its interval."""

from __future__ import annotations

import random

import pytest

from pytest_nixl.judge.growth import Slope


def test_a_line_has_its_slope_without_an_interval() -> None:
    assert Slope.of([3.0 + 2 * number for number in range(10)]) == Slope(2, 2, 2)


def test_places_are_the_steps() -> None:
    assert Slope.of([0, 10, 40, 50, 60, 70, 80], [0, 1, 4, 5, 6, 7, 8]).value == 10


def test_one_outlier_does_not_move_it() -> None:
    values = [float(number) for number in range(20)]
    values[7] = 1e9
    assert Slope.of(values).value == 1


def test_one_step_is_no_growth() -> None:
    slope = Slope.of([0.0] * 12 + [4096.0] * 12)
    assert slope.low == 0


def test_the_interval_has_the_order_statistics_that_sen_gives() -> None:
    # Of 276 slopes: 276 / 2 less and more 2.576 / 2 standard deviations of Kendall's statistic of 24 points, 40.3.
    values = [1.3**number for number in range(24)]
    found = Slope.of(values)
    slopes = sorted((values[b] - values[a]) / (b - a) for b in range(24) for a in range(b))
    assert (found.low, found.high) == (slopes[86], slopes[190])
    assert len(set(slopes)) == 276
    few = Slope.of([0.0, 1.0, 8.0])
    assert (few.value, few.low, few.high) == (4, 1, 7), "of few values it is the whole range"


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_the_interval_covers_the_slope_of_noise(slope: float) -> None:
    chance = random.Random(19)
    covered = 0
    for _ in range(200):
        found = Slope.of([slope * number + chance.gauss(0, 3) for number in range(24)])
        covered += found.low <= slope <= found.high
    assert covered >= 194
