# SPDX-License-Identifier: Apache-2.0
"""The charts of growth: what a worker held over the cycles, with the line of the slope."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.browser import open_page
from helpers.records import record

from pytest_nixl.model.figure import Figure
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.files import write
from pytest_nixl.report.growth_charts import growth
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.record_reader import parse_recorded

LABELS = {"backend": "UCX", "cycle": "transfer"}
PLACES = [100.0 * number for number in range(1, 25)]


def grown(name: str, held: Callable[[float], float]) -> Figure:
    """Return the figure of a growth; ``held`` returns what the worker held after a number of cycles."""
    return replace(Figure.of(name, 0.0, LABELS), samples=tuple((place, held(place)) for place in PLACES))


LEAK = grown("growth-heap", lambda cycle: 5e6 + 1024 * cycle)
STEADY = grown("growth-metadata", lambda cycle: 400.0)
SHRINKING = grown("growth-memory", lambda cycle: 3e8 - 100 * cycle)
DESCRIPTORS = grown("growth-descriptors", lambda cycle: 20 + cycle)


def result(*figures: Figure) -> Result:
    return Result("endurance-transfer", "t.py::t", Verdict.FAIL, "heap grows", measured=figures)


def test_each_growth_has_its_line_and_its_slope() -> None:
    bytes_card, numbers_card = growth([result(LEAK, DESCRIPTORS, SHRINKING, STEADY)])
    assert (bytes_card.title, numbers_card.title) == ("UCX transfer: bytes", "UCX transfer: numbers")
    assert [(line.name, line.style) for line in bytes_card.legend] == [
        ("heap", "s0"),
        ("heap: +1.02 KB with each cycle (99 % interval +1.02 KB to +1.02 KB)", "s0 slope"),
        ("memory", "s1"),
        ("memory: -100 B with each cycle (99 % interval -100 B to -100 B)", "s1 slope"),
    ]
    assert bytes_card.remarks == ["unchanged: metadata"]
    assert numbers_card.legend[0].points[-1] == (2400.0, 2300.0)  # more than at the first sample
    assert numbers_card.legend[1].points == ((100.0, 0.0), (2400.0, 2300.0))
    assert bytes_card.drawing.count("<polyline") == 4


def test_a_worker_that_holds_always_the_same_has_a_chart_without_lines() -> None:
    (card,) = growth([result(STEADY)])
    assert (card.legend, card.remarks) == ([], ["unchanged: metadata"])
    assert "<polyline" not in card.drawing


@pytest.mark.parametrize("figure", [replace(LEAK, samples=()), replace(LEAK, samples=LEAK.samples[:2]),
                                    replace(LEAK, unit="furlongs"), replace(LEAK, name="heap")])  # fmt: skip
def test_what_cannot_be_drawn_has_no_chart(figure: Figure) -> None:
    assert growth([result(figure)]) == []


@pytest.mark.parametrize("most", [5e-324, 1e-7, 1e18])
def test_any_values_of_a_record_are_drawn(most: float) -> None:
    samples = ((0.0, 0.0), (1.0, -most), (1e18, most))
    assert len(growth([result(replace(LEAK, samples=samples))])) == 1


def test_a_browser_shows_the_charts_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    run = parse_recorded(record("x", {}, results=(result(LEAK, DESCRIPTORS),)), "x.json")  # as it was recorded
    write(RunReport(run), path)
    opened = open_page(path, tmp_path)
    assert opened.console == ()
    assert "<h2>Growth over cycles</h2>" in opened.document
    found = re.findall(r'aria-label="growth of ([^"]*)"', opened.document)
    assert found == ["UCX transfer: bytes", "UCX transfer: numbers"]
    assert "+1.02 KB with each cycle" in opened.document
