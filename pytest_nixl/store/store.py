# SPDX-License-Identifier: Apache-2.0
"""The store: a directory of records, which many jobs on many hosts may share and write at the same time.

A record is written under a temporary name, flushed to the disk, and then renamed to a unique name. So no reader ever
sees an incomplete record, and no record is ever overwritten.

A large store also has an index with a summary of each run, so that a chart does not read ten thousand files. A process
that had to read many records writes a new index beside them. Nothing depends on the index: a record that changed is
read again, and an index that cannot be read or written is ignored.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.plain import from_plain
from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.store.provenance import Provenance
from pytest_nixl.store.record_reader import (
    RECORD_FORM,
    RecordedRun,
    ReportFileError,
    parse_json,
    read_recorded,
    shallow,
)

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
        for name, entry in self.entries.items():
            if not isinstance(entry.state, os.stat_result) or entry.state.st_mtime_ns / 1e9 > time.time() - _SETTLED:
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


@dataclass(frozen=True)
class Store:
    """A directory of records."""

    directory: Path

    def write(self, record: Mapping[str, Any], label: str) -> Path:
        """Add a record and return its path.

        :param label: a part of the file name, such as the image.
        :raises NixlPluginError: if the record cannot be written, for example because the disk is full. No file is left.
        """
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[-80:]
        path = self.directory / f"{now}-{plain or 'run'}-{uuid.uuid4().hex[:12]}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_stored(self.directory, error) from None
        write_whole(path, json.dumps(record, indent=1, default=str))
        return path

    def runs(self) -> tuple[list[RecordedRun], list[str]]:
        """Return all runs, the oldest first, and one sentence for each file that is not a record.

        :raises OSError: if the directory cannot be read.
        """
        runs, skipped = [], []
        for path, _ in self._files():
            run, fault = _read(path)
            if run is not None:
                runs.append(run)
            elif fault:
                skipped.append(f"skipped: {path}{fault}")
        return sorted(runs, key=lambda run: run.order), skipped

    def summaries(self) -> tuple[list[RecordedRun], list[str]]:
        """Return the same as :meth:`runs`, but with only the bandwidth and transports of each row, and no results.

        Files in the index are not opened. If many files are new, a new index is written, if the directory allows it.

        :raises OSError: if the directory cannot be read.
        """
        index = read_index(self.directory / INDEX)
        runs, skipped, entries, new = [], [], {}, 0
        for path, state in self._files():
            entry = index.entry(path.name, state)
            if entry is None:
                run, fault = _read(path)
                entry = IndexEntry(state, summary(run) if run is not None else None, fault)
                new += 1
            if entry.run is not None:
                runs.append(replace(entry.run, source=str(path)))
            elif entry.fault:
                skipped.append(f"skipped: {path}{entry.fault}")
            entries[path.name] = entry
        if new >= FEWEST_NEW:
            with contextlib.suppress(NixlPluginError):
                write_whole(self.directory / INDEX, Index(entries).text())
        return sorted(runs, key=lambda run: run.order), skipped

    def _files(self) -> Iterator[tuple[Path, os.stat_result | None]]:
        """Yield each file that may be a record, by name, with its state; None: not a regular file, or not readable."""
        with os.scandir(self.directory) as entries:
            files = sorted((entry for entry in entries if entry.name.endswith(".json")), key=lambda entry: entry.name)
        for entry in files:
            try:
                state = entry.stat()
            except OSError:
                state = None
            regular = state is not None and stat.S_ISREG(state.st_mode)
            yield self.directory / entry.name, state if regular else None


def _read(path: Path) -> tuple[RecordedRun | None, str]:
    """Return a run, or None and what is wrong with the file, to follow its path in a message."""
    try:
        return read_recorded(path), ""
    except OSError as error:
        return None, f" cannot be read ({error.strerror})"
    except ReportFileError:
        return None, ""  # --nixl-report may write into the store
    except ValueError as error:
        return None, str(error).removeprefix(str(path))


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see it complete or not at all, even after a power failure.

    :raises NixlPluginError: if it cannot be written. No file is left.
    """
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with hidden.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
        _flush_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise _not_stored(path, error) from None


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some shared file systems cannot flush directories; the file itself is on the disk
    finally:
        os.close(descriptor)


def _not_stored(path: Path, error: OSError) -> NixlPluginError:
    return NixlPluginError(
        f"{path} cannot be written ({error.strerror}): this run's verdict is not affected, but its record is lost",
        "Free space there or make the directory writable and run again; --benchmark-json FILE writes a record "
        "elsewhere.",
    )


def newest(runs: Sequence[RecordedRun], image: str) -> RecordedRun | None:
    """Return the newest run of an image; None: there is none.

    :param runs: the runs, the oldest first.
    :param image: the image's reference, its digest, or both as ``NAME@DIGEST``.
    """
    for run in reversed(runs):
        its = run.provenance.image
        if image in (its.reference, its.digest) or (its.digest and image == f"{its.reference}@{its.digest}"):
            return run
    return None


def find_baseline(requested: str, directory: str, *, whole: bool = True) -> tuple[RecordedRun, list[str]]:
    """Return the run that ``--nixl-baseline`` names, and one sentence for each file of the store that is left out.

    :param requested: a record, a store, or an image of the store.
    :param directory: the store in which an image is looked up.
    :param whole: whether only completed runs count.
    :raises ValueError: if there is no such run: one sentence.
    """
    path = Path(requested)
    try:
        if path.exists() and not path.is_dir():
            named = read_recorded(path)
            if whole and named.interrupted:
                raise ValueError(
                    f"{path} cannot be a baseline ({named.interrupted}): expected the record of a completed run"
                )
            return named, []
        runs, skipped = Store(path if path.is_dir() else Path(directory)).summaries()
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror}): expected a record or a store") from None
    if whole:
        skipped += [
            f"left out: {run.source} cannot be a baseline ({run.interrupted})" for run in runs if run.interrupted
        ]
        runs = [run for run in runs if not run.interrupted]
    latest = runs[-1] if runs else None
    baseline = latest if path.is_dir() else newest(runs, requested)
    if baseline is None:
        where = requested if path.is_dir() else directory
        missing = "no record" if path.is_dir() else f"no run of the image {requested}"
        has = sorted({run.provenance.image.reference for run in runs if run.provenance.image.reference})
        among = f"; it has {', '.join(has)}" if has and not path.is_dir() else ""
        bad = f"; {'; '.join(skipped)}" if skipped else ""
        file = "" if path.is_dir() else f"there is no file {requested}, and "
        raise ValueError(f"{file}{where} has {missing}{among}{bad}: expected the record of an earlier run")
    try:
        return read_recorded(Path(baseline.source)), skipped
    except OSError as error:
        raise ValueError(f"{baseline.source} cannot be read ({error.strerror}): expected {RECORD_FORM}") from None
