# SPDX-License-Identifier: Apache-2.0
"""Are all ranks alike?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_nixl import Facts, Judgement
from pytest_nixl.checks.doctor.ranks import ranks_agree


@pytest.mark.nixl_check("ranks-agree")
def test_ranks_agree(hosts: Sequence[Facts], verdict: Callable[[Judgement], None]) -> None:
    """What must be alike on every rank is: versions, rates, MTU, drivers, variables, slash for slash."""
    verdict(ranks_agree(hosts))
