# SPDX-License-Identifier: Apache-2.0
"""Write the outputs of a run at its end: its record in the store, and the requested reports.

An output that cannot be written never changes the verdict; the run reports it in a note.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.session.run import Run

if TYPE_CHECKING:
    from pytest_nixl.store.record_reader import RecordedRun


def in_action() -> bool:
    """Whether this process runs in a GitHub Actions job, which shows summaries and annotations."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def leave_again(config: pytest.Config, run: Run) -> None:
    """Write the record and the reports again, because the verdict has changed, and delete the old record."""
    old, run.stored = run.stored, []
    leave(config, run)
    if run.stored:
        for path in old:
            path.unlink(missing_ok=True)


def leave(config: pytest.Config, run: Run) -> None:
    """Write the record and the reports of a run."""
    if run.settings.store:
        _store(config, run)
    if run.settings.report or in_action():
        _report(run)


def _store(config: pytest.Config, run: Run) -> None:
    from pytest_nixl.session.record_writer import other_record, other_run, record_of
    from pytest_nixl.store.store import Store

    if not run.benchmarks:
        run.notes.append(f"nothing was stored in {run.settings.store}: no row was recorded")
        return
    store = Store(Path(run.settings.store))
    record = record_of(config, run)
    records = [(record, run.settings.image)]
    if run.settings.compare_image is not None and run.others:
        other = other_run(run, run.settings.compare_image)
        records.append((other_record(record, run, other), run.settings.compare_image.image))
    for each, label in records:
        try:
            path = store.write(each, label)
        except NixlPluginError as error:
            run.notes.append(f"{error.reason}. {error.remedy}")
        else:
            run.stored.append(path)
            run.notes.append(f"stored: {path}")


def _report(run: Run) -> None:
    from pytest_nixl.report.files import write
    from pytest_nixl.report.github import add_summary, workflow_commands
    from pytest_nixl.report.run_report import RunReport
    from pytest_nixl.session.record_writer import this_run
    from pytest_nixl.store.store import Store

    history: list[RecordedRun] = []
    skipped: list[str] = []
    if run.settings.store:
        try:
            history, skipped = Store(Path(run.settings.store)).summaries()
        except OSError as error:
            skipped = [f"the reports have no history: {run.settings.store} cannot be read ({error.strerror})"]
    report = RunReport(this_run(run), run.compared, tuple(history), gate=run.settings.gate)
    if in_action():
        run.annotations = list(workflow_commands(report))
        try:
            add_summary(report)
        except NixlPluginError as error:
            run.notes.append(error.reason)
    for path in run.settings.report:
        try:
            write(report, Path(path))
        except NixlPluginError as error:
            run.notes.append(f"{error.reason}. {error.remedy}")
        else:
            run.notes.append(f"wrote {path}")
    run.notes += [note for note in skipped if note not in run.notes]
