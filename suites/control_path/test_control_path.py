# SPDX-License-Identifier: Apache-2.0
"""How long do agents take for what they do before and around transfers?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_nixl import Figure, Judgement, Settings
from pytest_nixl.checks.control_path.check import (
    COUNTS,
    EXTENDED_SIZES,
    PAGE,
    SIZES,
    ControlPath,
    judge_path_growth,
    sizes_that_fit,
)

#: Writes figures to the report, and judges them by the profile's bounds.
Record = Callable[[Sequence[Figure]], Judgement]
Decide = Callable[[Judgement], None]


@pytest.mark.nixl_check("agent-creation")
def test_an_agent_is_created(control_path: ControlPath, record_figures: Record, verdict: Decide) -> None:
    """The creation of an agent with its backend takes no longer than the profile allows."""
    verdict(record_figures(control_path.creation()))


@pytest.mark.nixl_check("registration")
def test_memory_is_registered_and_deregistered(
    control_path: ControlPath, nixl_settings: Settings, record_figures: Record, verdict: Decide
) -> None:
    """Registration and deregistration of few and many, small and large regions take no longer than the profile allows.

    The regions have up to 64 MiB, and up to 1 GiB at the level extended.
    """
    sizes = SIZES + (EXTENDED_SIZES if nixl_settings.extended else ())
    calls = [(count, PAGE) for count in COUNTS] + [(1, size) for size in sizes_that_fit(sizes)]
    verdict(record_figures([figure for count, size in calls for figure in control_path.registration(count, size)]))


@pytest.mark.nixl_check("registration-growth")
def test_registration_does_not_become_slower(control_path: ControlPath, verdict: Decide) -> None:
    """Registration and deregistration take less than three times as long after a thousand registrations."""
    verdict(judge_path_growth(control_path))


@pytest.mark.nixl_check("metadata-size")
def test_metadata_is_exported_and_loaded(control_path: ControlPath, record_figures: Record, verdict: Decide) -> None:
    """Metadata of few and many regions is as small, and exported and loaded as fast, as the profile demands."""
    verdict(record_figures([figure for count in COUNTS for figure in control_path.metadata(count)]))


@pytest.mark.nixl_check("first-transfer")
def test_the_first_transfer_and_later_ones(
    agent_backend: str, start_path: Callable[[str], ControlPath], record_figures: Record, verdict: Decide
) -> None:
    """Two new agents connect, and the first and later transfers take no longer than the profile allows."""
    verdict(record_figures(start_path(agent_backend).connection()))


@pytest.mark.nixl_check("notification-latency")
def test_notifications_arrive(control_path: ControlPath, record_figures: Record, verdict: Decide) -> None:
    """Single notifications and a burst of them arrive as fast as the profile demands."""
    verdict(record_figures(control_path.notifications()))
