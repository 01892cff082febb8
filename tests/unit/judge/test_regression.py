# SPDX-License-Identifier: Apache-2.0
"""Comparison of the launches of two runs: each rule at its limit, and the error rates by simulation."""

from __future__ import annotations

import math

import numpy
import pytest
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu

from pytest_nixl.judge import regression
from pytest_nixl.judge.regression import RegressionTest, compare_launches, compare_rows, launches_for, least_p
from pytest_nixl.model.verdicts import Verdict

QUIET = [1.0, 1.001, 0.999, 1.002, 0.998]


def scaled(factor: float) -> list[float]:
    return [factor * value for value in QUIET]


def test_the_number_of_launches_needed_is_known() -> None:
    assert [round(least_p(count, count), 4) for count in (3, 5, 7)] == [0.05, 0.004, 0.0003]
    assert [launches_for(before, 7) for before in (1, 2, 3, 4, 5, 7)] == [None, None, None, 6, 5, 4]
    assert (launches_for(5, 5), launches_for(5, 4)) == (5, None)


@pytest.mark.parametrize(("before", "now"), [(4, 7), (7, 4), (5, 6)])
def test_p_is_that_of_scipy_whatever_the_numbers_of_launches(before: int, now: int) -> None:
    values = numpy.random.default_rng(before).permutation(numpy.linspace(1, 2, before + now))
    for factor in (0.7, 0.9, 1.1, 1.3):
        sides = values[:before].tolist(), (factor * values[before:]).tolist()
        side = "less" if numpy.median(sides[1]) < numpy.median(sides[0]) else "greater"
        expected = mannwhitneyu(sides[1], sides[0], alternative=side, method="exact").pvalue
        assert compare_launches(*sides, 0.05).p == pytest.approx(expected)


@pytest.mark.parametrize(("factor", "verdict"), [(1.5, Verdict.IMPROVED), (0.5, Verdict.REGRESSED)])
def test_p_of_a_row_among_others_counts_the_orders_in_which_any_row_is_as_extreme(
    factor: float, verdict: Verdict
) -> None:
    effect = compare_rows({"a": QUIET, "b": QUIET}, {"a": scaled(factor), "b": QUIET}, 0.05).rows["a"]
    assert effect.verdict is verdict
    assert effect.p == pytest.approx(1 / math.comb(10, 5))


def test_one_row_that_regressed_or_is_suspect_decides_against_the_pool() -> None:
    same, lost = compare_launches(QUIET, QUIET, 0.05), compare_launches(QUIET, scaled(0.5), 0.05)
    assert (same.verdict, lost.verdict) == (Verdict.UNCHANGED, Verdict.REGRESSED)
    for rows in ({"a": lost, "b": same}, {"a": same, "b": lost}):
        assert RegressionTest(same, rows).verdict is Verdict.REGRESSED
    assert RegressionTest(same, {"a": same}, frozenset("a")).verdict is Verdict.INCONCLUSIVE
    assert RegressionTest(same, {"a": same}).verdict is Verdict.UNCHANGED


def test_the_interval_agrees_with_published_tables() -> None:
    """The ends are the 5th and 21st of 25 sorted ratios for 5 against 5 launches; for 7 the 12th and 38th of 49."""
    random = numpy.random.default_rng(1)
    for count, low, high in ((5, 5, 21), (7, 12, 38)):
        before, now = random.uniform(1, 2, (2, count)).tolist()
        ratios = sorted(b / a for a in before for b in now)
        assert compare_launches(before, now, 0.05).interval == (ratios[low - 1], ratios[high - 1])


ROWS = 12


def drawn(random: numpy.random.Generator, launches: int, spread: float) -> NDArray[numpy.float64]:
    """Return launches of many rows, some of them heavy-tailed. All rows of a launch share a part of its noise."""
    noise = random.standard_t(3, (ROWS, launches)) * spread * 0.6
    shared = random.normal(0, spread, launches) * 0.5
    return numpy.asarray(numpy.exp(noise + shared))


def compared(before: NDArray[numpy.float64], now: NDArray[numpy.float64]) -> RegressionTest[str]:
    sides = [{f"row {number}": list(row) for number, row in enumerate(side)} for side in (before, now)]
    return compare_rows(sides[0], sides[1], 0.05)


