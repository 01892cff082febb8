# SPDX-License-Identifier: Apache-2.0
"""The agents of the fault checks: two whose processes are killed or stopped, on two ranks if there are several, and
agents that a wrong program uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from pytest_nixl import (
    Agents,
    Buffer,
    Cluster,
    LocalHost,
    NixlAgent,
    NotApplicableError,
    Settings,
    between_agents,
    supervisor,
)

from .. import early


@dataclass
class Couple:
    """An initiator that knows a target, and the registered memory of the target."""

    agents: Agents
    cluster: Cluster
    initiator: NixlAgent
    target: NixlAgent
    memory: Buffer

    @property
    def seconds(self) -> float:
        """The time in seconds that one step may take."""
        return self.agents.settings.timeout

    def another_target(self) -> tuple[NixlAgent, Buffer]:
        """Start a new target of the same name on the same host, with registered memory."""
        agent = self.agents.start(self.target.name, host=self.cluster.hosts[1], progress_thread=None)
        memory = agent.allocate_asked(self.memory.size)
        agent.register(memory)
        return agent, memory


def know_again(initiator: NixlAgent, target: NixlAgent) -> None:
    """Let an initiator forget an agent, and know the one that has its name now."""
    initiator.remove_remote_agent(target.name)
    metadata = target.get_agent_metadata()
    with target.polled():
        initiator.add_remote_agent(metadata)


@pytest.fixture
def agents(nixl_settings: Settings, agent_backend: str) -> Iterator[Agents]:
    """Agents of a requested backend in workers of their own, which end with the test.

    :raises NotApplicableError: if only storage backends are requested.
    """
    if not between_agents(nixl_settings.backend):
        raise NotApplicableError(f"--nixl-backend={','.join(nixl_settings.backend)} has no second agent")
    with Agents(LocalHost(supervisor()), replace(nixl_settings, backend=(agent_backend,))) as started:
        yield started


@early.fixture
def couple(nixl_settings: Settings, agent_backend: str, agent_progress: str, nixl_cluster: Cluster) -> Iterator[Couple]:
    """Two agents of a requested backend, in two workers; the initiator knows the target.

    :raises NotApplicableError: if only storage backends are requested.
    """
    if not between_agents(nixl_settings.backend):
        names = ",".join(nixl_settings.backend)
        raise NotApplicableError(f"--nixl-backend={names} moves bytes to storage and has no second agent")
    settings = replace(nixl_settings, backend=(agent_backend,), progress_thread=(agent_progress,))
    with Agents(nixl_cluster.hosts[0], settings) as agents:
        hosts = nixl_cluster.hosts[:2]
        initiator, target = agents.start_each(["initiator", "target"], hosts=hosts, progress_thread=None)
        memory = target.allocate_asked(64 << 10)
        target.register(memory)
        metadata = target.get_agent_metadata()
        with target.polled():
            initiator.add_remote_agent(metadata)
        yield Couple(agents, nixl_cluster, initiator, target, memory)
