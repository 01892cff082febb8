# SPDX-License-Identifier: Apache-2.0
"""A report format: the rows of a run as a table in Markdown."""

from __future__ import annotations

from pytest_nixl import RunReport


def markdown(report: RunReport) -> str:
    """Return the text of the file."""
    rows = report.run.rows.items()
    lines = [f"| {key} | {row.bandwidth / 1e9:.3g} | {', '.join(row.transports)} |" for key, row in rows]
    return "\n".join([f"# {report.run.name}", "", "| row | GB/s | transports |", "| --- | --- | --- |", *lines, ""])
