# SPDX-License-Identifier: Apache-2.0
"""Does NIXL load, with every requested backend?"""

from __future__ import annotations

import pytest

from pytest_nixl import NixlAgent, Settings, between_agents


@pytest.mark.nixl_check("nixl-loads", level="quick")
def test_nixl_loads(nixl_agent: NixlAgent) -> None:
    """A worker can import NIXL and create an agent that finds its plugins."""
    assert nixl_agent.get_plugin_list(), "the agent finds no plugin"
    assert nixl_agent.worker.versions["nixl"], "the NIXL package does not report its version"


@pytest.mark.nixl_check("backend-loads", level="quick")
def test_every_requested_backend_loads(nixl_agent: NixlAgent, nixl_settings: Settings) -> None:
    """NIXL has a plugin for each backend of --nixl-backend, can create it, and moves host memory with it."""
    [backend_made, *_] = between_agents(nixl_settings.backend) or nixl_settings.backend  # the backend of nixl_agent
    for backend in nixl_settings.backend:
        agent = nixl_agent if backend == backend_made else nixl_agent.another(backends=[backend])
        types = agent.get_backend_mem_types(backend)
        assert "DRAM" in str(types), f"{backend} was created, but supports {types}, not DRAM"
