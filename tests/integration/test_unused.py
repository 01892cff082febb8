# SPDX-License-Identifier: Apache-2.0
"""A project in which the plugin is installed and unused loads little of it, and none of its settings."""

from __future__ import annotations

import pytest
from helpers.pytester_run import run_pytest

pytestmark = pytest.mark.apart

#: Of ours, what the table of options, the hooks and the fixtures' names need.
NEEDED = {
    "pytest_nixl",
    "pytest_nixl.cluster",
    "pytest_nixl.model.rank_pairs",
    "pytest_nixl.core.errors",
    "pytest_nixl.etcd",
    "pytest_nixl.etcd.endpoints",
    "pytest_nixl.fixtures.etcd",
    "pytest_nixl.fixtures.agents",
    "pytest_nixl.gate",
    "pytest_nixl.session.completeness",
    "pytest_nixl.session.outcome",
    "pytest_nixl.session.preconditions",
    "pytest_nixl.model.verdicts",
    "pytest_nixl.session.options",
    "pytest_nixl.plugin",
    "pytest_nixl.session.run",
    "pytest_nixl.core.signals",
    "pytest_nixl.core.units",
    "pytest_nixl.session.parsers",
}
#: What only a run of ours needs, and is slow to load.
SLOW = {"numpy", "requests", "urllib3", "etcd3gw", "h2", "scipy", "nixl", "docker", "testcontainers"}


def test_an_unrelated_project_loads_no_settings(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            print("loaded:", *sys.modules)
        """
    )
    run = run_pytest(pytester, "-s", "-p", "no:benchmark")
    [loaded] = [line.split()[1:] for line in run.stdout.lines if line.startswith("loaded:")]
    assert run.ret == 0
    assert {name for name in loaded if name.partition(".")[0] == "pytest_nixl"} == NEEDED
    assert SLOW.isdisjoint(loaded)
