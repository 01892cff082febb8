# SPDX-License-Identifier: Apache-2.0
"""Floor decisions by several launches: each rule at its limit, error rates by simulation, and learned floors."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from pytest_nixl.judge.floors import _T995, LearnedFloor, decide_floor, interval, learn
from pytest_nixl.model.verdicts import Verdict

G = 1e9


def decide(*gigabytes: float, budget: int = 7) -> tuple[Verdict | None, str]:
    """Decide about a floor of 1 GB/s, with launches in GB/s."""
    return decide_floor([value * G for value in gigabytes], G, budget=budget)


@pytest.mark.parametrize("degrees", range(1, 7))
def test_the_table_of_students_t_is_right(degrees: int) -> None:
    """Integrate the density from 0 by Simpson's rule: the result is half of 99 %."""

    def density(x: float) -> float:
        scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
        return scale * math.pow(1 + x * x / degrees, -(degrees + 1) / 2)

    steps = 20_000
    width = _T995[degrees - 1] / steps
    weights = (1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1))
    area = sum(weight * density(i * width) for i, weight in enumerate(weights)) * width / 3
    assert area == pytest.approx(0.495, abs=1e-8)


@pytest.mark.parametrize(
    ("launches", "verdict", "text"),
    [
        ((20,), Verdict.PASS, "one launch decides: it is above the floor by a factor of 20"),
        ((4.0,), Verdict.PASS, "one launch decides: it is above the floor by a factor of 4"),
        *(((value,), None, "1 of the 3 launches needed at least") for value in (3.99, 1.0, 0.251)),
        ((0.25,), Verdict.FAIL, "one launch decides: it is below the floor by a factor of 4"),
        ((0.1,), Verdict.FAIL, "one launch decides: it is below the floor by a factor of 10"),
        *(((value,) * 2, None, "2 of the 3 launches needed at least") for value in (5, 0.2)),
    ],
)
def test_one_launch_decides_only_if_it_is_far_from_the_floor(
    launches: tuple[float, ...], verdict: Verdict | None, text: str
) -> None:
    assert decide(*launches) == (verdict, text)


def test_three_launches_decide_by_their_interval() -> None:
    verdict, description = decide(1.10, 1.11, 1.12)
    assert verdict is Verdict.PASS
    logs = [math.log(v) for v in (1.10, 1.11, 1.12)]
    centre = sum(logs) / 3
    half = 9.924843 * math.sqrt(sum((y - centre) ** 2 for y in logs) / 2) / math.sqrt(3)
    low, high, _ = interval([1.10, 1.11, 1.12])
    assert (low, high) == pytest.approx((math.exp(centre - half), math.exp(centre + half)))
    assert description == "3 launches, spread 0.9 %, between 1.05 GB/s and 1.17 GB/s: above the floor"
    assert decide(0.90, 0.89, 0.88)[0] is Verdict.FAIL
    assert decide(0.90, 0.89, 0.88)[1].endswith(": below the floor")


def test_the_least_spread_is_a_fifth_of_a_percent() -> None:
    edge = math.exp(9.924843 * 0.002 / math.sqrt(3))
    assert decide(*[edge * 1.00001] * 3)[0] is Verdict.PASS
    assert decide(*[edge * 0.99999] * 3)[0] is None
    assert decide(*[0.99999 / edge] * 3)[0] is Verdict.FAIL
    assert decide(*[1.00001 / edge] * 3)[0] is None


def test_a_wide_spread_needs_five_launches() -> None:
    wide = [2.0, 2.1, 1.95, 2.05, 1.9]
    for k in (3, 4):
        assert decide(*wide[:k])[0] is None
        assert decide(*wide[:k])[1].endswith("needs 5 launches")
    assert decide(1.0, 9.0, 81.0)[1].startswith("3 launches, spread 220 %, between ")
    assert decide(*wide)[0] is Verdict.PASS
    assert decide(*[1 / value for value in wide])[0] is Verdict.FAIL


def test_three_quarters_of_the_launches_must_be_on_the_side_of_the_verdict() -> None:
    # The interval of seven launches can be above the floor while two of them are not.
    for least in (0.999, 1.0):
        seven = [least, least, 1.2, 1.2, 1.2, 1.2, 1.2]
        assert interval(seven)[0] > 1
        assert decide(*seven)[0] is Verdict.INCONCLUSIVE
        slow = [1 / value for value in seven]
        assert interval(slow)[1] < 1
        assert decide(*slow)[0] is Verdict.INCONCLUSIVE
    assert decide(0.999, *[1.2] * 6)[0] is Verdict.PASS
    assert decide(1 / 0.999, *[1 / 1.2] * 6)[0] is Verdict.FAIL


