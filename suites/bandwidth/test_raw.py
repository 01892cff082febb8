# SPDX-License-Identifier: Apache-2.0
"""Is the fabric slow, or NIXL? A raw tool measures the same blocks over the same transport in the same run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Cluster, Judgement, Profile, RowKey, Run
from pytest_nixl.checks.raw_tools.check import compare, link_kinds


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = Run.of(metafunc.config)
    kinds = link_kinds(run) if run.usable else {"1": None}
    metafunc.parametrize("link_kind", kinds.values(), ids=kinds)


@pytest.mark.nixl_check("nixl-to-raw")
def test_nixl_moves_what_the_path_carries(
    request: pytest.FixtureRequest,
    link_kind: RowKey,
    nixl_run: Run,
    nixl_cluster: Cluster,
    profile: Profile,
    verdict: Callable[[Judgement], None],
) -> None:
    """A few rows are compared with a raw tool; for a failed row, the verdict names the fabric or NIXL as the cause."""
    judgement, ratios = compare(link_kind, nixl_run, nixl_cluster, profile)
    nixl_run.record.add_ratios(request.node.nodeid, ratios)
    verdict(judgement)