@pytest.mark.long
@pytest.mark.parametrize("spread", [0.003, 0.05, 0.3])
def test_twelve_rows_without_a_loss_are_rarely_regressed(spread: float) -> None:
    """At a true rate of one in a hundred, 400 runs have 9 or more false alarms in only one of fifty such tests."""
    random = numpy.random.default_rng(7)
    wrong = sum(
        compared(drawn(random, 5, spread), drawn(random, 5, spread)).verdict is Verdict.REGRESSED for _ in range(400)
    )
    assert wrong <= 8


def test_a_loss_in_one_row_of_twelve_is_found_in_that_row() -> None:
    random = numpy.random.default_rng(8)
    hits = 0
    for _ in range(60):
        before, now = drawn(random, 5, 0.003), drawn(random, 5, 0.003)
        now[4] *= 0.9
        comparison = compared(before, now)
        hits += [key for key, effect in comparison.rows.items() if effect.verdict is Verdict.REGRESSED] == ["row 4"]
        assert comparison.verdict in (Verdict.REGRESSED, Verdict.INCONCLUSIVE)
    assert hits >= 57


def test_a_suspect_row_keeps_the_run_from_being_unchanged() -> None:
    rows = {f"row {number}": [1.0 + 0.01 * number * (-1) ** launch for launch in range(5)] for number in range(4)}
    noisy = {"noisy": [1.0, 1.4, 0.9, 1.2, 1.1]}
    lost = {"noisy": [0.85, 0.5, 0.8, 0.3, 0.7]}
    comparison = compare_rows({**rows, **noisy}, {**rows, **lost}, 0.05)
    assert comparison.verdict is Verdict.INCONCLUSIVE
    assert comparison.suspects == {"noisy"}


def test_rows_with_different_keys_are_not_compared() -> None:
    assert compare_rows({"a": QUIET}, {"b": QUIET}, 0.05).verdict is Verdict.MISSING
    assert list(compare_rows({"a": QUIET, "c": QUIET}, {"a": QUIET, "b": QUIET}, 0.05).rows) == ["a"]


def test_one_launch_on_one_side_proves_nothing_of_several_rows() -> None:
    single, several = [[1.0], [2.0]], [[0.5, 0.51, 0.52], [1.0, 1.01, 1.02]]
    for before, now in ((single, several), (several, single), (single, single)):
        assert regression._joint_p_values(before, now) == [1.0, 1.0]


def test_launches_whose_least_p_is_the_limit_can_prove_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, unprovable in ((least_p(3, 3), False), (least_p(3, 3) * 0.999, True)):
        monkeypatch.setattr(regression, "PROOF", limit)
        assert regression.Effect(Verdict.UNCHANGED, 0.0, None, 1.0, 3, 3).unprovable is unprovable


@pytest.mark.parametrize("margin", [0.25, 0.5])
def test_a_change_of_exactly_the_margin_counts_and_a_smaller_one_does_not(margin: float) -> None:
    base = [4.0, 4.0625, 3.9375, 4.125, 3.875]  # all figures are exact in binary
    lost = [value * (1 - margin) for value in base]
    assert compare_launches(base, lost, margin).ratio == 1 - margin
    assert compare_launches(base, lost, margin).verdict is Verdict.REGRESSED
    assert compare_launches(lost, base, margin).verdict is Verdict.IMPROVED
    for before, now in ((base, lost), (lost, base)):
        assert compare_launches(before, now, margin + 1e-6).verdict is Verdict.INCONCLUSIVE
        assert compare_launches(before, now, 0.75).verdict is Verdict.UNCHANGED


@pytest.mark.parametrize(("p", "proven"), [(regression.PROOF, True), (regression.PROOF * 1.001, False)])
def test_a_p_of_exactly_the_limit_proves_a_change(p: float, proven: bool) -> None:
    for now, verdict in ((1.0, Verdict.REGRESSED), (16.0, Verdict.IMPROVED)):
        effect = compare_launches([4.0] * 5, [now] * 5, 0.05, p=p)
        assert effect.verdict is (verdict if proven else Verdict.INCONCLUSIVE)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_a_launch_without_a_bandwidth_is_refused(bad: float) -> None:
    for before, now in (([bad, 1.0], [1.0]), ([1.0], [1.0, bad]), ([], [1.0]), ([1.0], [])):
        with pytest.raises(ValueError, match="are not launches with finite values above zero"):
            compare_launches(before, now, 0.05)
