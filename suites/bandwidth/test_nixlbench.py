# SPDX-License-Identifier: Apache-2.0
"""Does nixlbench, NIXL's own benchmark, confirm the rows under the same profile?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, Profile, RowKey, Verdict
from pytest_nixl.checks.nixlbench.programs import Nixlbench
from pytest_nixl.checks.nixlbench.row import JudgedRow, judge_row


@pytest.mark.nixl_check("nixlbench-bandwidth", level="extended")
def test_nixlbench(
    record_program: Callable[[JudgedRow, dict[str, object]], None],
    program_row: RowKey,
    nixlbench: Nixlbench,
    profile: Profile,
    verdict: Callable[[Judgement], None],
) -> None:
    """Bandwidth and transport of one row, measured by nixlbench between the same ranks, are as the profile expects."""
    why = nixlbench.why_not(program_row)
    if why is not None:
        verdict(Judgement(Verdict.NOT_APPLICABLE, why))
        return
    ran = nixlbench.run(program_row)
    judged = judge_row(ran, nixlbench.plain(program_row), program_row, profile, nixlbench.line_rates(program_row))
    record_program(judged, nixlbench.described(program_row))
    verdict(judged.judgement)
