# SPDX-License-Identifier: Apache-2.0
"""Does anything grow while agents do the same work again and again, as they do over hours?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Judgement, NotApplicableError, shake_hands
from pytest_nixl.checks.endurance.check import kept_memory, kept_sockets

if TYPE_CHECKING:
    from ..conftest import FindingFixture
    from ..metadata.namespace import Namespace
    from .conftest import Endured

Decide = Callable[[Judgement], None]


@pytest.mark.nixl_check("endurance-transfer", level="extended")
def test_nothing_grows_with_transfers(endured: Endured, verdict: Decide) -> None:
    """Thousands of transfers with notifications leave no memory, descriptor or thread behind, and stay as fast."""
    verdict(endured("transfer")[1])


@pytest.mark.nixl_check("endurance-connection", level="extended")
def test_nothing_grows_with_connections(
    endured: Endured, agent_backend: str, verdict: Decide, finding: FindingFixture
) -> None:
    """Hundreds of times another agent is added, written to and removed, and no socket stays open.

    With a backend that cannot connect again to an agent that was removed, there is nothing to repeat.
    """
    if shake_hands([agent_backend]):
        raise NotApplicableError(f"{agent_backend} cannot connect again to an agent that was removed")
    figures, judgement = endured("connection")
    if judgement.verdict.value == "FAIL":
        verdict(judgement)
    finding("NIXL-REMOVED-AGENT-KEEPS-SOCKETS", kept_sockets(figures), judgement.reason)


@pytest.mark.nixl_check("endurance-registration", level="extended")
def test_nothing_grows_with_registrations(endured: Endured, verdict: Decide) -> None:
    """Thousands of registrations and deregistrations leave nothing behind, and stay as fast."""
    verdict(endured("registration")[1])


@pytest.mark.nixl_check("endurance-publication", level="extended")
def test_nothing_grows_with_publications(endured: Endured, namespace: Namespace, verdict: Decide) -> None:
    """Hundreds of publications to etcd and their removals leave no key and no memory behind."""
    verdict(endured("publication", namespace)[1])


@pytest.mark.nixl_check("endurance-agent", level="extended")
def test_nothing_grows_with_agents(
    endured: Endured, agent_backend: str, verdict: Decide, finding: FindingFixture
) -> None:
    """Agents that are created, move bytes and are deleted in one process leave nothing behind."""
    figures, judgement = endured("agent")
    if agent_backend != "LIBFABRIC" or judgement.verdict.value == "FAIL":
        verdict(judgement)
    else:
        finding("LIBFABRIC-DELETED-AGENT-KEEPS-MEMORY", kept_memory(figures), judgement.reason)
