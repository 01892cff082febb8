# SPDX-License-Identifier: Apache-2.0
"""Write the report files of a run, in the format of each path's ending."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nixl.core import extensions
from pytest_nixl.core.extensions import Extension, Registry
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.strict import printable
from pytest_nixl.report.prometheus import metrics
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.report.verdict_file import verdict_file
from pytest_nixl.session.options import report_ending
from pytest_nixl.store.store import write_whole

if TYPE_CHECKING:
    from pytest_nixl.report import page
else:  # it imports jinja2
    page = lazy_module("pytest_nixl.report.page")

_KEY = ("backend", "op", "memory", "block_bytes", "batch", "depth", "pair")
_PERCENTILES = ("p50", "p90", "p99", "p99.9")
_COLUMNS = (
    *("time", "image", "digest", "host", "row", *_KEY, "gigabytes_per_second", "launches"),
    *(f"{name}_us" for name in _PERCENTILES),
    *("floor_gigabytes_per_second", "ceiling_gigabytes_per_second", "transports"),
    *("verdict", "change", "regression", "interrupted"),
)


def table(report: RunReport) -> str:
    """Return the rows of a run as CSV with a header."""
    run = report.run
    verdicts = {result.row: str(result.verdict) for result in run.results if result.row is not None}
    effects = report.compared.comparison.rows if report.compared is not None else {}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    image = run.provenance.image
    when, host = run.when.isoformat(timespec="seconds"), run.provenance.host.get("name", "")
    for key, row in run.rows.items():
        effect = effects.get(key)
        latencies = (f"{1e6 * row.latencies[name]:.6g}" if name in row.latencies else "" for name in _PERCENTILES)
        bounds = (f"{bound / 1e9:.6g}" if bound else "" for bound in (row.floor, row.ceiling))
        change = (f"{effect.ratio - 1:.6g}", effect.verdict) if effect is not None else ("", "")
        launches = " ".join(f"{value / 1e9:.6g}" for value in row.values)
        writer.writerow(
            (
                *(when, image.reference, image.digest, host, key),
                *(key.backend, key.op, key.memory_text, key.block, key.batch, key.depth, key.ranks_text),
                *(f"{row.bandwidth / 1e9:.6g}", launches, *latencies, *bounds),
                *("+".join(row.transports), verdicts.get(key, ""), *change, run.interrupted),
            )
        )
    return text.getvalue()


#: Makes the text of a report's file.
ReportFormat = Callable[[RunReport], str]


def write(report: RunReport, path: Path) -> None:
    """Write a report atomically, in the format that the end of its name says, such as ``.html``.

    Control characters of hosts, images and errors are escaped, whatever the format is.

    :raises NixlPluginError: if it cannot be written, or another distribution's format fails.
    """
    with suppress(OSError):  # the writer says why the file cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, printable(FORMATS[report_ending(path.name, FORMATS)](report)))


def _page(report: RunReport) -> str:
    return page.page(report)


def _accept(extension: Extension, loaded: Any) -> ReportFormat:
    if not callable(loaded):
        raise extension.fault("is not a function of a RunReport")

    def text(report: RunReport) -> str:
        content = extension.call(lambda: loaded(report))
        if not isinstance(content, str):
            raise extension.fault(f"returned {type(content).__name__} instead of text")
        return content

    return text


_OUR_FORMATS: dict[str, ReportFormat] = {
    ".html": _page,
    ".csv": table,
    ".prom": metrics,
    ".json": verdict_file,
}
#: By the ending of a file's name: ours, and those that other distributions add.
FORMATS: Registry[ReportFormat] = Registry(extensions.REPORT_FORMATS, _OUR_FORMATS, _accept)
