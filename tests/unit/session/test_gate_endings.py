# SPDX-License-Identifier: Apache-2.0
"""The gate judges what the checks concluded, whatever pytest, a marker or another plugin makes of the run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.session.check_result import restore_outcome
from pytest_nixl.session.outcome import JUDGEMENT, NixlWarning, conclude

GATE = "--nixl-gate"

FAILS = """
import pytest

@pytest.mark.nixl_check("good")
def test_good():
    pass

{mark}
@pytest.mark.nixl_check("mine")
def test_mine():
    assert {holds}, "planted"
"""


@pytest.mark.parametrize("mark", ["@pytest.mark.xfail", "@pytest.mark.xfail(run=False)", ""])
def test_a_failed_check_that_is_expected_to_fail_fails_the_gate(pytester: pytest.Pytester, mark: str) -> None:
    pytester.makepyfile(FAILS.format(mark=mark, holds=False))
    if not mark:
        pytester.makeconftest(
            """
            import pytest

            def pytest_collection_modifyitems(items):
                for item in items:
                    item.add_marker(pytest.mark.xfail(reason="known"))
            """
        )
    result = run_pytest(pytester, GATE, in_process=True)
    # What is wrong stands before what pytest says of it.
    result.stdout.fnmatch_lines(["FAIL mine: *", "*= [FE]*S =*", "NIXL gate: FAIL (1 PASS, 1 FAIL; 0 rows measured*"])
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) + outcomes.get("errors", 0) == 1
    assert result.ret == 1


@pytest.mark.parametrize("made", ["passed", "skipped", "failed"])
@pytest.mark.parametrize(("raised", "ended"), [("", "passed"), ("skip", "skipped"), ("fail", "failed")])
def test_a_check_ends_as_it_ended_and_a_plugin_may_only_add_a_failure(
    request: pytest.FixtureRequest, made: Literal["passed", "skipped", "failed"], raised: str, ended: str
) -> None:
    excinfo = None
    if raised:
        with pytest.raises(getattr(pytest, raised).Exception) as excinfo:
            getattr(pytest, raised)("it")
    report = pytest.TestReport("t.py::test", ("t.py", 1, "test"), {}, made, None, "call")
    restore_outcome(request.node, cast(Any, SimpleNamespace(excinfo=excinfo)), report)
    assert report.outcome == ("failed" if made == "failed" else ended)
    if (made, ended) == ("passed", "skipped"):
        path, line, _ = request.node.location
        assert report.longrepr == (path, line + 1, "Skipped: it")


@pytest.mark.parametrize(
    ("verdict", "ended", "with_gate"),
    [
        ("PASS", "", ""),
        ("WARN", "warn", "warn"),
        ("INCONCLUSIVE", "warn", "fail"),
        ("NOT-APPLICABLE", "skip", "skip"),
        ("FAIL", "fail", "fail"),
    ],
)
def test_a_test_ends_as_its_verdict_demands(verdict: str, ended: str, with_gate: str) -> None:
    ends: dict[str, Any] = {
        "": nullcontext(),
        "warn": pytest.warns(NixlWarning, match="it is so"),
        "skip": pytest.raises(pytest.skip.Exception, match="it is so"),
        "fail": pytest.raises(pytest.fail.Exception, match="it is so"),
    }
    item = SimpleNamespace(stash=pytest.Stash(), get_closest_marker=lambda name: None)
    for gate, end in ((False, ended), (True, with_gate)):
        with ends[end]:
            conclude(cast(Any, item), Judgement(Verdict(verdict), "it is so"), load_profile("loopback"), gate=gate)
        assert item.stash[JUDGEMENT].verdict == verdict


def test_a_check_that_passes_although_a_strict_xfail_expects_a_failure_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAILS.format(mark="@pytest.mark.xfail(strict=True)", holds=True))
    result = run_pytest(pytester, GATE, in_process=True)
    result.stdout.fnmatch_lines(["NIXL gate: PASS (2 PASS; 0 rows measured*"])
    assert result.ret == 0


@pytest.mark.parametrize("when", ["trylast=True", "wrapper=True, tryfirst=True"])
def test_a_plugin_that_sets_the_exit_code_to_0_does_not_pass_the_gate(pytester: pytest.Pytester, when: str) -> None:
    pytester.makepyfile(FAILS.format(mark="", holds=False))
    pytester.makeconftest(
        f"""
        import pytest

        @pytest.hookimpl({when})
        def pytest_sessionfinish(session):
            {"yield" if "wrapper" in when else "pass"}
            session.exitstatus = 0
        """
    )
    ending = pytester.path / "ending.json"
    result = run_pytest(pytester, GATE, env={"PYTEST_NIXL_ENDING": str(ending)}, in_process=True)
    assert result.ret == 1
    assert json.loads(ending.read_text()) == {"exit_code": 1}


@pytest.mark.parametrize(
    ("hook", "end"),
    [
        ("pytest_sessionfinish(session)", "pytest.exit('enough', returncode=0)"),
        ("pytest_terminal_summary(terminalreporter)", "raise SystemExit(0)"),
    ],
)
def test_a_plugin_that_ends_the_run_while_it_reports_leaves_no_exit_code_0(
    pytester: pytest.Pytester, hook: str, end: str
) -> None:
    pytester.makepyfile(FAILS.format(mark="", holds=True))
    pytester.makeconftest(f"import pytest\n\ndef {hook}:\n    {end}\n")
    result = run_pytest(pytester, GATE)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "INTERRUPTED after 2 of 2 checks: pytest or one of its plugins failed: " in result.outlines[-1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *((option, "pytest would print a list *") for option in ("--fixtures", "--fixtures-per-test", "--markers")),
        ("--cache-show", "pytest would print a list *"),
        ("--collect-only", "nothing would be measured*"),
        ("--benchmark-disable", "no row would be recorded*"),
        ("--benchmark-skip", "no row would be measured*"),
        ("-n 2", "bandwidth is not measured in parallel*"),
    ],
)
def test_an_option_by_which_nothing_is_measured_is_refused(pytester: pytest.Pytester, options: str, why: str) -> None:
    pytester.makepyfile(FAILS.format(mark="", holds=True))
    result = run_pytest(pytester, "-p", "cacheprovider", GATE, *options.split(), in_process=options != "-n 2")
    result.stderr.fnmatch_lines([f"ERROR: --nixl-gate is refused with *: {why}"])
    assert options.partition("=")[0].split()[0] in result.stderr.str()
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_check_without_parameters_is_missing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.nixl_check("good")
        def test_good(): pass

        @pytest.mark.nixl_check("mine")
        @pytest.mark.parametrize("number", [])
        def test_mine(number): pass
        """
    )
    result = run_pytest(pytester, GATE, in_process=True)
    result.stdout.fnmatch_lines(
        ["MISSING mine: no test of it ran: got empty parameter set *", "NIXL gate: FAIL (1 PASS, 1 MISSING, *"]
    )
    assert result.ret == 1


def test_own_checks_that_were_all_skipped_are_no_pass_and_no_failure(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.nixl_check("mine")
        def test_mine():
            pytest.skip("no such device here")
        """
    )
    result = run_pytest(pytester, "--nixl-report=verdict.json", in_process=True)
    result.stdout.fnmatch_lines(
        [
            "NOT-APPLICABLE mine: no such device here",
            "NIXL verdict: NOTHING CHECKED (1 NOT-APPLICABLE; 0 rows measured)",
            "wrote verdict.json",
            "next: correct: *",
        ]
    )
    assert result.ret == 0
    assert json.loads((pytester.path / "verdict.json").read_text())["verdict"] == "NOTHING CHECKED"
