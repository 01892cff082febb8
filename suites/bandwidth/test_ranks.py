# SPDX-License-Identifier: Apache-2.0
"""Which rank is the culprit of a slow pair, and do pairs slow each other down?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Cluster, Judgement, Launches, Run, Settings
from pytest_nixl.checks.bandwidth.ranks_together import judge_culprit, judge_pairs_together

from ..conftest import Rows


@pytest.mark.nixl_check("rank-to-blame")
def test_no_rank_is_to_blame_for_a_slow_pair(
    nixl_run: Run,
    nixl_cluster: Cluster,
    nixl_launches: Launches,
    nixl_rows: Rows,
    verdict: Callable[[Judgement], None],
) -> None:
    """Each end of a failed pair is measured again with a rank that is not suspected, which shows the culprit."""
    verdict(judge_culprit(nixl_run, nixl_cluster, nixl_launches, nixl_rows.needs_launch, nixl_rows.judge))


@pytest.mark.nixl_check("pairs-together")
def test_pairs_do_not_hold_each_other_up(
    nixl_run: Run,
    nixl_settings: Settings,
    nixl_cluster: Cluster,
    nixl_launches: Launches,
    verdict: Callable[[Judgement], None],
) -> None:
    """Pairs without a common rank transfer at the same time: report the sum, and whether a pair starves."""
    verdict(judge_pairs_together(nixl_run, nixl_settings, nixl_cluster, nixl_launches))
