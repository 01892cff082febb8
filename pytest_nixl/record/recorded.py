# SPDX-License-Identifier: Apache-2.0
"""A run as its record tells it: a file of pytest-benchmark, with our rows and what we add to them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from pytest_nixl.record.provenance import Provenance
from pytest_nixl.record.results import Result

#: The part of a record that is ours, and the number that its form has.
OURS, FORM = "nixl", 1

RECORD_FORM = "a file that --nixl-store, --benchmark-json or --benchmark-autosave of the bandwidth suite has written"


@dataclass(frozen=True)
class Row:
    """One row of a run: bytes per second of each launch, and seconds of each percentile of single transfers."""

    key: str
    values: tuple[float, ...]
    latencies: Mapping[str, float]
    transports: tuple[str, ...] = ()
    floor: float = 0.0
    ceiling: float = 0.0

    @property
    def bandwidth(self) -> float:
        """The median over the launches in bytes per second."""
        return median(self.values)


@dataclass(frozen=True)
class Recorded:
    """A run: when it was, where its figures come from, its rows by key, and what each of its checks came to."""

    source: str
    when: datetime
    provenance: Provenance
    rows: Mapping[str, Row]
    results: tuple[Result, ...] = ()
    notes: tuple[str, ...] = ()
    #: How far the run came and what ended it early; empty: it came to its end.
    interrupted: str = ""

    @property
    def name(self) -> str:
        """What the run is called: by its image, or where it has none, by its file."""
        return str(self.provenance.image) if self.provenance.image.reference else Path(self.source).stem

    @property
    def order(self) -> tuple[datetime, str]:
        """What runs are sorted by: the oldest is the first."""
        return self.when, self.source


def read_recorded(path: Path) -> Recorded:
    """Read a record.

    :raises ValueError: in one sentence, where the file is torn, foreign, or has neither a row nor a result of ours.
    :raises OSError: where it cannot be read.
    """
    text = path.read_bytes()
    try:
        data = json.loads(text)
    except ValueError as error:
        why = "is empty" if not text.strip() else f"is torn or no JSON ({error})"
        raise ValueError(f"{path} {why}: expected {RECORD_FORM}") from None
    return parse_recorded(data, str(path))


def parse_recorded(data: Any, source: str) -> Recorded:
    """Read the JSON values of a record. :raises ValueError: as :func:`read_recorded`."""
    try:
        found = _parse(data, source)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{source} is no record of a run ({type(error).__name__}: {error}): expected {RECORD_FORM}"
        ) from None
    if not found.rows and not found.results:
        raise ValueError(f"{source} has no row of the bandwidth suite: expected {RECORD_FORM}")
    return found


def _parse(data: Any, source: str) -> Recorded:
    ours = data.get(OURS) or {}
    if ours and ours["form"] != FORM:
        raise ValueError(f"its form is {ours['form']!r}, and this version reads {FORM}")
    when = datetime.fromisoformat(str(data["datetime"]).replace("Z", "+00:00"))
    rows: dict[str, Row] = {}
    for row in _rows(data["benchmarks"]):
        if row.key in rows:
            raise ValueError(f"the row {row.key} is there twice")
        rows[row.key] = row
    return Recorded(
        source=source,
        when=when if when.tzinfo else when.replace(tzinfo=timezone.utc),
        provenance=Provenance.from_plain(ours["provenance"]) if ours else _older(data),
        rows=rows,
        results=tuple(Result.from_plain(one) for one in ours.get("results", ())),
        notes=tuple(str(note) for note in ours.get("notes", ())),
        interrupted=str(ours.get("interrupted", "")),
    )


def _rows(records: Any) -> Iterator[Row]:
    for record in records:
        extra = record.get("extra_info") or {}
        if "key" not in extra:
            continue
        # One launch was recorded as one figure before launches were.
        values = tuple(float(value) for value in extra.get("launches") or (float(extra["GB/s"]) * 1e9,))
        if not all(0 < value < math.inf for value in values):
            raise ValueError(f"the row {extra['key']} has a launch that is not a number above zero")
        yield Row(
            key=str(extra["key"]),
            values=values,
            latencies={
                name.removesuffix("_us"): float(extra[name]) / 1e6
                for name in ("p50_us", "p90_us", "p99_us", "p99.9_us")
                if extra.get(name) is not None
            },
            transports=tuple(str(name) for name in extra.get("transports", ())),
            floor=float(extra.get("floor", 0.0)),
            ceiling=float(extra.get("ceiling", 0.0)),
        )


def _older(data: Any) -> Provenance:
    """What a record of pytest-benchmark alone tells: its host's name, and the versions that rows were given."""
    machine = data.get("machine_info") or {}
    versions: dict[str, str] = {}
    for record in data["benchmarks"]:
        extra = record.get("extra_info") or {}
        versions |= {
            name.removeprefix("initiator_"): str(value)
            for name, value in extra.items()
            if name.startswith("initiator_") and name != "initiator_host"
        }
    return Provenance(versions=versions, host={"name": str(machine.get("node", ""))})
