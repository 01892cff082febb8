# SPDX-License-Identifier: Apache-2.0
"""Find the run that this one is compared with before anything is measured, and compare the two at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.judge.run_comparison import compare_runs, refuse_other_machine, steadiness, usable_rows, wants_launch
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Outcome, Verdict, outcome
from pytest_nixl.session.record_writer import other_run, record_of, this_run
from pytest_nixl.session.run import Run
from pytest_nixl.store.store import find_baseline, write_whole

if TYPE_CHECKING:
    from pytest_nixl.model.samples import Samples


def find(run: Run) -> None:
    """Find the baseline that the settings name and keep it in what the run found.

    :raises pytest.UsageError: if there is none, or if it was measured on another kind of machine.
    """
    settings = run.settings
    if not settings.baseline or settings.first_baseline or run.record.baseline is not None:
        return
    try:
        baseline, skipped = find_baseline(settings.baseline, settings.store)
        if not baseline.rows:
            raise ValueError(
                f"{baseline.source} has no row to compare with: expected the record of a run that measured"
            )
        refuse_other_machine(baseline, this_run(run))
    except ValueError as error:
        raise pytest.UsageError(f"--nixl-baseline: {error}") from None
    run.record.baseline = baseline
    run.record.note(*skipped)


def another_to_compare(samples: Samples, run: Run) -> bool:
    """Whether one more launch of a row could decide its comparison, which is undecided so far.

    A row that failed in the baseline is compared with nothing.

    :param samples: the launches of the row so far.
    """
    if not run.settings.compares:
        return False
    key = samples.key
    results = run.record
    rows = usable_rows(results.baseline) if results.baseline is not None else results.other_samples
    before = rows.get(key)
    values = before.values if before is not None else None
    disturbed = samples.disturbed and results.baseline is not None
    return wants_launch(
        values, samples.values, run.settings.max_regression, disturbed=disturbed, among_others=len(rows) > 1
    )


def compare(run: Run) -> None:
    """Compare this run, at its end, with its baseline or with the other image that was measured in turn with it."""
    settings = run.settings
    if run.record.comparison is not None or not settings.compares:
        return
    before = run.record.baseline
    in_turn = before is None
    if before is None:
        if settings.first_baseline:
            run.record.add_run_results([_make_first(run)])
        if settings.compare_image is None:
            return  # the run ended before its baseline was read, or there is none yet
        before = other_run(run, settings.compare_image)
        versions = run.record.versions
        if versions == run.record.other_versions:
            described = ", ".join(f"{name} {versions[name]}" for name in ("nixl", "ucx") if name in versions)
            run.record.note(
                f"both images report the same versions ({described}): if they should be two builds, see that the "
                "command of --nixl-compare-image loads the other one"
            )
    comparison = compare_runs(before, this_run(run), settings.max_regression, in_turn=in_turn)
    run.record.add_comparison(comparison)


def note_missing_baseline(run: Run) -> None:
    """Say at the end of a run that was interrupted that there is still no baseline, and that it cannot be one."""
    if run.settings.first_baseline:
        run.record.note(
            f"still no baseline: {run.settings.baseline} does not exist, and the record of an interrupted run cannot "
            "be one: run again to the end"
        )


def _make_first(run: Run) -> Result:
    """Write this run where its baseline is expected, unless it keeps its record elsewhere, and say so.

    Nobody has reviewed it, so it is no PASS.
    """
    path = run.settings.baseline
    reason = f"{path} does not exist, so no row was compared with an earlier run"
    bad = any(outcome(result.verdict, gate=run.settings.gate) is Outcome.FAIL for result in run.record.results)
    rows = this_run(run).rows
    if bad or not rows:
        cause = "a check failed" if bad else "no row was recorded"
        reason, remedy = (
            f"{reason}; this run cannot be the first baseline, because {cause}",
            "repair that, and run again",
        )
        return Result("regression", "", Verdict.NO_EXPECTATION, reason, remedy)
    description, idle = steadiness(rows)
    # A disturbed launch may be slower than its image is: a baseline with such launches hides a loss.
    again = "" if idle else " Better record it again on an idle machine: such launches prove nothing later."
    if json_file := run.config.getoption("benchmark_json", None):
        # An older pytest-benchmark opens the file.
        json_file = json_file if isinstance(json_file, Path) else json_file.name
        reason = f"{reason}; the record of this run can be the first baseline: {description}"
        remedy = f"review {json_file}, and put it at {path}: the next run is compared with it.{again}"
        return Result("regression", "", Verdict.NO_EXPECTATION, reason, remedy)
    try:
        write_whole(Path(path), json.dumps(record_of(run.config, run), indent=1, default=str))
    except NixlPluginError:
        remedy = f"keep this run's record (--benchmark-json FILE, or --nixl-store DIR), review it, and put it at {path}"
        return Result("regression", "", Verdict.NO_EXPECTATION, f"{reason}; it cannot be written there", remedy)
    reason = f"{reason}; this run is the first baseline, and was written there: {description}"
    remedy = f"review it and keep it: the next run is compared with it.{again}"
    return Result("regression", "", Verdict.NO_EXPECTATION, reason, remedy)
