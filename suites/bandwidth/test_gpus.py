# SPDX-License-Identifier: Apache-2.0
"""How much do several GPUs of a rank transfer at the same time, each with its nearest network cards?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Cluster, Judgement, Launches, Profile, Run, Settings
from pytest_nixl.checks.bandwidth.gpus_together import judge_gpus_together


@pytest.mark.nixl_check("gpus-together")
def test_gpus_do_not_hold_each_other_up(
    nixl_run: Run,
    nixl_settings: Settings,
    nixl_cluster: Cluster,
    nixl_launches: Launches,
    profile: Profile,
    verdict: Callable[[Judgement], None],
) -> None:
    """All GPUs transfer at the same time: report the sum and the slowest GPU, and whether a GPU starves."""
    verdict(judge_gpus_together(nixl_run, nixl_settings, nixl_cluster, nixl_launches, profile))
