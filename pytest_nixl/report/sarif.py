# SPDX-License-Identifier: Apache-2.0
"""What is wrong as SARIF 2.1.0, which code-scanning pages of forges show: ``findings.sarif``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from pytest_nixl.core.own_version import own_version
from pytest_nixl.core.redaction import hide_all, hider
from pytest_nixl.model.conclusion import WHOLE_RUN
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import INTERRUPTED, Outcome, Verdict, outcome
from pytest_nixl.report.run_report import RunReport

SCHEMA_URI = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Outcome.FAIL: "error", Outcome.WARN: "warning"}


def sarif(report: RunReport) -> str:
    """Return each result that fails or warns, as SARIF. Its rule is the finding, or else the check."""
    wrong = [(level, result) for result in _results(report) if (level := _level(result, report))]
    rules = list(dict.fromkeys(_rule_id(result) for _, result in wrong))
    interrupted = report.run.interrupted or report.refused
    invocation: dict[str, Any] = {"executionSuccessful": not interrupted}
    if report.exit_code is not None:
        invocation["exitCode"] = report.exit_code
    if interrupted:
        invocation["toolExecutionNotifications"] = [{"level": "error", "message": {"text": interrupted}}]
    driver = {"name": "pytest-nixl", "version": own_version(), "rules": [_rule(id) for id in rules]}
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [_plain(level, result, rules) for level, result in wrong],
    }
    plain = {"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}
    return json.dumps(hide_all(plain, hider(os.environ)), indent=2, allow_nan=False) + "\n"


def _results(report: RunReport) -> Iterator[Result]:
    """Yield the results, and one for each thing that fails the run without a result."""
    yield from report.run.results
    for nodeid in report.failed_tests:
        yield Result("test", nodeid, Verdict.FAIL, "a test failed that is not a NIXL check")
    if report.unnamed_failure:
        yield Result(WHOLE_RUN, "", Verdict.FAIL, report.unnamed_failure)
    if report.run.interrupted:
        yield Result(INTERRUPTED.lower(), "", Verdict.ERROR, report.run.interrupted)
    if report.refused:
        yield Result("refused", "", Verdict.ERROR, report.refused)


def _level(result: Result, report: RunReport) -> str:
    return _LEVELS.get(outcome(result.verdict, gate=report.gate), "")


def _rule_id(result: Result) -> str:
    return result.finding or result.check


def _rule(id: str) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": id}
    if id in FINDINGS:
        rule["shortDescription"] = {"text": FINDINGS[id].title}
        rule["help"] = {"text": FINDINGS[id].remedy}
    return rule


def _plain(level: str, result: Result, rules: list[str]) -> dict[str, Any]:
    id, text = _rule_id(result), f"{result.verdict}: {result.reason}" if result.reason else str(result.verdict)
    what = str(result.row or result.nodeid or result.name)
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": what}]}
    if path := result.nodeid.partition("::")[0]:
        location["physicalLocation"] = {"artifactLocation": {"uri": path}, "region": {"startLine": 1}}
    found = {
        "ruleId": id,
        "ruleIndex": rules.index(id),
        "level": level,
        "message": {"text": f"{text}\nremedy: {result.remedy}" if result.remedy else text},
        "locations": [location],
        "partialFingerprints": {"checkAndRow/v1": hashlib.sha256(f"{id} {what}".encode()).hexdigest()},
    }
    if result.repeat:
        found["properties"] = {"repeat": result.repeat}
    return found
