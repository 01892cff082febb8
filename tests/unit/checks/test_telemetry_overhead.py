# SPDX-License-Identifier: Apache-2.0
"""The ratio of launches with telemetry to launches without it, and its interval."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from pytest_nixl.checks.telemetry.overhead import in_turn, overhead_figures
from pytest_nixl.judge.figure_bounds import judge_figures
from pytest_nixl.model.figure import Bound
from pytest_nixl.model.verdicts import Verdict

WITHOUT = (10e-6, 10.1e-6, 9.9e-6, 10.2e-6, 9.8e-6)
WITH = tuple(2 * seconds for seconds in WITHOUT)
BOUND = Bound("telemetry-overhead-least", "a test", {"exporter": ("prometheus",)}, 1.5, None)


def test_the_ratio_lies_in_its_interval_and_is_not_a_benchmark_of_its_own() -> None:
    without, with_exporter, ratio, least, most = overhead_figures("UCX", "prometheus", WITHOUT, WITH)
    assert [without.labels["exporter"], with_exporter.labels["exporter"]] == ["none", "prometheus"]
    assert (without.rounds, with_exporter.rounds) == (WITHOUT, WITH)
    assert (without.value, with_exporter.value) == (10e-6, 20e-6)
    assert ratio.value == pytest.approx(2)
    assert 1.9 < least.value < ratio.value < most.value < 2.1
    assert [each.rounds for each in (ratio, least, most)] == [(), (), ()]


def test_a_bound_judges_the_lower_end_of_the_interval() -> None:
    judged = judge_figures(overhead_figures("UCX", "prometheus", WITHOUT, WITH), [BOUND])
    assert judged.verdict is Verdict.FAIL
    assert judged.reason == (
        "telemetry-overhead-least (UCX prometheus): 1.96, above its bound of 1.5 (bound of the profile, from: a test)"
    )
    assert "NIXL_TELEMETRY_ENABLE=n" in judged.remedy


def test_launches_that_differ_widely_prove_no_overhead() -> None:
    scattered = (8e-6, 30e-6, 9e-6, 60e-6, 40e-6)
    figures = overhead_figures("UCX", "prometheus", WITHOUT, scattered)
    assert figures[2].value > 1.5
    assert judge_figures(figures, [BOUND]).verdict is Verdict.PASS


def test_too_few_launches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^1 launches against 1: expected 5 of each$"):
        overhead_figures("UCX", "prometheus", WITHOUT[:1], WITH[:1])


def test_the_interval_leaves_out_one_in_twenty_on_each_side_if_telemetry_costs_nothing() -> None:
    times = [1.0 + number / 10 for number in range(10)]
    least = []
    for chosen in combinations(range(10), 5):  # every way in which ten equal launches may be on the two sides
        without = [times[place] for place in range(10) if place not in chosen]
        least.append(overhead_figures("UCX", "prometheus", without, [times[place] for place in chosen])[3].value)
    assert len(least) == 252
    assert sum(value > 1 for value in least) == 12


def test_launches_alternate() -> None:
    order: list[str] = []

    def launches(name: str) -> Iterator[float]:
        while True:
            order.append(name)
            yield float(len(order))

    one, other = launches("without"), launches("with")
    without, with_exporter = in_turn(lambda: next(one), lambda: next(other))
    assert [len(without), len(with_exporter)] == [5, 5]
    assert [name[4:] for name in order] == ["out", "", "", "out", "out", "", "", "out", "out", ""]
