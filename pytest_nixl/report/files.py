# SPDX-License-Identifier: Apache-2.0
"""A run as files for people and for machines: which form a path's ending asks for."""

from __future__ import annotations

from pathlib import Path

from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.store import write_whole


def write(report: RunReport, path: Path) -> None:
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
