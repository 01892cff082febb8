# SPDX-License-Identifier: Apache-2.0
"""The plugin's part of pytest's terminal output: the header, a word for each test, and the report at the end."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest

from pytest_nixl.cluster.placement import Placement
from pytest_nixl.core.extras import own_version
from pytest_nixl.core.strict import printable
from pytest_nixl.host import library_versions
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.conclusion import known_limits_line, summary_line
from pytest_nixl.model.nixl_releases import PACKAGES
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.model.verdicts import Outcome, TextLine
from pytest_nixl.nixl.backends import with_driver_standin
from pytest_nixl.nixl.installed import pip_command
from pytest_nixl.report.comparison import lines as comparison_lines
from pytest_nixl.report.table import measured_lines, wrong_lines
from pytest_nixl.session.completeness import completeness_of
from pytest_nixl.session.gate import silent_profile
from pytest_nixl.session.given_options import given_options
from pytest_nixl.session.run import Run, exit_code
from pytest_nixl.session.selection import left_out_line, suites_not_chosen
from pytest_nixl.session.settings import changed_settings, setting_lines

#: Whether the report was written, and the very last line, on the configuration.
_LAST_WORD = pytest.StashKey[bool]()
_REPORTED = pytest.StashKey[bool]()
#: Whether what is wrong was written, on the configuration.
_PROBLEMS = pytest.StashKey[bool]()

_UNKNOWN = "of unknown version"
_COLOURS = {Outcome.PASS: "green", Outcome.WARN: "yellow", Outcome.FAIL: "red", Outcome.SKIP: "yellow"}


def header(settings: Settings, placement: Placement, verbosity: int) -> Iterator[str]:
    """Yield the settings that are not the default in one line, and what else a reader has to know before the run.

    :param verbosity: that of pytest: from 2 (``-vv``) each setting has a line of its own, with its source.
    """
    nixl = installed_nixl()
    ucx = library_versions.ucx(os.environ)[0] if nixl else ""
    versions = f"pytest-nixl {own_version()}, {f'NIXL {nixl}' if nixl else 'no NIXL'}{f', UCX {ucx}' if ucx else ''}"
    if verbosity > 1:
        yield f"{versions}:"
        for line in setting_lines(settings):
            yield f"  {line}"
    else:
        changed = ", ".join(changed_settings(settings)) or "each setting has its default"
        yield f"{versions}: {changed} (-vv: all settings)"
        for line in settings.ignored:
            yield f"  {line}"
    if not nixl:
        yield f"  NIXL is not installed for {sys.executable}: `{pip_command()}`"
    if settings.first_baseline:
        yield f"  no baseline yet: {settings.baseline} does not exist, so this run is compared with none"
    if settings.compares and settings.fewest_launches > 1:
        least = settings.fewest_launches
        yield f"  a comparison needs several launches: each row has at least {least}, so this run takes longer"
    if silent := silent_profile(load_profile(settings.profile)):
        yield f"  {silent}"
    ours = {name: value for name, value in own_variables({}, memory=settings.memory).items() if value is not None}
    if lacking := with_driver_standin(settings.backend, {**os.environ, **ours}):
        yield f"  {' and '.join(lacking)}: workers load a stand-in for libcuda.so.1, as this host has no NVIDIA driver"
    if placement.several or placement.by_launcher is not None:
        yield f"  {placement}"
    if placement.several and not settings.group_token:
        yield "  no --nixl-group-token: the ranks trust everyone who can write to their etcd; set NIXL_GROUP_TOKEN"


def write_problems(terminal: pytest.TerminalReporter, run: Run) -> None:
    """Write what is wrong, which comes before pytest's own report of the failed tests.

    It writes nothing if nothing is wrong, and on a rank that serves rank 0.
    """
    run.config.stash[_PROBLEMS] = True
    if run.rank_session is not None and run.rank_session.ending is not None:
        return
    problem_lines = list(wrong_lines(run.record.results, _summary(run), gate=run.settings.gate, width=_width(terminal)))
    if problem_lines:
        terminal.section("NIXL: what is wrong, and what to do")
        changes = run.record.comparison.changes if run.record.comparison is not None else ()
        variables = (TextLine(f"changed: {item}") for item in changes if item.variable)
        # The first line is the verdict, which the report ends with.
        _write(terminal, (*variables, *problem_lines[1:]))


def write_report(terminal: pytest.TerminalReporter, run: Run) -> None:
    """Write the table of rows, what else was found, and the verdict."""
    if not run.config.stash.get(_PROBLEMS, False):
        write_problems(terminal, run)
    run.config.stash[_REPORTED] = True
    terminal.section("NIXL")
    if run.rank_session is not None and run.rank_session.ending is not None:
        for text in (*run.rank_session.ending.verdict.splitlines(), *run.record.notes):
            terminal.write_line(text)
        return
    gate, everything = run.settings.gate, terminal.verbosity > 0
    shown = list(measured_lines(run.record.results, gate=gate, everything=everything, width=_width(terminal)))
    if limits_line := known_limits_line(run.record.results, nixl_version(run)):
        shown.append(TextLine(limits_line))
    if levels := left_out_line(run.config):
        shown.append(TextLine(levels))
    if run.record.comparison is not None:
        shown += comparison_lines(run.record.comparison, gate=gate)
    _write(terminal, (*shown, _summary(run)))
    # A run of several suites has many notes about requests for KV blocks, whose rows are in the table.
    folded = not everything and len(run.collected.suites) > 1
    notes = (text for text in run.record.notes if not (folded and text in run.record.details))
    for text in (*notes, *run.record.annotations):
        terminal.write_line(text)


def _summary(run: Run) -> TextLine:
    left_out = suites_not_chosen(run.collected.suites) if run.settings.gate else ()
    deselected = completeness_of(run).deselected if run.settings.gate else ()
    results = run.record
    return summary_line(
        results.results,
        gate=run.settings.gate,
        interrupted=results.interrupted,
        left_out=left_out,
        deselected=deselected,
        code=exit_code(run.config),
    )


def _width(terminal: pytest.TerminalReporter) -> int | None:
    """Return the characters of a line of the terminal; None with -v, which shows everything."""
    return None if terminal.verbosity > 0 else shutil.get_terminal_size().columns


def _write(terminal: pytest.TerminalReporter, shown: Iterable[TextLine]) -> None:
    for line in shown:
        colour = _COLOURS[line.outcome] if line.outcome is not None else None
        terminal.write_line(printable(line.text), **({colour: True} if colour else {}))


def report_if_unwritten(config: pytest.Config, run: Run) -> None:
    """Write the report if pytest has not written it, as happens after SIGTERM and after a crash."""
    terminal: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    refused = exit_code(config) == pytest.ExitCode.USAGE_ERROR  # pytest's last line says why
    if terminal is not None and not config.stash.get(_REPORTED, False) and run.usable and not refused:
        write_report(terminal, run)


def repeat_verdict(config: pytest.Config, run: Run) -> None:
    """Write the verdict of an interrupted run again, as the very last line, once."""
    terminal: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not config.stash.get(_LAST_WORD, False):
        config.stash[_LAST_WORD] = True
        terminal.write_line(
            summary_line(run.record.results, gate=run.settings.gate, interrupted=run.record.interrupted).text, red=True
        )


def nixl_version(run: Run) -> str:
    """Return the version of NIXL: as the workers report it, else of the installed package; empty: not known."""
    version = run.record.versions.get("nixl") or installed_nixl()
    return "" if version == _UNKNOWN else version


def installed_nixl() -> str:
    """Return the version of the installed NIXL without loading it; empty: none can be imported."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    # An image's own build may be on the path without the metadata of a package.
    return _UNKNOWN if find_spec("nixl") is not None else ""


def nothing_collected(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the command to type, because ``--nixl-*`` options were given but no test of the plugin was collected."""
    flags = (flag if flag == "--nixl-gate" else f"{flag}={value}" for flag, value in given_options(config).items())
    command = shlex.join(["pytest", "--pyargs", "pytest_nixl.suites", *flags])
    terminal.section("NIXL")
    terminal.write_line("no NIXL check ran, because the validation suites were not selected; to run them")
    terminal.write_line(f"type: {command}")


def nothing_of_the_level(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write what the level of the run leaves out, because no check is left."""
    if line := left_out_line(config):
        terminal.section("NIXL")
        terminal.write_line(line)
