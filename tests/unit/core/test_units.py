# SPDX-License-Identifier: Apache-2.0
"""Sizes, rates and times: reading, printing, and the errors for malformed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from pytest_nixl.core import forms, units
from pytest_nixl.core.units import GIB, KIB, MIB

SECONDS = units.whole_seconds(2, 3600)


def time_in_seconds(text: str) -> float:
    return units.parse_time(text, default_unit="s")


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (units.parse_size, {
            "1": 1, "64 kib": 64 * KIB, "64K": 64 * KIB, "1M": MIB, "1MiB": MIB, "2G": 2 * GIB, "2GiB": 2 * GIB,
            "1KB": 1000, "1MB": 10**6, "1GB": 10**9, "1.5KiB": 1536, " 8 B ": 8,
            # No float has these.
            "9007199254740993": 2**53 + 1, "999999999999999999GiB": 999999999999999999 * GIB,
        }),
        (units.parse_blocks, {
            "4KiB": (4096,), "4KiB..4KiB": (4096,), "4KiB..32KiB": (4096, 8192, 16384, 32768),
            " 512 .. 1K ": (512, 1024), "3..12": (3, 6, 12), "1MiB,4KiB,6": (MIB, 4096, 6),
        }),
        (SECONDS, {"2": 2, " 30s": 30, "0.5min": 30, "1h": 3600}),
    ],
)  # fmt: skip
def test_a_whole_number_is_read(read: Callable[[str], object], values: Mapping[str, object]) -> None:
    assert {text: repr(read(text)) for text in values} == {text: repr(value) for text, value in values.items()}


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (units.parse_rate, {
            "12.5GB/s": 12.5e9, "100 Gb/s": 12.5e9, "100 Gbit/s": 12.5e9, "1 Tb/s": 125e9, "8 Mb/s": 1e6,
            "8 Mbit/s": 1e6, "3 MB/s": 3e6, "3 KB/s": 3e3, "3 B/s": 3.0, "2 GiB/s": 2.0 * GIB, "2 MiB/s": 2.0 * MIB,
        }),
        (units.parse_time, {
            "5ns": 5e-9, "20 us": 20e-6, "20 \u00b5s": 20e-6, "20 \u03bcs": 20e-6, "1.5 ms": 1.5e-3, "30s": 30.0,
            "2m": 120.0, "2 min": 120.0, "1h": 3600.0,
        }),
        (time_in_seconds, {"30": 30.0, "30ms": 0.03}),
        (units.parse_frequency, {"10000/s": 1e4, "0.5 /s": 0.5}),
        (units.parse_share, {"5%": 0.05, " 2.5 % ": 0.025, "99.9%": 0.999}),
    ],
)  # fmt: skip
def test_a_number_with_a_unit_is_read(read: Callable[[str], float], values: Mapping[str, float]) -> None:
    assert {text: read(text) for text in values} == pytest.approx(values)


SIZE, BLOCKS = f": expected {forms.SIZE_FORM}", f": expected {forms.BLOCKS_FORM}"
RATE, TIME = f": expected {forms.RATE_FORM}", f": expected {forms.TIME_FORM}"


@pytest.mark.parametrize(
    ("read", "faults", "form"),
    [
        (units.parse_size, {
            **{text: f"{text!r} is not a size" for text in (
                "", "KiB", "-4KiB", "1.KiB", "1e6", "0x10", ".5MiB", "4KiB 8KiB", "٤KiB", 400 * "9")},
            "4XiB": "'4XiB' has the unknown unit 'XiB'",
            **{text: f"{text!r} is not a whole number of bytes above zero" for text in ("0", "0.3KiB")},
        }, SIZE),
        (units.parse_blocks, {
            **dict.fromkeys(("", "4KiB,", "4KiB..", "..4KiB"), "'' is not a size"),
            "4KiB..8KiB,1MiB": "'8KiB,1MiB' is not a size",
        }, SIZE),
        (units.parse_blocks, {
            "4KiB,4096": "'4KiB,4096' names a size twice", "1..2..4": "'1..2..4' is not one range",
            "8KiB .. 4KiB": "'8KiB .. 4KiB' is a reversed range, 8KiB is more than 4KiB",
            "4KiB..9KiB": "'4KiB..9KiB' does not reach 9KiB by doubling 4KiB",
        }, BLOCKS),
        (units.parse_rate, {
            **{text: f"{text!r} is not a bandwidth" for text in ("", "-1 GB/s", "inf GB/s")},
            "12": "'12' has no unit", "12 gb/s": "'12 gb/s' has the wrong unit 'gb/s'",
        }, RATE),
        (time_in_seconds, {
            "-1s": "'-1s' is not a time", "1 d": "'1 d' has the wrong unit 'd'",
        }, TIME),
        (units.parse_time, {"30": "'30' has no unit"}, TIME),
        (SECONDS, {text: f"{text!r} is not a whole number of seconds from 2 to 3600"
                   for text in ("1", "2500ms", "3601")}, ""),
        (units.parse_frequency, {"often": "'often' is not a frequency"}, f": expected {forms.FREQUENCY_FORM}"),
        (units.parse_share, {
            **{text: f"{text!r} is not a percentage" for text in ("5", "1e1%")},
            **{text: f"{text!r} is not between 0 % and 100 %" for text in ("0%", "100%")},
        }, ""),
    ],
)  # fmt: skip
def test_a_malformed_text_is_refused(read: Callable[[str], object], faults: Mapping[str, str], form: str) -> None:
    for text, fault in faults.items():
        with pytest.raises(ValueError) as caught:
            read(text)
        assert str(caught.value) == f"{fault}{form}"


def test_a_size_is_printed_in_the_largest_unit_that_divides_it() -> None:
    texts = {0: "0B", 1023: "1023B", 1024: "1KiB", 1025: "1025B", MIB: "1MiB", MIB + KIB: "1025KiB", GIB: "1GiB",
             1024 * GIB: "1024GiB"}  # fmt: skip
    assert {size: units.format_size(size) for size in texts} == texts


def test_blocks_are_printed_as_a_range_if_they_double() -> None:
    texts = {(4096,): "4KiB", (4096, 8192): "4KiB,8KiB", (4096, 8192, 16384): "4KiB..16KiB",
             (16384, 8192, 4096): "16KiB,8KiB,4KiB", (4096, 8192, 16384, 1000): "4KiB,8KiB,16KiB,1000B"}  # fmt: skip
    assert {blocks: units.format_blocks(blocks) for blocks in texts} == texts
    assert [units.parse_blocks(text) for text in texts.values()] == list(texts)


def test_rates_and_times_are_printed_with_three_significant_digits() -> None:
    rates = {12.5e9: ("12.5", "100"), 1.2345e9: ("1.23", "9.88"), 0.06e9: ("0.06", "0.48"), 99.96e9: ("100", "800"),
             640e9: ("640", "5120"), 0.0: ("0", "0")}  # fmt: skip
    assert {rate: (units.gigabytes(rate), units.gigabits(rate)) for rate in rates} == rates
    times = {20e-6: "20", 1.2345e-6: "1.23", 1e-9: "0.001", 1.5e-3: "1500", 0.25: "250000"}
    assert {seconds: units.microseconds(seconds) for seconds in times} == times
