# SPDX-License-Identifier: Apache-2.0
"""The parts of checks that mostly wait run beside each other, and pytest reports each check in its turn."""

from __future__ import annotations

from textwrap import dedent

import pytest
from helpers.pytester_run import run_pytest

EVENTS = """
import pytest

@pytest.fixture(scope="session")
def events():
    return []
"""
CONFTEST = """
import pytest
from suites.early import started_scenes

@pytest.fixture(scope="package")
def early(request, events):
    with started_scenes(request.session, "own", lambda scene: scene(events)) as result_of:
        yield result_of
"""


def run(pytester: pytest.Pytester, tests: str, *arguments: str, after: str = "pass") -> pytest.RunResult:
    """Run the tests of a package, and one test after it."""
    pytester.makeconftest(EVENTS)
    own = pytester.mkpydir("own")
    (own / "conftest.py").write_text(CONFTEST)
    (own / "test_own.py").write_text(f"import threading, time, pytest\n{dedent(tests)}")
    (pytester.path / "test_z.py").write_text(f"def test_after(events): {after}\n")
    return run_pytest(pytester, *arguments)


def test_scenes_run_beside_each_other_and_each_ends_its_own_test(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
        met = threading.Barrier(3)

        def first(events):
            met.wait(300)
            return 1

        def second(events):
            met.wait(300)
            return 2

        def fails(events):
            met.wait(300)
            raise OSError("the scene fails")

        @pytest.mark.nixl_early(scene=first)
        def test_first(early): assert early(first) == 1

        @pytest.mark.nixl_early(scene=fails)
        def test_fails(early): early(fails)

        @pytest.mark.nixl_early(scene=second)
        def test_second(early): assert early(second) == 2
        """,
    )
    done.assert_outcomes(passed=3, failed=1)
    done.stdout.fnmatch_lines(["E *OSError: the scene fails"])


SCENE = """
def scene(events):
    events.append(threading.current_thread() is threading.main_thread())

@pytest.mark.usefixtures("early")
def test_first(): pass

@pytest.mark.nixl_early(scene=scene)
def test_asks(early, events):
    early(scene)
"""


def test_a_scene_starts_before_its_turn(pytester: pytest.Pytester) -> None:
    run(pytester, SCENE, after="assert events == [False]").assert_outcomes(passed=3)


def test_a_scene_whose_test_was_not_selected_does_not_start(pytester: pytest.Pytester) -> None:
    run(pytester, SCENE, "-k", "not asks", after="assert events == []").assert_outcomes(passed=2, deselected=1)


@pytest.mark.long
@pytest.mark.parametrize(
    "argument",
    ["--pdb", "--nixl-level=extended", "--nixl-backend=UCX,LIBFABRIC", "--nixl-backend=LIBFABRIC", "-n1"],
)
def test_scenes_run_in_their_turn_if_they_would_be_in_the_way(pytester: pytest.Pytester, argument: str) -> None:
    run(pytester, SCENE, argument, after="assert events == [True]").assert_outcomes(passed=3)


def test_nothing_of_another_package_runs_before_the_scenes_have_ended(pytester: pytest.Pytester) -> None:
    tests = """
        def scene(events):
            time.sleep(1)
            events.append("ended")

        @pytest.mark.nixl_early(scene=scene)
        def test_fails_before_it_asks(early): raise AssertionError("before it asks")
        """
    run(pytester, tests, after="assert events == ['ended']").assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize(("end", "code"), [("raise OSError", 1), ("raise KeyboardInterrupt", 2)])
def test_a_run_that_ends_early_does_not_wait_for_scenes(pytester: pytest.Pytester, end: str, code: int) -> None:
    tests = f"""
        def scene(events): threading.Event().wait()

        @pytest.mark.nixl_early(scene=scene)
        def test_ends(early): {end}
        """
    assert run(pytester, tests, "-x").ret == code
