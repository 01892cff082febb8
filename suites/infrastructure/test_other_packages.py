# SPDX-License-Identifier: Apache-2.0
"""What do the doctor checks of other installed packages find?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement
from pytest_nixl.checks.doctor.catalogue import other_checks

OTHERS = other_checks()
#: Without such a package there is no test, not a skipped one.
__test__ = bool(OTHERS)


@pytest.mark.parametrize("check", [pytest.param(check, marks=pytest.mark.nixl_check(check)) for check in OTHERS])
def test_a_check_of_another_package(
    check: str, ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """A check that a package adds by an entry point of the group ``pytest_nixl.doctor_checks``."""
    verdict(ask(check))
