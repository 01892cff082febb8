# SPDX-License-Identifier: Apache-2.0
"""Records of runs that a test makes up, in the form that real runs write: what is tested is who reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.store.provenance import ImageIdentity, Provenance, host
from pytest_nixl.store.record_reader import FORM, OURS

KEY = "UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1"
ROW = RowKey.parse(KEY)
START = datetime(2026, 3, 2, 3, 0, tzinfo=timezone.utc)

Rows = Mapping[str, Sequence[float]]


def key(block: str, op: str = "WRITE", pair: str = "0-1", backend: str = "UCX") -> str:
    """Return a row's key."""
    return f"{backend}/{op}/DRAM:DRAM/{block}/batch1/depth1/{pair}"


def record(
    image: str,
    rows: Rows,
    *,
    digest: str = "",
    week: float = 0,
    versions: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    results: Sequence[Result] = (),
    extra: Mapping[str, Any] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Return a record: of each row the GB/s of each launch; ``facts`` are of the host, where they are not ours."""
    provenance = Provenance(
        ImageIdentity(image, digest, "test"), dict(versions or {}), dict(environment or {}), host({}) | facts
    )
    return {
        "datetime": (START + timedelta(weeks=week)).isoformat(),
        "version": "5.3.1",
        "machine_info": {"node": "there"},
        "commit_info": {},
        "benchmarks": [_row(name, values, dict(extra or {})) for name, values in rows.items()],
        OURS: {
            "form": FORM,
            "provenance": provenance.plain(),
            "results": [result.plain() for result in results],
            "notes": [],
        },
    }


def _row(name: str, values: Sequence[float], extra: dict[str, Any]) -> dict[str, Any]:
    slowest = 65536 / (min(values) * 1e9) * 1e6
    latencies = {"p50_us": slowest, "p90_us": 1.2 * slowest, "p99_us": 2.5 * slowest, "p99.9_us": 9 * slowest}
    info = {"key": name, "GB/s": sorted(values)[len(values) // 2], "launches": [value * 1e9 for value in values]}
    return {"fullname": name, "name": name, "extra_info": {**info, **latencies, "transports": ["tcp/eth0"], **extra}}


def write(path: Path, data: Mapping[str, Any]) -> Path:
    """Write a record to a file and return its path."""
    path.write_text(json.dumps(data))
    return path
