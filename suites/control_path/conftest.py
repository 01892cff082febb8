# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the control path: two agents to time, and agents that publish to the run's etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from pytest_nixl import Agents, LocalHost, Settings, supervisor
from pytest_nixl.checks.control_path.check import ControlPath

from ..metadata.conftest import agents, agents_meet, namespace

__all__ = ["agents", "agents_meet", "namespace"]

StartPath = Callable[[str], ControlPath]


@pytest.fixture(scope="module")
def start_path(nixl_settings: Settings) -> Iterator[StartPath]:
    """Return a function that starts two agents of a backend, each in its own worker; they end with the module."""
    with ExitStack() as started:

        def start(backend: str) -> ControlPath:
            pair = Agents(LocalHost(supervisor()), replace(nixl_settings, backend=(backend,)))
            agent, other = started.enter_context(pair).start_each(["initiator", "target"], progress_thread=None)
            return ControlPath(backend, agent, other, nixl_settings.timeout)

        yield start


@pytest.fixture(scope="module")
def shared_paths() -> dict[str, ControlPath]:
    """The agents that the tests of this module share, by backend."""
    return {}


@pytest.fixture
def control_path(agent_backend: str, start_path: StartPath, shared_paths: dict[str, ControlPath]) -> ControlPath:
    """Two agents that know nothing of each other at first, and that other tests of the module also use."""
    shared = shared_paths.get(agent_backend)
    if shared is None or not shared.healthy:
        shared = shared_paths[agent_backend] = start_path(agent_backend)
    return shared
