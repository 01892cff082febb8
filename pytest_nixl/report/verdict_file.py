# SPDX-License-Identifier: Apache-2.0
"""The report for programs: ``verdict.json``, whose JSON Schema is ``schemas/verdict.schema.json``."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from pytest_nixl.core.extras import own_version
from pytest_nixl.core.redaction import hide_all, hider
from pytest_nixl.model.conclusion import VERDICT_FORMAT
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.verdicts import outcome
from pytest_nixl.report.run_report import RunReport

#: The JSON Schema of this file and of the ``verdict.json`` that each rank writes to ``--nixl-log-dir``.
SCHEMA = Path(__file__).parent / "schemas" / "verdict.schema.json"


def verdict_file(report: RunReport) -> str:
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
        "latencies": {name: seconds for name, seconds in summary.latencies.items() if math.isfinite(seconds)},
        "transports": list(summary.transports),
        "launches": list(summary.values),
    }
