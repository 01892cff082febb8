# SPDX-License-Identifier: Apache-2.0
"""How much longer do transfers take with telemetry?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nixl import Figure, Judgement, LocalHost, NotApplicableError, Settings, between_agents, supervisor
from pytest_nixl.checks.telemetry.exporters import PROMETHEUS
from pytest_nixl.checks.telemetry.overhead import measure_overhead


@pytest.mark.nixl_check("telemetry-overhead", level="extended")
def test_transfers_with_telemetry_take_hardly_longer(
    nixl_settings: Settings,
    agent_backend: str,
    tmp_path: Path,
    record_figures: Callable[[Sequence[Figure]], Judgement],
    verdict: Callable[[Judgement], None],
) -> None:
    """Small transfers with the exporter prometheus take no longer, as a ratio to those without, than a profile allows.

    Launches with and without telemetry alternate. Without a bound in the profile the figures are only recorded.
    """
    if not between_agents(nixl_settings.backend):
        raise NotApplicableError(f"--nixl-backend={','.join(nixl_settings.backend)} has no second agent")
    settings = replace(nixl_settings, backend=(agent_backend,))
    verdict(record_figures(measure_overhead(LocalHost(supervisor()), settings, PROMETHEUS, tmp_path)))
