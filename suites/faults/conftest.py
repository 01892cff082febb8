# SPDX-License-Identifier: Apache-2.0
"""Two agents to break: in workers of their own, of two ranks where there are several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from pytest_nixl import Agents, Buffer, Cluster, NixlAgent, NotApplicableError, Settings, between_agents


@dataclass
class Couple:
    """An initiator that knows a target, and the target's memory."""

    agents: Agents
    cluster: Cluster
    initiator: NixlAgent
    target: NixlAgent
    memory: Buffer

    @property
    def seconds(self) -> float:
        """Seconds that a step may take."""
        return self.agents.settings.timeout

    def another_target(self) -> tuple[NixlAgent, Buffer]:
        """Start a new process where the target was, with an agent of the same name, and have the initiator know it."""
        agent = self.agents.start(self.target.name, place=self.cluster.places[1], progress_thread=None)
        memory = agent.allocate_asked(self.memory.size)
        agent.register(memory)
        self.initiator.remove_remote_agent(self.target.name)
        self.initiator.add_remote_agent(agent.get_agent_metadata())
        return agent, memory


@pytest.fixture
def couple(nixl_settings: Settings, agent_backend: str, nixl_cluster: Cluster) -> Iterator[Couple]:
    """Two agents of one of the backends asked for, which know each other.

    :raises NotApplicableError: where only storage backends are asked for.
    """
    if not between_agents(nixl_settings.backend):
        names = ",".join(nixl_settings.backend)
        raise NotApplicableError(f"--nixl-backend={names} moves bytes to storage: no other agent can be lost")
    settings = replace(nixl_settings, backend=(agent_backend,))
    with Agents(nixl_cluster.places[0], settings) as agents:
        initiator, target = agents.start_each(
            ["initiator", "target"], places=nixl_cluster.places[:2], progress_thread=None
        )
        memory = target.allocate_asked(64 << 10)
        target.register(memory)
        initiator.add_remote_agent(target.get_agent_metadata())
        yield Couple(agents, nixl_cluster, initiator, target, memory)
