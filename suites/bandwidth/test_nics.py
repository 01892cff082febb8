# SPDX-License-Identifier: Apache-2.0
"""Does each RDMA device move bytes, and as many as the others?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Cluster, Judgement, Run, Settings
from pytest_nixl.checks.bandwidth.each_nic import judge_each_nic


@pytest.mark.nixl_check("each-nic")
def test_each_nic_moves_what_the_others_move(
    nixl_run: Run, nixl_settings: Settings, nixl_cluster: Cluster, verdict: Callable[[Judgement], None]
) -> None:
    """Each RDMA device alone moves bytes, and no less than half of what the others move."""
    verdict(judge_each_nic(nixl_run, nixl_settings, nixl_cluster))
