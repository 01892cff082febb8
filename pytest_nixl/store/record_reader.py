# SPDX-License-Identifier: Apache-2.0
"""Read a recorded run: a file of pytest-benchmark with the rows and the additional part of this plugin."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nixl.core.plain import from_plain
from pytest_nixl.core.redaction import hide_all, recorded, redact
from pytest_nixl.core.strict import escape
from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.model.results import PERCENTILES, Result, RowSummary
from pytest_nixl.model.row_key import RowKey, UnknownKey
from pytest_nixl.model.settings import MOST_LAUNCHES
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.store.provenance import Provenance

#: The key of this plugin's part of a record, and the version of its format.
OURS, FORM = "nixl", 1

#: The largest size of a record in bytes. A run of 1,000 rows with all its windows has less than a tenth of it.
LARGEST = 64 << 20

#: The most steps of a request for KV blocks, and the longest name of one. This plugin writes six.
_MOST_STEPS, _LONGEST_STEP = 16, 32

#: How deep the facts of a host may be nested. This plugin writes three levels.
_DEEPEST = 16

RECORD_FORM = "a file that the bandwidth suite wrote with --nixl-store, --benchmark-json or --benchmark-autosave"


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run.

    Its rows are read from what pytest-benchmark recorded, and its results from the part that this plugin added, because
    a record may have rows without results: an older one, or one of ``--benchmark-autosave``.

    :param source: the path of its record.
    :param when: when it ended.
    :param rows: the summaries of its rows, by row key.
    :param results: the result of each of its checks.
    :param notes: further sentences, such as what could not be written.
    """

    source: str
    when: datetime
    provenance: Provenance
    rows: Mapping[RowKey, RowSummary]
    results: tuple[Result, ...] = ()
    notes: tuple[str, ...] = ()
    #: How far the run came and what ended it early; empty: it was completed.
    interrupted: str = ""

    @property
    def name(self) -> str:
        """The run's name: its image, or its file if it has no image."""
        return str(self.provenance.image) if self.provenance.image.reference else Path(self.source).stem

    @property
    def unmeasured(self) -> Mapping[RowKey | UnknownKey, Result]:
        """The rows that ended in an error or are missing, each with its result."""
        lost = (result for result in self.results if result.verdict in (Verdict.ERROR, Verdict.MISSING))
        return {result.row: result for result in lost if result.row is not None and result.row not in self.rows}

    @property
    def order(self) -> tuple[datetime, str]:
        """The key to sort runs by, the oldest first."""
        return self.when, self.source


def read_recorded(path: Path) -> RecordedRun:
    """Read a record.

    :raises ValueError: if the file is torn, foreign, too large or not a regular file, or has neither a row nor a
        result: one sentence that begins with the path.
    :raises OSError: if it cannot be read.
    """
    text = read_regular(path, LARGEST, RECORD_FORM)
    try:
        data = parse_json(text)
    except UnicodeError:
        raise ValueError(f"{path} is not UTF-8: expected {RECORD_FORM}") from None
    except ValueError as error:
        reason = "is empty" if not text.strip() else f"is incomplete or not JSON ({error})"
        raise ValueError(f"{path} {reason}: expected {RECORD_FORM}") from None
    except RecursionError:
        raise ValueError(f"{path} is JSON that is nested too deep: expected {RECORD_FORM}") from None
    return parse_recorded(data, str(path))


def parse_json(text: bytes) -> Any:
    """Parse JSON, and check that its texts can be printed.

    :raises ValueError: if it is not JSON, or a text contains half a surrogate pair.
    :raises RecursionError: if it is nested too deep.
    """
    data = json.loads(text)
    if b"\\ud" in text.lower():
        json.dumps(data, ensure_ascii=False).encode()  # fails for half a surrogate pair, which cannot be printed
    return data


class ReportFileError(ValueError):
    """A file is a report of a run that ``--nixl-report`` wrote, and not the run's record."""


def parse_recorded(data: Any, source: str) -> RecordedRun:
    """Read a run from the JSON values of a record.

    :param source: the path of the record, for messages.
    :raises ValueError: as :func:`read_recorded`.
    """
    by = data.get("written_by") if isinstance(data, dict) else None
    if isinstance(by, str) and by.startswith("pytest-nixl "):
        raise ReportFileError(f"{source} is a report of a run, and not the run's record: expected {RECORD_FORM}")
    try:
        parsed = _parse(data, source)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = escape(f"{type(error).__name__}: {error}", _QUOTED)
        raise ValueError(f"{source} is not a record of a run ({reason}): expected {RECORD_FORM}") from None
    if not parsed.rows and not parsed.results:
        raise ValueError(f"{source} has no row of the bandwidth suite: expected {RECORD_FORM}")
    return parsed


#: The most characters of a file that a message quotes.
_QUOTED = 200


