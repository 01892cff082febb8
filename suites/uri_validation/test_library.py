# SPDX-License-Identifier: Apache-2.0
"""Which etcd client library does NIXL load? Does nixlbench load the same one? Does it have a known patch?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, NixlAgent, PrivateEtcd, Settings, parse_endpoints, supervisor
from pytest_nixl.checks.endpoints.client_library import judge_library, judge_patch, library_of


@pytest.mark.nixl_check("etcd-library")
@pytest.mark.nixl_early
def test_nixl_and_nixlbench_load_the_same_etcd_client(
    nixl_agent: NixlAgent, verdict: Callable[[Judgement], None]
) -> None:
    """NIXL and nixlbench (if it is on PATH) load the same etcd client library."""
    verdict(judge_library(library_of(nixl_agent)))


@pytest.mark.nixl_check("uri-validation-patch")
@pytest.mark.nixl_early
def test_the_patch_of_uri_validation_is_known(
    nixl_agent: NixlAgent,
    nixl_private_etcd: PrivateEtcd,
    nixl_settings: Settings,
    verdict: Callable[[Judgement], None],
) -> None:
    """Report whether the library has the patch, its variable is set, and this changes what an agent does."""
    (endpoint,) = parse_endpoints(nixl_private_etcd.endpoint)
    library = library_of(nixl_agent)
    verdict(judge_patch(library, endpoint, nixl_private_etcd.client, nixl_settings, supervisor()))
