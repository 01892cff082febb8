# SPDX-License-Identifier: Apache-2.0
"""Sizes, rates and times: reading, printing, and the errors for malformed values."""

from __future__ import annotations

import random

import pytest

from pytest_nixl.core import forms, units
from pytest_nixl.core.units import GIB, KIB, MIB, whole_seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("7B", 7),
        ("64KiB", 64 * KIB),
        ("64 kib", 64 * KIB),
        ("64K", 64 * KIB),
        ("1M", MIB),
        ("1MiB", MIB),
        ("2G", 2 * GIB),
        ("2GiB", 2 * GIB),
        ("1KB", 1000),
        ("1MB", 10**6),
        ("1GB", 10**9),
        ("1.5KiB", 1536),
        ("0.5KB", 500),
        (" 8 B ", 8),
        # Not to be had by way of a float.
        ("9007199254740993", 2**53 + 1),
        ("999999999999999999GiB", 999999999999999999 * GIB),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert units.parse_size(text) == size


SIZE = f": expected {forms.SIZE_FORM}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "'' is not a size"),
        ("KiB", "'KiB' is not a size"),
        ("-4KiB", "'-4KiB' is not a size"),
        ("1e6", "'1e6' is not a size"),
        ("0x10", "'0x10' is not a size"),
        (".5MiB", "'.5MiB' is not a size"),
        ("4KiB 8KiB", "'4KiB 8KiB' is not a size"),
        ("٤KiB", "'٤KiB' is not a size"),
        ("9" * 400, f"'{'9' * 400}' is not a size"),
        ("4XiB", "'4XiB' has the unknown unit 'XiB'"),
        ("4KiB/s", "'4KiB/s' has the unknown unit 'KiB/s'"),
        ("0", "'0' is not a whole number of bytes above zero"),
        ("0KiB", "'0KiB' is not a whole number of bytes above zero"),
        ("1.5", "'1.5' is not a whole number of bytes above zero"),
        ("0.3KiB", "'0.3KiB' is not a whole number of bytes above zero"),
    ],
)
def test_a_malformed_size_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        units.parse_size(text)
    assert str(caught.value) == fault + SIZE


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1, "1B"), (1000, "1000B"), (1023, "1023B"), (1024, "1KiB"), (1025, "1025B"), (65536, "64KiB"),
     (MIB, "1MiB"), (MIB + KIB, "1025KiB"), (1536 * KIB, "1536KiB"), (GIB, "1GiB"), (1024 * GIB, "1024GiB")],
)  # fmt: skip
def test_a_size_is_printed_in_the_largest_unit_that_divides_it(size: int, text: str) -> None:
    assert units.format_size(size) == text


def test_every_printed_size_is_read_back_unchanged() -> None:
    chance = random.Random(1)
    sizes = [*range(1, 5000), *(1 << n for n in range(80)), *(chance.randrange(1, 10**18) for _ in range(5000))]
    assert [size for size in sizes if units.parse_size(units.format_size(size)) != size] == []


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("4KiB", (4096,)),
        ("4KiB..4KiB", (4096,)),
        ("4KiB..32KiB", (4096, 8192, 16384, 32768)),
        (" 512 .. 1K ", (512, 1024)),
        ("3..12", (3, 6, 12)),
        ("1MiB,4KiB,6", (MIB, 4096, 6)),
    ],
)
def test_blocks_are_read(text: str, blocks: tuple[int, ...]) -> None:
    assert units.parse_blocks(text) == blocks


