# SPDX-License-Identifier: Apache-2.0
"""Two agents that publish to the session's etcd, in a namespace of their own."""

from __future__ import annotations

import pytest

from pytest_nixl.agent import NixlAgent
from pytest_nixl.etcd.fixtures import EtcdFixture


@pytest.fixture
def etcd_agents(nixl_etcd: EtcdFixture, nixl_agent: NixlAgent) -> tuple[NixlAgent, NixlAgent]:
    """A publisher and a finder."""
    environment = {"NIXL_ETCD_ENDPOINTS": nixl_etcd.endpoint, "NIXL_ETCD_NAMESPACE": nixl_etcd.prefix.rstrip("/")}
    publisher = nixl_agent.another("publisher", environment=environment, listen_thread=True)
    finder = nixl_agent.another("finder", environment=environment, listen_thread=True)
    return publisher, finder
