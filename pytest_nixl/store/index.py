# SPDX-License-Identifier: Apache-2.0
"""The index of a store: a summary of each run for histories, so that a chart does not read ten thousand files.

A process that had to read many records writes a new index beside them. Nothing depends on the index: a record that
changed is read again, and an index that cannot be read or written is ignored.
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

from pytest_nixl.core.plain import from_plain
from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.store.provenance import Provenance
from pytest_nixl.store.record_reader import RecordedRun, parse_json, shallow

#: The name of the index file, and the version of its format, which changes whenever records are read differently.
INDEX, FORM = ".pytest-nixl-index", 1

#: A new index is written if at least this many records had to be read.
FEWEST_NEW = 64

_LARGEST = 512 << 20

#: Seconds that a record must be unchanged before the index keeps it, because file times are coarse.
_SETTLED = 3.0


@dataclass(frozen=True)
class IndexEntry:
    """The entry of one file.

    :param state: the file's size and time before it was read; None: it is not a regular file and is never indexed.
    :param run: the summary of its run; None: the file is not a record.
    :param fault: why it is not a record, to follow its path in a message.
    """

    state: os.stat_result | tuple[int, int] | None
    run: RecordedRun | None
    fault: str = ""


@dataclass(frozen=True)
class Index:
    """The entries of a store's files, by file name."""

    entries: Mapping[str, IndexEntry] = field(default_factory=dict)

    def entry(self, name: str, state: os.stat_result | None) -> IndexEntry | None:
        """Return the entry of a file; None: there is none, or the file has changed.

        :param state: the file's present state.
        """
        entry = self.entries.get(name)
        return replace(entry, state=state) if entry and state and entry.state == _mark(state) else None

    def text(self) -> str:
        """Return the index as JSON text. Values that many runs share are written once."""
        provenances: dict[str, int] = {}
        keys: dict[str, int] = {}
        transports: dict[tuple[str, ...], int] = {}
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
                [
                    keys.setdefault(str(key), len(keys)),
                    row.values[0],
                    transports.setdefault(row.transports, len(transports)),
                ]
                for key, row in run.rows.items()
            ]
            place = provenances.setdefault(provenance, len(provenances))
            files[name] = [*_mark(entry.state), run.when.isoformat(), place, rows, run.interrupted]
        return json.dumps(
            {
                "form": FORM,
                "provenances": [json.loads(text) for text in provenances],
                "keys": list(keys),
                "transports": list(transports),
                "files": files,
            }
        )


def summary(run: RecordedRun) -> RecordedRun:
    """Return a run with only the bandwidth and the transports of each row."""
    rows = {key: RowSummary.of_launches((row.bandwidth,), row.transports) for key, row in run.rows.items()}
    return RecordedRun(run.source, run.when, run.provenance, rows, interrupted=run.interrupted)


def read_index(path: Path) -> Index:
    """Read an index. It is empty if the file is missing or unusable; this function never raises."""
    try:
        return Index(dict(_entries(parse_json(read_regular(path, _LARGEST, "an index")))))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return Index()


def _entries(data: Any) -> list[tuple[str, IndexEntry]]:
    if data["form"] != FORM:
        return []
    provenances = [from_plain(Provenance, plain) for plain in data["provenances"]]
    if not all(shallow(provenance.host) for provenance in provenances):
        raise ValueError("a host is nested too deep")
    keys = [RowKey.parse(str(key)) for key in data["keys"]]
    transports = [tuple(str(name) for name in names) for names in data["transports"]]
    entries = []
    for name, (size, changed, *fields) in data["files"].items():
        if len(fields) == 1:
            entries.append((name, IndexEntry((size, changed), None, str(fields[0]))))
            continue
        when, place, told_rows, interrupted = fields
        rows = {}
        for number, value, transport in told_rows:
            if not 0.0 < value < math.inf:
                raise ValueError("a bandwidth is not a number above zero")
            rows[keys[number]] = RowSummary.of_launches((float(value),), transports[transport])
        run = RecordedRun(name, datetime.fromisoformat(when), provenances[place], rows, interrupted=str(interrupted))
        if run.when.tzinfo is None:
            raise ValueError("a time has no zone")
        entries.append((name, IndexEntry((size, changed), run)))
    return entries


def _mark(state: os.stat_result | tuple[int, int]) -> tuple[int, int]:
    return (state.st_size, state.st_mtime_ns) if isinstance(state, os.stat_result) else state
