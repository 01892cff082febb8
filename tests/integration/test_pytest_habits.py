# SPDX-License-Identifier: Apache-2.0
"""What users of pytest type by habit works on NIXL checks as on any test, or is refused in a sentence."""

from __future__ import annotations

import pytest
from helpers.pytester_run import run_pytest

#: Checks of a user's own, of which one fails. They start no worker, so that each run takes a fraction of a second.
TESTS = """
import os
import pytest

@pytest.mark.nixl_check("first")
@pytest.mark.slow
def test_first(nixl_settings):
    assert nixl_settings.backend == ("UCX",)

@pytest.mark.nixl_check("second")
def test_second(nixl_settings):
    assert "MENDED" in os.environ, "it is broken"

@pytest.mark.nixl_check("third")
def test_third(nixl_settings, of_the_project):
    assert of_the_project == 3
"""
#: The configuration of another project: its own marker, options, and a conftest with hooks that change what runs.
INI = """
[pytest]
nixl_backend = UCX
addopts = -p no:randomly --strict-markers
markers = slow: takes long
"""
CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--env", default="test")

def pytest_collection_modifyitems(config, items):
    items.reverse()
    for item in items:
        item.user_properties.append(("project", "theirs"))

@pytest.fixture
def of_the_project():
    return 3

@pytest.fixture(autouse=True)
def around(monkeypatch):
    monkeypatch.setenv("PROJECT", "theirs")
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_mine=TESTS)
    return pytester


@pytest.mark.parametrize(
    ("options", "deselected"),
    [
        ("-k first", "; checks deselected: second, third"),
        ("-m slow", "; checks deselected: second, third"),
        ("--deselect=test_mine.py::test_second", "; checks deselected: second"),
    ],
)
def test_a_gate_says_which_checks_were_deselected(options: str, deselected: str, project: pytest.Pytester) -> None:
    """It passes, because the profile does not require them; a user who selects too little reads that at the end."""
    done = run_pytest(project, "--nixl-gate", *options.split(), in_process=True)
    assert int(done.ret) == 0
    last = next(line for line in done.outlines if line.startswith("NIXL gate: "))
    assert last.startswith("NIXL gate: PASS (")
    assert last.endswith(f"{deselected})")


def test_the_order_that_a_projects_conftest_gives_is_kept(project: pytest.Pytester) -> None:
    done = run_pytest(project, "-v", "-p", "no:cacheprovider", in_process=True)
    ran = [line.split("::")[1].split()[0] for line in done.outlines if line.startswith("test_mine.py::")]
    assert ran == ["test_third", "test_second", "test_first"], "the order is that of the project's conftest"
