# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the rank race checks: processes that claim ranks, and an etcd that each test may disturb."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator

import pytest

from pytest_nixl import EtcdProxy, NotApplicableError, PrivateEtcd, Settings, between_agents
from pytest_nixl.checks.rank_race.race import Race
from pytest_nixl.checks.rank_race.system_under_test import NixlbenchSubject

from .. import early


@early.fixture
def race(nixl_private_etcd: PrivateEtcd) -> Iterator[Race]:
    """An etcd to disturb, a proxy to it, and claimants, which end with the test."""
    with EtcdProxy(nixl_private_etcd.endpoint) as path:
        prefix = f"/pytest-nixl/{secrets.token_hex(8)}/"
        opened = Race(nixl_private_etcd.server, nixl_private_etcd.client, path, prefix)
        try:
            yield opened
        finally:
            for claimant in opened.claimants:
                claimant.close()


@pytest.fixture
def nixlbench(nixl_settings: Settings) -> NixlbenchSubject:
    """The real nixlbench: from ``--nixl-nixlbench``, else from PATH."""
    program = nixl_settings.nixlbench or shutil.which("nixlbench")
    if not program:
        raise NotApplicableError("nixlbench is not on PATH, and --nixl-nixlbench PATH is not given")
    backends = between_agents(nixl_settings.backend)
    if not backends:
        names = ",".join(nixl_settings.backend)
        raise NotApplicableError(
            f"--nixl-backend={names} moves bytes to storage, and nixlbench then has no second rank"
        )
    return NixlbenchSubject(program, backends[0])
