# SPDX-License-Identifier: Apache-2.0
"""Write the report files of a run, in the format of each path's ending."""

from __future__ import annotations

from pathlib import Path

from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.store import write_whole


def write(report: RunReport, path: Path) -> None:
    """Write a report atomically, in the format of the path's ending: ``.html``, ``.csv`` or ``.prom``.

    :raises NixlPluginError: if it cannot be written.
    """
    if path.suffix == ".html":
        from pytest_nixl.report.page import page as text
    elif path.suffix == ".csv":
        from pytest_nixl.report.csv_table import table as text
    else:
        from pytest_nixl.report.prometheus import metrics as text
    write_whole(path, text(report))
