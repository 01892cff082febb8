# SPDX-License-Identifier: Apache-2.0
"""What users of pytest type by habit works on NIXL checks as on any test, or is refused in a sentence."""

from __future__ import annotations

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


def _ran(done: pytest.RunResult) -> list[str]:
    return [line.split("::")[1].split()[0] for line in done.outlines if line.startswith("test_mine.py::")]


def _gate(done: pytest.RunResult) -> str:
    return next(line for line in done.outlines if line.startswith("NIXL gate: "))


@pytest.mark.parametrize(
    ("option", "ran", "failed", "passed", "not_run"),
    [
        (
            "--lf",
            ["test_second"],
            "FAIL (1 FAIL; ",
            "PASS (1 PASS; ",
            "; checks deselected: those that did not fail last time (--lf))",
        ),
        ("--ff", ["test_second", "test_first", "test_third"], "FAIL (2 PASS, 1 FAIL; ", "PASS (3 PASS; ", ""),
        (
            "--sw",
            ["test_second"],
            "FAIL, INTERRUPTED after 1 of 2 checks: Test failed, continuing from this test next run. (1 FAIL; ",
            "PASS (2 PASS; ",
            "; checks deselected: first)",
        ),
    ],
)
def test_an_option_that_remembers_the_last_run_begins_with_the_check_that_failed(
    option: str, ran: list[str], failed: str, passed: str, not_run: str, project: pytest.Pytester
) -> None:
    """The gate says what did not run again."""
    project.makeconftest(CONFTEST.replace("    items.reverse()\n", ""))  # --sw remembers the order before it
    run_pytest(project, *(["--sw"] if option == "--sw" else []), plugin=_CACHE, in_process=True)
    again = run_pytest(project, "--nixl-gate", option, "-v", plugin=_CACHE, in_process=True)
    assert _ran(again) == ran
    assert int(again.ret) == (2 if option == "--sw" else 1)
    assert _gate(again).startswith(f"NIXL gate: {failed}")
    mended = run_pytest(project, "--nixl-gate", option, plugin=_CACHE, in_process=True, env={"MENDED": "1"})
    assert int(mended.ret) == 0
    assert _gate(mended).startswith(f"NIXL gate: {passed}")
    assert _gate(mended).partition("; checks deselected: ")[1:] == not_run.partition("; checks deselected: ")[1:]


def test_a_run_of_what_failed_last_is_whole_if_nothing_had_failed(project: pytest.Pytester) -> None:
    """As pytest does: with no failure to repeat, --lf runs everything."""
    for _ in range(2):
        done = run_pytest(project, "--nixl-gate", "--lf", plugin=_CACHE, in_process=True, env={"MENDED": "1"})
        assert _gate(done).startswith("NIXL gate: PASS (3 PASS; ")
        assert "deselected" not in _gate(done)


def test_durations_are_those_of_each_phase_of_each_check(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_slow="""
        import time
        import pytest

        @pytest.fixture
        def slow_to_end(nixl_settings):
            yield
            time.sleep(0.2)

        @pytest.mark.nixl_check("slow")
        def test_slow(slow_to_end):
            time.sleep(0.4)
        """
    )
    done = run_pytest(project, "--durations=2", "test_slow.py", in_process=True)
    shown = [line.split()[1:] for line in done.outlines if line.endswith("test_slow.py::test_slow")]
    assert shown == [["call", "test_slow.py::test_slow"], ["teardown", "test_slow.py::test_slow"]]
