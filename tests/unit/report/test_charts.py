# SPDX-License-Identifier: Apache-2.0
"""The charts of a report: which lines, names and scales each has, and where they are drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from helpers.records import key, record

from pytest_nixl.report.charts import (
    ChartCard,
    Series,
    change_bar,
    change_scale,
    changes_axis,
    history,
    lines,
    nice_step,
    sizes_axis,
    time_text,
    value_axis,
)
from pytest_nixl.report.charts import bandwidth as bandwidth_cards
from pytest_nixl.report.charts import latency as latency_cards
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

PAIR = "UCX/READ/DRAM:VRAM/{}/batch8/depth4/2-5/threads=4"


def run(rows: Mapping[str, list[float]], week: int = 0, **facts: Any) -> RecordedRun:
    figures = {"floor": 5e8, "ceiling": 9e9, "p50_us": 1.5, "p90_us": 0.0, "p99_us": 4.0, "p99.9_us": 8.0}
    return parse_recorded(record(f"reg/nixl:1.{week}", rows, week=week, extra=figures, **facts), f"{week}.json")


def drawn(card: ChartCard, unit: float) -> tuple[str, list[tuple[str, str, list[tuple[float, float]]]], list[str]]:
    """Return the title, the lines by KiB and a unit, and the remarks of a chart."""
    legend = [(line.name, line.style, [(x / 1024, round(y / unit, 9)) for x, y in line.points]) for line in card.legend]
    return card.title, legend, list(card.remarks)


def test_each_group_of_rows_has_its_lines_bounds_and_baseline() -> None:
    """Bounds far above all rows are a remark. KV requests have charts of their own."""
    rows = {key("1MiB"): [8.0], key("4KiB"): [2.0, 2.2, 1.9], key("64KiB", "READ"): [3.0], key("1MiB", "READ"): [7.0],
            PAIR.format("64KiB"): [1.0], PAIR.format("128KiB"): [1.5], f"{key('1MiB')}/kv=x": [3.0]}  # fmt: skip
    now = run(rows, nics={"eth0": "25 Gb/sec (4X)"})
    before = run({key("4KiB"): [1.0], key("1MiB"): [4.0], key("2KiB"): [1.0], key("2MiB"): [1.0]}, 1)
    first, second = bandwidth_cards(now, before)
    sizes = [4.0, 64.0, 1024.0]
    assert drawn(first, 1e9) == (
        "UCX DRAM:DRAM",
        [
            ("WRITE before", "s0 before", [(4.0, 1.0), (1024.0, 4.0)]),
            ("WRITE", "s0", [(4.0, 2.0), (1024.0, 8.0)]),
            ("READ", "s1", [(64.0, 3.0), (1024.0, 7.0)]),
            ("floor", "floor", [(size, 0.5) for size in sizes]),
            ("ceiling", "limit", [(size, 9.0) for size in sizes]),
            ("line rate", "limit", [(size, 3.125) for size in sizes]),
        ],
        [],
    )
    assert first.legend[1].labels == ("WRITE 4KiB: 2 GB/s (16 Gb/s)", "WRITE 1MiB: 8 GB/s (64 Gb/s)")
    assert first.legend[1].spread == ((4096.0, 2e9), (4096.0, 2.2e9), (4096.0, 1.9e9))
    assert 'aria-label="bandwidth of UCX DRAM:DRAM"' in first.drawing
    assert drawn(second, 1e9) == (
        "UCX DRAM:VRAM, batch 8, depth 4, ranks 2-5, threads 4",
        [
            ("READ", "s0", [(64.0, 1.0), (128.0, 1.5)]),
            ("floor", "floor", [(64.0, 0.5), (128.0, 0.5)]),
            ("line rate", "limit", [(64.0, 3.125), (128.0, 3.125)]),
        ],
        ["ceiling 9 GB/s (72 Gb/s), far above"],
    )
    cards = latency_cards(now)
    titles = [
        "UCX DRAM:DRAM, WRITE",
        "UCX DRAM:DRAM, READ",
        "UCX DRAM:VRAM, batch 8, depth 4, ranks 2-5, threads 4, READ",
    ]
    assert [card.title for card in cards] == titles
    assert drawn(cards[1], 1e-6)[1] == [
        (name, style, [(64.0, value), (1024.0, value)])
        for name, style, value in (("p50", "s0", 1.5), ("p99", "s2", 4.0), ("p99.9", "s3", 8.0))
    ]
    assert cards[1].legend[0].labels == ("p50 of 64KiB: 1.5 µs", "p50 of 1MiB: 1.5 µs")


@pytest.mark.parametrize(
    ("nics", "rate"),
    [
        ({"eth0": "25 Gb/sec (4X)"}, 3.125), ({"eth0:1": "2500 Mb/s"}, 0.3125), ({"eth0": "25"}, None), (None, None),
        ({"eth0": "fast Gb/s"}, None), ({"eth1": "25 Gb/s"}, None),
    ],
)  # fmt: skip
def test_the_line_rate_is_that_of_the_cards_of_the_transports(nics: Any, rate: float | None) -> None:
    [card] = bandwidth_cards(run({key("4KiB"): [1.0]}, nics=nics))
    legend = {name: points for name, _, points in drawn(card, 1e9)[1]}
    assert legend.get("line rate") == (None if rate is None else [(4.0, rate)])


def test_the_history_of_a_row_marks_its_changes_and_names_the_images() -> None:
    runs = [run({key("4KiB"): [2.0], key("1MiB"): [2.0 if week < 6 else 1.5]}, week,
                versions={"ucx": "1.19" if week < 6 else "1.20"}) for week in range(12)]  # fmt: skip
    changed, steady = history(runs)
    assert (changed.title, steady.title) == ("UCX WRITE DRAM:DRAM 1MiB", "UCX WRITE DRAM:DRAM 4KiB")
    differences = "image: reg/nixl:1.5 -> reg/nixl:1.6; versions ucx: 1.19 -> 1.20"
    assert (changed.remarks, steady.remarks) == ([f"-25.0 % from reg/nixl:1.6 on ({differences})"], [])
    titles = re.findall(r"<title>(.*?)</title>", changed.drawing)
    assert titles[:2] == ["-25.0 %", "reg/nixl:1.0, 2026-03-02 03:00 UTC: 2 GB/s (16 Gb/s)"]
    assert len(titles) == 13
    ticks = re.findall(r'class="tick"[^>]*>([^<]*)<', changed.drawing)
    assert ticks == ["0", "0.5", "1", "1.5", "2", "2.5", "1.0", "1.3", "1.6", "1.9"]
    assert re.findall(r'class="title"[^>]*>([^<]*)<', changed.drawing) == ["runs, 2026-03-02 to 2026-05-18", "GB/s"]
    assert re.findall(r'class="mark" x1="([\d.]+)" x2="([\d.]+)"', changed.drawing) == [("287.0", "287.0")]
    [points] = re.findall(r'points="([^"]*)"', changed.drawing)
    assert points.split()[4:7] == ["227.3,62.0", "267.1,62.0", "306.9,110.0"]
    assert history(runs[:1]) == []


def elements(drawing: str) -> list[str]:
    """Return the elements of a drawing in order: the values of the attributes of each, and its text."""
    parts = re.findall(r"<\w+([^>]*)>([^<]*)", drawing)
    return [" ".join((*re.findall(r'="([^"]*)"', attributes), text)).strip() for attributes, text in parts]


def test_a_chart_has_its_scales_marks_and_lines() -> None:
    """The drawing is 520 by 300 points. A line goes from the left below to the right above; one point is a circle."""
    x = sizes_axis([4096.0, 65536.0, 1048576.0], lambda value: f"{value / 1024:g} <K>")
    y = value_axis([1e9, 4e9], lambda value: f"{value / 1e9:g}", "GB/s")
    series = [
        Series("a <b>", ((4096.0, 0.0), (65536.0, 2.5e9), (1048576.0, 5e9)), "s0", spread=((65536.0, 1.25e9),)),
        Series("one", ((4096.0, 5e9),), "s1"),
        Series("two", ((4096.0, 4e9), (65536.0, 5e9)), "s2", labels=("left", "<right>")),
    ]
    assert elements(lines(x, y, series, "x & y", [(16384.0, "<changed>")])) == [
        "0 0 520 300 img x &amp; y",
        *("grid 68.0 506.0 254.0 254.0", "tick end 60.0 258.5 0", "grid 68.0 506.0 206.0 206.0"),
        *("tick end 60.0 210.5 1", "grid 68.0 506.0 158.0 158.0", "tick end 60.0 162.5 2"),
        *("grid 68.0 506.0 110.0 110.0", "tick end 60.0 114.5 3", "grid 68.0 506.0 62.0 62.0", "tick end 60.0 66.5 4"),
        *("grid 68.0 506.0 14.0 14.0", "tick end 60.0 18.5 5"),
        *("tickmark 68.0 68.0 254.0 259.0", "tick middle 68.0 275.0 4 &lt;K&gt;"),
        *("tickmark 287.0 287.0 254.0 259.0", "tick middle 287.0 275.0 64 &lt;K&gt;"),
        *("tickmark 506.0 506.0 254.0 259.0", "tick end 518.0 275.0 1024 &lt;K&gt;"),
        *("axis 68.0 506.0 254.0 254.0", "title end 506.0 294.0 block", "title 4 294.0 GB/s"),
        *("mark 177.5 177.5 14.0 254.0", "&lt;changed&gt;"),
        *("dot s0 287.0 194.0 2.6", "a &lt;b&gt;, one launch: 1.25 GB/s"),
        "line s0 68.0,254.0 287.0,134.0 506.0,14.0",
        *("line s1 68.0,14.0", "point s1 68.0 14.0 4", ""),
        *("line s2 68.0,62.0 287.0,14.0", "point s2 68.0 62.0 4", "left", "point s2 287.0 14.0 4", "&lt;right&gt;"),
    ]
    seven = sizes_axis([float(1 << power) for power in range(7)], str)
    assert seven.ticks == (1.0, 4.0, 16.0, 64.0)
    assert [seven.share(value) for value in (1.0, 8.0, 64.0)] == [0.0, 0.5, 1.0]
    assert sizes_axis([8.0, 8.0], str).share(8.0) == 0.5


def test_a_change_is_drawn_with_its_interval_over_the_band_of_what_is_unchanged() -> None:
    """A change beyond the axis is at its end, and only each second of many names is shown, zero among them."""
    axis = changes_axis([-0.1, 0.04])
    grid = ["grid 26.0 26.0 0 24", "grid 88.7 88.7 0 24", "axis 151.3 151.3 0 24", "grid 214.0 214.0 0 24"]
    band = ["0 0 240 24 img -5.0 % &lt;", "band 88.7 2 125.3 20.0", *grid]
    bar = change_bar(axis, 0.95, (0.9, 1.0), 0.05, "bad", "-5.0 % <")
    assert elements(bar) == [*band, "interval bad 26.0 151.3 12.0 12.0", "point bad 88.7 12.0 4.5"]
    assert elements(change_bar(axis, 1.5, None, 0.05, "good", "-5.0 % <")) == [*band, "point good 214.0 12.0 4.5"]
    assert elements(change_scale(axis)) == [
        "0 0 240 24 img axis from -10 % to +5 %", "tick middle 26.0 17 -10 %", "tick middle 88.7 17 -5 %",
        "tick middle 151.3 17 0", "tick middle 214.0 17 +5 %",
    ]  # fmt: skip
    assert elements(change_scale(changes_axis([-0.11, 0.09]))) == [
        "0 0 240 24 img axis from -15 % to +10 %", "tick middle 63.6 17 -10 %", "tick middle 138.8 17 0",
        "tick middle 214.0 17 +10 %",
    ]  # fmt: skip
    assert changes_axis([3.0]).high == 100.0


def test_sizes_are_in_order_whatever_the_record_has() -> None:
    sizes = {key(size): [float(number)] for number, size in enumerate(("4KiB", "64KiB", "1MiB"), 1)}
    for draw in (bandwidth_cards, latency_cards):
        first, second = (
            draw(parse_recorded(record("image:1", dict(items)), "r.json"))
            for items in (sizes.items(), reversed(sizes.items()))
        )
        assert first == second != []


@pytest.mark.parametrize("value", [1.0, 1.01, 2.0, 2.3, 2.6, 4.9, 5.1, 9.9, 0.03, 7e9])
def test_a_step_of_an_axis_is_the_least_round_number_that_is_large_enough(value: float) -> None:
    rounds = [factor * 10.0**power for power in range(-3, 11) for factor in (1, 2, 2.5, 5)]
    assert nice_step(value) == pytest.approx(min(step for step in rounds if step >= value))


@pytest.mark.parametrize(
    ("values", "ticks"), [((2.0, 900.0), (1, 10, 100, 1000)), ((10.0, 1e4), (10, 100, 1e3, 1e4, 1e5))]
)
def test_a_logarithmic_axis_has_a_name_at_each_power_of_ten(
    values: tuple[float, ...], ticks: tuple[float, ...]
) -> None:
    axis = value_axis(values, str, "GB/s")
    assert (axis.low, *axis.ticks[1:-1], axis.high) == ticks
    assert value_axis((1.0, 30.0), str, "GB/s").ticks == (0.0, 10.0, 20.0, 30.0, 40.0)


def test_charts_of_one_kind_have_one_scale_and_its_names_differ() -> None:
    """Rows of tens of GB/s beside rows of some KB/s, as a mistake leaves them."""
    fast, slow = (
        {key(size, pair=pair): [rate] for size in ("64KiB", "1MiB")} for pair, rate in (("0-1", 40.0), ("1-0", 4e-6))
    )
    for rates in ({**fast, **slow}, slow):
        cards = bandwidth_cards(parse_recorded(record("image:1", rates), "r.json"))
        scales = {tuple(re.findall(r'text-anchor="end" x="60.0"[^>]*>([^<]+)', card.drawing)) for card in cards}
        assert len(cards) > len(scales) == 1 or len(cards) == 1
        [names] = scales
        assert len(set(names)) == len(names) > 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.166919, "167 ms"), (3.71e-6, "3.71 µs"), (1.5, "1.5 s"), (9e-8, "90 ns"), (0.9995, "1 s"), (120.0, "120 s")],
)
def test_a_time_has_the_unit_that_fits_it(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
