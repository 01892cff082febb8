# SPDX-License-Identifier: Apache-2.0
"""A delay of 1 us per region in registration is found with a bound of 10 %, and nothing is found if there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from helpers.cli_run import repeats
from helpers.delay_comparison import DELAY, check_delay
from helpers.slow_registration import slow_registration

from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

#: The regions of one registration, of a page each.
REGIONS, PAGE = 1024, 4096
#: The registrations of a launch, so many that one of them is hardly disturbed on a busy machine.
CALLS = 200


def launch(settings: Settings, variables: Mapping[str, str]) -> float:
    """Return the regions per second of the fastest registration of one launch."""
    worker = LocalHost(supervisor()).start("agent", variables, settings.timeout, settings.start_timeout)
    agent = NixlAgent.within(worker, backends=["UCX"], progress_thread=False)
    try:
        times = agent.run("pytest_nixl.checks.control_path.worker:register", count=REGIONS, size=PAGE, repeats=CALLS)
    finally:
        agent.close()
    return REGIONS / min(float(registered) for registered, _ in times)


# In CI test_kv_post_delay.py finds such a delay in posts, and test_control_path_suite.py a longer one in registration.
@pytest.mark.whole
@pytest.mark.soak
@pytest.mark.parametrize("repeat", repeats())
@pytest.mark.parametrize("delay", [pytest.param(0.0, id="healthy"), pytest.param(DELAY, id="delayed")])
def test_a_microsecond_per_region_in_registration_is_found_and_nothing_where_there_is_none(
    make_settings: Callable[..., Settings],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    delay: float,
    repeat: int,
) -> None:
    healthy = slow_registration(tmp_path / "healthy")  # both have the same code in the worker
    other = slow_registration(tmp_path / "other", per_region=delay)
    sides = [partial(launch, make_settings(), variables) for variables in (healthy, other)]
    check_delay(*sides, delayed=bool(delay), repeat=repeat, capsys=capsys)
