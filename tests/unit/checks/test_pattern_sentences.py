# SPDX-License-Identifier: Apache-2.0
"""The suite ``pattern`` is selected with a pattern or by its name, records each flow, and ends as it is judged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.cli_run import ROOT
from helpers.suite_calls import arguments_of, conclusion_of, value_of

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.pattern import conftest, test_pattern

JUDGED = Judgement(Verdict.WARN, "reason")


@pytest.mark.parametrize(
    ("arguments", "pyargs", "ignored"),
    [
        (["suites"], False, True),
        (["suites", "suites/pattern"], False, None),
        (["suites/patterns"], False, True),
        (["suites/bandwidth/../pattern"], False, None),
        (["suites/pattern/.."], False, True),
        (["suites.pattern.test_pattern::test_no_flow"], True, None),
        (["suites.pattern"], False, True),
        (["suites.bandwidth", "suites.nowhere", "..", "nowhere.at.all"], True, True),
        (["suites/pattern/test_pattern.py"], True, None),
        (["without_spec", "unit"], True, True),
    ],
)
def test_a_run_without_a_pattern_leaves_the_suite_out_unless_it_is_named(
    arguments: list[str], pyargs: bool, ignored: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may be a package without ``__init__.py``, or one that no importer has loaded."""
    monkeypatch.setitem(sys.modules, "without_spec", ModuleType("without_spec"))
    run = SimpleNamespace(usable=True, settings=SimpleNamespace(pattern=None))
    monkeypatch.setattr(conftest, "Run", SimpleNamespace(of=lambda config: run))
    config: Any = SimpleNamespace(
        args=arguments, getoption=lambda name: pyargs, invocation_params=SimpleNamespace(dir=ROOT)
    )
    assert conftest.pytest_ignore_collect(Path("x"), config) is ignored
    run.settings.pattern = "incast:3"
    assert conftest.pytest_ignore_collect(Path("x"), config) is None
    run.settings.pattern, run.usable = None, False
    assert conftest.pytest_ignore_collect(Path("x"), config) is None


@pytest.mark.parametrize(("argument", "function"), [("flow_row", "flow_rows"), ("pattern_kind", "pattern_kinds")])
def test_each_flow_or_kind_of_a_usable_run_is_a_parameter(
    argument: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flow_rows", "pattern_kinds"):
        monkeypatch.setattr(conftest, name, lambda run, name=name: [f"one of {name}", "two"] * run.full)
    for usable, full, values in ((True, 1, [f"one of {function}", "two"]), (True, 0, [None]), (False, 1, [None])):
        run = SimpleNamespace(usable=usable, full=full)
        monkeypatch.setattr(conftest, "Run", SimpleNamespace(of=lambda config, run=run: run))
        metafunc = MagicMock(fixturenames=[argument])
        conftest.pytest_generate_tests(metafunc)
        assert metafunc.parametrize.mock_calls == [call(argument, values, ids=str)]


def test_a_flow_is_recorded_with_the_versions_of_its_workers_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = MagicMock(return_value=("samples", {"nixl": "1.5.1"}, {"source": 1}))
    monkeypatch.setattr(conftest, "measured_row", measured)
    rows = MagicMock(**{"judge.return_value": JUDGED})
    judged = value_of(conftest.flow_judged, ExitStack(), pattern_launches="launches", nixl_rows=rows)
    check = test_pattern.test_a_flow_moves_the_right_bytes_alone_and_together
    assert conclusion_of(check, flow_row="a row", flow_judged=judged) == "WARN: reason"
    measured.assert_called_once_with("a row", "launches")
    assert rows.mock_calls == [
        call.record("samples", versions={"nixl": "1.5.1"}, more={"source": 1}), call.judge("samples"),
    ]  # fmt: skip
    with pytest.raises(NotApplicableError, match=r"^no --nixl-pattern is given, or no requested backend moves bytes"):
        judged(None)


def test_the_report_has_a_pattern_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "line_of", lambda samples: f"line of {samples}")
    launches_type = MagicMock()
    monkeypatch.setattr(conftest, "PatternLaunches", launches_type)
    profile: Any = SimpleNamespace(bounds="bounds")
    launches = value_of(
        conftest.pattern_launches, ExitStack(), nixl_cluster="cluster", nixl_settings="settings", profile=profile
    )
    launches_type.assert_called_once_with("cluster", "settings", "bounds")
    launches.samples.side_effect = lambda kind: f"samples of {kind}"
    run = MagicMock()
    arguments = {"pattern_launches": launches, "nixl_run": run}
    assert value_of(conftest.kind_of_pattern, ExitStack(), pattern_kind="a kind", **arguments) == "a kind"
    assert run.record.mock_calls == [call.note("line of samples of a kind")]
    with pytest.raises(NotApplicableError, match=r"^no --nixl-pattern is given"):
        value_of(conftest.kind_of_pattern, ExitStack(), pattern_kind=None, **arguments)


SAMPLES = "samples of a kind"


@pytest.mark.parametrize(
    ("check", "judge", "passed_on"),
    [
        (test_pattern.test_no_flow_starves_beside_the_others, "judge_fairness", [SAMPLES]),
        (test_pattern.test_a_pattern_reaches_what_the_profile_demands, "judge_pattern_figures", [SAMPLES, "record"]),
        (test_pattern.test_no_rank_is_slow_with_each_of_its_partners, "judge_culprit_of_pattern",
         ["a kind", "the launches", "cluster"]),
    ],
)  # fmt: skip
def test_a_check_of_a_pattern_ends_as_it_is_judged(
    check: Callable[..., None], judge: str, passed_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, launches = MagicMock(return_value=JUDGED), MagicMock()
    launches.samples.side_effect = lambda kind: f"samples of {kind}"
    monkeypatch.setattr(test_pattern, judge, judged)
    values = {"kind_of_pattern": "a kind", "pattern_launches": launches, "nixl_cluster": "cluster",
              "record_figures": "record"}  # fmt: skip
    assert conclusion_of(check, **arguments_of(check, values)) == "WARN: reason"
    judged.assert_called_once_with(*(launches if name == "the launches" else name for name in passed_on))
