# SPDX-License-Identifier: Apache-2.0
"""Checks with the marker ``nixl_concurrent`` run beside each other, and pytest reports each in its turn."""

from __future__ import annotations

import pytest
from helpers.pytester_run import run_pytest

CONFTEST = """
    import pytest
    from suites import concurrent_checks

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(item):
        concurrent_checks.before_setup(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem):
        return concurrent_checks.call(pyfuncitem)

    @pytest.fixture(scope="session")
    def events():
        return []

    @pytest.fixture
    def verdict(events):
        import threading
        def conclude(word):
            assert threading.current_thread() is threading.main_thread()
            events.append(f"concluded {word}")
            if word == "FAIL":
                pytest.fail("the verdict is FAIL")
        return conclude

    @pytest.fixture
    def opened(events, request):
        events.append(f"opened {request.node.name}")
        yield request.node.name
        events.append(f"closed {request.node.name}")
"""


def run(pytester: pytest.Pytester, tests: str, *arguments: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(tests)
    return run_pytest(pytester, *arguments)


MEET = """
    import threading
    import pytest

    met = threading.Barrier(3)

    @pytest.mark.nixl_concurrent
    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_meets_two_others(number, opened, verdict):
        assert number in (1, 2, 3) and f"[{number}]" in opened
        met.wait(300)
        verdict(f"PASS {number}")

    def test_alone(events):
        assert not [thread for thread in threading.enumerate() if thread.name == "concurrent checks"
                    and any(f"opened" in each and each.replace("opened", "closed") not in events for each in events)]
        assert [each for each in events if "concluded" in each] == [f"concluded PASS {n}" for n in (1, 2, 3)]
        assert sum("closed" in each for each in events) == sum("opened" in each for each in events) == 3
"""


def test_marked_checks_run_beside_each_other_and_conclude_in_their_turn(pytester: pytest.Pytester) -> None:
    run(pytester, MEET).assert_outcomes(passed=4)


def test_the_end_of_each_check_is_its_own(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
        import pytest

        pytestmark = pytest.mark.nixl_concurrent

        def test_first(): pass
        def test_passes(opened): pass
        def test_fails(opened): assert opened == "something else"
        def test_skips(): pytest.skip("not here")
        def test_has_a_bad_verdict(verdict):
            verdict("FAIL")
            raise AssertionError("the verdict ends the check")
        @pytest.fixture
        def broken():
            yield
            raise OSError("the fixture cannot clean up")

        def test_cannot_clean_up(broken): pass
        def test_has_no_such_fixture(missing): pass
        """,
        "-rA",
    )
    done.assert_outcomes(passed=2, failed=3, skipped=1, errors=1)
    done.stdout.fnmatch_lines_random(
        [
            "E *AssertionError: assert 'test_fails' == 'something else'",
            "E *Failed: the verdict is FAIL",
            "E *OSError: the fixture cannot clean up",
            "ERROR *::test_has_no_such_fixture",
            "*SKIPPED*not here*",
        ]
    )


def test_what_follows_directly_and_is_marked_runs_beside_and_nothing_else(pytester: pytest.Pytester) -> None:
    run(
        pytester,
        """
        import threading
        import pytest

        names = []

        @pytest.mark.nixl_concurrent
        def test_one(): names.append(threading.current_thread().name)

        def test_unmarked(): names.append(threading.current_thread().name)

        @pytest.mark.nixl_concurrent
        def test_two(): names.append(threading.current_thread().name)

        def test_all():
            assert names == ["MainThread"] * 3
        """,
    ).assert_outcomes(passed=4)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [("-n", "2"), ("--pdb",)])
def test_they_run_one_after_the_other_if_pytest_is_to_do_more_than_run_them(
    pytester: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    run(
        pytester,
        """
        import threading
        import pytest

        @pytest.mark.nixl_concurrent
        @pytest.mark.parametrize("number", range(4))
        def test_is_in_the_main_thread(number):
            assert threading.current_thread() is threading.main_thread()
        """,
        *arguments,
    ).assert_outcomes(passed=4)


def test_a_run_that_ends_early_does_not_wait_for_the_others(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
        import threading
        import pytest

        pytestmark = pytest.mark.nixl_concurrent

        def test_fails(): raise AssertionError("first")
        def test_waits(): threading.Event().wait()
        """,
        "-x",
    )
    done.assert_outcomes(failed=1)


def test_the_one_that_waits_longest_starts_first(pytester: pytest.Pytester) -> None:
    run(
        pytester,
        """
        import pytest

        order = []

        def test_before(): pass

        @pytest.mark.nixl_concurrent
        def test_first(): pass

        @pytest.mark.nixl_concurrent
        @pytest.mark.parametrize("number", range(20))
        def test_short(number): order.append(number)

        @pytest.mark.nixl_concurrent(waits=5)
        def test_long(): order.append("long")

        def test_order(): assert order[0] == "long"
        """,
    ).assert_outcomes(passed=24)
