# SPDX-License-Identifier: Apache-2.0
"""The report in the Common Test Report Format (ctrf.io): ``ctrf.json``, a test for each result."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pytest_nixl.core.own_version import own_version
from pytest_nixl.core.redaction import hide_all, hider
from pytest_nixl.model.conclusion import WHOLE_RUN
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import INTERRUPTED, Outcome, outcome
from pytest_nixl.report.run_report import RunReport

SPEC_VERSION = "0.0.0"
_STATUS = {Outcome.PASS: "passed", Outcome.WARN: "passed", Outcome.FAIL: "failed", Outcome.SKIP: "skipped"}


def ctrf(report: RunReport) -> str:
    """Return the results of a run as CTRF. A run that was interrupted or refused has a failed test for that."""
    tests = list(_tests(report))
    counts = Counter(test["status"] for test in tests)
    stop = int(1000 * report.run.when.timestamp())
    statuses = ("passed", "failed", "skipped", "pending", "other")
    plain = {
        "reportFormat": "CTRF",
        "specVersion": SPEC_VERSION,
        "timestamp": report.run.when.isoformat(),
        "generatedBy": f"pytest-nixl {own_version()}",
        "results": {
            "tool": {"name": "pytest-nixl", "version": own_version()},
            "summary": {
                "tests": len(tests),
                **{status: counts[status] for status in statuses},
                "start": stop - int(1000 * report.seconds),
                "stop": stop,
            },
            "tests": tests,
            "environment": _environment(report),
        },
    }
    return json.dumps(hide_all(plain, hider(os.environ)), indent=2, allow_nan=False) + "\n"


def _tests(report: RunReport) -> Iterator[dict[str, Any]]:
    for result in report.run.results:
        yield _test(result, report)
    for nodeid in report.failed_tests:
        yield _failed(nodeid, "FAIL", "a test failed that is not a NIXL check", report.durations.get(nodeid, 0.0))
    if report.unnamed_failure:
        yield _failed(WHOLE_RUN, "FAIL", report.unnamed_failure)
    if report.run.interrupted:
        yield _failed(INTERRUPTED.lower(), INTERRUPTED, report.run.interrupted)
    if report.refused:
        yield _failed("refused", "REFUSED", report.refused)


def _failed(name: str, status: str, message: str, seconds: float = 0.0) -> dict[str, Any]:
    duration = int(1000 * seconds)
    return {"name": name, "status": "failed", "duration": duration, "rawStatus": status, "message": message}


def _test(result: Result, report: RunReport) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": result.nodeid or result.name,
        "status": _STATUS[outcome(result.verdict, gate=report.gate)],
        "duration": int(1000 * report.durations.get(result.nodeid, 0.0)),
        "rawStatus": str(result.verdict),
        "tags": [tag for tag in (result.check, result.finding) if tag],
    }
    if result.reason:
        found["message"] = f"{result.reason}\nremedy: {result.remedy}" if result.remedy else result.reason
    if path := result.nodeid.partition("::")[0]:
        found["filePath"] = path
    extra = {"row": str(result.row or ""), "repeat": result.repeat}
    if any(extra.values()):
        found["extra"] = {name: text for name, text in extra.items() if text}
    return found


def _environment(report: RunReport) -> dict[str, Any]:
    provenance = report.run.provenance
    versions = {str(name): str(version) for name, version in provenance.versions.items()}
    return {"appName": str(provenance.image), "extra": {"host": str(provenance.host.get("name", "")), **versions}}
