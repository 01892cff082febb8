# SPDX-License-Identifier: Apache-2.0
"""Check that NIXL can be used by several threads, agents and peers at once, as far as it promises that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Agents, Judgement, NotApplicableError, Settings
from pytest_nixl.checks.faults.threads import (
    LOCKED,
    PROCESSES,
    create_in_threads,
    has_modes,
    judge_concurrent_use,
    notify_at_once,
    transfer_in_threads,
)

Decide = Callable[[Judgement], None]


@pytest.mark.nixl_check("threads-one-agent", level="extended")
def test_threads_share_an_agent(agents: Agents, agent_backend: str, nixl_settings: Settings, verdict: Decide) -> None:
    """Four threads register, transfer and release on one agent in each mode with a lock; every byte is compared.

    The mode ``none`` has no lock, so NIXL promises nothing there: with ``--nixl-sync-mode=none`` nothing is asked.
    """
    chosen_mode = nixl_settings.sync_mode
    if chosen_mode == "none":
        raise NotApplicableError("with --nixl-sync-mode=none NIXL does not let several threads use one agent")
    outcomes = []
    for mode in LOCKED if chosen_mode == "auto" else (chosen_mode,):
        agent = agents.start(progress_thread=None)
        if not has_modes(agent):
            raise NotApplicableError(f"an agent of NIXL {agent.worker.versions['nixl']} has no synchronization mode")
        outcomes.append(transfer_in_threads(agent, agent_backend, mode))
        agent.close()
    verdict(judge_concurrent_use(outcomes))


@pytest.mark.nixl_check("threads-many-agents", level="extended")
def test_many_agents_are_created_at_once(agents: Agents, agent_backend: str, verdict: Decide) -> None:
    """Eight agents are created at once in one process, then in each of four processes; each moves correct bytes."""
    agent = agents.start(progress_thread=None)
    outcomes = create_in_threads([agent], agent_backend)
    agent.close()
    several = agents.start_each([None] * PROCESSES, progress_thread=None)
    verdict(judge_concurrent_use([*outcomes, *create_in_threads(several, agent_backend)]))


@pytest.mark.nixl_check("threads-many-notifiers", level="extended")
def test_notifications_of_many_peers_arrive_once(agents: Agents, agent_backend: str, verdict: Decide) -> None:
    """Each notification that four processes send to one agent at the same time arrives exactly once."""
    receiver, *senders = agents.start_each([None] * (1 + PROCESSES), progress_thread=None)
    verdict(judge_concurrent_use([notify_at_once(receiver, senders, agent_backend)]))
