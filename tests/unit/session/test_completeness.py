# SPDX-License-Identifier: Apache-2.0
"""How far a run came and what ended it, by what pytest says of its tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session.completeness import Completeness, refuse_exit_code_0
from pytest_nixl.session.run import LiveRecord, Run
from pytest_nixl.session.selection import LevelSelection

CODE = pytest.ExitCode


def session_of(checks: Sequence[str], code: int = CODE.OK, *, stop: str = "", failed: Sequence[str] = ()) -> Any:
    """Return a session with a test for each check (``-``: a test that makes none), each with the id of its check."""
    marks = [SimpleNamespace(args=(check,)) if check != "-" else None for check in checks]
    items = [
        SimpleNamespace(nodeid=check, get_closest_marker=lambda _, mark=mark: mark)
        for check, mark in zip(checks, marks, strict=True)
    ]
    option = SimpleNamespace(collectonly=False, lf=bool(failed))
    cache = SimpleNamespace(get=lambda _, default: dict.fromkeys(failed, True) or default)
    config = SimpleNamespace(option=option, cache=cache)
    return SimpleNamespace(items=items, config=config, exitstatus=code, shouldfail="", shouldstop=stop)


def report(nodeid: str, when: Any = "teardown", outcome: Any = "passed", duration: float = 0.0) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("t.py", 1, nodeid), {}, outcome, None, when, duration=duration)


def counting(
    session: Any, *results: Result, lost: str = "", left_out: Sequence[str] = (), **facts: object
) -> Completeness:
    """Return what counts the tests of a session that has begun to run them."""
    ranks = SimpleNamespace(faults=[SimpleNamespace(reason=lost)]) if lost else None
    values = {
        "config": SimpleNamespace(stash={}),
        "configured": False,
        "collected": SimpleNamespace(used=False),
        **facts,
    }
    run = SimpleNamespace(record=LiveRecord(results=results), rank_session=ranks, serves=False, **values)
    worker = SimpleNamespace(workeroutput={"nixl_left_out": dict.fromkeys(left_out, "extended")})
    LevelSelection(cast(Run, run)).pytest_testnodedown(worker)
    counted = Completeness(cast(Run, run))
    counted.pytest_collection_finish(session)
    loop = counted.pytest_runtestloop()
    next(loop)
    with suppress(StopIteration):
        next(loop)
    return counted


@pytest.mark.parametrize(
    ("ran", "code", "stop", "said"),
    [
        ("ab-", CODE.OK, "", ""),
        ("ab-", CODE.USAGE_ERROR, "", ""),
        ("ab-", CODE.INTERNAL_ERROR, "", "INTERRUPTED after 2 of 2 checks: pytest ended with exit code 3"),
        ("a", CODE.OK, "", "INTERRUPTED after 1 of 2 checks: the remaining tests did not run"),
        ("b", CODE.OK, "stopping", "INTERRUPTED after 1 of 2 checks: stopping"),
    ],
)
def test_a_run_whose_tests_did_not_all_end_is_interrupted(ran: str, code: int, stop: str, said: str) -> None:
    session = session_of("ab-", code, stop=stop)
    counted = counting(session)
    for nodeid in ran:
        counted.pytest_runtest_logreport(report(nodeid))
    assert counted.interruption(session) == said


@pytest.mark.parametrize(("lost", "checks"), [("", "2 of 2 checks"), ("rank 1 is gone", "1 of 2 checks")])
def test_a_check_that_failed_because_a_rank_was_lost_did_not_run(lost: str, checks: str) -> None:
    session = session_of("ab", CODE.INTERNAL_ERROR)
    counted = counting(session, Result("a", "a", Verdict.ERROR), Result("b", "b", Verdict.FAIL), lost=lost)
    for nodeid in "ab":
        counted.pytest_runtest_logreport(report(nodeid))
    assert counted.interruption(session) == f"INTERRUPTED after {checks}: {lost or 'pytest ended with exit code 3'}"


def test_tests_that_are_no_checks_are_counted_if_there_are_no_checks() -> None:
    assert counting(session_of("--")).crash(KeyboardInterrupt()).startswith("INTERRUPTED after 0 of 2 tests: Ctrl-C")
    assert (
        counting(session_of("-"))
        .crash(ValueError("no"))
        .startswith("INTERRUPTED after 0 of 1 test: pytest or one of its plugins failed: ")
    )
    assert counting(session_of("")).crash(ValueError("no")).startswith("INTERRUPTED before any check ran: ")


def test_the_time_of_a_test_is_that_of_all_its_phases() -> None:
    counted = counting(session_of("ab"))
    for nodeid, when, seconds in (("a", "setup", 1.0), ("a", "call", 2.0), ("a", "teardown", 4.0), ("b", "setup", 8.0)):
        counted.pytest_runtest_logreport(report(nodeid, when, duration=seconds))
    assert counted.durations == {"a": 7.0, "b": 8.0}
    assert counted.unfinished is not None
    assert counted.unfinished.nodeid == "b"


@pytest.mark.parametrize(("failed", "names"), [((), []), ("a", ["those that did not fail last time (--lf)"])])
def test_a_check_without_a_test_is_deselected_unless_it_ran_or_its_level_leaves_it_out(
    failed: Sequence[str], names: list[str]
) -> None:
    session = session_of("a", failed=failed)
    counted = counting(session, Result("b", "b", Verdict.PASS), left_out="c")
    for item in session_of("dabc-").items:
        counted.pytest_itemcollected(item)
    counted.pytest_collection_finish(session)
    assert counted.deselected == [*names, "d"]


@pytest.mark.parametrize(
    ("configured", "used", "exists", "text"),
    [
        (True, False, False, "INTERRUPTED after 1 of 1 check: the directory was deleted"),
        (False, True, False, "INTERRUPTED after 1 of 1 check: the directory was deleted"),
        (False, False, False, ""),
        (True, False, True, ""),
    ],
)
def test_a_run_of_ours_whose_directory_was_deleted_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, configured: bool, used: bool, exists: bool, text: str
) -> None:
    monkeypatch.setattr("pytest_nixl.session.completeness.keep_a_directory", lambda config: "the directory was deleted")
    params = SimpleNamespace(dir=tmp_path if exists else tmp_path / "none")
    config = SimpleNamespace(stash={}, invocation_params=params)
    session = session_of("a")
    counted = counting(session, config=config, configured=configured, collected=SimpleNamespace(used=used))
    counted.pytest_runtest_logreport(report("a"))
    assert counted.interruption(session) == text


def test_what_failed_is_known_by_its_node_id() -> None:
    counted = counting(session_of("ab"))
    for nodeid, outcome in (("a", "failed"), ("b", "passed")):
        counted.pytest_runtest_logreport(report(nodeid, "call", outcome))
        counted.pytest_collectreport(pytest.CollectReport(f"{nodeid}.py", cast(Any, outcome), None, None))
    assert counted.failed == {"a", "a.py"}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (pytest.exit.Exception("x", returncode=None), CODE.TESTS_FAILED, CODE.TESTS_FAILED),
        (pytest.exit.Exception("x", returncode=0), CODE.TESTS_FAILED, CODE.INTERRUPTED),
        (pytest.exit.Exception("x", returncode=5), CODE.OK, 5),
        (SystemExit(0), CODE.OK, CODE.INTERRUPTED),
        (SystemExit(3), CODE.OK, 3),
        (SystemExit("why"), CODE.OK, CODE.TESTS_FAILED),
        (KeyboardInterrupt(), CODE.OK, CODE.INTERRUPTED),
        (ValueError("x"), CODE.OK, CODE.TESTS_FAILED),
    ],
)
def test_a_run_that_a_plugin_ends_while_it_reports_does_not_end_with_0(
    error: BaseException, status: int, code: int
) -> None:
    session = session_of("a", status)
    refuse_exit_code_0(session, error)
    assert session.exitstatus == code
    ends = {getattr(error, name) for name in ("returncode", "code") if hasattr(error, name)}
    assert ends <= {code, "why"}
