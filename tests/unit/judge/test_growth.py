# SPDX-License-Identifier: Apache-2.0
"""The slope of a call's time over its repeats: found if it is there, also on a busy machine, and not found if not."""

from __future__ import annotations

import random
import statistics

import pytest

from pytest_nixl.judge.growth import Growth, Slope, _smoothed, judge_growth
from pytest_nixl.model.verdicts import Verdict

REPEATS, ROUNDS, BASE = 64, 5, 20e-6


def growth(seed: int, delay: float = 0.0, *, busy: bool = False) -> Growth:
    """Return the growth of noisy times.

    :param delay: what each repeat takes more than the one before.
    :param busy: other processes interrupt every tenth call, and make the machine three times slower from some call on.
    """
    chance = random.Random(seed)
    slow = chance.randrange(ROUNDS * REPEATS) if busy else ROUNDS * REPEATS

    def times(base: float, more: float) -> list[list[float]]:
        rounds: list[list[float]] = []
        for index in range(ROUNDS):
            rounds.append([])
            for number in range(REPEATS):
                speed = 3.0 if index * REPEATS + number >= slow else 1.0
                interrupted = chance.uniform(1e-4, 4e-3) if busy and chance.random() < 0.1 else 0.0
                rounds[-1].append(speed * (base * chance.uniform(1.0, 1.4) + number * more) + interrupted)
        return rounds

    return Growth.of(times(BASE, delay), times(BASE / 2, 0.0))


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(("delay", "verdict"), [(3e-6, Verdict.FAIL), (0.0, Verdict.PASS)], ids=["grows", "healthy"])
def test_a_delay_that_grows_is_found_and_a_healthy_call_never_accused_a_hundred_times_of_a_hundred(
    delay: float, verdict: Verdict, busy: bool
) -> None:
    # 3 µs more with each repeat: the total is quadratic in the number of repeats.
    judged = [judge_growth("registration", growth(seed, delay, busy=busy), "mend it") for seed in range(100)]
    assert {judgement.verdict for judgement in judged} == {verdict}


def test_a_call_that_becomes_faster_is_not_slower() -> None:
    assert judge_growth("registration", growth(1, -2e-7), "mend it").verdict is Verdict.PASS


def test_slope_and_first_time_are_those_of_the_line() -> None:
    grown = Growth.of([[1e-3 + 1e-4 * number for number in range(20)]], [[1e-5] * 20])
    assert (grown.slope, grown.low, grown.high) == pytest.approx((1e-4, 1e-4, 1e-4))
    assert grown.first == pytest.approx(1e-3)
    assert grown.least_factor == pytest.approx(2.9)
    times = [1e-3 + 1e-4 * number**1.1 for number in range(20)]
    slope = Slope.of(times)
    assert slope.low < slope.value < slope.high
    bent = Growth.of([times], [[1e-5] * 20])
    assert (bent.slope, bent.low, bent.high) == pytest.approx((slope.value, slope.low, slope.high))


def test_a_machine_that_becomes_slower_is_no_growth() -> None:
    """Both rounds are made of the same call: the second on a machine that becomes three times slower meanwhile."""
    references = [[1e-5] * 40, [1e-5] * 20 + [3e-5] * 20]
    rounds = [[1.0] * 40, [100 * reference for reference in references[1]]]
    rounds[0][20:] = [9.0] * 20  # disturbed
    grown = Growth.of([[1e-3 * second for second in rounds[0]], rounds[1]], references)
    assert grown.first == pytest.approx(1e-3)
    assert grown.slope == pytest.approx(0, abs=1e-9)


def test_the_first_time_is_half_of_the_least_one_at_least() -> None:
    assert Growth.of([[1.0 + number**2 for number in range(20)]], [[1.0] * 20]).first == 0.5


@pytest.mark.parametrize(("low", "slower"), [(1.0, True), (0.99, False)])
def test_a_call_is_slower_from_three_times_its_first_time(low: float, slower: bool) -> None:
    assert Growth(2.0, low, 3.0, 1.0, 3).slower is slower


def test_the_message_has_the_times_the_interval_and_the_limit() -> None:
    grown = Growth(1e-6, 9e-7, 1.1e-6, 20e-6, 64)
    judged = judge_growth("registration", grown, "mend it")
    assert judged.reason == (
        "registration becomes slower with each repeat: 20 us at first, and +1000 ns a repeat over 64 repeats (99 % "
        "interval +900, +1100); the last takes at least 3.8 times as long as the first, and the limit is 3 times"
    )
    assert judged.remedy == "mend it"


def test_a_value_is_smoothed_by_its_five_neighbours_on_each_side() -> None:
    values = [float(number**2 % 17) for number in range(40)]
    smoothed = _smoothed(values)
    assert len(smoothed) == 40
    for place, value in enumerate(smoothed):
        near = [values[other] for other in range(40) if abs(other - place) <= 5]
        assert value == statistics.median(near)
    assert _smoothed([3.0]) == [3.0]


def test_places_are_the_steps() -> None:
    assert Slope.of([0, 20, 50, 60], [0, 2, 5, 6]).value == 10


def test_the_interval_has_the_order_statistics_that_sen_gives() -> None:
    # Of 276 slopes: 276 / 2 less and more 2.576 / 2 standard deviations of Kendall's statistic of 24 points, 40.3.
    values = [1.3**number for number in range(24)]
    slope = Slope.of(values)
    slopes = sorted((values[b] - values[a]) / (b - a) for b in range(24) for a in range(b))
    assert (slope.low, slope.high) == (slopes[86], slopes[190])
    assert len(set(slopes)) == 276
    few = Slope.of([0.0, 1.0, 8.0])
    assert (few.value, few.low, few.high) == (4, 1, 7), "of few values it is the whole range"


@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_the_interval_covers_the_slope_of_noise(slope: float) -> None:
    chance = random.Random(19)
    covered = 0
    for _ in range(200):
        fitted = Slope.of([slope * number + chance.gauss(0, 3) for number in range(24)])
        covered += fitted.low <= slope <= fitted.high
    assert covered >= 194
