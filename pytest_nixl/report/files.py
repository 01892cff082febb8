# SPDX-License-Identifier: Apache-2.0
"""A run as files for people and for machines: which form a path's ending asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.judge.run_comparison import RunComparison
from pytest_nixl.store.record_reader import RecordedRun
from pytest_nixl.store.store import write_whole


@dataclass(frozen=True)
class ReportFormat:
    """What a report tells of.

    :param compared: what came of judging the run by another one; None: it was not.
    :param history: earlier runs, the oldest first; the run itself may be among them.
    :param gate: whether what is undecided fails.
    """

    run: RecordedRun
    compared: RunComparison | None = None
    history: tuple[RecordedRun, ...] = ()
    gate: bool = False


def write(report: ReportFormat, path: Path) -> None:
    """Write a report whole or not at all, in the form of the path's ending: ``.html``, ``.csv`` or ``.prom``.

    :raises NixlPluginError: where it cannot be written.
    """
    if path.suffix == ".html":
        from pytest_nixl.report.page import page as text
    elif path.suffix == ".csv":
        from pytest_nixl.report.csv_table import table as text
    else:
        from pytest_nixl.report.prometheus import metrics as text
    write_whole(path, text(report))