def _parse(data: Any, source: str) -> RecordedRun:
    ours = data.get(OURS) or {}
    if ours and ours["form"] != FORM:
        raise ValueError(f"its format version is {ours['form']!r}, and this pytest-nixl reads {FORM}")
    when = datetime.fromisoformat(str(data["datetime"]).replace("Z", "+00:00"))
    when = when.replace(tzinfo=timezone.utc) if when.tzinfo is None else when.astimezone(timezone.utc)
    provenance = from_plain(Provenance, ours["provenance"]) if ours else _older(data)
    if not shallow(provenance.host):
        raise ValueError(f"its host is nested deeper than {_DEEPEST} levels")
    rows: dict[RowKey, RowSummary] = {}
    for key, summary in _rows(data["benchmarks"]):
        if key in rows:
            raise ValueError(f"it contains the row {key} twice")
        rows[key] = summary
    return RecordedRun(
        source=source,
        when=when,
        provenance=_hidden(provenance),
        rows=rows,
        results=tuple(Result.from_plain(hide_all(result, _hide)) for result in ours.get("results", ())),
        notes=tuple(_hide(str(note)) for note in ours.get("notes", ())),
        interrupted=_hide(str(ours.get("interrupted", ""))),
    )


def _hidden(provenance: Provenance) -> Provenance:
    """Hide the secrets that an older version recorded, because it knew fewer shapes and names of secrets."""
    plain = hide_all(provenance.plain(), _hide)
    plain["environment"] = {
        # A name in parentheses is that of a setting, such as the level, and of no variable.
        name: _hide(value) if name.startswith("(") else recorded(name, value)
        for name, value in provenance.environment.items()
    }
    return from_plain(Provenance, plain)


#: Bytes per second between which a launch of a record can be. A chart cannot draw others.
_SLOWEST, _FASTEST = 1e-3, 1e18


@lru_cache(maxsize=1 << 14)  # most texts of a record are those of other results and records too
def _hide(text: str) -> str:
    return redact(text)


def _rows(records: Any) -> Iterator[tuple[RowKey, RowSummary]]:
    for record in records:
        extra = record.get("extra_info") or {}
        if "key" not in extra:
            continue
        # Older records have no launches, only one bandwidth.
        values = tuple(float(value) for value in extra.get("launches") or (float(extra["GB/s"]) * 1e9,))
        if len(values) > MOST_LAUNCHES:
            raise ValueError(f"a row has {len(values)} launches, more than the maximum of {MOST_LAUNCHES}")
        key = RowKey.parse(str(extra["key"]))
        if not all(_SLOWEST <= value <= _FASTEST for value in values):
            raise ValueError(f"the row {key} has a launch that is not a bandwidth")
        latencies = {
            name: _drawable(extra[f"{name}_us"]) / 1e6 for name in PERCENTILES if extra.get(f"{name}_us") is not None
        }
        latencies = {name: value for name, value in latencies.items() if not math.isnan(value)}
        floor, ceiling = _drawable(extra.get("floor", 0.0)), _drawable(extra.get("ceiling", 0.0))
        contention = tuple(float(cores) for cores in extra.get("others_cores") or ())
        gpu_waits = tuple(float(microseconds) / 1e6 for microseconds in extra.get("gpu_waits_us") or ())
        if not all(0 <= value < math.inf for value in (floor, ceiling, *latencies.values(), *contention, *gpu_waits)):
            raise ValueError(
                f"the row {key} has a floor, a ceiling, a latency, a contention or a GPU's wait that is not a number "
                "from zero on"
            )
        transports = extra.get("transports", ())
        if not isinstance(transports, (list, tuple)):
            raise TypeError(f"the row {key} has transports that are not a list")
        names = tuple(str(name) for name in transports)
        summary = RowSummary.of_launches(
            values, names, latencies, floor=floor, ceiling=ceiling, contention=contention, gpu_waits=gpu_waits
        )
        yield key, replace(summary, steps=_steps(key, extra.get("steps_us") or {}))


def _drawable(value: Any) -> float:
    """Return a number; one that is too small for a logarithmic scale is zero."""
    number = float(value)
    return 0.0 if abs(number) < 1e-9 else number


def _steps(key: RowKey, recorded: Any) -> dict[str, float]:
    """Return the seconds of the steps of a request for KV blocks."""
    steps = {str(name)[:_LONGEST_STEP]: float(value) / 1e6 for name, value in dict(recorded).items()}
    if len(steps) > _MOST_STEPS or not all(0 <= value < math.inf for value in steps.values()):
        raise ValueError(f"the row {key} has more than {_MOST_STEPS} steps, or one that is not a number from zero on")
    return steps


def shallow(value: Any) -> bool:
    """Whether a value is nested no deeper than is safe for recursive functions."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for element in level
            for inner in (
                element.values() if isinstance(element, Mapping) else element if isinstance(element, list) else ()
            )
        ]
        if not level:
            return True
    return False


def _older(data: Any) -> Provenance:
    """Return the provenance of a record without this plugin's part: the host's name, and the versions of the rows."""
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
