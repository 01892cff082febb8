# SPDX-License-Identifier: Apache-2.0
"""Checks that measure nothing run beside each other, and pytest reports each in its turn."""

from __future__ import annotations

from textwrap import dedent

import pytest
from helpers.pytester_run import run_pytest

CONFTEST = """
import pytest
from suites import early

EVENTS = []

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    early.before_setup(item)

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return early.call(pyfuncitem)

@pytest.fixture(scope="session", autouse=True)
def session_fixtures(request):
    request.session.stash[early.FIXTURES] = request.getfixturevalue

def in_main_thread():
    return threading.current_thread() is threading.main_thread()

@early.fixture
def events():
    EVENTS.append(("set up", in_main_thread()))
    return EVENTS

@pytest.fixture
def verdict():
    def decide(good):
        assert threading.current_thread() is threading.main_thread()
        assert good
    return decide

import threading
"""


def run(pytester: pytest.Pytester, tests: str, *arguments: str, after: str = "pass") -> pytest.RunResult:
    """Run the tests of a package, and one test after it, of a package that measures."""
    pytester.makeconftest(CONFTEST)
    package = pytester.mkpydir("own")
    (package / "test_own.py").write_text(f"import threading, time, pytest\n{dedent(tests)}")
    (pytester.mkpydir("sub") / "bandwidth").mkdir()
    (pytester.path / "sub" / "bandwidth" / "__init__.py").touch()
    (pytester.path / "sub" / "bandwidth" / "test_z.py").write_text(
        f"import conftest\ndef test_after():\n    events = conftest.EVENTS\n    {after}\n"
    )
    return run_pytest(pytester, *arguments)


def test_checks_run_beside_each_other_and_each_ends_as_its_body_does(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
        met = threading.Barrier(4)

        @pytest.mark.nixl_early
        def test_first(): met.wait(300)

        @pytest.mark.nixl_early
        @pytest.mark.parametrize("good", [True, False])
        def test_concludes(good, verdict):
            met.wait(300)
            verdict(good)
            raise AssertionError("a verdict ends the check")

        def test_between(): pass

        @pytest.mark.nixl_early
        def test_fails():
            met.wait(300)
            raise OSError("the check fails")
        """,
    )
    done.assert_outcomes(passed=4, failed=2)
    done.stdout.fnmatch_lines(["E *assert False", "E *OSError: the check fails"])


OTHER = """
@pytest.mark.nixl_early
def test_first(): pass

@pytest.mark.nixl_early
def test_other(events):
    events.append(threading.current_thread() is threading.main_thread())
"""


def test_a_check_starts_before_its_turn_with_its_own_fixtures(pytester: pytest.Pytester) -> None:
    done = run(pytester, OTHER, "--nixl-backend=UCX", after="assert events == [('set up', False), False]")
    done.assert_outcomes(passed=3)


@pytest.mark.parametrize(("end", "code"), [("raise OSError", 1), ("raise KeyboardInterrupt", 2)])
def test_a_run_that_ends_early_does_not_wait_for_checks(pytester: pytest.Pytester, end: str, code: int) -> None:
    tests = f"""
        @pytest.mark.nixl_early
        def test_ends(): {end}

        @pytest.mark.nixl_early
        def test_waits(): threading.Event().wait()
        """
    assert run(pytester, tests, "-x").ret == code
