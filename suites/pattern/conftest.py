# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the suite that measures a traffic pattern, which is selected only if ``--nixl-pattern`` is given."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from pytest_nixl import Cluster, Judgement, NotApplicableError, Profile, Run, Settings
from pytest_nixl.checks.pattern.check import (
    NOTHING,
    REMEDY,
    FlowRow,
    PatternKind,
    PatternLaunches,
    flow_rows,
    line_of,
    measured_row,
    pattern_kinds,
)

from ..conftest import Rows


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the tests out of a run without a pattern, unless the run names this suite: they then say what to give."""
    run = Run.of(config)
    if not run.usable or run.settings.pattern is not None:
        return None
    return None if any(_names_this(argument, config) for argument in config.args) else True


def _names_this(argument: str, config: pytest.Config) -> bool:
    """Whether an argument of the command line names this folder or something in it, as a path or as a module."""
    folder, named = Path(__file__).parent, argument.partition("::")[0]
    path = Path(config.invocation_params.dir, named)
    if config.getoption("pyargs") and not path.exists():
        try:
            spec = find_spec(named)
        except (ImportError, ValueError):
            return False  # pytest says that there is no such module
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin)
    path = path.resolve()
    return path == folder or folder in path.parents


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = Run.of(metafunc.config)
    for name, values in (("flow_row", flow_rows), ("pattern_kind", pattern_kinds)):
        if name in metafunc.fixturenames:
            # None: the test says why there is nothing to measure.
            metafunc.parametrize(name, (values(run) if run.usable else []) or [None], ids=str)


@pytest.fixture(scope="session")
def pattern_launches(nixl_cluster: Cluster, nixl_settings: Settings, profile: Profile) -> PatternLaunches:
    """What was measured of each pattern, for all tests."""
    return PatternLaunches(nixl_cluster, nixl_settings, profile.bounds)


@pytest.fixture
def flow_judged(
    pattern_launches: PatternLaunches,
    nixl_rows: Rows,
) -> Callable[[FlowRow | None], Judgement]:
    """Record the row of a flow, and judge it by what the profile expects."""

    def judged(row: FlowRow | None) -> Judgement:
        if row is None:
            raise NotApplicableError(NOTHING, REMEDY)
        samples, versions, more = measured_row(row, pattern_launches)
        nixl_rows.record(samples, versions=versions, more=more)
        return nixl_rows.judge(samples)

    return judged


@pytest.fixture
def kind_of_pattern(pattern_kind: PatternKind | None, pattern_launches: PatternLaunches, nixl_run: Run) -> PatternKind:
    """What is measured of the pattern; the run's report has it in one line."""
    if pattern_kind is None:
        raise NotApplicableError(NOTHING, REMEDY)
    nixl_run.record.note(line_of(pattern_launches.samples(pattern_kind)))
    return pattern_kind
