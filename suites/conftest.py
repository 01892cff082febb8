# SPDX-License-Identifier: Apache-2.0
"""What the suites' tests are written in: the sizes to measure, what to expect, how to record and conclude."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_nixl.fixtures import parametrize_values
from pytest_nixl.gate.conclude import conclude
from pytest_nixl.gate.judge import another_launch, judge
from pytest_nixl.gate.profiles import Profile, load_profile
from pytest_nixl.gate.verdicts import Judgement
from pytest_nixl.link import Link
from pytest_nixl.record.benchmark import CLOCK, record_samples
from pytest_nixl.record.results import FIGURES, Figures
from pytest_nixl.record.samples import Samples
from pytest_nixl.run import Run
from pytest_nixl.settings import Settings
from pytest_nixl.units import format_size


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = Run.of(metafunc.config)
    if not run.usable:  # the tests will say so
        for name in ("block", "batch", "depth"):
            parametrize_values(metafunc, name, (1,), str)
        return
    parametrize_values(metafunc, "block", run.settings.blocks, format_size)
    parametrize_values(metafunc, "batch", run.settings.batch, lambda count: f"batch{count}")
    parametrize_values(metafunc, "depth", run.settings.depth, lambda count: f"depth{count}")


@pytest.fixture(scope="session")
def profile(nixl_settings: Settings) -> Profile:
    """What to expect of this machine."""
    return load_profile(nixl_settings.profile)


@pytest.fixture
def verdict(request: pytest.FixtureRequest, nixl_settings: Settings, profile: Profile) -> Callable[[Judgement], None]:
    """End the test as the verdict table says: pass, warn, skip or fail."""

    def decide(judgement: Judgement) -> None:
        conclude(request.node, judgement, profile, gate=nixl_settings.gate)

    return decide


@pytest.fixture
def expect(profile: Profile) -> Callable[[Samples], Judgement]:
    """Judge samples by what the profile expects of their row."""
    return lambda samples: judge(samples, profile.expectation(samples.key), profile.machine)


@pytest.fixture
def another(profile: Profile) -> Callable[[Samples], bool]:
    """Whether one more launch could decide what those so far leave open."""
    return lambda samples: another_launch(samples, profile.expectation(samples.key), profile.machine)


@pytest.fixture
def record(request: pytest.FixtureRequest, nixl_link: Link, profile: Profile) -> Callable[[Samples], None]:
    """Write a row to the table and, through pytest-benchmark, to its files."""
    benchmark: Any = None
    if request.config.pluginmanager.has_plugin("benchmark"):
        benchmark = request.getfixturevalue("benchmark")
        # Until there is something to record: pytest-benchmark warns of a test that fails before it measures.
        benchmark.has_error = True

    def write(samples: Samples) -> None:
        request.node.stash[FIGURES] = Figures.of(samples, profile.expectation(samples.key), profile.machine)
        if benchmark is None:
            return
        benchmark.has_error = False
        versions = {
            f"{end.worker.role}_{name}": end.worker.versions[name]
            for end in (nixl_link.initiator, nixl_link.target)
            for name in ("nixl", "nixl_package", "ucx", "python", "host")
            if name in end.worker.versions
        }
        record_samples(benchmark, request.node.stash[CLOCK], samples, versions)

    return write
