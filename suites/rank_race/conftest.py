# SPDX-License-Identifier: Apache-2.0
"""What claims ranks in these tests, and the etcd of their own that all of them disturb."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator

import pytest

from pytest_nixl import EtcdProxy, NotApplicableError, PrivateEtcd, Settings, between_agents
from pytest_nixl.checks.rank_race.forkserver import ForkServer
from pytest_nixl.checks.rank_race.system_under_test import NixlbenchSubject

from .race import Race


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """What forks claimants."""
    with ForkServer() as started:
        yield started


@pytest.fixture
def race(nixl_private_etcd: PrivateEtcd, forkserver: ForkServer) -> Iterator[Race]:
    """An etcd to disturb, a path to it, and claimants, which end with the test."""
    with EtcdProxy(nixl_private_etcd.endpoint) as path:
        opened = Race(nixl_private_etcd, path, forkserver, f"/pytest-nixl/{secrets.token_hex(8)}/")
        try:
            yield opened
        finally:
            for claimant in opened.claimants:
                claimant.close()


@pytest.fixture
def nixlbench(nixl_settings: Settings) -> NixlbenchSubject:
    """The real nixlbench: that of ``--nixl-nixlbench``, or that on PATH."""
    program = nixl_settings.nixlbench or shutil.which("nixlbench")
    if not program:
        raise NotApplicableError("there is no nixlbench on PATH, and --nixl-nixlbench PATH names none")
    backends = between_agents(nixl_settings.backend)
    if not backends:
        names = ",".join(nixl_settings.backend)
        raise NotApplicableError(
            f"--nixl-backend={names} moves bytes to storage: nixlbench gives out no two ranks for it"
        )
    return NixlbenchSubject(program, backends[0])
