# SPDX-License-Identifier: Apache-2.0
"""Agents that publish to the run's etcd, in a namespace of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import (
    Agents,
    Cluster,
    EtcdFixture,
    LocalHost,
    NixlPluginError,
    NotApplicableError,
    Settings,
    between_agents,
    redact,
    shake_hands,
    supervisor,
)

from .namespace import Namespace

if TYPE_CHECKING:
    from pytest_nixl import EtcdProxy, ProxyClient


#: How long LIBFABRIC waits for the handshake of an agent that it loads the metadata of, while it does nothing else.
HANDSHAKE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def agents_meet(nixl_settings: Settings) -> None:
    """:raises NotApplicableError: where only storage backends are asked for."""
    if not between_agents(nixl_settings.backend):
        names = ",".join(nixl_settings.backend)
        raise NotApplicableError(f"--nixl-backend={names} moves bytes to storage: no agent learns of another for it")


@pytest.fixture
def agents(
    nixl_settings: Settings, agent_backend: str, nixl_etcd_proxy: Callable[[str], EtcdProxy]
) -> Iterator[Agents]:
    """Agents of one of the backends asked for, in workers of their own, which all end with the test: before the ways to
    etcd that they may have.
    """
    seconds = nixl_settings.timeout + (HANDSHAKE_SECONDS if shake_hands([agent_backend]) else 0)
    with Agents(LocalHost(supervisor()), replace(nixl_settings, backend=(agent_backend,), timeout=seconds)) as started:
        yield started


@pytest.fixture
def namespace(nixl_etcd: EtcdFixture, agents: Agents, nixl_settings: Settings, nixl_cluster: Cluster) -> Namespace:
    """A namespace in the run's etcd, under the test's own prefix; its agents are spread over the ranks of the run.

    :raises NixlPluginError: at once, where NIXL cannot reach that etcd: every step would wait for its whole time.
    """
    encrypted = any(member.startswith("https://") for member in nixl_etcd.client.endpoints)
    if encrypted or nixl_settings.etcd_user or "@" in nixl_etcd.endpoint:
        raise NixlPluginError(
            f"NIXL cannot use the etcd at {redact(nixl_etcd.endpoint)}: it speaks plaintext, and sends no password",
            "run `etcd grpc-proxy start` with the certificates beside the agents, and give its http:// address with "
            "--nixl-etcd; with a password there is no way",
        )
    name = nixl_etcd.prefix.rstrip("/")
    # Where the ranks' own etcd cannot be used by agents, that of this run is one of rank 0's own host.
    places = nixl_cluster.places[: nixl_cluster.ranks] if nixl_cluster.etcd() is not None else ()
    return Namespace(agents, nixl_etcd.client, nixl_etcd.endpoint, name, agents.settings.timeout, places)


@pytest.fixture
def way(nixl_etcd: EtcdFixture, nixl_etcd_proxy: Callable[[str], EtcdProxy]) -> ProxyClient:
    """A way of our own to the run's etcd: it counts what agents ask, and can be cut with no harm to anybody else."""
    return nixl_etcd_proxy(nixl_etcd.endpoint).client("agents")
