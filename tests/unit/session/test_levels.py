# SPDX-License-Identifier: Apache-2.0
"""A run makes the checks of its level and of every lower one, and says in one line what its level leaves out."""

from __future__ import annotations

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl.judge.profiles import bundled_profiles, load_profile
from pytest_nixl.model.settings import LEVELS
from pytest_nixl.session.selection import check_ids_by_suite, suite_checks

TESTS = """
import pytest

@pytest.mark.nixl_check("first", level="quick")
def test_quick(): pass

@pytest.mark.nixl_check("first", level="extended")
def test_quick_again(): pass

@pytest.mark.nixl_check("second")
def test_standard(): pass

@pytest.mark.nixl_check("third", level="extended")
@pytest.mark.parametrize("count", [1, 2])
def test_extended(count): pass

@pytest.mark.nixl_check("fourth", level="extended")
def test_more(): pass

def test_of_a_user(): pass
"""
#: The number of tests that run at each level, and what is said of the others.
STANDARD_LEFT_OUT = "2 checks of level extended were left out; --nixl-level=extended runs them"
SELECTED = {
    "quick": (
        2,
        "1 check of level standard and 2 checks of level extended were left out; "
        "--nixl-level=standard runs the former, --nixl-level=extended runs all",
    ),
    "standard": (3, STANDARD_LEFT_OUT),
    "extended": (7, ""),
}


LEVEL_OF = {check.id: check.level for check in suite_checks()}


def test_a_quick_run_examines_the_machine_and_its_endpoints() -> None:
    quick = {check for check, level in LEVEL_OF.items() if level == "quick"}
    assert quick > check_ids_by_suite()["infrastructure"]
    assert quick >= {"endpoints-well-formed", "endpoints-publish", "metadata-by-etcd", "bandwidth"}


def test_only_repetitions_are_left_out_of_the_default_level() -> None:
    extended = {check for check, level in LEVEL_OF.items() if level == "extended"}
    # Faults of NIXL itself, whatever the machine.
    of_nixl = ("misuse-", "transfer-", "endurance-", "threads-", "several-backends", "hierarchy", "telemetry-")
    assert {check for check in extended if not check.startswith(of_nixl)} == {
        "bandwidth-cold",
        "kv-post-scaling",
        "kv-requests-compared",
        "kv-storage",
        "nixlbench-bandwidth",
        "nixlbench-lost-answer",
        "publish-to-found-of-many",
    }


@pytest.mark.parametrize("name", bundled_profiles())
def test_a_quick_run_can_pass_the_gate_of_a_profile_that_comes_with_the_plugin(name: str) -> None:
    assert {check for check in load_profile(name).required if LEVEL_OF[check] != "quick"} == set()


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_selects_its_checks_and_those_of_the_levels_below(pytester: pytest.Pytester, level: str) -> None:
    pytester.makepyfile(TESTS)
    result = run_pytest(pytester, f"--nixl-level={level}", in_process=True)
    passed, line = SELECTED[level]
    result.assert_outcomes(passed=passed, deselected=7 - passed)
    left_out = [text for text in result.outlines if "left out" in text]
    assert len(left_out) == bool(line)
    assert not line or left_out[0].startswith(line)


def test_what_another_option_deselects_is_not_left_out_by_the_level(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = run_pytest(pytester, "-k", "more", in_process=True)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "1 check of level extended was left out; --nixl-level=extended runs it" in result.outlines


@pytest.mark.long
def test_workers_of_xdist_tell_what_was_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = run_pytest(pytester, "-n", "2")
    result.assert_outcomes(passed=3)
    assert STANDARD_LEFT_OUT in result.outlines


def test_a_wrong_level_of_a_marker_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS.replace('level="quick"', 'level="fast"'))
    result = run_pytest(pytester, in_process=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    [error] = [line for line in result.errlines if line.startswith("ERROR: ")]
    assert error.endswith(
        "::test_quick: 'fast' of the marker nixl_check is not a level: expected quick, standard, extended"
    )
