# SPDX-License-Identifier: Apache-2.0
"""The charts of a report: bandwidth and latency over block sizes, and the history of each row."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pytest_nixl.core import units
from pytest_nixl.report.names import short
from pytest_nixl.report.svg import Axis, Series, lines, sizes_axis, value_axis
from pytest_nixl.store.record_reader import RecordedRow, RecordedRun

#: The most history charts in a report. Rows with changes come first.
_MOST_HISTORIES = 12


@dataclass(frozen=True)
class _Group:
    """Rows that differ only in operation and block size. A chart has one line for each operation."""

    backend: str
    memory: str
    batch: str
    depth: str
    pair: str

    def __str__(self) -> str:
        counts = (
            f"{name} {count.removeprefix(name)}" for name, count in (("batch", self.batch), ("depth", self.depth))
        )
        pair = "" if self.pair in ("0-1", "0-0") else f"ranks {self.pair}"
        extra = [text for text in counts if not text.endswith(" 1")]
        return ", ".join(filter(None, (f"{self.backend} {self.memory}", *extra, pair)))


def _groups(run: RecordedRun) -> dict[_Group, dict[str, list[tuple[int, RecordedRow]]]]:
    """Return the rows with their block sizes in bytes, smallest first, by group and operation."""
    found: dict[_Group, dict[str, list[tuple[int, RecordedRow]]]] = {}
    for key, row in run.rows.items():
        backend, op, memory, block, batch, depth, pair = key.split("/")
        group = found.setdefault(_Group(backend, memory, batch, depth, pair), {})
        group.setdefault(op, []).append((units.parse_size(block), row))
    for by_op in found.values():
        for rows in by_op.values():
            rows.sort(key=lambda one: one[0])
    # For many links at one block size the matrix is clearer than charts of one point.
    wide = {group: by_op for group, by_op in found.items() if any(len(rows) > 1 for rows in by_op.values())}
    return wide or found


def bandwidth(run: RecordedRun) -> list[str]:
    """Return an HTML card for each group of rows: bandwidth with floor, ceiling and line rate of the network card."""
    cards = []
    for group, by_op in _groups(run).items():
        rows = [one for rows in by_op.values() for one in rows]
        most = max(value for _, row in rows for value in row.values)
        series = []
        for number, (op, found) in enumerate(by_op.items()):
            labels = tuple(f"{op} {units.format_size(size)}: {_rate(row.bandwidth)}" for size, row in found)
            spread = tuple((float(size), value) for size, row in found for value in row.values if len(row.values) > 1)
            points = tuple((float(size), row.bandwidth) for size, row in found)
            series.append(Series(op, points, f"s{number % 6}", spread, labels))
        remarks = []
        sizes = sorted({float(size) for size, _ in rows})
        if floors := dict(sorted((float(size), row.floor) for size, row in rows if row.floor)):
            series.append(Series("floor", tuple(floors.items()), "floor"))
        for name, bound in (("ceiling", max(row.ceiling for _, row in rows)), ("line rate", _line_rate(run, rows))):
            if bound and bound <= 4 * most:
                series.append(Series(name, tuple((size, bound) for size in sizes), "limit"))
            elif bound:
                remarks.append(f"{name} {_rate(bound)}, far above")
        values = [value for one in series for _, value in (*one.points, *one.spread)]
        axes = sizes_axis(sizes, _size), value_axis(values, _gigabytes, "GB/s")
        cards.append(_card(str(group), lines(*axes, series, f"bandwidth of {group}"), series, remarks))
    return cards


def latency(run: RecordedRun) -> list[str]:
    """Return an HTML card for each operation of each group of rows: latency percentiles of single transfers."""
    cards = []
    for group, by_op in _groups(run).items():
        for op, rows in by_op.items():
            names = dict.fromkeys(name for _, row in rows for name in row.latencies)
            series = []
            for number, name in enumerate(names):
                found = [(float(size), row.latencies[name]) for size, row in rows if row.latencies.get(name, 0) > 0]
                if found:
                    labels = tuple(f"{name} of {_size(size)}: {_time(seconds)}" for size, seconds in found)
                    series.append(Series(name, tuple(found), f"s{number % 6}", (), labels))
            if not series:
                continue
            values = [value for one in series for _, value in one.points]
            axes = sizes_axis([size for size, _ in rows], _size), value_axis(values, _time, "", log=True)
            title = f"{group}, {op}"
            cards.append(_card(title, lines(*axes, series, f"latency of {title}"), series, []))
    return cards


def history(runs: Sequence[RecordedRun]) -> list[str]:
    """Return an HTML card for the history of each row; rows with changes come first.

    :param runs: the runs, the oldest first.
    """
    if len(runs) < 2:
        return []
    from pytest_nixl.report.history import RowHistory, courses, of_one_machine

    kept, _ = of_one_machine(runs)
    if importlib.util.find_spec("ruptures") is None:  # show the history also if changes cannot be searched for
        keys = dict.fromkeys(key for run in kept for key in run.rows)
        found = [RowHistory(key, tuple(run for run in kept if key in run.rows), ()) for key in keys]
    else:
        found = courses(kept)
    found = sorted((course for course in found if len(course.runs) > 1), key=lambda course: -len(course.steps))
    cards = []
    for course in found[:_MOST_HISTORIES]:
        values = course.values
        labels = tuple(
            f"{run.name}, {run.when:%Y-%m-%d %H:%M} UTC: {_rate(value)}"
            for run, value in zip(course.runs, values, strict=True)
        )
        points = tuple((float(place), value) for place, value in enumerate(values))
        one = Series(course.key, points, "s0", (), labels)
        marks = [(step.place - 0.5, f"{100 * (step.ratio - 1):+.1f} %") for step in course.steps]
        axes = _runs_axis(course.runs), value_axis(values, _gigabytes, "GB/s", log=False)
        remarks = []
        for step in course.steps:
            what = "; ".join(str(item) for item in course.differences(step)[:3]) or "no recorded difference"
            remarks.append(f"{100 * (step.ratio - 1):+.1f} % from {course.runs[step.place].name} on ({what})")
        cards.append(_card(short(course.key), lines(*axes, [one], f"history of {course.key}", marks), [], remarks))
    return cards


def _runs_axis(runs: Sequence[RecordedRun]) -> Axis:
    """Return an axis on which the first run of each image is named, as far as there is space."""
    firsts, seen = [], ""
    for place, run in enumerate(runs):
        if run.provenance.image.reference != seen or not place:
            firsts.append(place)
            seen = run.provenance.image.reference
    room = max(1, -(-len(firsts) // 4))
    names = {float(place): _tag(runs[place]) for place in firsts[::room]}
    return Axis(0.0, float(len(runs) - 1), tuple(names), lambda value: names[value])


def _tag(run: RecordedRun) -> str:
    reference = run.provenance.image.reference
    tag = reference.rpartition("/")[2].rpartition(":")[2]
    return (tag or f"{run.when:%m-%d}")[-14:]


def _line_rate(run: RecordedRun, rows: Sequence[tuple[int, RecordedRow]]) -> float:
    """Return the sum of the line rates of the cards that the transports name, in bytes per second; 0: not known."""
    nics = run.provenance.host.get("nics")
    if not isinstance(nics, dict):
        return 0.0
    total = 0.0
    for name in dict.fromkeys(name.partition("/")[2] for _, row in rows for name in row.transports):
        speed = str(nics.get(name) or nics.get(f"{name}:1") or "").split()
        if len(speed) < 2 or not speed[0].replace(".", "", 1).isdecimal():
            return 0.0
        total += float(speed[0]) * (1e9 if speed[1].startswith("Gb") else 1e6) / 8
    return total


def _card(title: str, chart: str, series: Sequence[Series], remarks: Sequence[str]) -> str:
    names = [f'<li><i class="{one.style}"></i>{escape(one.name)}</li>' for one in series]
    names += [f"<li>{escape(text)}</li>" for text in remarks]
    legend = f'<ul class="legend">{"".join(names)}</ul>' if names else ""
    return f'<figure class="card"><h3>{escape(title)}</h3>{chart}{legend}</figure>'


def _rate(value: float) -> str:
    return f"{units.gigabytes(value)} GB/s ({units.gigabits(value)} Gb/s)"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:g}" if value >= 1e6 or not value else f"{value / 1e9:.0e}"


def _size(value: float) -> str:
    return units.format_size(int(value))


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale * 0.999:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
