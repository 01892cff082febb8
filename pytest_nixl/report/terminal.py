# SPDX-License-Identifier: Apache-2.0
"""The plugin's part of pytest's terminal output: the header, a word for each test, and the report at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest

from pytest_nixl.cluster.placement import Placement
from pytest_nixl.core import units
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.conclusion import known_limits_line, summary_line
from pytest_nixl.model.results import Result
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Outcome, TextLine
from pytest_nixl.report.comparison import lines as comparison_lines
from pytest_nixl.report.table import lines
from pytest_nixl.session.options import given_options
from pytest_nixl.session.run import Run
from pytest_nixl.session.settings import setting_lines
from pytest_nixl.session.silent_profile import silence
from pytest_nixl.session.suites import not_chosen

_COLOURS = {Outcome.PASS: "green", Outcome.WARN: "yellow", Outcome.FAIL: "red", Outcome.SKIP: "yellow"}


def header(settings: Settings, asked: Placement) -> Iterator[str]:
    """Yield each setting with its source, and this process's rank."""
    yield f"pytest-nixl {_own_version()}:"
    for line in setting_lines(settings):
        yield f"  {line}"
    if silent := silence(load_profile(settings.profile)):
        yield f"  {silent}"
    if asked.several or asked.placement is not None:
        yield f"  {asked}"
    if asked.several and not settings.group_token:
        yield "  no --nixl-group-token: the ranks trust everyone who can write to their etcd; set NIXL_GROUP_TOKEN"


def status_word(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Return category, letter and verbose word for a measured row: its verdict and bandwidth; None: not a row."""
    plain = getattr(report, "nixl_result", None)
    letter = {"passed": ".", "failed": "F", "skipped": "s"}.get(report.outcome)
    if report.when != "call" or plain is None or not plain["figures"] or letter is None:
        return None  # an outcome of another plugin, such as a rerun, has its own word
    result = Result.from_plain(plain)
    assert result.figures is not None
    return report.outcome, letter, f"{result.verdict} {units.gigabytes(result.figures.bandwidth)} GB/s"


def write_report(terminal: pytest.TerminalReporter, run: Run) -> None:
    """Write the table of rows, the results that are not PASS, and the verdict."""
    run.reported = True
    terminal.section("NIXL")
    if run.party is not None and run.party.ending is not None:
        for text in (*run.party.ending.verdict.splitlines(), *run.notes):
            terminal.write_line(text)
        return
    left_out = not_chosen(run.suites) if run.settings.gate else ()
    shown = list(lines(run.results, gate=run.settings.gate, interrupted=run.interrupted, left_out=left_out))
    if run.compared is not None:
        shown[-1:-1] = comparison_lines(run.compared, gate=run.settings.gate)
    if known := known_limits_line(run.results, nixl_version(run)):
        shown.insert(-1, TextLine(known))
    for line in shown:
        colour = _COLOURS[line.outcome] if line.outcome is not None else None
        terminal.write_line(line.text, **({colour: True} if colour else {}))
    for text in (*run.notes, *run.annotations):
        terminal.write_line(text)


def report_if_left_out(config: pytest.Config, run: Run) -> None:
    """Write the report if pytest has not written it, as happens after SIGTERM and after a crash."""
    terminal: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not run.reported and run.usable:
        write_report(terminal, run)


def last_word(config: pytest.Config, run: Run) -> None:
    """Write the verdict of an interrupted run again, as the very last line."""
    terminal: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.write_line(summary_line(run.results, gate=run.settings.gate, interrupted=run.interrupted), red=True)


def nixl_version(run: Run) -> str:
    """Return the version of NIXL: as the workers report it, else of the installed package; empty: not known."""
    if told := run.versions.get("nixl"):
        return told
    from pytest_nixl.model.nixl_releases import PACKAGES

    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def nothing_collected(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the command to type, because ``--nixl-*`` options were given but no test of the plugin was collected."""
    given = (flag if flag == "--nixl-gate" else f"{flag}={value}" for flag, value in given_options(config).items())
    command = shlex.join(["pytest", "--pyargs", "pytest_nixl.suites", *given])
    terminal.section("NIXL")
    terminal.write_line("no NIXL check ran, because the validation suites were not selected; to run them")
    terminal.write_line(f"type: {command}")


def _own_version() -> str:
    try:
        return version("pytest-nixl")
    except PackageNotFoundError:
        return "from a clone"
