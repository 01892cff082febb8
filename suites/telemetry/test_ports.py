# SPDX-License-Identifier: Apache-2.0
"""Is each process measured if several of them have telemetry?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Agents, Judgement, LocalHost, Settings, supervisor
from pytest_nixl.checks.telemetry.shared_port import deployment_port, describe_sharing, judge_taken_port, share_port

if TYPE_CHECKING:
    from ..conftest import FindingFixture

Decide = Callable[[Judgement], None]


@pytest.mark.nixl_check("telemetry-port", level="extended")
def test_each_process_with_telemetry_is_measured(
    nixl_settings: Settings, agent_backend: str, verdict: Decide, finding: FindingFixture
) -> None:
    """Two processes with the exporter prometheus and one port are both measured, with this run's variables if set."""
    port = deployment_port()
    settings = replace(nixl_settings, backend=(agent_backend,))
    with Agents(LocalHost(supervisor()), settings) as agents:
        unmeasured = share_port(agents, port)
    taken = judge_taken_port(unmeasured)
    if taken is not None:
        verdict(taken)
    description = describe_sharing(unmeasured, port)
    finding("NIXL-TELEMETRY-PORT-SHARED", bool(unmeasured), description, affects=port is not None)