BLOCKS = f": expected {forms.BLOCKS_FORM}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"'' is not a size{SIZE}"),
        ("4KiB,", f"'' is not a size{SIZE}"),
        ("4KiB..", f"'' is not a size{SIZE}"),
        ("..4KiB", f"'' is not a size{SIZE}"),
        ("..", f"'' is not a size{SIZE}"),
        ("4KiB...8KiB", f"'.8KiB' is not a size{SIZE}"),
        ("4KiB..8KiB,1MiB", f"'8KiB,1MiB' is not a size{SIZE}"),
        ("4KiB,4096", f"'4KiB,4096' names a size twice{BLOCKS}"),
        ("1..2..4", f"'1..2..4' is not one range{BLOCKS}"),
        ("8KiB .. 4KiB", f"'8KiB .. 4KiB' is a reversed range, 8KiB is more than 4KiB{BLOCKS}"),
        ("4KiB..9KiB", f"'4KiB..9KiB' does not reach 9KiB by doubling 4KiB{BLOCKS}"),
    ],
)
def test_malformed_blocks_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        units.parse_blocks(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((4096,), "4KiB"),
        ((4096, 8192), "4KiB,8KiB"),
        ((4096, 8192, 16384), "4KiB..16KiB"),
        ((16384, 8192, 4096), "16KiB,8KiB,4KiB"),
        ((4096, 8192, 16384, 1000), "4KiB,8KiB,16KiB,1000B"),
    ],
)
def test_blocks_are_printed_as_a_range_if_they_double(blocks: tuple[int, ...], text: str) -> None:
    assert units.format_blocks(blocks) == text
    assert units.parse_blocks(text) == blocks


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("12.5 GB/s", 12.5e9),
        ("12.5GB/s", 12.5e9),
        ("100 Gb/s", 12.5e9),
        ("100 Gbit/s", 12.5e9),
        ("1 Tb/s", 125e9),
        ("8 Mb/s", 1e6),
        ("8 Mbit/s", 1e6),
        ("3 MB/s", 3e6),
        ("3 KB/s", 3e3),
        ("3 B/s", 3.0),
        ("2 GiB/s", 2.0 * GIB),
        ("2 MiB/s", 2.0 * MIB),
        ("0 GB/s", 0.0),
    ],
)
def test_a_rate_is_read(text: str, rate: float) -> None:
    assert units.parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "'' is not a bandwidth"),
        ("fast", "'fast' is not a bandwidth"),
        ("-1 GB/s", "'-1 GB/s' is not a bandwidth"),
        ("inf GB/s", "'inf GB/s' is not a bandwidth"),
        ("nan", "'nan' is not a bandwidth"),
        ("12", "'12' has no unit"),
        ("12 Gb", "'12 Gb' has the wrong unit 'Gb'"),
        ("12 gb/s", "'12 gb/s' has the wrong unit 'gb/s'"),
        ("5 us", "'5 us' has the wrong unit 'us'"),
    ],
)
def test_a_malformed_rate_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        units.parse_rate(text)
    assert str(caught.value) == f"{fault}: expected {forms.RATE_FORM}"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5ns", 5e-9), ("20 us", 20e-6), ("20 \u00b5s", 20e-6), ("20 \u03bcs", 20e-6), ("1.5 ms", 1.5e-3), ("30s", 30.0),
     ("2m", 120.0), ("2 min", 120.0), ("1h", 3600.0)],
)  # fmt: skip
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert units.parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "seconds"), [("2", 2), (" 30s", 30), ("0.5min", 30), ("1h", 3600)])
def test_whole_seconds_are_read(text: str, seconds: int) -> None:
    assert whole_seconds(2, 3600)(text) == seconds


@pytest.mark.parametrize("text", ["1", "2500ms", "0.01min", "3601", "2h"])
def test_seconds_that_are_not_whole_or_not_in_the_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not a whole number of seconds from 2 to 3600"):
        whole_seconds(2, 3600)(text)


def test_a_bare_number_is_a_time_only_with_a_default_unit() -> None:
    assert units.parse_time("30", default_unit="s") == 30.0
    assert units.parse_time("30ms", default_unit="s") == pytest.approx(0.03)
    with pytest.raises(ValueError) as caught:
        units.parse_time("30")
    assert str(caught.value) == f"'30' has no unit: expected {forms.TIME_FORM}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [("", "'' is not a time"), ("soon", "'soon' is not a time"), ("-1s", "'-1s' is not a time"),
     ("1 d", "'1 d' has the wrong unit 'd'"), ("1 GB/s", "'1 GB/s' has the wrong unit 'GB/s'")],
)  # fmt: skip
def test_a_malformed_time_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        units.parse_time(text, default_unit="s")
    assert str(caught.value) == f"{fault}: expected {forms.TIME_FORM}"


@pytest.mark.parametrize(
    ("rate", "gigabytes", "gigabits"),
    [
        (12.5e9, "12.5", "100"),
        (1.2345e9, "1.23", "9.88"),
        (0.06e9, "0.06", "0.48"),
        (99.96e9, "100", "800"),
        (640e9, "640", "5120"),
        (0.0, "0", "0"),
    ],
)
def test_a_rate_is_printed_in_bytes_and_in_bits(rate: float, gigabytes: str, gigabits: str) -> None:
    assert (units.gigabytes(rate), units.gigabits(rate)) == (gigabytes, gigabits)


@pytest.mark.parametrize(
    ("seconds", "text"), [(20e-6, "20"), (1.2345e-6, "1.23"), (1e-9, "0.001"), (1.5e-3, "1500"), (0.25, "250000")]
)
def test_a_time_is_printed_in_microseconds(seconds: float, text: str) -> None:
    assert units.microseconds(seconds) == text


def test_a_printed_rate_has_three_significant_digits() -> None:
    chance = random.Random(2)
    for _ in range(1000):
        rate = 10 ** chance.uniform(7, 12)
        assert units.parse_rate(f"{units.gigabytes(rate)} GB/s") == pytest.approx(rate, rel=0.006)
        assert units.parse_rate(f"{units.gigabits(rate)} Gb/s") == pytest.approx(rate, rel=0.006)
