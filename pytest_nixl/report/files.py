# SPDX-License-Identifier: Apache-2.0
"""Write the report files of a run, in the format of each path's ending."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_nixl.core import extensions
from pytest_nixl.core.extensions import Extension, Registry
from pytest_nixl.core.strict import printable
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.options import report_ending
from pytest_nixl.store.store import write_whole

#: Makes the text of a report's file.
ReportFormat = Callable[[RunReport], str]


def write(report: RunReport, path: Path) -> None:
    """Write a report atomically, in the format that the end of its name says, such as ``.html`` or ``ctrf.json``.

    Control characters of hosts, images and errors are escaped, whatever the format is.

    :raises NixlPluginError: if it cannot be written, or another distribution's format fails.
    """
    with suppress(OSError):  # the writer says why the file cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, printable(FORMATS[report_ending(path.name, FORMATS)](report)))


def _page(report: RunReport) -> str:
    from pytest_nixl.report.page import page

    return page(report)


def _table(report: RunReport) -> str:
    from pytest_nixl.report.csv_table import table

    return table(report)


def _metrics(report: RunReport) -> str:
    from pytest_nixl.report.prometheus import metrics

    return metrics(report)


def _verdict(report: RunReport) -> str:
    from pytest_nixl.report.verdict_file import verdict_file

    return verdict_file(report)


def _ctrf(report: RunReport) -> str:
    from pytest_nixl.report.ctrf import ctrf

    return ctrf(report)


def _sarif(report: RunReport) -> str:
    from pytest_nixl.report.sarif import sarif

    return sarif(report)


def _accept(extension: Extension, loaded: Any) -> ReportFormat:
    if not callable(loaded):
        raise extension.fault("is not a function of a RunReport")

    def text(report: RunReport) -> str:
        made = extension.call(lambda: loaded(report))
        if not isinstance(made, str):
            raise extension.fault(f"returned {type(made).__name__} instead of text")
        return made

    return text


_OWN: dict[str, ReportFormat] = {
    ".html": _page,
    ".csv": _table,
    ".prom": _metrics,
    ".json": _verdict,
    "ctrf.json": _ctrf,
    ".sarif": _sarif,
}
#: By the ending of a file's name: ours, and those that other distributions add.
FORMATS: Registry[ReportFormat] = Registry(extensions.REPORT_FORMATS, _OWN, _accept)
