# SPDX-License-Identifier: Apache-2.0
"""The facts of every rank's host, and what each check makes of them."""

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

#: A question is asked by the id of its check.
Ask = Callable[[str], Judgement]


@pytest.fixture(scope="session")
def hosts(nixl_settings: Settings, nixl_cluster: Cluster) -> Sequence[Facts]:
    """What the host of each rank is, and of the etcd that the deployment has, if any."""
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
            f"{name} told facts of its host that no rank of this version tells: {error}",
            "see that every rank has the same pytest-nixl",
        ) from None


@pytest.fixture(scope="session")
def facts(hosts: Sequence[Facts]) -> Facts:
    """What this host is."""
    return hosts[0]


@pytest.fixture(scope="session")
def wanted(nixl_settings: Settings, profile: Profile) -> Requirements:
    """What every host should be."""
    return Requirements(profile, nixl_settings.backend)


@pytest.fixture
def ask(hosts: Sequence[Facts], nixl_cluster: Cluster, wanted: Requirements) -> Ask:
    """Ask a check of the facts of every rank's host."""
    return lambda check: everywhere(nixl_cluster.names, [judge(check, each, wanted) for each in hosts])


@pytest.fixture
def ask_etcd(nixl_etcd: EtcdFixture, facts: Facts, wanted: Requirements) -> Ask:
    """Ask a check that is about the etcd of this run."""
    found = replace(facts, etcd=read_etcd(FactsRoot(), nixl_etcd.endpoint, "this run", lambda: nixl_etcd.client))
    return lambda check: judge(check, found, wanted)
