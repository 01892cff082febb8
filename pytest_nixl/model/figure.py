# SPDX-License-Identifier: Apache-2.0
"""Figures, single measured values with a name such as the time of a registration, and the bounds that a profile has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any

from pytest_nixl.core import units
from pytest_nixl.core.forms import COUNT_FORM, FREQUENCY_FORM, RATE_FORM, SIZE_FORM, TIME_FORM
from pytest_nixl.core.plain import to_plain

_REQUEST = (
    "Run the suite kv_cache again, alone on an idle machine; if the time stays and most of it is `post` in the line "
    "'KV requests', try --nixl-kv-block-tokens=64, else compare the rows of the suite bandwidth with those of a "
    "healthy machine."
)
_CONTROL = (
    "Run the suite control_path again, alone on an idle machine; if the value stays, compare it with that of a healthy "
    "machine that has the same NIXL and the same UCX or libfabric."
)
_ENDURANCE = (
    "Run the suite endurance again with a longer --nixl-duration and with another release of NIXL, and report the "
    "growth with both releases; until it is fixed, restart the process before what grows is used up."
)
_TELEMETRY = (
    "Run the suite telemetry again, alone on an idle machine and with another release of NIXL; if the ratio stays, and "
    "the engine makes many small transfers, turn telemetry off with NIXL_TELEMETRY_ENABLE=n."
)
_PATTERN = (
    "Run the suite pattern again, alone on idle hosts; if the value stays, read what pattern-fairness says of the "
    "flows that slow each other and run --nixl-pattern=pairs, which shows whether single pairs are slow."
)
#: The most characters of a name, a label or a unit in a record.
_LONGEST = 200
#: The most samples of a figure in a record.
MOST_SAMPLES = 300
#: The largest value, and number of cycles, in a record.
_LARGEST = 1e18


@dataclass(frozen=True)
class FigureUnit:
    """The unit of a figure: how a profile writes a bound in it, and how a report shows a value.

    :param name: the unit's symbol.
    :param form: what a profile's bound in this unit looks like, in words.
    """

    name: str
    form: str
    read: Callable[[str], float]
    show: Callable[[float], str]


def _show_time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds / factor < 100 else f"{seconds / factor:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _show_bytes(size: float) -> str:
    """Return a size in decimal units, as limits of etcd's requests are usually told."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def _read_count(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


SECONDS = FigureUnit("s", TIME_FORM, units.parse_time, _show_time)
BYTES = FigureUnit("B", SIZE_FORM, lambda text: float(units.parse_size(text)), _show_bytes)
PER_SECOND = FigureUnit("1/s", FREQUENCY_FORM, units.parse_frequency, lambda value: f"{value:.0f}/s")
BANDWIDTH = FigureUnit("B/s", RATE_FORM, units.parse_rate, lambda value: f"{units.gigabytes(value)} GB/s")
COUNT = FigureUnit("1", COUNT_FORM, _read_count, lambda value: f"{value:.3g}")
UNITS: Mapping[str, FigureUnit] = MappingProxyType(
    {one.name: one for one in (SECONDS, BYTES, PER_SECOND, BANDWIDTH, COUNT)}
)


@dataclass(frozen=True)
class FigureKind:
    """A figure that a suite records.

    :param name: its name in profiles and reports.
    :param labels: the names of its labels, by which a profile selects it.
    :param summary: what is measured, as a phrase.
    :param remedy: what to do if a value is outside its bound.
    """

    name: str
    unit: FigureUnit
    labels: tuple[str, ...]
    summary: str
    remedy: str


def _growing(resource: str, unit: FigureUnit, summary: str) -> FigureKind:
    """Return the figure for the growth of a resource of a worker."""
    description = f"{summary}: the least growth with each cycle (lower end of the 99 % interval)"
    return FigureKind(f"growth-{resource}", unit, ("backend", "cycle"), description, _ENDURANCE)


