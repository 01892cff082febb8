# SPDX-License-Identifier: Apache-2.0
"""Check that NIXL refuses a program's misuse, or survives it. Each misuse has a worker of its own, which may crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import (
    Agents,
    Judgement,
    LocalHost,
    NixlAgent,
    NotApplicableError,
    Settings,
    between_agents,
    supervisor,
)
from pytest_nixl.checks.faults.misuse import (
    KINDS,
    SURVIVED,
    judge_misuses,
    misuse,
    misuse_outcome,
    misuse_reason,
    start_misuse,
)

if TYPE_CHECKING:
    from suites.conftest import FindingFixture

Decide = Callable[[Judgement], None]
#: The number of workers that run at the same time.
TOGETHER = 4


@pytest.fixture
def agents(nixl_settings: Settings, agent_backend: str) -> Iterator[Agents]:
    """Agents of a requested backend in workers of their own, which end with the test.

    :raises NotApplicableError: if only storage backends are requested.
    """
    if not between_agents(nixl_settings.backend):
        raise NotApplicableError(f"--nixl-backend={','.join(nixl_settings.backend)} has no second agent")
    with Agents(LocalHost(supervisor()), replace(nixl_settings, backend=(agent_backend,))) as started:
        yield started


def _start(agents: Agents, count: int) -> list[NixlAgent]:
    return agents.start_each([None] * count, progress_thread=None)


@pytest.mark.nixl_check("misuse-duplicate-descriptor", level="extended")
def test_a_region_that_is_named_twice_is_freed_once(
    agents: Agents, agent_backend: str, finding: FindingFixture
) -> None:
    """A list that names a region twice is deregistered or refused, and the process lives."""
    (agent,) = _start(agents, 1)
    outcome = misuse(agent, KINDS["duplicate-descriptor"], agent_backend)
    finding("NIXL-DUPLICATE-DESCRIPTOR", bool(outcome.fault), misuse_reason(outcome))


@pytest.mark.nixl_check("misuse-released-handle", level="extended")
def test_a_released_handle_is_refused(agents: Agents, agent_backend: str, finding: FindingFixture) -> None:
    """A transfer that is posted after its handle was released is refused, and the process lives."""
    (agent,) = _start(agents, 1)
    outcome = misuse(agent, KINDS["released-handle"], agent_backend)
    finding("NIXL-RELEASED-HANDLE", bool(outcome.fault), misuse_reason(outcome))


@pytest.mark.nixl_check("misuse-deregistered-source", level="extended")
def test_a_transfer_of_deregistered_memory_is_survived(
    agents: Agents, agent_backend: str, finding: FindingFixture
) -> None:
    """A transfer that is posted after its own region was deregistered is refused or done, and the process lives."""
    (agent,) = _start(agents, 1)
    outcome = misuse(agent, KINDS["deregistered-source"], agent_backend)
    finding("NIXL-DEREGISTERED-SOURCE", bool(outcome.fault), misuse_reason(outcome))


@pytest.mark.nixl_check("misuse-cut-metadata", level="extended")
def test_an_agent_can_be_added_after_cut_metadata(agents: Agents, agent_backend: str, finding: FindingFixture) -> None:
    """NIXL refuses metadata without its last byte, then accepts the whole metadata, and a transfer is correct."""
    (agent,) = _start(agents, 1)
    outcome = misuse(agent, KINDS["cut-metadata"], agent_backend)
    finding("NIXL-CUT-METADATA", bool(outcome.fault), misuse_reason(outcome))


@pytest.mark.nixl_check("misuse-survived", level="extended")
def test_every_other_misuse_is_refused_or_survived(agents: Agents, agent_backend: str, verdict: Decide) -> None:
    """Wrong lengths, overlaps, unknown agents and repeated calls end in an error or are carried out.

    After each of them the agent moves correct bytes.
    """
    outcomes = []
    for first in range(0, len(SURVIVED), TOGETHER):
        kinds = SURVIVED[first : first + TOGETHER]
        started = list(zip(_start(agents, len(kinds)), kinds, strict=True))
        running = [(agent, kind, start_misuse(agent, kind, agent_backend)) for agent, kind in started]
        for agent, kind, pending in running:
            outcomes.append(misuse_outcome(agent, kind, agent_backend, pending))
            agent.close()
    verdict(judge_misuses(outcomes))
