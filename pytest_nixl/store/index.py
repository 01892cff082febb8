# SPDX-License-Identifier: Apache-2.0
"""The index of a store: what histories need of each run, so that ten thousand files need not be read for one chart.

It is written whole beside the runs by whoever had to read many of them, and nothing depends on it: a file that changed
is read again, and an index that cannot be read or written is done without.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pytest_nixl.store.provenance import Provenance
from pytest_nixl.store.record_reader import RecordedRow, RecordedRun, parse_json, read_regular, shallow

#: The name of the file in a store, and the number of its form: another one whenever records are read otherwise.
INDEX, FORM = ".pytest-nixl-index", 1

#: An index is written where so many files had to be read; fewer are read as fast.
FEWEST_NEW = 64

_LARGEST = 512 << 20

#: Seconds since a file was changed before its state tells whether it changes again: clocks of file systems are coarse.
_SETTLED = 3.0


@dataclass(frozen=True)
class IndexEntry:
    """What is known of a file.

    :param state: what the file looked like before it was read; None: it is no regular file, and is never known.
    :param run: its summary; None: it is no record.
    :param fault: why it is none, to be said after its path.
    """

    state: os.stat_result | tuple[int, int] | None
    run: RecordedRun | None
    fault: str = ""


@dataclass(frozen=True)
class Index:
    """What is known of the files of a store, by name."""

    entries: Mapping[str, IndexEntry] = field(default_factory=dict)

    def entry(self, name: str, state: os.stat_result | None) -> IndexEntry | None:
        """Return what is known of a file; None: nothing, or it is another one now."""
        found = self.entries.get(name)
        return replace(found, state=state) if found and state and found.state == _mark(state) else None

    def text(self) -> str:
        """Return the index as it is written: what many runs have in common is there once."""
        provenances: dict[str, int] = {}
        keys: dict[str, int] = {}
        ways: dict[tuple[str, ...], int] = {}
        files: dict[str, list[Any]] = {}
        latest = (time.time() - _SETTLED) * 1e9
        for name, entry in self.entries.items():
            if not isinstance(entry.state, os.stat_result) or entry.state.st_mtime_ns > latest:
                continue
            if (run := entry.run) is None:
                files[name] = [*_mark(entry.state), entry.fault]
                continue
            provenance = json.dumps(run.provenance.plain())
            rows = [
                [keys.setdefault(key, len(keys)), row.values[0], ways.setdefault(row.transports, len(ways))]
                for key, row in run.rows.items()
            ]
            place = provenances.setdefault(provenance, len(provenances))
            files[name] = [*_mark(entry.state), run.when.isoformat(), place, rows, run.interrupted]
        return json.dumps(
            {
                "form": FORM,
                "provenances": [json.loads(text) for text in provenances],
                "keys": list(keys),
                "transports": list(ways),
                "files": files,
            }
        )


def summary(run: RecordedRun) -> RecordedRun:
    """Return a run with the bandwidth and the transports of each row only."""
    rows = {key: RecordedRow(key, (row.bandwidth,), {}, row.transports) for key, row in run.rows.items()}
    return RecordedRun(run.source, run.when, run.provenance, rows, interrupted=run.interrupted)


def read_index(path: Path) -> Index:
    """Read an index; it is empty where there is none that can be used. It never raises."""
    try:
        return Index(dict(_entries(parse_json(read_regular(path, _LARGEST, "an index")))))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return Index()


def _entries(data: Any) -> list[tuple[str, IndexEntry]]:
    if data["form"] != FORM:
        return []
    provenances = [Provenance.from_plain(plain) for plain in data["provenances"]]
    if not all(shallow(one.host) for one in provenances):
        raise ValueError("a host is nested too deep")
    keys = [str(key) for key in data["keys"]]
    ways = [tuple(str(name) for name in names) for names in data["transports"]]
    found = []
    for name, (size, changed, *told) in data["files"].items():
        if len(told) == 1:
            found.append((name, IndexEntry((size, changed), None, str(told[0]))))
            continue
        when, place, told_rows, interrupted = told
        rows = {}
        for number, value, way in told_rows:
            if not 0.0 < value < math.inf:
                raise ValueError("a bandwidth is not a number above zero")
            rows[keys[number]] = RecordedRow(keys[number], (float(value),), {}, ways[way])
        run = RecordedRun(name, datetime.fromisoformat(when), provenances[place], rows, interrupted=str(interrupted))
        if run.when.tzinfo is None:
            raise ValueError("a time has no zone")
        found.append((name, IndexEntry((size, changed), run)))
    return found


def _mark(state: os.stat_result | tuple[int, int]) -> tuple[int, int]:
    return (state.st_size, state.st_mtime_ns) if isinstance(state, os.stat_result) else state
