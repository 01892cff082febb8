# SPDX-License-Identifier: Apache-2.0
"""The report in a GitHub Actions job: a summary on the job's page, and an annotation for each failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pytest_nixl.core import units
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import printable
from pytest_nixl.core.untrusted_file import write_regular
from pytest_nixl.judge.run_comparison import change_text
from pytest_nixl.model.conclusion import NEXT_STEPS, counted, known_limits_line
from pytest_nixl.model.verdicts import INTERRUPTED, Outcome, Verdict, outcome
from pytest_nixl.report.charts import time_text
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.report.table import reasons

#: The most annotations of each kind that GitHub shows for a step.
_MOST_ANNOTATIONS = 10


def add_summary(report: RunReport) -> None:
    """Append a run to the step's summary; do nothing if the job has none.

    :raises NixlPluginError: if the summary cannot be written.
    """
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        write_regular(Path(path), printable("\n".join(summary(report)) + "\n"), append=True)
    except (OSError, ValueError) as error:
        raise NixlPluginError(
            f"the step summary {path} cannot be written ({getattr(error, 'strerror', None) or error})",
            "Check the variable GITHUB_STEP_SUMMARY of the job.",
        ) from None


def summary(report: RunReport) -> Iterator[str]:
    """Yield lines of Markdown: the verdict, bad results with their remedies, the rows, and the differences."""
    run, compared = report.run, report.compared
    counts = ", ".join(f"{count} {verdict}" for verdict, count in counted(run.results).items())
    yield f"## NIXL {'gate' if report.gate else 'verdict'}: {_plain(report.verdict_text)}"
    yield ""
    yield f"{_plain(run.name)} on {_plain(str(run.provenance.host.get('name', '')))}: {counts or 'no check ran'}"
    yield ""
    if report.recorded:
        yield f"Next: **{report.next_step}**: {_plain(NEXT_STEPS[report.next_step])}."
        yield ""
    for group in report.problems:
        if group[0].verdict is not Verdict.NOT_APPLICABLE:
            yield from (f"- **{group[0].verdict}** {_plain(reason)}" for reason in reasons(group))
            if group[0].remedy:
                yield f"  - {'' if len(group) == 1 else f'for these {len(group)}: '}{_plain(group[0].remedy)}"
    if limits := known_limits_line(run.results, run.provenance.versions.get("nixl", "")):
        yield ""
        yield limits
    if run.rows:
        change_column = " change |" if compared is not None else ""
        yield ""
        yield f"| row | verdict | GB/s | floor | p50 | p99 | transport |{change_column}"
        yield f"| --- | --- | ---: | ---: | ---: | ---: | --- |{' ---: |' if compared is not None else ''}"
    verdicts = {result.row: result.verdict for result in run.results if result.summary is not None}
    for key, row in run.rows.items():
        latencies = [
            time_text(row.latencies[name]) if row.latencies.get(name, 0) > 0 else "" for name in ("p50", "p99")
        ]
        floor = units.gigabytes(row.floor) if row.floor else ""
        verdict = str(verdicts.get(key, ""))
        cells = [key.short, verdict, units.gigabytes(row.bandwidth), floor, *latencies, "+".join(row.transports)]
        if compared is not None:
            effect = compared.comparison.rows.get(key)
            cells.append(f"{change_text(effect)} {effect.verdict}" if effect is not None else "")
        yield f"| {' | '.join(_plain(cell) for cell in cells)} |"
    ratios = [ratio for result in run.results for ratio in result.ratios if ratio.comparable]
    if ratios:
        yield ""
        yield "| row | NIXL : raw | raw GB/s | by | over |"
        yield "| --- | ---: | ---: | --- | --- |"
    for ratio in ratios:
        raw = ratio.raw
        columns = (
            ratio.row.short,
            f"{ratio.value:.2f}",
            units.gigabytes(raw.value),
            raw.words,
            "+".join(raw.transports),
        )
        yield f"| {' | '.join(_plain(cell) for cell in columns)} |"
    if compared is not None and compared.changes:
        yield ""
        yield f"Changed since {_plain(compared.before.name)}:"
        yield ""
        yield from (f"- {_plain(str(item))}" for item in compared.changes)


def workflow_commands(report: RunReport) -> Iterator[str]:
    """Yield workflow commands that annotate the job: an error for each failure, a warning for each warning."""
    if report.refused:
        yield f"::error title=NIXL REFUSED::{_data(report.refused)}"
    if report.run.interrupted:
        yield f"::error title=NIXL {INTERRUPTED}::{_data(report.run.interrupted)}"
    if report.conclusion.beside:
        yield f"::error title=NIXL FAIL::{_data(report.conclusion.beside)}"
    for kind, kind_of_outcome in (("error", Outcome.FAIL), ("warning", Outcome.WARN)):
        bad = [result for result in report.run.results if outcome(result.verdict, gate=report.gate) is kind_of_outcome]
        for result in bad[:_MOST_ANNOTATIONS]:
            title = f"NIXL {result.verdict} {result.check}"
            text = f"{result.reason}\n{result.remedy}" if result.remedy else result.reason
            yield f"::{kind} title={_property(title)}::{_data(text)}"


def _plain(text: str) -> str:
    """Escape a text so that it does not end a table cell and is not read as Markdown or HTML."""
    for sign in "\\`*_[]|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("<", "&lt;").replace("\n", " ")


def _data(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
