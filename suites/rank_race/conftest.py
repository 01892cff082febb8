# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the rank race checks: processes that claim ranks, and an etcd that each test may disturb."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_nixl import EtcdProxy, NotApplicableError, PrivateEtcd, Settings, between_agents
from pytest_nixl.checks.rank_race.forkserver import ForkServer
from pytest_nixl.checks.rank_race.race import Race
from pytest_nixl.checks.rank_race.system_under_test import NixlbenchSubject
from pytest_nixl.fixtures.etcd import opened_private_etcd

from ..early import Play, started_scenes


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """The process that forks claimants."""
    with ForkServer() as started:
        yield started


@pytest.fixture
def race(nixl_private_etcd: PrivateEtcd, forkserver: ForkServer) -> Iterator[Race]:
    """An etcd to disturb, a proxy to it, and claimants, which end with the test."""
    with _race(nixl_private_etcd, forkserver) as opened:
        yield opened


@pytest.fixture(scope="package")
def early(request: pytest.FixtureRequest, nixl_settings: Settings, forkserver: ForkServer) -> Iterator[Play]:
    """Return a function that plays a scene in a race of its own, which was started early if possible."""

    def play(scene: Callable[[Race], Any]) -> Any:
        with opened_private_etcd(nixl_settings) as etcd, _race(etcd, forkserver) as opened:
            return scene(opened)

    with started_scenes(request.session, __package__, play) as result_of:
        yield result_of


@contextmanager
def _race(etcd: PrivateEtcd, forkserver: ForkServer) -> Iterator[Race]:
    with EtcdProxy(etcd.endpoint) as path:
        prefix = f"/pytest-nixl/{secrets.token_hex(8)}/"
        opened = Race(etcd.server, etcd.client, path, forkserver, prefix)
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
