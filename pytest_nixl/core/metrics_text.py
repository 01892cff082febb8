# SPDX-License-Identifier: Apache-2.0
"""Read Prometheus' text format as another process wrote it: ``name{label="value"} number``.

For any bytes the only exception is :class:`~pytest_nixl.core.strict.StrictError`, with one short sentence that names
the line. The whole text is refused if one line is wrong, because a reader that skips lines reports sums that are too
small.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pytest_nixl.core.strict import StrictError, shorten

#: The most bytes of a text, of one line, and the most series. vLLM with many engines writes about 1 MiB.
MOST_TEXT, MOST_LINE, MOST_SERIES = 16 << 20, 1 << 16, 1 << 18
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*')
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?|[+-]?inf|nan", re.IGNORECASE)
_TIMESTAMP = re.compile(r"-?[0-9]{1,19}")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class MetricSample:
    """The value of one series.

    :param labels: its labels by name.
    :param value: may be infinite or NaN.
    """

    name: str
    labels: Mapping[str, str] = field(hash=False)
    value: float


def read_metrics(data: bytes) -> list[MetricSample]:
    """Return the samples of a text, in its order.

    :param data: UTF-8 text in version 0.0.4 of the format.
    :raises StrictError: if it is not such a text, has no sample, names a series twice, or is too large.
    """
    if len(data) > MOST_TEXT:
        raise StrictError(f"it has more than {MOST_TEXT >> 20} MiB")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise StrictError("it is not UTF-8") from None
    samples: dict[tuple[str, frozenset[tuple[str, str]]], MetricSample] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip(" \t\r")
        if not line or line.startswith("#"):
            continue
        if len(line) > MOST_LINE:
            raise StrictError(f"line {number} has {len(line)} characters: expected at most {MOST_LINE}")
        sample = _sample(line, number)
        key = sample.name, frozenset(sample.labels.items())
        if key in samples:
            raise StrictError(f"line {number} repeats the series {shorten(line)}")
        if len(samples) == MOST_SERIES:
            raise StrictError(f"it has more than {MOST_SERIES} series")
        samples[key] = sample
    if not samples:
        raise StrictError("it has no series")
    return list(samples.values())


def _sample(line: str, number: int) -> MetricSample:
    name = _NAME.match(line)
    if name is None:
        raise StrictError(f"line {number} is {shorten(line)}: expected a metric's name and value")
    labels_and_value = line[name.end() :].lstrip(" \t")
    labels: dict[str, str] = {}
    if labels_and_value.startswith("{"):
        labels, labels_and_value = _labels(labels_and_value[1:], number)
    elif len(line) - name.end() == len(labels_and_value):
        raise StrictError(f"line {number} is {shorten(line)}: expected a blank after the metric's name")
    value, *timestamp = labels_and_value.split()[:3] or [""]
    if _NUMBER.fullmatch(value) is None:
        raise StrictError(f"line {number} has the value {shorten(value)}: expected a number")
    if timestamp and (len(timestamp) > 1 or _TIMESTAMP.fullmatch(timestamp[0]) is None):
        raise StrictError(f"line {number} has {shorten(' '.join(timestamp))} after its value: expected a timestamp")
    return MetricSample(name[0], labels, float(value))


def _labels(text: str, number: int) -> tuple[dict[str, str], str]:
    """Return the labels at the start of a text, which follow ``{``, and what follows ``}``."""
    labels: dict[str, str] = {}
    place = 0
    while (match := _LABEL.match(text, place)) is not None:
        if match[1] in labels:
            raise StrictError(f"line {number} has the label {shorten(match[1])} twice")
        labels[match[1]] = re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), match[2])
        place = match.end()
        if not text.startswith(",", place):
            break
        place += 1
    place += len(text) - place - len(text[place:].lstrip(" \t"))
    if not text.startswith("}", place):
        raise StrictError(f'line {number} has the labels {shorten(text)}: expected name="value", …')
    return labels, text[place + 1 :]


def total(samples: Iterable[MetricSample], name: str, **labels: str) -> float | None:
    """Return the sum of all series of a metric that have these labels; None if there is no such series."""
    values = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
    return sum(values) if values else None