def test_only_launches_without_contention_fail_a_row() -> None:
    slow, cores = [0.5 * G] * 3, 0.31
    assert decide_floor(slow[:2], G, contention=[0.3] * 2) == decide_floor(slow[:2], G), "too few cores to matter"
    with pytest.raises(ValueError):
        decide_floor(slow, G, contention=[cores])
    assert decide_floor([*slow, 0.9 * G], G, contention=[0.0, 0.3, 0.0, cores])[0] is Verdict.FAIL
    undecided = decide_floor(slow, G, contention=[0.0, 0.0, cores])
    assert undecided[0] is None
    assert undecided[1].endswith("; in 1 of 3 launches other processes used up to 0.31 of this row's cores")
    assert decide_floor(slow, G, contention=[cores] * 3)[0] is None
    assert decide_floor(slow, G, contention=[cores] * 3, budget=3)[0] is Verdict.INCONCLUSIVE
    assert decide_floor([2 * G] * 3, G, contention=[9.0] * 3)[0] is Verdict.PASS


def test_a_row_that_others_may_have_brought_below_its_floor_does_not_fail() -> None:
    """Of a healthy cable, two busy loops took 0.15 to 0.28 core of each launch, and it was 12 % slower."""
    near, taken = [0.9 * G] * 7, [0.2, 0.15, 0.28, 0.16, 0.25, 0.2, 0.18]
    verdict, description = decide_floor(near, G, contention=taken)
    assert verdict is Verdict.INCONCLUSIVE
    assert description.endswith(
        ": below the floor, but other processes used up to 0.28 of this row's cores, which may be why; "
        "no further launch is made"
    )
    assert decide_floor(near[:6], G, contention=taken[:6])[0] is None
    # What is further below than that fails, and so does what quieter launches prove.
    assert decide_floor([0.84 * G] * 3, G, contention=[0.15] * 3)[0] is Verdict.FAIL
    assert decide_floor([0.86 * G] * 3, G, contention=[0.15] * 3)[0] is None
    verdict, description = decide_floor(near, G, contention=[0.0, 0.25, 0.01, 0.25, 0.02, 0.25, 0.25])
    assert (verdict, description) == (
        Verdict.FAIL, f"without 4 that other processes slowed: {decide_floor(near[:3], G)[1]}"
    )  # fmt: skip
    assert decide_floor([G / 4.1], G, contention=[0.02]) == decide_floor([G / 4.1], G)
    assert decide_floor([G / 4.1], G, contention=[0.2])[0] is None
    assert decide_floor([0.9 * G, 0.9 * G, G / 4.1], G, contention=[0.2, 0.2, 0.0])[0] is None


def test_launches_that_are_above_the_floor_beside_others_speak_against_fail() -> None:
    mixed, taken = [0.98 * G, 1.05 * G] * 3, [0.0, 0.1] * 3
    assert decide_floor(mixed, G, contention=taken)[0] is None
    assert decide_floor([0.98 * G] * 5 + [1.05 * G], G, contention=[0.0] * 5 + [0.1])[0] is Verdict.FAIL


def test_the_budget_ends_in_inconclusive() -> None:
    near = [1.01, 0.99, 1.01, 0.99, 1.01, 0.99, 1.01]
    for k in range(1, 7):
        assert decide(*near[:k])[0] is None
    last = decide(*near)
    assert last[0] is Verdict.INCONCLUSIVE
    assert last[1].endswith(": 4 of 7 are above the floor, which decides nothing; no further launch is made")
    busy = decide_floor([1e9 * value for value in near], 1e9, contention=[1.8] * 7)
    assert busy[1].count("no further launch is made") == 1
    assert busy[1].endswith(
        "decides nothing; in 7 of 7 launches other processes used up to 1.8 of this row's cores; "
        "no further launch is made"
    )
    assert decide(*near[:3], budget=3)[0] is Verdict.INCONCLUSIVE
    assert decide(1.0, budget=1)[0] is Verdict.INCONCLUSIVE
    assert decide(2.0, 2.2, 1.9, budget=3)[0] is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("values", [(), (1.0,) * 8, (0.0,), (-1.0,), (math.nan,), (math.inf,)])
def test_an_invalid_launch_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        decide_floor(values, 1.0)
    with pytest.raises(ValueError):
        decide_floor((1.0,), math.nan)


