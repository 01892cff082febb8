# SPDX-License-Identifier: Apache-2.0
"""Add test cases to pytest's JUnit file for failures that belong to no test, such as regressed rows or missing checks.

They appear only in that file: pytest does not count or print them, and its exit code does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import INTERRUPTED, Outcome, Verdict, outcome
from pytest_nixl.session.completeness import completeness_of
from pytest_nixl.session.run import Run

#: The class name of test cases about the whole run.
RUN_CASES = "nixl_run"


def junit_files(config: pytest.Config) -> Iterator[Any]:
    """Yield pytest's writers of JUnit files; with ``--junit-xml`` there is one."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "LogXML" and hasattr(plugin, "logfile"):
            yield plugin


def add_run_cases(config: pytest.Config, run: Run) -> None:
    """Add a failed test case for each result that fails the run but no test, and for an interruption."""
    for writer in junit_files(config):
        _name_the_unfinished(writer)
        for name, words, properties in _cases(run):
            for report in _reports(name, words, properties):
                writer.pytest_runtest_logreport(report)


def write_again(config: pytest.Config, run: Run) -> None:
    """Write the JUnit file again, because the verdict has changed since."""
    for writer in junit_files(config):
        for report in _reports(INTERRUPTED.lower(), run.interrupted, []):
            writer.pytest_runtest_logreport(report)
        writer.pytest_sessionfinish()


def _cases(run: Run) -> Iterator[tuple[str, str, list[tuple[str, object]]]]:
    if run.interrupted:
        yield INTERRUPTED.lower(), run.interrupted, [("nixl_verdict", INTERRUPTED)]
    names: dict[str, int] = {}
    for result in run.results:
        if outcome(result.verdict, gate=run.settings.gate) is not Outcome.FAIL:
            continue
        if result.nodeid in completeness_of(run).failed:
            continue  # its own test case has failed already
        name = f"{result.check}[{result.row}]" if result.row else result.check
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        yield name, _words(result), result.properties()


def _words(result: Result) -> str:
    text = f"{result.verdict}: {result.reason}"
    return f"{text}\nremedy: {result.remedy}" if result.remedy else text


def _reports(name: str, words: str, properties: list[tuple[str, object]]) -> Iterator[pytest.TestReport]:
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
            words if failed else None,
            when,
            user_properties=properties,
        )


def _name_the_unfinished(writer: Any) -> None:
    """Add name and result to the test that was running when the run ended, because pytest writes neither."""
    for reporter in getattr(writer, "node_reporters_ordered", ()):
        attributes = getattr(reporter, "attrs", None)  # None: it is finished
        if attributes is None or "name" in attributes:
            continue
        path, _, name = str(getattr(reporter, "id", "")).partition("::")
        classname = path.removesuffix(".py").replace("/", ".")
        attributes.update(classname=classname, name=name or path or Verdict.UNKNOWN.value)
        reporter._add_simple("error", f"{INTERRUPTED}: the run ended while this test ran", "")