_KINDS = (
    FigureKind(
        "kv-request-p50", SECONDS, ("backend", "op", "memory", "way", "model", "tokens"),
        "a request for KV blocks until the target has its notification, median", _REQUEST,
    ),
    FigureKind(
        "kv-request-p99", SECONDS, ("backend", "op", "memory", "way", "model", "tokens"),
        "a request for KV blocks until the target has its notification, 99th percentile", _REQUEST,
    ),
    FigureKind("agent-creation", SECONDS, ("backend",), "one more agent with its backend in a process", _CONTROL),
    FigureKind(
        "registration", SECONDS, ("backend", "count", "size"),
        "one call that registers `count` regions of `size` each", _CONTROL,
    ),
    FigureKind("deregistration", SECONDS, ("backend", "count", "size"), "the call that deregisters them", _CONTROL),
    FigureKind("metadata-export", SECONDS, ("backend", "count"), "`get_agent_metadata` with `count` regions", _CONTROL),
    FigureKind("metadata-load", SECONDS, ("backend", "count"), "loading that metadata in another agent", _CONTROL),
    FigureKind("metadata-size", BYTES, ("backend", "count"), "the size of that metadata", _CONTROL),
    FigureKind(
        "publish-to-found", SECONDS, ("backend", "agents"),
        "from the first of `agents` agents that publishes to etcd until one of them has loaded all others", _CONTROL,
    ),
    FigureKind("connect", SECONDS, ("backend",), "`make_connection` to another agent", _CONTROL),
    FigureKind("first-transfer", SECONDS, ("backend", "size"), "the first WRITE between two agents", _CONTROL),
    FigureKind("later-transfer", SECONDS, ("backend", "size"), "a later WRITE of the same bytes, median", _CONTROL),
    FigureKind(
        "notification-latency", SECONDS, ("backend",), "half of a round trip of two notifications, median", _CONTROL
    ),
    FigureKind("notification-rate", PER_SECOND, ("backend",), "notifications of a burst that arrive", _CONTROL),
    _growing("heap", BYTES, "memory in use by malloc"),
    _growing("memory", BYTES, "anonymous memory"),
    _growing("descriptors", COUNT, "open file descriptors other than sockets"),
    _growing("sockets", COUNT, "open sockets"),
    _growing("threads", COUNT, "threads"),
    _growing("shared-memory", COUNT, "mapped shared-memory files"),
    _growing("metadata", BYTES, "the metadata of the agents, which names each registered region"),
    _growing("etcd-keys", COUNT, "keys of the namespace in etcd"),
    FigureKind(
        "cycle-time", SECONDS, ("backend", "cycle"), "the fastest cycle between two samples, median", _ENDURANCE
    ),
    FigureKind(
        "slowdown", COUNT, ("backend", "cycle"), "the time of the last cycle divided by that of the first, at least",
        _ENDURANCE,
    ),
    FigureKind(
        "telemetry-transfer", SECONDS, ("backend", "exporter"),
        "a WRITE of four blocks of 4 KiB, median of the launches; with the exporter `none` without telemetry",
        _TELEMETRY,
    ),
    FigureKind(
        "telemetry-overhead", COUNT, ("backend", "exporter"),
        "the time of that WRITE with telemetry divided by the time without it", _TELEMETRY,
    ),
    FigureKind(
        "telemetry-overhead-least", COUNT, ("backend", "exporter"), "the lower end of its 90 % interval", _TELEMETRY
    ),
    FigureKind(
        "pattern-bandwidth", BANDWIDTH, ("backend", "op", "memory", "pattern"),
        "the sum of the bandwidths of all flows of a pattern at the same time", _PATTERN,
    ),
    FigureKind(
        "pattern-share", COUNT, ("backend", "op", "memory", "pattern"),
        "the least share of a flow: its bandwidth while all others run divided by that alone", _PATTERN,
    ),
    FigureKind(
        "pattern-jain", COUNT, ("backend", "op", "memory", "pattern"),
        "Jain's fairness index of the flows at the same time, from 1/n to 1", _PATTERN,
    ),
    FigureKind(
        "telemetry-overhead-most", COUNT, ("backend", "exporter"), "the upper end of its 90 % interval", _TELEMETRY
    ),
)  # fmt: skip

#: The figures that suites record, by name. A profile may bound these and no others.
FIGURE_KINDS: Mapping[str, FigureKind] = MappingProxyType({kind.name: kind for kind in _KINDS})


