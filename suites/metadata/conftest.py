# SPDX-License-Identifier: Apache-2.0
"""Fixtures with agents that publish to the run's etcd, each test in its own namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import (
    Agents,
    Cluster,
    EtcdFixture,
    EtcdProxy,
    LocalHost,
    NixlPluginError,
    NotApplicableError,
    Settings,
    between_agents,
    redact,
    shake_hands,
    supervisor,
)

from .. import early
from .namespace import Namespace

if TYPE_CHECKING:
    from pytest_nixl import ProxyClient


#: The time for which LIBFABRIC blocks to wait for another agent's handshake when it loads metadata, in seconds.
HANDSHAKE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def agents_meet(nixl_settings: Settings) -> None:
    """Skip the test if only storage backends are requested."""
    if not between_agents(nixl_settings.backend):
        names = ",".join(nixl_settings.backend)
        raise NotApplicableError(
            f"--nixl-backend={names} moves bytes only to storage, for which agents need no metadata of each other"
        )


@early.fixture
def agents(
    nixl_settings: Settings, agent_backend: str, agent_progress: str, nixl_etcd_proxy: Callable[[str], EtcdProxy]
) -> Iterator[Agents]:
    """Agents of one requested backend in separate workers, which end with the test, before their proxies to etcd."""
    seconds = nixl_settings.timeout + (HANDSHAKE_SECONDS if shake_hands([agent_backend]) else 0)
    settings = replace(nixl_settings, backend=(agent_backend,), progress_thread=(agent_progress,), timeout=seconds)
    with Agents(LocalHost(supervisor()), settings) as started:
        yield started


@early.fixture
def namespace(nixl_etcd: EtcdFixture, agents: Agents, nixl_cluster: Cluster) -> Namespace:
    """A namespace in the run's etcd under the test's own prefix, with agents on all ranks of the run.

    :raises NixlPluginError: NIXL cannot use that etcd; without this error every step would wait for its deadline.
    """
    encrypted = any(member.startswith("https://") for member in nixl_etcd.client.endpoints)
    if encrypted or agents.settings.etcd_user or "@" in nixl_etcd.endpoint:
        raise NixlPluginError(
            f"NIXL cannot use the etcd at {redact(nixl_etcd.endpoint)}: NIXL speaks plaintext and sends no password",
            "run `etcd grpc-proxy start` with the certificates on the agents' hosts, and set --nixl-etcd to its "
            "http:// address; for an etcd with a password there is no remedy",
        )
    name = nixl_etcd.prefix.rstrip("/")
    # If agents cannot use the ranks' etcd, this run's etcd is on rank 0's host, and so are all agents.
    hosts = nixl_cluster.hosts[: nixl_cluster.ranks] if nixl_cluster.etcd() is not None else ()
    return Namespace(agents, nixl_etcd.client, nixl_etcd.endpoint, name, agents.settings.timeout, hosts)


@early.fixture
def proxy_client(nixl_etcd: EtcdFixture, nixl_etcd_proxy: Callable[[str], EtcdProxy]) -> ProxyClient:
    """A proxy to the run's etcd that counts the agents' requests, and that can be cut without harm to other clients."""
    return nixl_etcd_proxy(nixl_etcd.endpoint).client("agents")
