# SPDX-License-Identifier: Apache-2.0
"""The reports for programs, verdict.json by its schema and JUnit's cases of no test."""

from __future__ import annotations

from collections.abc import Callable
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
from pytest_nixl.report.junit import add_early_end, add_refusal, add_run_cases, name_by_module, write_again
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.completeness import completeness_of
from pytest_nixl.session.run import LiveRecord, Run
from pytest_nixl.store.record_reader import parse_recorded


def test_the_shipped_schema_is_a_schema_and_describes_each_field() -> None:
    jsonschema.Draft202012Validator.check_schema(verdict_schema())
    assert set(verdict_schema()["required"]) <= verdict_schema()["properties"].keys()


def test_secrets_of_the_environment_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCDCTL_PASSWORD", "hunter2-hunter2")
    result = Result("etcd-uri", "u.py::u", Verdict.FAIL, "hunter2-hunter2 is refused")
    run = parse_recorded(record("image:1", {KEY: [1.0]}, results=[result]), "r.json")
    write_report(RunReport(run), tmp_path / "verdict.json")
    assert read_verdict_file(tmp_path)["verdict"] == "FAIL"
    assert "hunter2" not in (tmp_path / "verdict.json").read_text()


def writer_and_config(path: Path) -> tuple[LogXML, Any]:
    """Return pytest's writer of a JUnit file, and a configuration with it and with another plugin of this name."""
    writer = LogXML(str(path), None, family="xunit2")
    plugins = [type("LogXML", (), {})(), SimpleNamespace(logfile="x"), writer]
    manager = SimpleNamespace(get_plugins=lambda: plugins, get_plugin=lambda _: None)
    writer.pytest_sessionstart()
    return writer, SimpleNamespace(stash=pytest.Stash(), pluginmanager=manager)


def cases(path: Path) -> list[tuple[str, list[tuple[str, str]], list[str]]]:
    """Return name, properties and failures of each case of a JUnit file, which has no other class than the run's."""
    read = []
    for case in junit_suite(path).findall("testcase"):
        properties = [(item.attrib["name"], item.attrib["value"]) for item in case.iter("property")]
        failures = [failure.attrib["message"] for failure in case.iter("failure")]
        assert case.attrib["classname"] == "nixl_run"
        read.append((case.attrib["name"], properties, failures))
    return read


ENDED = "INTERRUPTED after 1 of 2 checks: Ctrl-C"


def test_each_failure_of_no_failed_test_is_a_whole_case_of_its_own(tmp_path: Path) -> None:
    missing = Result("bandwidth", "", Verdict.MISSING, "no row", "run it", finding="F")
    results = (
        missing, missing, Result("fails", "t.py::fails", Verdict.FAIL, "has its own case"),
        Result("odd", "t.py::skipped", Verdict.INCONCLUSIVE, "no launch"),
        replace(missing, check="fine", verdict=Verdict.WARN),
    )  # fmt: skip
    writer, config = writer_and_config(tmp_path / "r.xml")
    run = SimpleNamespace(
        config=config, settings=SimpleNamespace(gate=True), record=LiveRecord(results=results, interrupted=ENDED)
    )
    completeness_of(cast(Run, run)).failed.add("t.py::fails")
    add_run_cases(config, cast(Run, run))
    writer.pytest_sessionfinish()
    properties = [
        ("nixl_check", "bandwidth"), ("nixl_verdict", "MISSING"), ("nixl_reason", "no row"), ("nixl_finding", "F"),
    ]  # fmt: skip
    message = "MISSING: no row\nremedy: run it"
    undecided = [("nixl_check", "odd"), ("nixl_verdict", "INCONCLUSIVE"), ("nixl_reason", "no launch")]
    assert cases(tmp_path / "r.xml") == [
        ("interrupted", [("nixl_verdict", "INTERRUPTED")], [ENDED]), ("bandwidth", properties, [message]),
        ("bandwidth#2", properties, [message]), ("odd", undecided, ["INCONCLUSIVE: no launch"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("add", "file", "case"),
    [
        (lambda config: add_refusal(config, "no etcd", 0), "r.xml",
         [("refused", [("nixl_verdict", "REFUSED")], ["REFUSED: no etcd"])]),
        (lambda config: add_refusal(config, "no etcd", 2), "r.rank2.xml",
         [("refused", [("nixl_verdict", "REFUSED")], ["REFUSED: no etcd"])]),
        (lambda config: add_early_end(config, "rank 0 is lost"), "r.xml",
         [("interrupted", [("nixl_verdict", "INTERRUPTED")], ["rank 0 is lost"])]),
        (lambda config: write_again(config, cast(Run, SimpleNamespace(record=LiveRecord(interrupted=ENDED)))), "r.xml",
         [("interrupted", [], [ENDED])]),
    ],
    ids=["refused", "refused of a rank", "a peer that ended early", "written again"],
)  # fmt: skip
def test_an_end_without_a_result_is_a_case(tmp_path: Path, add: Callable[[Any], None], file: str, case: Any) -> None:
    writer, config = writer_and_config(tmp_path / "r.xml")
    add(config)
    writer.pytest_sessionfinish()
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert cases(tmp_path / file) == case


def test_a_case_of_the_suites_has_the_class_of_its_module_wherever_it_is_installed(tmp_path: Path) -> None:
    writer, config = writer_and_config(tmp_path / "r.xml")
    for name, module in (("a", "pytest_nixl.suites.bandwidth.test_bandwidth"), ("b", "")):
        report = pytest.TestReport(f"x/t.py::{name}", ("x/t.py", 1, name), {}, "passed", None, "call")
        vars(report)["nixl_module"] = module
        name_by_module(config, report)
        writer.pytest_runtest_logreport(report)
    writer.pytest_sessionfinish()
    classes = [case.attrib["classname"] for case in junit_suite(tmp_path / "r.xml").findall("testcase")]
    assert classes == ["pytest_nixl.suites.bandwidth.test_bandwidth", "x.t"]
