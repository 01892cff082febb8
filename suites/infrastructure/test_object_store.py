# SPDX-License-Identifier: Apache-2.0
"""Can the object store be used before rows are measured through it?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Agents, Cluster, Judgement, Settings
from pytest_nixl.checks.storage.check import judge_object_store


@pytest.mark.nixl_check("object-store", level="quick")
def test_object_store_can_be_used(
    nixl_settings: Settings, nixl_cluster: Cluster, verdict: Callable[[Judgement], None]
) -> None:
    """The server of OBJ or AZURE_BLOB answers, accepts the key, and stores and returns objects, for NIXL too."""
    with Agents(nixl_cluster.hosts[0], nixl_settings) as agents:
        verdict(judge_object_store(agents, nixl_settings))
