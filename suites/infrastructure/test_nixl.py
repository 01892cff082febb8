# SPDX-License-Identifier: Apache-2.0
"""Is NIXL here, and does it have what was asked for?"""

from __future__ import annotations

import pytest

from pytest_nixl import NixlAgent, Settings


@pytest.mark.nixl_check("nixl-loads")
def test_nixl_loads(nixl_agent: NixlAgent) -> None:
    """NIXL can be imported, in a process of its own, and makes an agent that knows its plugins."""
    assert nixl_agent.get_plugin_list(), "the agent finds no plugin"
    assert nixl_agent.worker.versions["nixl"], "the NIXL package does not tell its version"


@pytest.mark.nixl_check("backend-loads")
def test_every_requested_backend_loads(nixl_agent: NixlAgent, nixl_settings: Settings) -> None:
    """Each backend of --nixl-backend is among NIXL's plugins, can be created, and moves host memory."""
    for backend in nixl_settings.backend:
        agent = nixl_agent.another(backends=[backend])
        types = agent.get_backend_mem_types(backend)
        assert "DRAM" in str(types), f"{backend} was created, and supports {types}: not DRAM"
