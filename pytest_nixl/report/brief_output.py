# SPDX-License-Identifier: Apache-2.0
"""Write what is wrong before pytest's failures, and without ``-v`` shorten pytest's failures and benchmarks."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pytest_nixl.core import units
from pytest_nixl.model.results import Result
from pytest_nixl.report.terminal import nothing_collected, nothing_of_the_level, write_problems, write_report
from pytest_nixl.session.run import Run, exit_code
from pytest_nixl.session.selection import left_out_line, suite_of, suites_folder

NAME = "nixl-brief-output"
#: Options of pytest-benchmark that ask for more than its table of this run.
_BENCHMARK_OPTIONS = ("benchmark_compare", "benchmark_histogram", "benchmark_cprofile")


class BriefOutput:
    """A pytest plugin that writes what is wrong first, and shortens what pytest writes in a run of the suites alone.

    The failures that the report has with reason and remedy are left out. With ``-v`` pytest writes everything.
    """

    #: The name under which the plugin is registered.
    name = NAME

    def __init__(self, run: Run) -> None:
        self._run = run
        self._applies = False
        self._held: dict[str, list[Any]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly or self._run.parallel:
            return
        suites = [suite_of(item.path) for item in session.items]
        self._applies = bool(suites) and None not in suites

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest writes the failures
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
        run = self._run
        if run.usable and not run.serves and (run.record.results or run.record.interrupted):
            write_problems(terminalreporter, run)
        if terminalreporter.verbosity > 0:
            return (yield)
        warnings = terminalreporter.stats.get("warnings", [])
        if self._applies and warnings:  # those of the checks are in the report
            terminalreporter.stats["warnings"] = [
                warning for warning in warnings if "NixlWarning: " not in warning.message
            ]
        for kind in ("failed", "error"):
            reports = terminalreporter.stats.get(kind)
            if reports:
                self._held[kind] = reports
                terminalreporter.stats[kind] = [report for report in reports if not _is_told(report)]
        try:
            return (yield)
        finally:
            self.give_back(terminalreporter)

    def give_back(self, terminal: pytest.TerminalReporter) -> None:
        """Count the failures again that were left out, before pytest writes its short summary."""
        terminal.stats.update(self._held)
        self._held = {}


def quiet_benchmarks(config: pytest.Config) -> None:
    """Leave out pytest-benchmark's table, which repeats the rows, as its option ``--benchmark-quiet`` does.

    It stays if an option of pytest-benchmark asks for more, or if tests outside the suites are selected.
    """
    if (
        config.get_verbosity() <= 0
        and _only_suites(config)
        and not any(config.getoption(name, None) for name in _BENCHMARK_OPTIONS)
    ):
        config.option.benchmark_quiet = True


def status_word(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Return category, letter and verbose word for a measured row: its verdict and bandwidth; None: not a row."""
    result: Result | None = getattr(report, "nixl_result", None)
    letter = {"passed": ".", "failed": "F", "skipped": "s"}.get(report.outcome)
    if report.when != "call" or result is None or result.summary is None or letter is None:
        return None  # an outcome of another plugin, such as a rerun, has its own word
    return report.outcome, letter, f"{result.verdict} {units.gigabytes(result.summary.bandwidth)} GB/s"


def without_benchmark_header(config: pytest.Config, headers: list[Any]) -> list[Any]:
    """Return the headers of all plugins without that of pytest-benchmark, if only tests of the suites are selected.

    It prints options that do not apply to rows, in three lines of a terminal.

    :param headers: what the hook ``pytest_report_header`` of each plugin returned.
    """
    if config.get_verbosity() > 0 or not _only_suites(config):
        return headers
    return [
        header
        for header in headers
        if not (isinstance(header, str) and re.match(r"benchmark: \S+ \(defaults:", header))
    ]


def _only_suites(config: pytest.Config) -> bool:
    """Whether every argument of the command line, or of ``testpaths``, is in the folder of the suites."""
    folder = suites_folder()

    def inside(argument: str) -> bool:
        name = argument.partition("::")[0]
        if config.getoption("pyargs") and name.startswith("pytest_nixl.suites"):
            return True
        path = Path(config.invocation_params.dir, name).resolve()
        return path == folder or folder in path.parents

    return bool(config.args) and all(inside(argument) for argument in config.args)


def _is_told(report: Any) -> bool:
    """Whether the run's report tells everything about a failed test, which has no captured output and no log lines."""
    result: Result | None = getattr(report, "nixl_result", None)
    if result is None or not isinstance(report.longrepr, str) or report.sections:
        return False
    texts = [text for text in (result.reason, result.remedy, result.repeat) if text]
    return all(any(text in line for text in texts) for line in report.longrepr.splitlines())


def finish(terminal: pytest.TerminalReporter, run: Run) -> None:
    """Write the report after pytest's failures, and count the failures again that were left out."""
    plugin: BriefOutput | None = terminal.config.pluginmanager.get_plugin(NAME)
    if plugin is not None:
        plugin.give_back(terminal)
    if not run.usable or exit_code(run.config) == pytest.ExitCode.USAGE_ERROR:
        return  # pytest's last line says why the run is refused
    if not (run.record.results or run.configured or run.record.interrupted or left_out_line(run.config)):
        return
    if run.record.results or run.serves or run.record.interrupted:
        write_report(terminal, run)
    elif not run.collected.used:
        nothing_collected(terminal, run.config)
    else:
        nothing_of_the_level(terminal, run.config)
