# SPDX-License-Identifier: Apache-2.0
"""The facts that the suite infrastructure judges: those of every rank's host, and of an etcd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd_servers.sources import ExternalServer
from pytest_nixl.host.etcd import read_etcd
from pytest_nixl.host.facts import Facts, gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.model.settings import Settings
from pytest_nixl.session.cluster import Cluster


def gather_hosts(settings: Settings, cluster: Cluster) -> Sequence[Facts]:
    """Return the facts of each rank's host, and of the deployment's etcd if there is one.

    :raises NixlPluginError: a rank sends facts that this version does not know.
    """
    if cluster.several:
        addresses = cluster.ask("address")
        told = cluster.ask("facts", peers=addresses)
        return [_read(name, plain) for name, plain in zip(cluster.names, told, strict=True)]
    own = gather(
        FactsRoot(),
        backends=settings.backend,
        etcd=settings.etcd,
        connect=lambda: ExternalServer.of(settings).client(),
    )
    return [own]


def with_etcd(facts: Facts, endpoint: str, client: EtcdClient) -> Facts:
    """Return the facts of a host with those of this etcd, which was started for the run."""
    return replace(facts, etcd=read_etcd(FactsRoot(), endpoint, "this run", lambda: client))


def _read(name: str, plain: dict[str, Any]) -> Facts:
    try:
        return Facts.of(plain)
    except ValueError as error:
        raise NixlPluginError(
            f"{name} sent facts that this version of pytest-nixl does not know: {error}",
            "install the same pytest-nixl on every rank",
        ) from None
