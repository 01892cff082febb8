# SPDX-License-Identifier: Apache-2.0
"""What users of pytest type by habit works on NIXL checks as on any test, or is refused in a sentence."""

from __future__ import annotations

import shlex

import pytest
from helpers.cli_run import WITHOUT
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


#: Other runs of these tests keep nothing of an earlier run; here that is the question.
_CACHE = WITHOUT[2:]


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_mine=TESTS)
    return pytester


@pytest.mark.parametrize(
    ("options", "outcomes", "code", "words"),
    [
        ("", {"passed": 2, "failed": 1}, 1, ["NIXL verdict: FAIL (2 PASS, 1 FAIL; 0 rows measured)"]),
        ("-k first", {"passed": 1, "deselected": 2}, 0, ["NIXL verdict: PASS (1 PASS; 0 rows measured)"]),
        ("-k 'not second'", {"passed": 2, "deselected": 1}, 0, ["NIXL verdict: PASS (2 PASS; 0 rows measured)"]),
        ("-m slow", {"passed": 1, "deselected": 2}, 0, ["NIXL verdict: PASS (1 PASS; 0 rows measured)"]),
        ("test_mine.py::test_first", {"passed": 1}, 0, ["NIXL verdict: PASS (1 PASS; 0 rows measured)"]),
        ("-k nothing", {"deselected": 3}, 5, []),
        ("-x", {"passed": 1, "failed": 1}, 1, ["stopping after 1 failures", "NIXL verdict: FAIL", "1 FAIL"]),
        ("--maxfail=1", {"passed": 1, "failed": 1}, 1, ["NIXL verdict: FAIL", "1 FAIL"]),
        ("-q", {"passed": 2, "failed": 1}, 1, ["NIXL verdict: FAIL (2 PASS, 1 FAIL; 0 rows measured)"]),
        ("-qq", {}, 1, ["NIXL verdict: FAIL (2 PASS, 1 FAIL; 0 rows measured)"]),
        ("--durations=0 -vv", {"passed": 2, "failed": 1}, 1, ["slowest durations", "test_mine.py::test_first"]),
        ("--tb=no", {"passed": 2, "failed": 1}, 1, ["NIXL verdict: FAIL"]),
        ("-rA", {"passed": 2, "failed": 1}, 1, ["PASSED test_mine.py::test_third"]),
        ("--co", {}, 0, ["<Function test_first>", "3 tests collected"]),
        ("--co -q", {}, 0, ["test_mine.py::test_second", "3 tests collected"]),
        ("--setup-plan", {}, 0, ["SETUP    S nixl_settings"]),
        ("--fixtures", {}, 0, ["nixl_settings"]),
        ("--markers", {}, 0, ["@pytest.mark.nixl_check(id"]),
        ("--env=prod -k first", {"passed": 1, "deselected": 2}, 0, ["NIXL verdict: PASS (1 PASS; 0 rows measured)"]),
        ("--co --nixl-gate", {}, 4, ["--nixl-gate is refused with --collect-only: nothing would be measured"]),
    ],
)
def test_an_option_does_what_it_does_elsewhere(
    options: str, outcomes: dict[str, int], code: int, words: list[str], project: pytest.Pytester
) -> None:
    done = run_pytest(project, *shlex.split(options), in_process=True)
    printed = done.stdout.str() + done.stderr.str()
    assert [text for text in words if text not in printed] == []
    assert "INTERNALERROR" not in printed
    assert int(done.ret) == code
    if outcomes:
        assert done.parseoutcomes() == outcomes


@pytest.mark.parametrize(
    ("options", "outcomes", "first"),
    [
        ("--lf", {"failed": 1}, "test_second"),
        ("--ff", {"passed": 2, "failed": 1}, "test_second"),
        ("--sw", {"failed": 1, "deselected": 1}, ""),
        ("--nf", {"passed": 2, "failed": 1}, ""),
    ],
)
def test_an_option_that_remembers_the_last_run_finds_the_check_that_failed(
    options: str, outcomes: dict[str, int], first: str, project: pytest.Pytester
) -> None:
    """``--sw`` stops at the failure in its first run, which it remembers."""
    run_pytest(project, *(["--sw"] if options == "--sw" else []), plugin=_CACHE, in_process=True)
    done = run_pytest(project, options, "-v", plugin=_CACHE, in_process=True)
    found = done.parseoutcomes()
    assert {name: found.get(name, 0) for name in outcomes} == outcomes
    ran = [line.split("::")[1].split()[0] for line in done.outlines if line.startswith("test_mine.py::")]
    assert not first or ran[0] == first
    mended = run_pytest(project, options, plugin=_CACHE, in_process=True, env={"MENDED": "1"})
    assert int(mended.ret) == 0
    assert mended.stdout.str().count("NIXL verdict: PASS") == 1


def test_the_environment_of_a_run_is_left_as_it_was(project: pytest.Pytester) -> None:
    """Hooks and fixtures of another project's conftest run as they would without the plugin."""
    done = run_pytest(project, "-v", "-p", "no:cacheprovider", in_process=True)
    ran = [line.split("::")[1].split()[0] for line in done.outlines if line.startswith("test_mine.py::")]
    assert ran == ["test_third", "test_second", "test_first"], "the order is that of the project's conftest"
