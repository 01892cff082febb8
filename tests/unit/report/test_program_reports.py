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

from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import REPORT_ENDINGS
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.files import write_report
from pytest_nixl.report.junit import add_run_cases
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.completeness import completeness_of
from pytest_nixl.session.options import report_ending
from pytest_nixl.session.run import LiveRecord, Run
from pytest_nixl.store.record_reader import parse_recorded

SUMMARY = RowSummary(1e9, 1e-5, 2e-5, 10, 1e8, 1e10, ("tcp/eth0",), (1e9, 1.1e9))
RESULTS = (
    Result("bandwidth", f"t.py::{KEY}", Verdict.FAIL, "too slow", "mend it", RowKey.parse(KEY), SUMMARY, "pytest t.py"),
    Result("etcd-uri", "u.py::u", Verdict.WARN, "a slash at its end", "leave it out"),
    Result("leaks", "v.py::v", Verdict.FAIL, "it leaks", finding="NIXL-ETCD-HTTPS-PLAINTEXT"),
    Result("gpus", "w.py::w", Verdict.NOT_APPLICABLE, "no GPU"),
    Result("nixl-loads", "x.py::x", Verdict.PASS),
)


def written(report: RunReport, folder: Path) -> dict[str, Any]:
    """Write the verdict.json of a report, validate it, and return its contents."""
    write_report(report, folder / "verdict.json")
    return read_verdict_file(folder)


def recorded(*results: Result) -> RunReport:
    return RunReport(parse_recorded(record("image:1", {KEY: [1.0]}, results=results), "r.json"))


def test_the_shipped_schema_is_a_schema_and_describes_each_field() -> None:
    jsonschema.Draft202012Validator.check_schema(verdict_schema())
    assert set(verdict_schema()["required"]) <= verdict_schema()["properties"].keys()


def test_the_file_has_every_result_with_its_ids(tmp_path: Path) -> None:
    verdict = written(recorded(*RESULTS), tmp_path)
    assert (verdict["format"], verdict["verdict"], verdict["host"] != "") == (1, "FAIL", True)
    assert [entry["check"] for entry in verdict["results"]] == [result.check for result in RESULTS]
    assert [entry["outcome"] for entry in verdict["results"]] == ["FAIL", "WARN", "FAIL", "SKIP", "PASS"]
    assert verdict["results"][0]["row"] == KEY
    assert verdict["results"][0]["repeat"] == "pytest t.py"
    assert [entry["row"] for entry in verdict["measured_rows"]] == [KEY]
    assert verdict["findings"] == ["NIXL-ETCD-HTTPS-PLAINTEXT"]


def test_a_row_has_its_bounds_and_launches_in_base_units(tmp_path: Path) -> None:
    data = record("image:1", {KEY: [3.0, 1.0, 2.0]}, extra={"floor": 5e8, "ceiling": 9e9})
    [row] = written(RunReport(parse_recorded(data, "r.json")), tmp_path)["measured_rows"]
    assert (row["bandwidth"], row["floor"], row["ceiling"], row["launches"]) == (2e9, 5e8, 9e9, [3e9, 1e9, 2e9])


@pytest.mark.parametrize(("gate", "outcome"), [(False, "WARN"), (True, "FAIL")])
def test_the_gate_fails_what_is_undecided(tmp_path: Path, gate: bool, outcome: str) -> None:
    undecided = recorded(Result("etcd-uri", "u.py::u", Verdict.INCONCLUSIVE))
    assert [result["outcome"] for result in written(replace(undecided, gate=gate), tmp_path)["results"]] == [outcome]


def test_secrets_of_the_environment_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCDCTL_PASSWORD", "hunter2-hunter2")
    written(recorded(Result("etcd-uri", "u.py::u", Verdict.FAIL, "hunter2-hunter2 is refused")), tmp_path)
    assert "hunter2" not in (tmp_path / "verdict.json").read_text()


@pytest.mark.parametrize(
    ("name", "ending"), [("a.json", ".json"), (".json", ""), ("a.txt", ""), ("x.b.json", "b.json")]
)
def test_the_name_of_a_file_says_its_format(name: str, ending: str) -> None:
    assert report_ending(name, (*REPORT_ENDINGS, "b.json")) == ending


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
