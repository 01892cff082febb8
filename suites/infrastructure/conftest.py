# SPDX-License-Identifier: Apache-2.0
"""Fixtures with the facts of every rank's host, and functions that run a check on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl import (
    Cluster,
    EtcdFixture,
    Facts,
    FactsRoot,
    Judgement,
    NixlPluginError,
    Profile,
    Requirements,
    Settings,
)
from pytest_nixl.checks.doctor.catalogue import judge
from pytest_nixl.checks.doctor.ranks import everywhere
from pytest_nixl.etcd_servers.sources import ExternalServer
from pytest_nixl.host.etcd import read_etcd
from pytest_nixl.host.facts import gather

#: Runs a check by its id.
Ask = Callable[[str], Judgement]


@pytest.fixture(scope="session")
def hosts(nixl_settings: Settings, nixl_cluster: Cluster) -> Sequence[Facts]:
    """The facts of each rank's host, and of the deployment's etcd if there is one."""
    if nixl_cluster.several:
        addresses = nixl_cluster.ask("address")
        told = nixl_cluster.ask("facts", peers=addresses)
        return [_read(name, plain) for name, plain in zip(nixl_cluster.names, told, strict=True)]
    own = gather(
        FactsRoot(),
        backends=nixl_settings.backend,
        etcd=nixl_settings.etcd,
        connect=lambda: ExternalServer.of(nixl_settings).client(),
    )
    return [own]


def _read(name: str, plain: dict[str, Any]) -> Facts:
    try:
        return Facts.of(plain)
    except ValueError as error:
        raise NixlPluginError(
            f"{name} sent facts that this version of pytest-nixl does not know: {error}",
            "install the same pytest-nixl on every rank",
        ) from None


@pytest.fixture(scope="session")
def facts(hosts: Sequence[Facts]) -> Facts:
    """The facts of this host."""
    return hosts[0]


@pytest.fixture(scope="session")
def wanted(nixl_settings: Settings, profile: Profile) -> Requirements:
    """The expected state of every host."""
    return Requirements(profile, nixl_settings.backend)


@pytest.fixture
def ask(hosts: Sequence[Facts], nixl_cluster: Cluster, wanted: Requirements) -> Ask:
    """A function that runs a check on the facts of every rank's host."""
    return lambda check: everywhere(nixl_cluster.names, [judge(check, each, wanted) for each in hosts])


@pytest.fixture
def ask_etcd(nixl_etcd: EtcdFixture, facts: Facts, wanted: Requirements) -> Ask:
    """A function that runs a check on the etcd of this run."""
    found = replace(facts, etcd=read_etcd(FactsRoot(), nixl_etcd.endpoint, "this run", lambda: nixl_etcd.client))
    return lambda check: judge(check, found, wanted)
