# SPDX-License-Identifier: Apache-2.0
"""The figures that are claimed: each with its bound, its peer and the machine's load, and the table of them."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

BEGIN, END = "<!-- figures: written by `tox -e bench -- --write` -->", "<!-- end of the figures -->"


@dataclass(frozen=True)
class Figure:
    """A measured figure.

    :param name: what was measured, for the table.
    :param values: every measured value, in ``unit``.
    :param bound: the largest median that is claimed, or the smallest with ``at_least``; infinite: none is claimed.
    :param peer: what it is compared with, and that one's value; empty: nothing.
    :param load: how busy the machine was when it ended.
    """

    name: str
    values: tuple[float, ...]
    unit: str
    bound: float
    at_least: bool = False
    peer: str = ""
    digits: int = 1
    load: str = field(default_factory=lambda: load())

    @property
    def value(self) -> float:
        """The median."""
        return median(self.values)

    @property
    def holds(self) -> bool:
        """Whether the median is within the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def limit(self) -> str:
        """The bound as text."""
        if math.isinf(self.bound):
            return "–"
        return f"{'at least' if self.at_least else 'at most'} {self._with_unit(f'{self.bound:g}')}"

    @property
    def measured(self) -> str:
        """The median and the range as text."""
        shown = self._with_unit(self._text(self.value))
        if len(self.values) == 1:
            return shown
        return f"{shown} ({self._text(min(self.values))} to {self._text(max(self.values))})"

    def __str__(self) -> str:
        peer = f"; {self.peer}" if self.peer else ""
        ends = "holds" if self.holds else "DOES NOT HOLD"
        return f"{self.name}: {self.measured}; bound: {self.limit}, {ends}{peer}; {self.load}"

    def _text(self, value: float) -> str:
        return f"{value:.{self.digits}f}"

    def _with_unit(self, text: str) -> str:
        return f"{text} {self.unit}".rstrip()


def load() -> str:
    """Return how busy the machine is: processes that ran or waited for a core in the last minute."""
    return f"load {os.getloadavg()[0]:.1f}"


def machine() -> str:
    """Return what the figures were measured on."""
    processor = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} cores ({processor}), {gib:.0f} GiB, Python {sys.version.split()[0]}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def table(figures: Sequence[Figure], day: date | None = None, without: Sequence[str] = ()) -> str:
    """Return the figures as Markdown, with the day and the machine.

    :param without: the names of the figures that were left out.
    """
    rows = [f"| {figure.name} | {figure.limit} | {figure.measured} | {figure.peer or '–'} |" for figure in figures]
    busiest = max((figure.load for figure in figures), key=lambda text: float(text.split()[-1]), default=load())
    head = f"`tox -e bench` measures each figure; on {day or date.today()}, on {machine()}, {busiest} at most"
    head += f" (not measured: {', '.join(without)}):" if without else ":"
    return "\n".join([head, "", "| figure | bound | median (range) | peer |", "| --- | --- | --- | --- |", *rows])


def write_table(path: Path, text: str) -> None:
    """Replace what is between the two markers.

    :raises ValueError: a marker is missing, or stands there twice.
    """
    whole = path.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1 or whole.index(BEGIN) > whole.index(END):
        raise ValueError(f"{path} does not have the lines {BEGIN!r} and {END!r}, once each and in this order")
    before, _, remainder = whole.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{remainder.partition(END)[2]}", encoding="utf-8")
