# SPDX-License-Identifier: Apache-2.0
"""Check that NIXL refuses a program's misuse, or survives it. Each misuse has a worker of its own, which may crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import (
    Agents,
    Judgement,
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
Misused = Callable[[str], tuple[bool, str]]
#: The number of workers that run at the same time.
TOGETHER = 4


@pytest.fixture
def misused(agents: Agents, agent_backend: str) -> Misused:
    """Make the wrong calls of a kind in a worker of their own; return whether there is a fault, and the reason."""

    def make(kind: str) -> tuple[bool, str]:
        (agent,) = agents.start_each([None], progress_thread=None)
        outcome = misuse(agent, KINDS[kind], agent_backend)
        return bool(outcome.fault), misuse_reason(outcome)

    return make


@pytest.mark.nixl_check("misuse-duplicate-descriptor", level="extended")
def test_a_region_that_is_named_twice_is_freed_once(misused: Misused, finding: FindingFixture) -> None:
    """A list that names a region twice is deregistered or refused, and the process lives."""
    finding("NIXL-DUPLICATE-DESCRIPTOR", *misused("duplicate-descriptor"))


@pytest.mark.nixl_check("misuse-released-handle", level="extended")
def test_a_released_handle_is_refused(misused: Misused, finding: FindingFixture) -> None:
    """A transfer that is posted after its handle was released is refused, and the process lives."""
    finding("NIXL-RELEASED-HANDLE", *misused("released-handle"))


@pytest.mark.nixl_check("misuse-released-in-flight", level="extended")
def test_a_transfer_is_done_after_another_was_released_in_flight(misused: Misused, finding: FindingFixture) -> None:
    """A transfer that is posted after the handle of another one was released in flight is done, and correct."""
    finding("LIBFABRIC-RELEASE-STALLS", *misused("released-in-flight"))


@pytest.mark.nixl_check("misuse-deregistered-source", level="extended")
def test_a_transfer_of_deregistered_memory_is_survived(misused: Misused, finding: FindingFixture) -> None:
    """A transfer that is posted after its own region was deregistered is refused or done, and the process lives."""
    finding("NIXL-DEREGISTERED-SOURCE", *misused("deregistered-source"))


@pytest.mark.nixl_check("misuse-cut-metadata", level="extended")
def test_an_agent_can_be_added_after_cut_metadata(misused: Misused, finding: FindingFixture) -> None:
    """NIXL refuses metadata without its last byte, then accepts the whole metadata, and a transfer is correct."""
    finding("NIXL-CUT-METADATA", *misused("cut-metadata"))


@pytest.mark.nixl_check("misuse-survived", level="extended")
def test_every_other_misuse_is_refused_or_survived(agents: Agents, agent_backend: str, verdict: Decide) -> None:
    """Wrong lengths, overlaps, unknown agents and repeated calls end in an error or are carried out.

    After each of them the agent moves correct bytes.
    """
    outcomes = []
    for first in range(0, len(SURVIVED), TOGETHER):
        kinds = SURVIVED[first : first + TOGETHER]
        started = list(zip(agents.start_each([None] * len(kinds), progress_thread=None), kinds, strict=True))
        running = [(agent, kind, start_misuse(agent, kind, agent_backend)) for agent, kind in started]
        for agent, kind, pending in running:
            outcomes.append(misuse_outcome(agent, kind, agent_backend, pending))
            agent.close()
    verdict(judge_misuses(outcomes))
