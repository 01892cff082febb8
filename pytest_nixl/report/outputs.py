# SPDX-License-Identifier: Apache-2.0
"""Write the outputs of a run at its end: its record in the store, and the requested reports.

An output that cannot be written never changes the verdict; the run reports it in a note.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import error_text
from pytest_nixl.judge.run_comparison import disturbance
from pytest_nixl.model.conclusion import NEXT_STEPS
from pytest_nixl.report.files import write_report
from pytest_nixl.report.github import add_summary, workflow_commands
from pytest_nixl.report.junit import add_refusal
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.completeness import completeness_of
from pytest_nixl.session.record_writer import other_record, other_run, record_of, refused_run, this_run
from pytest_nixl.session.run import Run, exit_code
from pytest_nixl.session.selection import left_out_of
from pytest_nixl.session.settings import readable_settings
from pytest_nixl.store.store import Store

if TYPE_CHECKING:
    from pytest_nixl.model.settings import Settings
    from pytest_nixl.store.record_reader import RecordedRun

#: Whether the reports of a refused run were written, on the configuration.
_REFUSED = pytest.StashKey[bool]()


#: The most characters of a refusal in a report: it may list each option of another rank.
_LONGEST_REFUSAL = 10_000


def in_action() -> bool:
    """Whether this process runs in a GitHub Actions job, which shows summaries and annotations."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def rewrite_reports(config: pytest.Config, run: Run) -> None:
    """Write the record and the reports again, because the verdict has changed, and delete the old record."""
    old = run.record.stored
    write_reports(config, run)
    if run.record.stored != old:
        for path in old:
            path.unlink(missing_ok=True)


def write_reports(config: pytest.Config, run: Run) -> None:
    """Write the record and the reports of a run. With several ranks, rank 0 writes them."""
    if run.placement.several and run.placement.rank:
        return  # this rank could not join: rank 0 may still write reports of its own
    if run.settings.store:
        _store(config, run)
    if run.settings.report or in_action():
        _report(config, run, run.settings, this_run(run))


def write_refusal(config: pytest.Config, run: Run, reason: str) -> None:
    """Write the reports of a run that is refused before its first test, so that no file of an earlier run stays.

    The first reason counts. With several ranks, rank 0 writes the reports; the others write only their JUnit file.

    :param reason: why it is refused, in one sentence.
    """
    if config.stash.get(_REFUSED, False):
        return
    config.stash[_REFUSED] = True
    reason = error_text(run.hide(reason), _LONGEST_REFUSAL)
    rank = run.placement.rank if run.usable else None
    if run.rank_session is not None:  # without a launcher, the group gave this process its rank
        rank = run.rank_session.rank
    add_refusal(config, reason, rank or 0)
    if rank:
        return  # the report files are those of rank 0
    settings = run.settings if run.usable else readable_settings(config)
    if settings.report or in_action():
        _report(config, run, settings, refused_run(run, settings), refused=reason)
    for text in (*run.record.notes, *run.record.annotations):
        print(text, file=sys.stderr)


def write_session_refusal(config: pytest.Config, run: Run) -> None:
    """Write the reports of a run whose session ends with a usage error, unless they are written already.

    A process that the other ranks refuse has no rank, and their reports may be complete: it writes none.
    """
    if run.usable and run.placement.several and run.placement.rank is None and run.rank_session is None:
        return
    error = sys.exc_info()[1]  # pytest calls the hook pytest_sessionfinish while it passes the error on
    usage_error = isinstance(error, pytest.UsageError) and str(error)
    write_refusal(config, run, usage_error or "pytest refused the command line: its output says why")


def _store(config: pytest.Config, run: Run) -> None:
    if not run.record.benchmarks:
        run.record.note(f"nothing was stored in {run.settings.store}: no row was recorded")
        return
    store = Store(Path(run.settings.store))
    record = record_of(config, run)
    records = [(record, run.settings.image)]
    if run.settings.compare_image is not None and run.record.other_samples:
        other = other_run(run, run.settings.compare_image)
        records.append((other_record(record, run, other), run.settings.compare_image.image))
    stored = []
    for run_record, label in records:
        try:
            path = store.write(run_record, label)
        except NixlPluginError as error:
            run.record.note(f"{error.reason}. {error.remedy}")
        else:
            stored.append(path)
            run.record.note(f"stored: {path}")
    if stored:
        run.record.stored = tuple(stored)


def _chosen(config: pytest.Config, settings: Settings) -> dict[str, str]:
    """Return what was asked for and what was left out, as the page's first lines name it."""
    chosen = {
        "profile": settings.profile,
        "level": settings.level,
        "ranks": str(settings.ranks or ""),
        "left out": f"{len(left_out_of(config))} checks of higher levels" if left_out_of(config) else "",
    }
    return {name: text for name, text in chosen.items() if text}


def _next_step(report: RunReport, run: Run, page: str) -> str:
    """Return what a reader does next, with the word of ``verdict.json``.

    :param page: the page of the run; empty: it has none.
    """
    step = report.next_step
    if step != "accept":
        return f"next: {step}: {f'open {page}; ' if page else ''}{NEXT_STEPS[step]}"
    figures = f"; figures: {page}" if page else ""
    if run.record.stored:
        return f"next: accept: nothing to do{figures}; compare a later run: --nixl-baseline={run.record.stored[0]}"
    return f"next: accept: nothing to do{figures}; to compare a later run: --nixl-store=DIR, then --nixl-baseline=FILE"


def _report(config: pytest.Config, run: Run, settings: Settings, record: RecordedRun, refused: str = "") -> None:
    history: list[RecordedRun] = []
    skipped: list[str] = []
    if settings.store:
        try:
            history, skipped = Store(Path(settings.store)).summaries()
        except OSError as error:
            skipped = [f"the reports have no history: {settings.store} cannot be read ({error.strerror})"]
    completeness = completeness_of(run)
    checks = {result.nodeid for result in run.record.results}
    report = RunReport(
        record,
        run.record.comparison,
        tuple(history),
        gate=settings.gate,
        refused=refused,
        exit_code=int(pytest.ExitCode.USAGE_ERROR) if refused else exit_code(config),
        seconds=completeness.seconds,
        durations=completeness.durations,
        failed_tests=tuple(sorted(completeness.failed - checks)),
        chosen=_chosen(config, settings),
    )
    if in_action():
        run.record.annotations = tuple(workflow_commands(report))
        try:
            add_summary(report)
        except NixlPluginError as error:
            run.record.note(error.reason)
    if used := disturbance(record.rows):
        run.record.note(f"{used}: the figures are less than this machine's best")
    pages = []
    for path in settings.report:
        try:
            write_report(report, Path(path))
        except NixlPluginError as error:
            run.record.note(f"{error.reason}. {error.remedy}")
        else:
            run.record.note(f"wrote {path}")
            pages += [path] if path.endswith(".html") else []
    if not refused:
        run.record.note(_next_step(report, run, pages[0] if pages else ""))
    run.record.note(*skipped)
