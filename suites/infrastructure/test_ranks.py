# SPDX-License-Identifier: Apache-2.0
"""Do all ranks have the same software, hardware and settings?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_nixl import Facts, Judgement
from pytest_nixl.checks.doctor.ranks import ranks_agree


@pytest.mark.nixl_check("ranks-agree", level="quick")
def test_ranks_agree(hosts: Sequence[Facts], verdict: Callable[[Judgement], None]) -> None:
    """Versions, rates, MTUs, drivers and variables are the same on every rank."""
    verdict(ranks_agree(hosts))
