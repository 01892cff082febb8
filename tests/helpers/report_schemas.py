# SPDX-License-Identifier: Apache-2.0
"""The reports for programs, read by their JSON Schemas: ours, and those of CTRF and SARIF for what the reports use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from pytest_nixl.report.verdict_file import SCHEMA

#: The names of the reports for programs.
PROGRAM_REPORTS = ("verdict.json", "ctrf.json", "findings.sarif")

_TEXT: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other fields than these."""
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_STATUSES = ["passed", "failed", "skipped", "pending", "other"]
_COUNTS = dict.fromkeys(("tests", *_STATUSES, "start", "stop"), _INTEGER)

#: https://github.com/ctrf-io/ctrf: schema/ctrf.schema.json. Every object but ``extra`` is closed there too.
CTRF = _closed(
    ["results", "reportFormat", "specVersion"],
    reportFormat={"const": "CTRF"},
    specVersion={"type": "string", "pattern": "^[0-9]+\\.[0-9]+\\.[0-9]+$"},
    timestamp={"type": "string", "format": "date-time"},
    generatedBy=_TEXT,
    results=_closed(
        ["tool", "summary", "tests"],
        tool=_closed(["name"], name={"type": "string", "minLength": 1}, version=_TEXT),
        summary=_closed(list(_COUNTS), **_COUNTS),
        tests={
            "type": "array",
            "items": _closed(
                ["name", "status", "duration"],
                name={"type": "string", "minLength": 1},
                status={"enum": _STATUSES},
                duration=_INTEGER,
                message=_TEXT,
                rawStatus=_TEXT,
                tags={"type": "array", "items": _TEXT},
                filePath=_TEXT,
                extra={"type": "object"},
            ),
        },
        environment=_closed([], appName=_TEXT, extra={"type": "object"}),
    ),
)

_MESSAGE = _closed(["text"], text=_TEXT)
_LEVEL = {"enum": ["none", "note", "warning", "error"]}

#: OASIS, Static Analysis Results Interchange Format 2.1.0, sections 3.13 (log), 3.14 (run) and 3.27 (result).
SARIF = _closed(
    ["version", "runs"],
    **{"$schema": {"type": "string", "format": "uri"}},
    version={"const": "2.1.0"},
    runs={
        "type": "array",
        "minItems": 1,
        "items": _closed(
            ["tool"],
            tool=_closed(
                ["driver"],
                driver=_closed(
                    ["name"],
                    name=_TEXT,
                    version=_TEXT,
                    rules={
                        "type": "array",
                        "uniqueItems": True,
                        "items": _closed(["id"], id=_TEXT, shortDescription=_MESSAGE, help=_MESSAGE),
                    },
                ),
            ),
            invocations={
                "type": "array",
                "items": _closed(
                    ["executionSuccessful"],
                    executionSuccessful={"type": "boolean"},
                    exitCode=_INTEGER,
                    toolExecutionNotifications={
                        "type": "array",
                        "items": _closed(["message"], level=_LEVEL, message=_MESSAGE),
                    },
                ),
            },
            results={
                "type": "array",
                "items": _closed(
                    ["message"],
                    ruleId=_TEXT,
                    ruleIndex={"type": "integer", "minimum": 0},
                    level=_LEVEL,
                    message=_MESSAGE,
                    locations={
                        "type": "array",
                        "items": _closed(
                            [],
                            logicalLocations={
                                "type": "array",
                                "uniqueItems": True,
                                "items": _closed([], fullyQualifiedName=_TEXT),
                            },
                            physicalLocation=_closed(
                                ["artifactLocation"],
                                artifactLocation=_closed([], uri={"type": "string", "format": "uri-reference"}),
                                region=_closed([], startLine={"type": "integer", "minimum": 1}),
                            ),
                        ),
                    },
                    partialFingerprints={"type": "object", "additionalProperties": _TEXT},
                    properties={"type": "object"},
                ),
            },
        ),
    },
)


def verdict_schema() -> dict[str, Any]:
    """Return the schema of verdict.json that is shipped."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    return found


def read_program_reports(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the contents of the three reports of a directory, which their schemas allow."""
    verdict, ctrf, sarif = (json.loads((folder / name).read_text()) for name in PROGRAM_REPORTS)
    jsonschema.validate(verdict, verdict_schema(), jsonschema.Draft202012Validator)
    assert verdict.keys() <= verdict_schema()["properties"].keys()
    jsonschema.validate(ctrf, CTRF)
    jsonschema.validate(sarif, SARIF)
    summary = ctrf["results"]["summary"]
    assert summary["tests"] == len(ctrf["results"]["tests"])
    assert summary["failed"] == sum(test["status"] == "failed" for test in ctrf["results"]["tests"])
    return verdict, ctrf, sarif
