# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the endurance checks: an agent in a worker of its own that repeats one kind of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Agents, Figure, Judgement, LocalHost, Settings, supervisor, wait_until
from pytest_nixl.checks.endurance.check import CYCLES, HEAP_WITHOUT_CONTEXT, Endurance, endure, judge_endurance

from ..metadata.conftest import agents, agents_meet, namespace

if TYPE_CHECKING:
    from pytest_nixl import Profile

    from ..metadata.namespace import Namespace

__all__ = ["agents", "agents_meet", "namespace"]

Endured = Callable[..., tuple[tuple[Figure, ...], Judgement]]


@pytest.fixture
def endured(
    nixl_settings: Settings, agent_backend: str, profile: Profile, record_figures: Callable[..., Judgement]
) -> Endured:
    """Repeat a cycle in a new worker, or in that of a namespace's agent; return what grew, and the judgement."""

    def run(cycle: str, namespace: Namespace | None = None) -> tuple[tuple[Figure, ...], Judgement]:
        kind = CYCLES[cycle]
        settings = replace(nixl_settings, backend=(agent_backend,))
        with Agents(LocalHost(supervisor()), settings) as started:
            if namespace is None:
                agent, published = started.start(progress_thread=None), None
            else:
                (agent,) = namespace.start("publisher")

                def published(label: str) -> int:
                    key = namespace.key(agent, label)
                    awaited = f"etcd to have {key}, which {agent.worker.name} publishes"
                    wait_until(lambda: namespace.client.get(key) is not None, awaited, seconds=namespace.seconds)
                    return namespace.client.count_prefix(f"{namespace.name}/")

            if cycle == "agent" and agent.worker.call("devices")["devices"]:
                if any("VRAM" in str(pair) for pair in nixl_settings.memory):
                    agent.worker.call("activate", device=0)
                else:
                    kind = replace(kind, heap=kind.heap + HEAP_WITHOUT_CONTEXT)
            endurance = Endurance(agent, kind, agent_backend, nixl_settings.duration, published)
            figures = endure(endurance, profile.bounds)
            return figures, judge_endurance(record_figures(figures, kind.limits), endurance)

    return run
