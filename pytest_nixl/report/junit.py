# SPDX-License-Identifier: Apache-2.0
"""Add test cases to pytest's JUnit file for failures that belong to no test, such as regressed rows or missing checks.

They appear only in that file: pytest does not count or print them, and its exit code does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pytest_nixl.model.conclusion import WHOLE_RUN
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import INTERRUPTED, Outcome, outcome
from pytest_nixl.session.completeness import completeness_of
from pytest_nixl.session.run import Run, exit_code

#: The class name of test cases about the whole run.
RUN_CASES = "nixl_run"


def junit_files(config: pytest.Config) -> Iterator[Any]:
    """Yield pytest's writers of JUnit files; with ``--junit-xml`` there is one."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "LogXML" and hasattr(plugin, "logfile"):
            yield plugin


def name_by_rank(config: pytest.Config, rank: int) -> None:
    """Add the rank to the name of this rank's JUnit file, so that it does not replace the file of rank 0."""
    for writer in junit_files(config):
        writer.logfile = str(_of_rank(Path(writer.logfile), rank))


def name_by_module(config: pytest.Config, report: pytest.TestReport) -> None:
    """Name the class of a suite's test case by its module, wherever the suites are installed."""
    module = getattr(report, "nixl_module", "")
    for writer in junit_files(config) if module else ():
        writer.node_reporter(report).add_attribute("classname", module)


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def add_run_cases(config: pytest.Config, run: Run) -> None:
    """Add a failed test case for each result that fails the run but no test, and for an interruption."""
    for writer in junit_files(config):
        if (unfinished := completeness_of(run).unfinished) is not None:  # pytest writes neither its name nor a result
            text = f"{INTERRUPTED}: the run ended while this test ran"
            writer.pytest_runtest_logreport(
                pytest.TestReport(unfinished.nodeid, unfinished.location, {}, "failed", text, "setup")
            )
        for name, message, properties in _cases(run):
            for report in _reports(name, message, properties):
                writer.pytest_runtest_logreport(report)


def write_again(config: pytest.Config, run: Run) -> None:
    """Write the JUnit file again, because the verdict has changed since."""
    for writer in junit_files(config):
        for report in _reports(INTERRUPTED.lower(), run.record.interrupted, []):
            writer.pytest_runtest_logreport(report)
        writer.pytest_sessionfinish()


def add_early_end(config: pytest.Config, message: str) -> None:
    """Add a failed test case for a peer that was interrupted: it ran no test, and its file would be green without.

    :param message: how it ended.
    """
    for writer in junit_files(config):
        for report in _reports(INTERRUPTED.lower(), message, [("nixl_verdict", INTERRUPTED)]):
            writer.pytest_runtest_logreport(report)


def add_refusal(config: pytest.Config, reason: str, rank: int) -> None:
    """Write a JUnit file with a failed test case for a run that is refused before its first test.

    pytest may have no writer yet, because it makes it after this plugin has read its options.

    :param reason: why it is refused, in one sentence.
    :param rank: the rank of this process. From rank 1 the file has the rank in its name.
    """
    message = f"REFUSED: {reason}"
    name_by_rank(config, rank)
    for writer in junit_files(config):
        for report in _reports("refused", message, [("nixl_verdict", "REFUSED")]):
            writer.pytest_runtest_logreport(report)
        return
    if xml_path := config.getoption("xmlpath", None):
        path = _of_rank(Path(xml_path), rank)
        counts = {"errors": "0", "failures": "1", "skipped": "0", "tests": "1", "time": "0"}
        root = ElementTree.Element("testsuites")
        suite = ElementTree.SubElement(root, "testsuite", {"name": "pytest", **counts})
        case = ElementTree.SubElement(suite, "testcase", classname=RUN_CASES, name="refused", time="0")
        ElementTree.SubElement(case, "failure", message=message).text = message
        with suppress(OSError):  # the exit code says it too
            path.parent.mkdir(parents=True, exist_ok=True)
            ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _cases(run: Run) -> Iterator[tuple[str, str, list[tuple[str, object]]]]:
    if run.record.interrupted:
        yield INTERRUPTED.lower(), run.record.interrupted, [("nixl_verdict", INTERRUPTED)]
    if exit_code(run.config) == pytest.ExitCode.NO_TESTS_COLLECTED:
        yield WHOLE_RUN, "FAIL: no test was collected", [("nixl_verdict", "FAIL")]
    names: dict[str, int] = {}
    for result in run.record.results:
        if outcome(result.verdict, gate=run.settings.gate) is not Outcome.FAIL:
            continue
        if result.nodeid in completeness_of(run).failed:
            continue  # its own test case has failed already
        name = result.name
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        yield name, _reason_and_remedy(result), result.properties()


def _reason_and_remedy(result: Result) -> str:
    text = f"{result.verdict}: {result.reason}"
    return f"{text}\nremedy: {result.remedy}" if result.remedy else text


def _reports(name: str, message: str, properties: list[tuple[str, object]]) -> Iterator[pytest.TestReport]:
    """Yield the reports of a failed test as pytest creates them."""
    nodeid = f"{RUN_CASES}.py::{name}"
    location = (f"{RUN_CASES}.py", None, name)
    for when in ("setup", "call", "teardown"):
        failed = when == "call"
        yield pytest.TestReport(
            nodeid,
            location,
            {},
            "failed" if failed else "passed",
            message if failed else None,
            when,
            user_properties=properties,
        )
