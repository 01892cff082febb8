# SPDX-License-Identifier: Apache-2.0
"""The reports for programs, verdict.json by its schema and JUnit's cases of no test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest
from _pytest.junitxml import LogXML
from helpers.cli_run import junit_suite
from helpers.records import KEY, record
from helpers.report_schemas import read_verdict_file, verdict_schema

from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.files import write_report
from pytest_nixl.report.junit import add_run_cases
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.completeness import completeness_of
from pytest_nixl.session.run import LiveRecord, Run
from pytest_nixl.store.record_reader import parse_recorded


def written(report: RunReport, folder: Path) -> dict[str, Any]:
    """Write the verdict.json of a report, validate it, and return its contents."""
    write_report(report, folder / "verdict.json")
    return read_verdict_file(folder)


def recorded(*results: Result) -> RunReport:
    return RunReport(parse_recorded(record("image:1", {KEY: [1.0]}, results=results), "r.json"))


def test_the_shipped_schema_is_a_schema_and_describes_each_field() -> None:
    jsonschema.Draft202012Validator.check_schema(verdict_schema())
    assert set(verdict_schema()["required"]) <= verdict_schema()["properties"].keys()


def test_secrets_of_the_environment_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCDCTL_PASSWORD", "hunter2-hunter2")
    written(recorded(Result("etcd-uri", "u.py::u", Verdict.FAIL, "hunter2-hunter2 is refused")), tmp_path)
    assert "hunter2" not in (tmp_path / "verdict.json").read_text()


def test_each_failure_of_no_failed_test_is_a_whole_case_of_its_own(tmp_path: Path) -> None:
    missing = Result("bandwidth", "", Verdict.MISSING, "no row", "run it", finding="F")
    results = (
        missing, missing, Result("fails", "t.py::fails", Verdict.FAIL, "has its own case"),
        replace(missing, check="odd", verdict=Verdict.INCONCLUSIVE, nodeid="t.py::skipped"),
        replace(missing, check="fine", verdict=Verdict.WARN),
    )  # fmt: skip
    writer = LogXML(str(tmp_path / "r.xml"), None, family="xunit2")
    plugins = SimpleNamespace(get_plugins=lambda: [writer], get_plugin=lambda _: None)
    run = SimpleNamespace(
        config=SimpleNamespace(stash=pytest.Stash(), pluginmanager=plugins), settings=SimpleNamespace(gate=True),
        record=LiveRecord(results=results, interrupted="INTERRUPTED after 1 of 2 checks: Ctrl-C"),
    )  # fmt: skip
    completeness_of(cast(Run, run)).failed.add("t.py::fails")
    writer.pytest_sessionstart()
    add_run_cases(cast(pytest.Config, run.config), cast(Run, run))
    writer.pytest_sessionfinish()
    suite = junit_suite(tmp_path / "r.xml")
    shown = {}
    for case in suite.findall("testcase"):
        names = [str(item.attrib["name"]) for item in case.iter("property")]
        shown[case.attrib["name"]] = (names, [str(failure.attrib["message"]) for failure in case.iter("failure")])
    of_result = ["nixl_check", "nixl_verdict", "nixl_reason", "nixl_finding"]
    text = "MISSING: no row\nremedy: run it"
    assert shown == {
        "interrupted": (["nixl_verdict"], ["INTERRUPTED after 1 of 2 checks: Ctrl-C"]),
        "bandwidth": (of_result, [text]),
        "bandwidth#2": (of_result, [text]),
        "odd": (of_result, [text.replace("MISSING", "INCONCLUSIVE")]),
    }
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["errors"]) == ("4", "4", "0")
