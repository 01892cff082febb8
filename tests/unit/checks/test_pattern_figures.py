# SPDX-License-Identifier: Apache-2.0
"""The figures of a pattern, and their verdict by a profile's bounds: broken, kept, and open on a busy host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_pattern_fairness import FAIR, samples

from pytest_nixl.checks.pattern.fairness import LOADS, PatternSamples, judge_pattern_figures, pattern_figures
from pytest_nixl.judge.figure_bounds import judge_figures
from pytest_nixl.model.figure import Bound
from pytest_nixl.model.verdicts import Judgement, Verdict


def judged(found: PatternSamples, figure: str, at_least: float, pattern: str = "incast:4") -> Judgement:
    bounds = [Bound(figure, "four nodes", {"pattern": (pattern,)}, at_least=at_least)]
    return judge_pattern_figures(found, lambda figures: judge_figures(figures, bounds))


def test_the_figures_are_the_sum_the_least_share_and_the_fairness() -> None:
    figures = pattern_figures(samples("incast", FAIR))
    assert [str(figure) for figure in figures] == [
        "pattern-bandwidth (UCX WRITE DRAM:DRAM incast:4): 0.096 GB/s",
        "pattern-share (UCX WRITE DRAM:DRAM incast:4): 0.31",
        "pattern-jain (UCX WRITE DRAM:DRAM incast:4): 0.999",
    ]


@pytest.mark.parametrize(
    ("figure", "kept", "broken"),
    [("pattern-bandwidth", 0.095e9, 0.097e9), ("pattern-share", 0.3, 0.32), ("pattern-jain", 0.99, 0.9999)],
)
def test_a_bound_that_is_not_kept_fails_and_on_a_busy_host_is_left_open(
    figure: str, kept: float, broken: float
) -> None:
    found = samples("incast", FAIR)
    assert judged(found, figure, kept).verdict is Verdict.PASS
    assert judged(found, figure, broken, pattern="incast:8").verdict is Verdict.PASS
    failed = judged(found, figure, broken)
    assert failed.verdict is Verdict.FAIL
    assert failed.reason.startswith(f"{figure} (UCX WRITE DRAM:DRAM incast:4): ")
    assert "--nixl-pattern=pairs" in failed.remedy
    busy = judged(samples("incast", FAIR, others=0.8), figure, broken)
    assert busy.verdict is Verdict.INCONCLUSIVE
    assert busy.reason.startswith(failed.reason)
    assert judged(samples("incast", FAIR, others=0.8), figure, kept).verdict is Verdict.PASS


def test_contention_is_that_of_the_load_and_none_if_it_is_not_known() -> None:
    found = samples("incast", FAIR, others=0.8)
    known, keys = found.flows[0], {load: found.kind.key(found.flows[0].flow, load) for load in LOADS}
    unknown = replace(known, contention=())
    assert [known.samples(keys[load], load).contention for load in LOADS] == [(0.0,), (0.8,)]
    assert [unknown.samples(keys[load], load).contention for load in LOADS] == [(), ()]
    assert replace(found, flows=(unknown,)).disturbed == 0.0
