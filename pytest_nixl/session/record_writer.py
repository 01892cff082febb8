# SPDX-License-Identifier: Apache-2.0
"""Build the record of the present run: what pytest-benchmark writes, and the part that this plugin adds."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from pytest_benchmark.stats import Stats

from pytest_nixl.core.redaction import hide_command
from pytest_nixl.core.units import format_size
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.results import Result, RowSummary, measured_rows
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import DEFAULT_LEVEL, AlternateImage, Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.backends.driver_standin import RECORDED
from pytest_nixl.session.benchmark import described, rounds
from pytest_nixl.session.run import Run
from pytest_nixl.store.provenance import Provenance, gather
from pytest_nixl.store.record_reader import FORM, OURS, RecordedRun


def this_run(run: Run) -> RecordedRun:
    """Return this run with the results so far, in the form in which recorded runs are read."""
    versions = {name: version for name, version in run.record.versions.items() if name != RECORDED}
    provenance = gather(run.settings.image, versions, ranks=_hosts(run))
    environment = dict(provenance.environment)
    if run.settings.level != DEFAULT_LEVEL:
        environment["(level)"] = run.settings.level
    if (allowed := len(os.sched_getaffinity(0))) != (every := os.cpu_count()):
        environment["(cores allowed)"] = f"{allowed} of {every}"
    if run.settings.agents != (AgentOptions(),):
        environment["(agents)"] = "; ".join(map(str, run.settings.agents))
    if driver := run.record.versions.get(RECORDED):
        environment["(CUDA driver)"] = driver
    if run.settings.footprint is not None:
        environment["(footprint)"] = format_size(run.settings.footprint)
    return RecordedRun(
        source="this run",
        when=datetime.now(timezone.utc),
        provenance=replace(provenance, environment=environment),
        rows=_rows(run),
        results=run.record.results,
        notes=run.record.notes,
        interrupted=run.record.interrupted,
    )


def refused_run(run: Run, settings: Settings) -> RecordedRun:
    """Return a run that is refused before its first test, in the form in which recorded runs are read.

    :param settings: those that can be read.
    """
    provenance = gather(settings.image, {})
    return RecordedRun("this run", datetime.now(timezone.utc), provenance, rows={}, notes=run.record.notes)


def _hosts(run: Run) -> list[str]:
    return [member.host for member in run.rank_session.membership.members] if run.rank_session is not None else []


def _rows(run: Run) -> dict[RowKey, RowSummary]:
    return {
        key: result.summary
        for key, result in measured_rows(run.record.results)
        if result.summary is not None and result.summary.values
    }


def other_run(run: Run, against: AlternateImage) -> RecordedRun:
    """Return the other image's part of this run as a separate run.

    :param against: the other image, which was measured in turn with this one.
    """
    rows = {key: RowSummary.of(samples, None) for key, samples in run.record.other_samples.items()}
    failed = tuple(
        Result("bandwidth", "", Verdict.CORRUPT, str(samples.corruption), row=key)
        for key, samples in run.record.other_samples.items()
        if samples.corruption is not None
    )
    when, provenance = datetime.now(timezone.utc), _other_provenance(run, against)
    return RecordedRun("measured in turn", when, provenance, rows, failed, interrupted=run.record.interrupted)


def _other_provenance(run: Run, against: AlternateImage) -> Provenance:
    """Return the other image's provenance: this host, with the variables that its ``env NAME=VALUE`` command sets."""
    changed = {}
    if os.path.basename(against.prefix[0]) == "env":
        changed = dict(assignment.split("=", 1) for assignment in against.prefix[1:] if "=" in assignment)
    environment = {name: value for name, value in os.environ.items() if name != "NIXL_IMAGE_DIGEST"}
    provenance = gather(against.image, run.record.other_versions, {**environment, **changed})
    started = {"(started with)": hide_command(shlex.join(against.prefix))}
    return replace(provenance, environment={**provenance.environment, **started})


def add_ours(record: dict[str, Any], run: Run) -> None:
    """Add this plugin's part to a record of pytest-benchmark: provenance, results, floors and ceilings.

    :param record: the record, which is changed in place.
    """
    this = this_run(run)
    record[OURS] = _ours(this)
    rows = {str(key): row for key, row in this.rows.items()}
    for benchmark in record["benchmarks"]:
        row = rows.get(benchmark.get("extra_info", {}).get("key", ""))
        if row is not None:
            image = this.provenance.image
            benchmark["extra_info"] |= {"image": str(image), "floor": row.floor, "ceiling": row.ceiling}


def _ours(recorded: RecordedRun) -> dict[str, Any]:
    return {
        "form": FORM,
        "provenance": recorded.provenance.plain(),
        "results": [result.plain() for result in recorded.results],
        "notes": list(recorded.notes),
        "interrupted": recorded.interrupted,
    }


def record_of(config: pytest.Config, run: Run) -> dict[str, Any]:
    """Return this run's record with every sample, made by the hooks of pytest-benchmark."""
    hook = config.hook
    machine = hook.pytest_benchmark_generate_machine_info(config=config)
    hook.pytest_benchmark_update_machine_info(config=config, machine_info=machine)
    commit = hook.pytest_benchmark_generate_commit_info(config=config)
    hook.pytest_benchmark_update_commit_info(config=config, commit_info=commit)
    record: dict[str, Any] = hook.pytest_benchmark_generate_json(
        config=config, benchmarks=_last_of_each_row(run), include_data=True, machine_info=machine, commit_info=commit
    )
    hook.pytest_benchmark_update_json(config=config, benchmarks=run.record.benchmarks, output_json=record)
    return record


def _last_of_each_row(run: Run) -> list[Any]:
    """Return the last measurement of each row: pytest-repeat and pytest-rerunfailures may measure a row repeatedly."""
    last = {benchmark.extra_info.get("key", benchmark.fullname): benchmark for benchmark in run.record.benchmarks}
    if len(last) < len(run.record.benchmarks):
        note = f"{len(run.record.benchmarks)} measurements of {len(last)} rows: the record has the last one of each row"
        run.record.note(note)
    return list(last.values())


def other_record(record: Mapping[str, Any], run: Run, other: RecordedRun) -> dict[str, Any]:
    """Return the record of the other image, in the same form as this run's.

    :param record: this run's record.
    :param other: the other image's run, from :func:`other_run`.
    """
    benchmarks = []
    by_row = {str(key): samples for key, samples in run.record.other_samples.items()}
    for benchmark in record["benchmarks"]:
        samples = by_row.get(benchmark["fullname"])
        if samples is not None:
            extra = {**described(samples), "image": str(other.provenance.image)}
            benchmarks.append({**benchmark, "extra_info": extra, "stats": _statistics(samples)})
    return {**record, "benchmarks": benchmarks, OURS: _ours(other)}


def _statistics(samples: Samples) -> dict[str, Any]:
    statistics = Stats()
    for seconds in rounds(samples):
        statistics.update(seconds)
    return {**statistics.as_dict(), "rounds": len(samples.windows), "iterations": 1, "data": list(rounds(samples))}
