# SPDX-License-Identifier: Apache-2.0
"""Bounds of figures: read from the ``[[bound]]`` tables of a profile, and figures judged by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from types import MappingProxyType

from pytest_nixl.core import units
from pytest_nixl.core.forms import MEMORY_FORM, SIZE_FORM
from pytest_nixl.judge.profile_table import (
    SOURCE_FORM,
    ProfileTable,
    backend_name,
    filled,
    one_line,
    operation,
    positive,
)
from pytest_nixl.model.figure import FIGURE_KINDS, Bound, Figure, FigureKind
from pytest_nixl.model.memory import OPS, MemoryPair
from pytest_nixl.model.verdicts import Judgement, Verdict

#: The labels whose values are integers in a profile.
_COUNTS = ("count", "tokens", "agents")
#: The accepted form of the other labels, and how one is read; the figure's label has the same text.
_TEXTS: Mapping[str, tuple[str, Callable[[str], object]]] = MappingProxyType(
    {
        "backend": ('names of backends such as "UCX"', backend_name),
        "op": (" or ".join(OPS), operation),
        "memory": (MEMORY_FORM, MemoryPair.parse),
        "size": (SIZE_FORM, lambda text: units.format_size(units.parse_size(text))),
        "way": ('ways of suites/kv_cache such as "scattered-prepped"', one_line),
        "model": ('names of models such as "llama-3-8b"', one_line),
        "exporter": ('exporters of NIXL\'s telemetry such as "prometheus"', one_line),
        "pattern": ('patterns with their ranks such as "incast:4"', one_line),
        "cycle": ('cycles of suites/endurance such as "transfer"', one_line),
    }
)


def read_bounds(tables: Sequence[ProfileTable]) -> tuple[Bound, ...]:
    """Read the ``[[bound]]`` tables of a profile.

    :raises ValueError: if a table is not valid, or two apply to one figure: one sentence.
    """
    bounds = tuple(_bound(table) for table in tables)
    for (first, earlier), (second, other) in combinations(enumerate(bounds, 1), 2):
        if shared := earlier.shared_with(other):
            where = tables[second - 1].where
            raise ValueError(
                f"{where}: applies to {shared}, as bound #{first} does: expected at most one [[bound]] for each figure"
            )
    return bounds


def _bound(table: ProfileTable) -> Bound:
    form = f"one of {', '.join(FIGURE_KINDS)}"
    name = table.text("figure", form, _known_figure, mandatory=True) or ""
    kind = FIGURE_KINDS[name]
    table.allow("figure", *kind.labels, "at_most", "at_least", "source")
    labels = {label: texts for label in kind.labels if (texts := _label(table, label)) is not None}
    at_most, at_least = (table.text(key, kind.unit.form, positive(kind.unit.read)) for key in ("at_most", "at_least"))
    if at_most is None and at_least is None:
        raise ValueError(f"{table.where}: bounds nothing: expected at_most or at_least")
    if at_most is not None and at_least is not None and at_least > at_most:
        fault = f"{table.data['at_least']!r} is above at_most"
        raise table.fault("at_least", fault, f"at most {table.data['at_most']}")
    source = table.text("source", SOURCE_FORM, filled, mandatory=True) or ""
    return Bound(name, source, labels, at_most, at_least)


def _known_figure(text: str) -> str:
    if text not in FIGURE_KINDS:
        raise ValueError(f"{text!r} is not a figure that a suite records")
    return text


def _label(table: ProfileTable, label: str) -> tuple[str, ...] | None:
    if label in _COUNTS:
        counts = table.counts(label)
        return None if counts is None else tuple(map(str, counts))
    form, read = _TEXTS[label]
    texts = table.texts(label, form, read)
    return None if texts is None else tuple(map(str, texts))


def bounded(figure: Figure, bounds: Sequence[Bound]) -> Figure:
    """Return a figure with the bound that applies to it; the same figure if there is none."""
    bound = next((candidate for candidate in bounds if candidate.applies(figure)), None)
    return figure if bound is None else replace(figure, at_most=bound.at_most, at_least=bound.at_least)


def judge_figures(figures: Sequence[Figure], bounds: Sequence[Bound]) -> Judgement:
    """Judge figures by the bounds of a profile: FAIL outside one, else PASS. A figure without a bound passes.

    :param bounds: the first that applies to a figure counts.
    """
    faults: list[str] = []
    kind: FigureKind | None = None
    for figure in figures:
        bound = next((candidate for candidate in bounds if candidate.applies(figure)), None)
        if bound is None:
            continue
        fault = _fault(figure, bound)
        if fault:
            faults.append(fault)
            kind = kind or FIGURE_KINDS[figure.name]
    if kind is not None:
        return Judgement(Verdict.FAIL, "; ".join(faults), kind.remedy)
    return Judgement(Verdict.PASS, "; ".join(map(str, figures)))


def _fault(figure: Figure, bound: Bound) -> str:
    """Describe how a figure is outside its bound; empty: it is within."""
    owner = "default of the check" if bound.default else "bound of the profile"
    where = f"({owner}, from: {' '.join(bound.source.split())})"
    if bound.at_most is not None and figure.value > bound.at_most:
        return f"{figure}, above its bound of {figure.show(bound.at_most)} {where}"
    if bound.at_least is not None and figure.value < bound.at_least:
        return f"{figure}, below its bound of {figure.show(bound.at_least)} {where}"
    return ""
