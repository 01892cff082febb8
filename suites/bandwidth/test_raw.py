# SPDX-License-Identifier: Apache-2.0
"""Is it the fabric that is slow, or NIXL? The same blocks over the same path by a raw tool, in the same run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Cluster, Judgement, Profile
from pytest_nixl.checks.raw_tools.check import LinkKind, compare
from pytest_nixl.model.results import RATIOS
from pytest_nixl.session.run import Run


@pytest.mark.nixl_check("nixl-to-raw")
def test_nixl_moves_what_the_path_carries(
    request: pytest.FixtureRequest,
    link_kind: LinkKind,
    nixl_run: Run,
    nixl_cluster: Cluster,
    profile: Profile,
    verdict: Callable[[Judgement], None],
) -> None:
    """A few rows of NIXL beside a raw tool's: what failed is the fabric's fault or NIXL's, and which is said."""
    judgement, ratios = compare(link_kind, nixl_run, nixl_cluster, profile)
    request.node.stash[RATIOS] = ratios
    verdict(judgement)
