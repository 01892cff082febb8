# SPDX-License-Identifier: Apache-2.0
"""Write the report files of a run, in the format of each path's ending.

Metrics are those of the last run, for the textfile collector of Prometheus' node exporter. The report for programs is
``verdict.json``, whose JSON Schema is ``schemas/verdict.schema.json``.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nixl.core import extensions
from pytest_nixl.core.extensions import Extension, Registry
from pytest_nixl.core.extras import own_version
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.redaction import hide_all, hider
from pytest_nixl.core.strict import printable
from pytest_nixl.model.conclusion import VERDICT_FORMAT
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict, outcome
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.options import report_ending
from pytest_nixl.store.store import write_whole

if TYPE_CHECKING:
    from pytest_nixl.report import page
else:  # it imports jinja2
    page = lazy_module("pytest_nixl.report.page")

_KEY_COLUMNS = ("backend", "op", "memory", "block_bytes", "batch", "depth", "pair")
_PERCENTILES = ("p50", "p90", "p99", "p99.9")
_COLUMNS = (
    *("time", "image", "digest", "host", "row", *_KEY_COLUMNS, "gigabytes_per_second", "launches"),
    *(f"{name}_us" for name in _PERCENTILES),
    *("floor_gigabytes_per_second", "ceiling_gigabytes_per_second", "transports"),
    *("verdict", "change", "regression", "interrupted"),
)
#: Makes the text of a report's file.
ReportFormat = Callable[[RunReport], str]


def metrics_text(report: RunReport) -> str:
    """Return all metrics of a run, in base units."""
    return "\n".join(_metric_lines(report)) + "\n"


def _metric_lines(report: RunReport) -> Iterator[str]:
    run = report.run
    yield from _metric("nixl_run_timestamp_seconds", "When the run ended.", [({}, run.when.timestamp())])
    image = run.provenance.image
    about = {"image": image.reference, "digest": image.digest, "host": str(run.provenance.host.get("name", ""))}
    versions = {f"{name}_version": run.provenance.versions.get(name, "") for name in ("nixl", "ucx", "libfabric")}
    yield from _metric("nixl_run_info", "What the run validated, and where.", [({**about, **versions}, 1.0)])
    counts = Counter(result.verdict for result in run.results)
    samples = [({"verdict": str(verdict)}, float(counts[verdict])) for verdict in Verdict]
    yield from _metric("nixl_checks", "Checks of the run by verdict.", samples)
    yield from _metric("nixl_run_passed", "1 if the run passed.", [({}, float(report.passed))])
    text = "1 if the run was ended before all of its checks had run."
    yield from _metric("nixl_run_interrupted", text, [({}, float(bool(run.interrupted)))])
    labels = {key: _row_labels(key) for key in run.rows}
    yield from _metric(
        "nixl_bandwidth_bytes_per_second",
        "Delivered bandwidth of a row: the median over its launches.",
        [(labels[key], row.bandwidth) for key, row in run.rows.items()],
    )
    yield from _metric(
        "nixl_latency_seconds",
        "Latency of single transfers of a row, from post to completion.",
        [
            ({**labels[key], "quantile": f"{float(name[1:]) / 100:g}"}, seconds)
            for key, row in run.rows.items()
            for name, seconds in row.latencies.items()
        ],
        kind="summary",  # the only kind that may have the label quantile
    )
    for name, text in (("floor", "The least a row may show."), ("ceiling", "The most a row may show.")):
        bounds = [(labels[key], float(getattr(row, name))) for key, row in run.rows.items() if getattr(row, name)]
        yield from _metric(f"nixl_bandwidth_{name}_bytes_per_second", text, bounds)
    for unit, name in (
        ("s", "seconds"),
        ("B", "bytes"),
        ("B/s", "bytes_per_second"),
        ("1/s", "per_second"),
        ("1", "value"),
    ):
        figures = [figure for result in run.results for figure in result.measured if figure.unit == unit]
        # A figure may be measured twice; each set of labels may occur once, so the last value counts.
        last = {(figure.name, figure.labels_text): figure for figure in figures}
        values = [({"figure": figure.name, **figure.labels}, figure.value) for figure in last.values()]
        yield from _metric(f"nixl_figure_{name}", "A named figure, such as the time of a registration.", values)
    if report.compared is not None:
        yield from _metric(
            "nixl_bandwidth_change_ratio",
            "Bandwidth of a row divided by that of the baseline.",
            [(labels[key], effect.ratio) for key, effect in report.compared.comparison.rows.items()],
        )
        regressed = report.compared.comparison.verdict is Verdict.REGRESSED
        yield from _metric("nixl_regressed", "1 if the run is slower than its baseline.", [({}, float(regressed))])


def _metric(
    name: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]], kind: str = "gauge"
) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}"


def _row_labels(key: RowKey) -> dict[str, str]:
    return {
        "backend": key.backend,
        "op": key.op,
        "memory": key.memory_text,
        "block_bytes": str(key.block),
        "batch": str(key.batch),
        "depth": str(key.depth),
        "pair": key.ranks_text,
        **({"variant": key.variant_text} if key.variant else {}),
    }


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


#: The JSON Schema of what :func:`verdict_text` returns, and of ``verdict.json``, which each rank writes to
#: ``--nixl-log-dir``.
VERDICT_SCHEMA = Path(__file__).parent / "schemas" / "verdict.schema.json"


def verdict_text(report: RunReport) -> str:
    """Return the verdict, every result and row of a run, and what it validated, as JSON."""
    run = report.run
    plain = {
        "format": VERDICT_FORMAT,
        **report.verdict_values,
        "next": report.next_step,
        "text": report.refused or run.interrupted,
        "exit_code": report.exit_code,
        "written_by": f"pytest-nixl {own_version()}",
        "when": run.when.isoformat(timespec="seconds"),
        "seconds": round(report.seconds, 3),
        "host": str(run.provenance.host.get("name", "")),
        "hosts": [str(name) for name in run.provenance.host.get("ranks", ())],
        "image": {"reference": run.provenance.image.reference, "digest": run.provenance.image.digest},
        "versions": {str(name): str(version) for name, version in run.provenance.versions.items()},
        "findings": list(dict.fromkeys(result.finding for result in run.results if result.finding)),
        "results": [_result(result, report) for result in run.results],
        "measured_rows": [_row(str(key), summary) for key, summary in run.rows.items()],
        "failed_tests": list(report.failed_tests),
    }
    return json.dumps(hide_all(plain, hider(os.environ)), indent=2, allow_nan=False) + "\n"


def _result(result: Result, report: RunReport) -> dict[str, Any]:
    return {
        "check": result.check,
        "test": result.nodeid,
        "verdict": str(result.verdict),
        "outcome": outcome(result.verdict, gate=report.gate).name,
        "reason": result.reason,
        "remedy": result.remedy,
        "row": str(result.row or ""),
        "finding": result.finding,
        "known_limit": result.known_limit,
        "repeat": result.repeat,
        "seconds": round(report.durations.get(result.nodeid, 0.0), 3),
    }


def _row(key: str, summary: RowSummary) -> dict[str, Any]:
    """Return a row in base units: bytes per second and seconds. What is not known is null."""
    return {
        "row": key,
        "bandwidth": summary.bandwidth,
        "floor": summary.floor or None,
        "ceiling": summary.ceiling or None,
        "latencies": summary.latencies,
        "transports": list(summary.transports),
        "launches": list(summary.values),
    }


def csv_text(report: RunReport) -> str:
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


def write_report(report: RunReport, path: Path) -> None:
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
    ".csv": csv_text,
    ".prom": metrics_text,
    ".json": verdict_text,
}
#: By the ending of a file's name: ours, and those that other distributions add.
FORMATS: Registry[ReportFormat] = Registry(extensions.REPORT_FORMATS, _OUR_FORMATS, _accept)
