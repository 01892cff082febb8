# SPDX-License-Identifier: Apache-2.0
"""The report for programs, ``verdict.json``, read by its JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from pytest_nixl.report.files import VERDICT_SCHEMA


def verdict_schema() -> dict[str, Any]:
    """Return the schema of verdict.json that is shipped."""
    schema: dict[str, Any] = json.loads(VERDICT_SCHEMA.read_text())
    return schema


def read_verdict_file(folder: Path) -> dict[str, Any]:
    """Return the contents of the ``verdict.json`` of a directory, which its schema allows."""
    verdict: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    jsonschema.validate(verdict, verdict_schema(), jsonschema.Draft202012Validator)
    assert verdict.keys() <= verdict_schema()["properties"].keys()
    return verdict
