# SPDX-License-Identifier: Apache-2.0
"""What several test files use: workers, links and an etcd of our own, outside any run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from helpers.forked_runs import save_time

from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.session.settings import read_settings

if TYPE_CHECKING:
    from helpers.etcd import Etcd

# Behind a shell's & Ctrl-C is ignored, and so it would be in every run that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No clock of hypothesis fails a test, because a busy machine may stop it at any moment. Not each environment has it.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

#: What needs torch, which is too large for CI: ``tox -e torch`` has it; and other plugins: ``tox -e plugins`` has them.
collect_ignore = [*([] if find_spec("torch") else ["with_torch"]),
                  *([] if find_spec("pytest_rerunfailures") else ["plugins"])]  # fmt: skip


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the hostile tries by class, and how many of them had a wrong outcome (``tests/hostile``)."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, ())]
    properties = [value for report in reports for name, value in getattr(report, "user_properties", ())
                  if name == "hostile" and report.when == "call"]  # fmt: skip
    for kind, tries, violations in properties:
        terminalreporter.write_line(f"hostile {kind}: {tries} tries, {violations} violations")


MakePairs = Callable[..., Launches]


@pytest.fixture(scope="session")
def make_settings(pytestconfig: pytest.Config) -> Callable[..., Settings]:
    """Make settings from the defaults and what differs from them."""
    defaults = read_settings(pytestconfig, environ={})
    return lambda **changes: replace(defaults, **{"timeout": 30.0, "blocks": (65536,), **changes})


@contextmanager
def _pairs(make_settings: Callable[..., Settings], *, warm_up: bool) -> Iterator[MakePairs]:
    """Make pairs of workers with settings of their own; all end with the block.

    :param warm_up: whether workers are executed, and make transfers for 0.3 s before the first row, as in a run.
    """
    opened: list[Launches] = []

    def make(**changes: Any) -> Launches:
        opened.append(Launches((LocalHost(supervisor(), 0), LocalHost(supervisor(), 1)), make_settings(**changes)))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        if not warm_up:
            save_time(patch.setattr)
        try:
            yield make
        finally:
            for pairs in opened:
                pairs.close()


@pytest.fixture
def make_pairs(request: pytest.FixtureRequest, make_settings: Callable[..., Settings]) -> Iterator[MakePairs]:
    """Make pairs of workers with settings of their own; all end with the test."""
    # Only the tests that run alone judge what they measure.
    with _pairs(make_settings, warm_up=request.node.get_closest_marker("alone") is not None) as make:
        yield make


@pytest.fixture(scope="module")
def shared_pairs(make_settings: Callable[..., Settings]) -> Iterator[MakePairs]:
    """Make pairs of workers that stay for later tests of the module with the same settings: tests must not end them."""
    with _pairs(make_settings, warm_up=False) as make:
        opened: dict[tuple[tuple[str, object], ...], Launches] = {}

        def shared(**changes: Any) -> Launches:
            settings_key = tuple(sorted(changes.items()))
            if settings_key not in opened:
                opened[settings_key] = make(**changes)
            return opened[settings_key]

        yield shared


@pytest.fixture
def agents(make_settings: Callable[..., Settings]) -> Iterator[Agents]:
    """Agents whose steps may take twenty seconds."""
    with Agents(LocalHost(supervisor()), make_settings(timeout=20.0)) as started:
        yield started


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    """A real etcd that the tests of a module share."""
    from helpers.etcd import running_etcd  # not each environment has what the module imports

    with running_etcd() as started:
        yield started
