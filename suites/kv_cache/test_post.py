# SPDX-License-Identifier: Apache-2.0
"""Does the time to post a request grow with its descriptors, and not faster?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from pytest_nixl import Cluster, Judgement, NotApplicableError, Run, Settings, between_agents
from pytest_nixl.checks.kv_cache.post import judge_posts, measure_posts


@pytest.mark.nixl_check("kv-post-scaling", level="extended")
def test_a_post_of_many_descriptors_takes_no_longer_for_each(
    nixl_run: Run, nixl_cluster: Cluster, nixl_settings: Settings, verdict: Callable[[Judgement], None]
) -> None:
    """Posting a request of 100 times as many descriptors takes at most 5 times as long for each of them."""
    backends = between_agents(nixl_settings.backend)
    if not backends or not nixl_run.placement.pairs:
        raise NotApplicableError("no requested backend moves bytes between two agents", "give --nixl-backend=UCX")
    hosts = [nixl_cluster.hosts[rank] for rank in nixl_run.placement.pairs[0]]
    links = product(backends, nixl_settings.op)
    verdict(judge_posts({f"{name} {op}": measure_posts(hosts, nixl_settings, name, op) for name, op in links}))
