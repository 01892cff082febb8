# SPDX-License-Identifier: Apache-2.0
"""Is every byte of every transfer right, also if only one transfer in a hundred is wrong?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, Link, Settings
from pytest_nixl.checks.integrity.check import judge_every_transfer


@pytest.mark.nixl_check("bytes-of-every-transfer", level="quick")
def test_the_bytes_of_every_transfer_are_right(
    nixl_link: Link, nixl_settings: Settings, verdict: Callable[[Judgement], None]
) -> None:
    """Each of 200 transfers (extended: 5,000) brings a pattern of its own, compared before the next one is posted."""
    verdict(judge_every_transfer(nixl_link, nixl_settings))
