# SPDX-License-Identifier: Apache-2.0
"""What the ranks report of a step of a traffic pattern."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_nixl.checks.pattern.fairness import ALONE
from pytest_nixl.checks.pattern.rank_flows import FlowStep
from pytest_nixl.model.traffic_pattern import Flow
from pytest_nixl.processes.worker_errors import WorkerError

ONE, OTHER = Flow(0, 1, 4096), Flow(3, 2, 4096)
#: Two flows at the same time, WRITE: each source posts. Rank 4 rests.
STEP = FlowStep(ALONE, [[ONE], [OTHER]], (0.1, 0.5))
POSTS = {ONE: (0, 7), OTHER: (3, 8)}
HEALTHY: dict[int, Any] = {
    0: {"windows": [(7, [4, 20], [0.1, 0.5])], "contention": 0.25},
    1: {"windows": [], "contention": 0.0},
    2: {"windows": [], "contention": 0.0},
    3: {"windows": [(8, [3, 15], [0.2, 0.6])], "contention": 0.0},
    4: None,
}


def test_each_flow_has_the_windows_of_the_rank_that_posts_it() -> None:
    measured = STEP.measured(HEALTHY, POSTS)
    assert measured.windows == {ONE: [(4, 0.1), (20, 0.5)], OTHER: [(3, 0.2), (15, 0.6)]}
    assert measured.contention == {0: 0.25, 1: 0.0, 2: 0.0, 3: 0.0}


@pytest.mark.parametrize(
    "changed",
    [
        {0: None},
        {1: None},
        {0: {"windows": [], "contention": 0.0}},
        {0: {"windows": [(7, [4], [0.1])], "contention": 0.0}},
        # Rank 1 reports the flow that rank 0 posts.
        {0: {"windows": [], "contention": 0.0}, 1: {"windows": [(7, [4, 20], [0.1, 0.5])], "contention": 0.0}},
    ],
)
def test_a_flow_that_its_rank_does_not_report_whole_is_named(changed: dict[int, Any]) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 did not report 2 windows of the flow 0->1"):
        STEP.measured({**HEALTHY, **changed}, POSTS)
