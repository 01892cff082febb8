# SPDX-License-Identifier: Apache-2.0
"""What do the flows of a traffic pattern reach alone and together, which of them slow each other, and which rank?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_nixl import Cluster, Figure, Judgement
from pytest_nixl.checks.pattern.check import (
    FlowRow,
    PatternKind,
    PatternLaunches,
    judge_culprit_of_pattern,
    judge_fairness,
    judge_pattern_figures,
)


@pytest.mark.nixl_check("pattern-flow")
def test_a_flow_moves_the_right_bytes_alone_and_together(
    flow_row: FlowRow | None,
    flow_judged: Callable[[FlowRow | None], Judgement],
    verdict: Callable[[Judgement], None],
) -> None:
    """Each flow of a pattern moves the right bytes over an accepted transport, alone and with all others."""
    verdict(flow_judged(flow_row))


@pytest.mark.nixl_check("pattern-fairness")
def test_no_flow_starves_beside_the_others(
    kind_of_pattern: PatternKind, pattern_launches: PatternLaunches, verdict: Callable[[Judgement], None]
) -> None:
    """All flows of a pattern transfer at the same time: report the sum, the fairness and who slows whom."""
    verdict(judge_fairness(pattern_launches.samples(kind_of_pattern)))


@pytest.mark.nixl_check("pattern-bandwidth")
def test_a_pattern_reaches_what_the_profile_demands(
    kind_of_pattern: PatternKind,
    pattern_launches: PatternLaunches,
    record_figures: Callable[[Sequence[Figure]], Judgement],
    verdict: Callable[[Judgement], None],
) -> None:
    """All flows together reach the bandwidth, the shares and the fairness that the profile's bounds demand."""
    verdict(judge_pattern_figures(pattern_launches.samples(kind_of_pattern), record_figures))


@pytest.mark.nixl_check("pattern-culprit")
def test_no_rank_is_slow_with_each_of_its_partners(
    kind_of_pattern: PatternKind,
    pattern_launches: PatternLaunches,
    nixl_cluster: Cluster,
    verdict: Callable[[Judgement], None],
) -> None:
    """Each rank sends to several others, one at a time: report the rank that is slow with each of them."""
    verdict(judge_culprit_of_pattern(kind_of_pattern, pattern_launches, nixl_cluster))