def simulate(mean: float, spread: float, runs: int = 1000) -> tuple[Counter[Verdict], float]:
    """Return verdicts of rows with log-normal launches around ``mean`` times the floor, and the launches per row."""
    noise = random.Random(20261120)
    verdicts: Counter[Verdict] = Counter()
    launches = 0
    for _ in range(runs):
        values: list[float] = []
        verdict = None
        while verdict is None:
            values.append(mean * math.exp(noise.gauss(0, spread)))
            verdict = decide_floor(values, 1.0)[0]
        verdicts[verdict] += 1
        launches += len(values)
    return verdicts, launches / runs


@pytest.mark.parametrize("spread", [0.001, 0.002, 0.005])
def test_quiet_rows_five_percent_off_the_floor_are_decided_correctly_and_early(spread: float) -> None:
    verdicts, launches = simulate(1.05, spread)
    assert verdicts == {Verdict.PASS: 1000}
    assert launches < 3.2
    verdicts, launches = simulate(0.95, spread)
    assert verdicts == {Verdict.FAIL: 1000}
    assert launches < 3.2


@pytest.mark.parametrize("spread", [0.001, 0.005, 0.02, 0.05])
def test_a_row_at_its_floor_is_decided_in_at_most_one_of_twenty_runs(spread: float) -> None:
    verdicts, _ = simulate(1.0, spread)
    assert verdicts[Verdict.PASS] + verdicts[Verdict.FAIL] < 50


@pytest.mark.parametrize("spread", [0.02, 0.05])
def test_a_noisy_row_is_inconclusive_instead_of_wrong(spread: float) -> None:
    assert simulate(1.05, spread)[0][Verdict.FAIL] < 5
    assert simulate(0.95, spread)[0][Verdict.PASS] < 5


def figures(learned: LearnedFloor) -> tuple[float, ...]:
    """Return floor, median and MAD in GB/s; the floor is NaN if there is none."""
    return tuple((math.nan if value is None else value) / G for value in (learned.floor, learned.median, learned.mad))


NONE = math.nan


@pytest.mark.parametrize(
    ("values", "learned", "outliers"),
    [
        # The lower of both rules; constant runs keep a margin, and a run at it is no outlier.
        ((10.0, 10.01, 9.99), (9.5, 10.0, 0.01), ()),
        ((10.0, 10.3, 9.7), (8.5, 10.0, 0.3), ()),
        ((1.0,) * 5, (0.95, 1.0, 0.0), ()),
        ((0.5 / G,) * 5, (0.475 / G, 0.5 / G, 0.0), ()),
        ((16.0, 16.0, 16.0, 16.0, 16.0 * 0.95), (15.2, 16.0, 0.0), ()),
        # Without the outlier.
        *(((10.0, 10.02, outlier, 9.98, 10.01), (9.50475, 10.005, 0.01), (2,)) for outlier in (5.0, 9.4, 10.6, 30.0)),
        # Fewer than three runs that agree, or a very large spread: a floor of 0 is no floor.
        ((10.0,), (NONE, 10.0, 0.0), ()),
        ((10.0, 10.1), (NONE, 10.05, 0.05), ()),
        ((10.0, 10.1, 5.0), (NONE, 10.05, 0.05), (2,)),
        ((10.0, 7.0, 14.0), (NONE, 10.0, 3.0), ()),
        ((5.0, 4.0, 6.0), (NONE, 5.0, 1.0), ()),
    ],
)
def test_a_floor_is_learned_from_the_runs_that_agree(
    values: tuple[float, ...], learned: tuple[float, ...], outliers: tuple[int, ...]
) -> None:
    floor = learn({"other": [G] * 3, "row": [value * G for value in values]})["row"]
    assert figures(floor) == pytest.approx(learned, abs=1e-12, nan_ok=True)
    assert (floor.runs, floor.outliers) == (len(values), outliers)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [math.nan], [math.inf]])
def test_an_invalid_run_is_refused_with_the_name_of_its_row(values: list[float]) -> None:
    with pytest.raises(ValueError, match="UCX/WRITE: "):
        learn({"UCX/WRITE": values})


@pytest.mark.parametrize("spread", [0.001, 0.002, 0.005])
@pytest.mark.parametrize("runs", [3, 5])
def test_a_learned_floor_has_no_false_alarm_and_catches_a_tenth(runs: int, spread: float) -> None:
    noise = random.Random(3)

    def value(share: float) -> float:
        return share * G * math.exp(noise.gauss(0, spread))

    for _ in range(500):
        floor = learn({"row": [value(1) for _ in range(runs)]})["row"].floor
        assert floor is not None
        assert decide_floor([value(1) for _ in range(3)], floor)[0] is not Verdict.FAIL
        assert value(1) > floor
        assert value(0.9) < floor
