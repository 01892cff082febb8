# SPDX-License-Identifier: Apache-2.0
"""What several test files use: workers and links of our own, outside any run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from pytest_nixl.measure.link import WorkerPairs
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.session.settings import read_settings

# Behind a shell's & Ctrl-C is ignored, and so it would be in every run that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: What needs torch, which is too large for CI: ``tox -e torch`` has it; and other plugins: ``tox -e plugins`` has them.
collect_ignore = [*([] if find_spec("torch") else ["with_torch"]),
                  *([] if find_spec("pytest_rerunfailures") else ["plugins"])]  # fmt: skip


@pytest.fixture
def make_settings(pytestconfig: pytest.Config) -> Callable[..., Settings]:
    """Make settings from the defaults and what differs from them."""
    defaults = read_settings(pytestconfig, environ={})
    return lambda **changes: replace(defaults, **{"timeout": 30.0, "blocks": (65536,), **changes})


@pytest.fixture
def make_pairs(make_settings: Callable[..., Settings]) -> Iterator[Callable[..., WorkerPairs]]:
    """Make pairs of workers with settings of their own; all end with the test."""
    made: list[WorkerPairs] = []

    def make(**changes: Any) -> WorkerPairs:
        made.append(WorkerPairs((LocalHost(supervisor(), 0), LocalHost(supervisor(), 1)), make_settings(**changes)))
        return made[-1]

    yield make
    for pairs in made:
        pairs.close()


@pytest.fixture
def agents(make_settings: Callable[..., Settings]) -> Iterator[Agents]:
    """Agents whose steps may take twenty seconds."""
    with Agents(LocalHost(supervisor()), make_settings(timeout=20.0)) as started:
        yield started
