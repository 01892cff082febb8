# SPDX-License-Identifier: Apache-2.0
"""Does this environment give an inference engine what it asks of NIXL on each request?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Judgement, Verdict
from pytest_nixl.checks.doctor.engine import NO_TELEMETRY

if TYPE_CHECKING:
    from suites.conftest import FindingFixture


@pytest.mark.nixl_check("telemetry-in-process", level="quick")
def test_engines_can_read_the_telemetry_of_a_transfer(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None], finding: FindingFixture
) -> None:
    """NIXL returns the telemetry of a transfer to an agent that asks for it, as agents of engines do."""
    judged = ask("telemetry-in-process")
    raises = NO_TELEMETRY in judged.reason
    if not raises and judged.verdict is not Verdict.PASS:
        verdict(judged)
    finding("NIXL-TELEMETRY-OFF-RAISES", raises, judged.reason, affects=True)
