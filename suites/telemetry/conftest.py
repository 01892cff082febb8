# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the checks of telemetry: two agents whose telemetry is on, each in a worker of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nixl import Agents, LocalHost, NotApplicableError, Settings, between_agents, supervisor
from pytest_nixl.checks.telemetry.measured_agents import MeasuredAgents

StartMeasured = Callable[[str], MeasuredAgents]


@pytest.fixture
def start_measured(nixl_settings: Settings, agent_backend: str, tmp_path: Path) -> Iterator[StartMeasured]:
    """Return a function that starts two agents with an exporter; they end with the test.

    :raises NotApplicableError: if only storage backends are requested.
    """
    if not between_agents(nixl_settings.backend):
        raise NotApplicableError(f"--nixl-backend={','.join(nixl_settings.backend)} has no second agent")
    settings = replace(nixl_settings, backend=(agent_backend,))
    with ExitStack() as started:

        def start(exporter: str) -> MeasuredAgents:
            folder = tmp_path / exporter
            folder.mkdir()
            return MeasuredAgents(started.enter_context(Agents(LocalHost(supervisor()), settings)), exporter, folder)

        yield start
