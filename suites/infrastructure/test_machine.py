# SPDX-License-Identifier: Apache-2.0
"""Is the host, or the container image, of every rank fit for NIXL: libraries, limits, network, GPUs, variables?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement
from pytest_nixl.checks.doctor.catalogue import other_checks, own_checks

from .conftest import COMMAND_ONLY, OF_ETCD, OWN_TEST, check_parameters

#: Every check of the doctor, except for those of etcd and those that have a test of their own.
MACHINE = [id for id in own_checks() if id not in (*OF_ETCD, *OWN_TEST, *COMMAND_ONLY)]
#: Checks that packages add by an entry point of the group ``pytest_nixl.doctor_checks``.
OTHER_CHECKS = [pytest.param(id, id=id, marks=pytest.mark.nixl_check(id)) for id in other_checks()]


@pytest.mark.parametrize("check", [*check_parameters(MACHINE), *OTHER_CHECKS])
def test_machine(check: str, ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """A check of ``pytest-nixl doctor``, on the host of every rank."""
    verdict(ask(check))
