# SPDX-License-Identifier: Apache-2.0
"""The strict reader of Prometheus' text format, beside Prometheus' own writer and parser."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pytest_nixl.core.metrics_text import MOST_LINE, MOST_TEXT, MetricSample, read_metrics, total
from pytest_nixl.core.strict import StrictError


def test_series_have_names_labels_and_values_and_blanks_mean_nothing() -> None:
    text = b'# HELP a what\n# TYPE a counter\na_total{x="1",y="two words",} 3 1700000000000\r\n\nvllm:b 1e-3\n c{} +Inf'
    text += b'\nd{x="1" } 2\ne { x="1"} 2\nf\t{x="1", }\t2\ng  {x="1"}   2 1764000000'
    text += b"\n" + rb'h{path="C:\\x \"y\"\nz}"} 1'
    assert read_metrics(text) == [
        MetricSample("a_total", {"x": "1", "y": "two words"}, 3.0),
        MetricSample("vllm:b", {}, 0.001),
        MetricSample("c", {}, math.inf),
        *(MetricSample(name, {"x": "1"}, 2.0) for name in "defg"),
        MetricSample("h", {"path": 'C:\\x "y"\nz}'}, 1.0),
    ]


@pytest.mark.parametrize("number", ["NaN", "Nan", "nan"])
def test_not_a_number_is_a_value_as_nixl_writes_it(number: str) -> None:
    (sample,) = read_metrics(f'exposer_request_latencies{{quantile="0.5"}} {number}'.encode())
    assert math.isnan(sample.value)


NAME, BLANK = "expected a metric's name and value", "expected a blank after the metric's name"
LABELS = 'expected name="value", …'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "it has no series"),
        (b"# only a comment\n", "it has no series"),
        (b"\xff 1", "it is not UTF-8"),
        (b"<!DOCTYPE html><html></html>", f"line 1 is '<!DOCTYPE html><html></html>': {NAME}"),
        (b'{"status": "ok"}', f"""line 1 is '{{"status": "ok"}}': {NAME}"""),
        (b"a 1\nb", f"line 2 is 'b': {BLANK}"),
        (b"a-b 1", f"line 1 is 'a-b 1': {BLANK}"),
        (b"a ", f"line 1 is 'a': {BLANK}"),
        (b"a{}", "line 1 has the value '': expected a number"),
        *((b"a %s" % value, f"line 1 has the value {value.decode()!r}: expected a number")
          for value in (b"1_000", b"0x10", b"+", b"e5", b".", b"1e12345", b"-nan", b"infinity")),
        (b"a 1 2 3", "line 1 has '2 3' after its value: expected a timestamp"),
        (b"a 1 2 3 4", "line 1 has '2 3' after its value: expected a timestamp"),
        (b"a 1 x", "line 1 has 'x' after its value: expected a timestamp"),
        (b'a 1 # {x="y"} 1', """line 1 has '# {x="y"}' after its value: expected a timestamp"""),
        (b'a{x="1" 1', f"""line 1 has the labels 'x="1" 1': {LABELS}"""),
        (b'a{="1"} 1', f"""line 1 has the labels '="1"}} 1': {LABELS}"""),
        (b'a{x="1"y="2"} 1', f"""line 1 has the labels 'x="1"y="2"}} 1': {LABELS}"""),
        (b"a{x=1} 1", f"line 1 has the labels 'x=1}} 1': {LABELS}"),
        (b'a{x="1",x="2"} 1', "line 1 has the label 'x' twice"),
        (b'a{x="1"} 1\n\na{x="1"} 2', """line 3 repeats the series 'a{x="1"} 2'"""),
        (b'a{x="1",y="2"} 1\na{y="2",x="1"} 2', """line 2 repeats the series 'a{y="2",x="1"} 2'"""),
        (b"agent_errors_total 1\nagent_errors_total{ 5\n", f"line 2 has the labels ' 5': {LABELS}"),
        (b"a" * (MOST_LINE + 1), "line 1 has 65537 characters: expected at most 65536"),
        (b"a" * MOST_LINE, f"line 1 is '{60 * 'a'}'…: {BLANK}"),
        (b"\n" * (MOST_TEXT + 1), "it has more than 16 MiB"),
    ],
)  # fmt: skip
def test_what_is_not_metrics_is_refused_with_one_sentence(text: bytes, reason: str) -> None:
    with pytest.raises(StrictError) as refused:
        read_metrics(text)
    assert str(refused.value) == reason


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(StrictError):
        read_metrics(data)


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=4, unique=True))
def test_it_reads_what_the_library_of_prometheus_writes_as_its_parser_does(values: list[str]) -> None:
    registry = CollectorRegistry()
    counter, gauge = Counter("a", "what\nit is", ["x"], registry=registry), Gauge("b", "", registry=registry)
    gauge.set(-1.5)
    histogram = Histogram("c", "", registry=registry)
    for number, value in enumerate(values):
        counter.labels(value).inc(number)
        histogram.observe(number)
    text = generate_latest(registry)
    expected = {
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert {
        (metric.name, tuple(sorted(metric.labels.items())), metric.value) for metric in read_metrics(text)
    } == expected


def test_series_of_a_metric_are_added_by_labels() -> None:
    samples = read_metrics(b'a{x="1",y="1"} 1\na{x="1",y="2"} 2\na{x="2",y="1"} 4')
    assert total(samples, "a") == 7
    assert total(samples, "a", x="1") == 3
    assert total(samples, "b") is None