@dataclass(frozen=True)
class Figure:
    """A measured value.

    :param name: a name in :data:`FIGURE_KINDS`.
    :param labels: what was measured, such as ``{"backend": "UCX", "count": "256"}``.
    :param value: in ``unit``: ``s``, ``B``, ``B/s``, ``1/s`` or ``1``.
    :param rounds: the seconds of each repetition, for pytest-benchmark; empty: the value was not timed by itself.
    :param at_most: the bound that applies to it; None: there is none. So ``at_least``.
    :param samples: for a growth the number of cycles before each sample, and what was held then; at most
        :data:`MOST_SAMPLES`.
    """

    name: str
    value: float
    unit: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    rounds: tuple[float, ...] = ()
    at_most: float | None = None
    at_least: float | None = None
    samples: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, name: str, value: float, labels: Mapping[str, object], rounds: tuple[float, ...] = ()) -> Figure:
        """Return a figure of a known kind.

        :param name: a name in :data:`FIGURE_KINDS`.
        :param value: in the unit of that kind.
        :param labels: a value for each label of that kind.
        :param rounds: as in :class:`Figure`.
        :raises ValueError: if a label is missing or is not one of that kind.
        """
        kind = FIGURE_KINDS[name]
        if set(labels) != set(kind.labels):
            raise ValueError(f"the figure {name} has the labels {', '.join(kind.labels)}, not {', '.join(labels)}")
        texts = {label: str(labels[label])[-_LONGEST:] for label in kind.labels}
        return cls(name, value, kind.unit.name, texts, rounds)

    @property
    def key(self) -> str:
        """The name and the labels, which identify the figure in files of pytest-benchmark."""
        return "/".join((self.name, *self.labels.values()))

    @property
    def labels_text(self) -> str:
        """The labels as text. A bare number is preceded by its label's name."""
        return " ".join(f"{name} {text}" if text.isdecimal() else text for name, text in self.labels.items())

    def show(self, value: float) -> str:
        """Return a value of this figure with its unit."""
        return UNITS[self.unit].show(value) if self.unit in UNITS else f"{value:.3g} {self.unit}"

    @property
    def within(self) -> bool:
        """Whether the value is within the bounds that apply to it; a figure without a bound is."""
        above = self.at_most is not None and self.value > self.at_most
        return not above and not (self.at_least is not None and self.value < self.at_least)

    @property
    def limit_text(self) -> str:
        """The bounds that apply, as text; empty: there is none."""
        bounds = (("at most", self.at_most), ("at least", self.at_least))
        return ", ".join(f"{relation} {self.show(bound)}" for relation, bound in bounds if bound is not None)

    def __str__(self) -> str:
        return f"{self.name} ({self.labels_text}): {self.show(self.value)}"

    def plain(self) -> dict[str, Any]:
        """Return the figure as JSON values, without its rounds, which pytest-benchmark writes."""
        plain = to_plain(replace(self, rounds=()))
        return {name: value for name, value in plain.items() if value is not None and value != []}

    def check_plain(self) -> None:
        """Refuse values that a record may not have. :raises ValueError: with the first reason."""
        if any(len(text) > _LONGEST for text in (self.name, self.unit, *self.labels, *self.labels.values())):
            raise ValueError(f"a figure has a name, unit or label of more than {_LONGEST} characters")
        numbers = (self.value, self.at_most or 0.0, self.at_least or 0.0, *chain.from_iterable(self.samples))
        if not all(abs(number) <= _LARGEST for number in numbers):  # NaN is not less either
            raise ValueError(f"a figure has a number that is not finite, or beyond {_LARGEST:g}")
        cycles = [cycle for cycle, _ in self.samples]
        if len(cycles) > MOST_SAMPLES or any(cycle < 0 or not cycle.is_integer() for cycle in cycles):
            raise ValueError(f"a figure has more than {MOST_SAMPLES} samples, or one whose cycles are not counted")
        if any(later <= earlier for earlier, later in pairwise(cycles)):
            raise ValueError("a figure has samples that are not in the order of their cycles")


@dataclass(frozen=True)
class Bound:
    """A ``[[bound]]`` table of a profile: which figures it applies to, and the least and the most they may be.

    :param figure: the name of the figure, one of :data:`~pytest_nixl.model.figure.FIGURE_KINDS`.
    :param source: where the bound is from.
    :param labels: the accepted texts of each label that the table selects by; a label that is not there: any.
    :param at_most: in the figure's unit, as ``at_least``; None: no bound on that side.
    :param default: whether it comes from a check, and applies if no bound of the profile does.
    """

    figure: str
    source: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    at_most: float | None = None
    at_least: float | None = None
    default: bool = False

    def applies(self, figure: Figure) -> bool:
        """Whether this bound applies to a figure."""
        return figure.name == self.figure and all(
            figure.labels.get(label) in accepted for label, accepted in self.labels.items()
        )

    def shared_with(self, other: Bound) -> str:
        """Describe figures that both bounds apply to; empty: there are none."""
        if self.figure != other.figure:
            return ""
        parts = [self.figure]
        for label in {**self.labels, **other.labels}:
            mine, theirs = self.labels.get(label), other.labels.get(label)
            both = [text for text in mine or theirs or () if theirs is None or text in theirs]
            if not both:
                return ""
            parts.append(f"{label} {both[0]}")
        return ", ".join(parts)
