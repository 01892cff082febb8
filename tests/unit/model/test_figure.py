# SPDX-License-Identifier: Apache-2.0
"""Figures: their labels, their units as text, and as JSON values that may come from anywhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from helpers.cli_run import ROOT

from pytest_nixl.core.plain import from_plain
from pytest_nixl.model.figure import BANDWIDTH, BYTES, FIGURE_KINDS, MOST_SAMPLES, PER_SECOND, SECONDS, Figure
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Outcome, Verdict
from pytest_nixl.report.table import FEW, MOST, figure_lines

LABELS = {"backend": "UCX", "op": "READ", "memory": "DRAM:DRAM", "way": "scattered-prepped", "model": "generic",
          "tokens": 64}  # fmt: skip
FIGURE = Figure.of("kv-request-p50", 0.00127, LABELS, (0.001, 0.00127, 0.002))


def test_a_figure_has_every_label_of_its_kind() -> None:
    assert FIGURE.labels["tokens"] == "64"
    assert FIGURE.key == "kv-request-p50/UCX/READ/DRAM:DRAM/scattered-prepped/generic/64"
    with pytest.raises(ValueError, match="kv-request-p50 has the labels backend, op, memory, way, model, tokens"):
        Figure.of("kv-request-p50", 1.0, {"backend": "UCX"})


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [(SECONDS, 12.34, "12.3 s"), (SECONDS, 0.0631, "63.1 ms"), (SECONDS, 0.63149, "631 ms"), (SECONDS, 2e-5, "20 us"),
     (SECONDS, 2e-7, "0.2 us"), (BYTES, 1.764e6, "1.76 MB"), (BYTES, 612, "612 B"), (BYTES, 2500, "2.5 KB"),
     (BYTES, 999, "999 B"), (BYTES, 1e3, "1 KB"), (BYTES, 1e6, "1 MB"), (BYTES, 1e9, "1 GB"),
     (SECONDS, 1.0, "1 s"), (SECONDS, 1e-3, "1 ms"), (SECONDS, 1e-6, "1 us"), (SECONDS, -0.5, "-500 ms"),
     (PER_SECOND, 12345.6, "12346/s"), (BANDWIDTH, 1.234e10, "12.3 GB/s")],
)  # fmt: skip
def test_values_are_shown_with_their_unit(unit: Any, value: float, text: str) -> None:
    assert unit.show(value) == text


def test_a_bound_of_each_unit_is_read() -> None:
    assert (SECONDS.read("50 ms"), BYTES.read("1.5 MB"), PER_SECOND.read("1000/s")) == (0.05, 1.5e6, 1000.0)
    assert BANDWIDTH.read("100 Gb/s") == 12.5e9
    with pytest.raises(ValueError, match="'1000' has no unit: expected a number a second"):
        PER_SECOND.read("1000")


def test_a_figure_survives_json_without_its_rounds() -> None:
    figure = replace(FIGURE, at_most=0.05)
    assert from_plain(Figure, json.loads(json.dumps(figure.plain()))) == replace(figure, rounds=())


@pytest.mark.parametrize(
    "changed",
    [{"name": 3}, {"labels": {"op": 1}}, {"labels": {"op": "x" * 201}}, {"value": "1"}, {"value": None},
     {"value": float("inf")}, {"value": 10**400}, {"value": True}, {"unit": None}, {"at_most": "1"},
     {"at_most": float("nan")}],
)  # fmt: skip
def test_values_of_another_form_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_plain(Figure, {**FIGURE.plain(), **changed})


@pytest.mark.parametrize(
    "samples",
    [3, {"1": 2}, [[1.0]], [[1.0, 2.0, 3.0]], [[1.0, "2"]], [[True, 2.0]], [[1.0, float("nan")]],
     [[2.0, 1.0], [1.0, 1.0]], [[0.0, float("inf")]], [[0.5, 1.0]], [[-1.0, 1.0]], [[1e19, 1.0]], [[1.0, -1e19]],
     [[1, 10**400]], [[number, 1.0] for number in range(MOST_SAMPLES + 1)]],
)  # fmt: skip
def test_samples_of_another_form_are_refused(samples: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_plain(Figure, {**FIGURE.plain(), "samples": samples})


def test_samples_survive_json_and_a_figure_without_them_is_written_as_before() -> None:
    figure = replace(FIGURE, rounds=(), samples=((1.0, 0.0), (2.0, 1024.0)))
    assert from_plain(Figure, json.loads(json.dumps(figure.plain()))) == figure
    assert "samples" not in FIGURE.plain()


def result_of(verdict: Verdict, *figures: Figure) -> Result:
    return Result("a-check", "t.py::t", verdict, measured=figures)


CONNECT = Figure("connect", 0.0631, "s", {"backend": "UCX"}, at_most=0.05)
SIZE = Figure("metadata-size", 612.0, "B", {"backend": "UCX", "count": "256"})
REGISTRATION = Figure(
    "registration", 1.5, "s", {"backend": "LIBFABRIC", "count": "1", "size": "4096"}, at_most=2.0, at_least=1.0
)
BOUNDED = [result_of(Verdict.FAIL, CONNECT), result_of(Verdict.PASS, SIZE, REGISTRATION)]
TABLE = """\
figure         of                             value  bound
connect        UCX                          63.1 ms  at most 50 ms
metadata-size  UCX count 256                  612 B  -
registration   LIBFABRIC count 1 size 4096    1.5 s  at most 2 s, at least 1 s"""
WITHOUT_BOUNDS = """\
figure         of             value
metadata-size  UCX count 256  612 B"""
FEW_SIZES = "\n".join([WITHOUT_BOUNDS, *WITHOUT_BOUNDS.splitlines()[1:] * (FEW - 1)])
FOLDED = f"""\
figure   of     value  bound
connect  UCX  63.1 ms  at most 50 ms
{FEW + 1} figures without a bound were recorded; -v shows them"""


@pytest.mark.parametrize(
    ("results", "everything", "text"),
    [
        (BOUNDED, False, TABLE),
        ([result_of(Verdict.PASS, SIZE)], False, WITHOUT_BOUNDS),
        ([result_of(Verdict.FAIL, *[SIZE] * (FEW + 1), CONNECT)], False, FOLDED),
        ([result_of(Verdict.PASS, *[SIZE] * (FEW + 1))], False, FOLDED.splitlines()[-1]),
        ([result_of(Verdict.PASS, *[SIZE] * FEW)], False, FEW_SIZES),
        ([], True, ""),
    ],
    ids=["bounds", "no bound", "many without a bound", "many, none with a bound", "few", "no figure"],
)
def test_the_table_of_figures(results: list[Result], everything: bool, text: str) -> None:
    assert "\n".join(line.text for line in figure_lines(results, gate=False, everything=everything)) == text


def test_a_line_of_a_figure_has_the_outcome_of_its_check_and_their_number_is_limited() -> None:
    assert [line.outcome for line in figure_lines(BOUNDED, gate=False)] == [
        None,
        Outcome.FAIL,
        Outcome.PASS,
        Outcome.PASS,
    ]
    shown = [line.text for line in figure_lines([result_of(Verdict.PASS, *[SIZE] * (MOST + 3))], gate=False)]
    assert shown[1:-1] == [WITHOUT_BOUNDS.splitlines()[1]] * MOST
    assert shown[-1] == "and 3 more figures: --nixl-report=FILE.html shows all of them"


def test_the_reference_of_profiles_has_each_figure_with_its_labels() -> None:
    page = (ROOT / "docs" / "reference" / "profile-file.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (`.*`) \| (\S+) \| (.*) \|$", page, re.MULTILINE)
    assert {name: (labels, unit) for name, labels, unit, _ in rows} == {
        kind.name: (", ".join(f"`{label}`" for label in kind.labels), kind.unit.name) for kind in FIGURE_KINDS.values()
    }
