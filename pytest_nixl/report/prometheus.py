# SPDX-License-Identifier: Apache-2.0
"""The Prometheus report: metrics of the last run, for the textfile collector of the node exporter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.run_report import RunReport


def metrics(report: RunReport) -> str:
    """Return all metrics of a run, in base units."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: RunReport) -> Iterator[str]:
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
    labels = {key: _labels(key) for key in run.rows}
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
            if seconds == seconds  # a recorded run may have NaN
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


def _labels(key: RowKey) -> dict[str, str]:
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
