# SPDX-License-Identifier: Apache-2.0
"""The CSV report: one line for each row of a run."""

from __future__ import annotations

import csv
import io

from pytest_nixl.report.run_report import RunReport

_KEY = ("backend", "op", "memory", "block_bytes", "batch", "depth", "pair")
_COLUMNS = (
    "time", "image", "digest", "host", "row", *_KEY, "gigabytes_per_second", "launches", "p50_us", "p90_us", "p99_us",
    "p99.9_us", "floor_gigabytes_per_second", "ceiling_gigabytes_per_second", "transports", "verdict", "change",
    "regression", "interrupted",
)  # fmt: skip


def table(report: RunReport) -> str:
    """Return the rows of a run as CSV with a header."""
    run = report.run
    verdicts = {result.row: str(result.verdict) for result in run.results if result.row is not None}
    effects = report.compared.comparison.rows if report.compared is not None else {}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    image = run.provenance.image
    for key, row in run.rows.items():
        effect = effects.get(key)
        writer.writerow(
            [
                run.when.isoformat(timespec="seconds"), image.reference, image.digest,
                run.provenance.host.get("name", ""), key, key.backend, key.op, key.memory_text,
                key.block, key.batch, key.depth, key.ranks_text, f"{row.bandwidth / 1e9:.6g}",
                " ".join(f"{value / 1e9:.6g}" for value in row.values),
                *(f"{1e6 * row.latencies[name]:.6g}" if name in row.latencies else ""
                  for name in ("p50", "p90", "p99", "p99.9")),
                f"{row.floor / 1e9:.6g}" if row.floor else "", f"{row.ceiling / 1e9:.6g}" if row.ceiling else "",
                "+".join(row.transports), verdicts.get(key, ""),
                f"{effect.ratio - 1:.6g}" if effect is not None else "",
                effect.verdict if effect is not None else "", run.interrupted,
            ]
        )  # fmt: skip
    return text.getvalue()
