# SPDX-License-Identifier: Apache-2.0
"""The store: a directory of records, which many jobs on many hosts may share and write at the same time.

A record is written under a temporary name, flushed to the disk, and then renamed to a unique name. So no reader ever
sees an incomplete record, and no record is ever overwritten.

A large store also has an index with a summary of each run (:mod:`pytest_nixl.store.index`). It may be missing, old or
wrong at any time, because it only avoids reading unchanged files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.store.index import FEWEST_NEW, INDEX, Index, IndexEntry, read_index, summary
from pytest_nixl.store.record_reader import RECORD_FORM, RecordedRun, ReportFileError, read_recorded


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
