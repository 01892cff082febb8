# SPDX-License-Identifier: Apache-2.0
"""Tests as a user annotates them. Nothing runs them: mypy (``tox -e lint``) and pyright (``tox -e docs``) read them.

Each mistake must be an error for both: mypy and pyright report an ``ignore`` that they do not need.
"""

from __future__ import annotations

from collections.abc import Callable

from pytest_nixl import (
    Buffer,
    Cluster,
    EtcdFixture,
    EtcdProxy,
    Link,
    MakeBuffer,
    NixlAgent,
    PrivateEtcd,
    Samples,
    Settings,
)


def test_a_link(nixl_link: Link) -> None:
    samples: Samples = nixl_link.measure(block=1 << 20)
    bandwidth: float = samples.bandwidth
    assert bandwidth > 1e9
    nixl_link.measure(blok=1 << 20)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    assert samples.bandwith  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def test_agents(nixl_agent: NixlAgent, nixl_buffer: MakeBuffer) -> None:
    other: NixlAgent = nixl_agent.another("other")
    peer: str = nixl_agent.add_remote_agent(other.get_agent_metadata())
    buffer: Buffer = nixl_buffer(nixl_agent, 1 << 20)
    assert peer == other.name
    assert buffer
    nixl_agent.another(nome="other")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_etcd(
    nixl_etcd: EtcdFixture, nixl_private_etcd: PrivateEtcd, nixl_etcd_proxy: Callable[[str], EtcdProxy]
) -> None:
    nixl_etcd.client.put(f"{nixl_etcd.prefix}key", b"value")
    nixl_private_etcd.kill()
    nixl_etcd_proxy(nixl_private_etcd.endpoint)
    nixl_etcd.client.put("key", "value")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_settings(nixl_settings: Settings, nixl_cluster: Cluster) -> None:
    assert nixl_settings.timeout * nixl_cluster.ranks > 0
    nixl_settings.timeout = 1.0  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
