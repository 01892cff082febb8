# SPDX-License-Identifier: Apache-2.0
"""Read and print sizes in bytes, rates in bytes per second, and times in seconds.

Every ``parse_`` function raises :class:`ValueError` with one sentence that names the accepted form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from pytest_nixl.core.forms import BLOCKS_FORM, FREQUENCY_FORM, RATE_FORM, SIZE_FORM, TIME_FORM

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_SIZES = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "m": MIB,
    "mib": MIB,
    "g": GIB,
    "gib": GIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_RATES = {
    "GB/s": 1e9,
    "MB/s": 1e6,
    "KB/s": 1e3,
    "B/s": 1.0,
    "GiB/s": float(GIB),
    "MiB/s": float(MIB),
    "Tb/s": 1e12 / 8,
    "Gb/s": 1e9 / 8,
    "Mb/s": 1e6 / 8,
    "Gbit/s": 1e9 / 8,
    "Mbit/s": 1e6 / 8,
}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

# The number of digits is limited so that every number is finite. Both Unicode micro signs are accepted.
_NUMBER = re.compile(r"\s*([0-9]{1,18})(?:\.([0-9]{1,18}))?\s*([A-Za-zµμ/]*)\s*")


def _split(text: str, subject: str, form: str) -> tuple[str, str, str]:
    """Return the digits before the point, those after it, and the unit."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a {subject}: expected {form}")
    return match[1], match[2] or "", match[3].replace("μ", "µ")


def _scaled(text: str, subject: str, form: str, units: Mapping[str, float], default_unit: str = "") -> float:
    whole, fraction, unit = _split(text, subject, form)
    unit = unit or default_unit
    if unit not in units:
        fault = f"has the wrong unit {unit!r}" if unit else "has no unit"
        raise ValueError(f"{text!r} {fault}: expected {form}")
    return float(f"{whole}.{fraction}") * units[unit]


def parse_size(text: str) -> int:
    """Read a size in bytes: ``64KiB``, ``1M``, ``4096``.

    :raises ValueError: if it is not a whole number of bytes above zero.
    """
    whole, fraction, unit = _split(text, "size", SIZE_FORM)
    if unit.lower() not in _SIZES:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}: expected {SIZE_FORM}")
    # Use integers only: from 8 PiB on, a float would be wrong by bytes.
    scale: int = 10 ** len(fraction)
    size, remainder = divmod(int(whole + fraction) * _SIZES[unit.lower()], scale)
    if remainder or size < 1:
        raise ValueError(f"{text!r} is not a whole number of bytes above zero: expected {SIZE_FORM}")
    return size


def format_size(size: int) -> str:
    """Print a size in the largest binary unit that divides it: ``65536`` is ``64KiB``, ``1000`` is ``1000B``."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def parse_blocks(text: str) -> tuple[int, ...]:
    """Read block sizes in bytes: a doubling range ``4KiB..64MiB``, or a list ``4KiB,1MiB`` in its given order.

    :raises ValueError: if it is neither, or if it names a size twice.
    """
    if ".." not in text:
        sizes = tuple(parse_size(part) for part in text.split(","))
        if len(set(sizes)) != len(sizes):
            raise ValueError(f"{text!r} names a size twice: expected {BLOCKS_FORM}")
        return sizes
    parts = [part.strip() for part in text.split("..")]
    if len(parts) != 2:
        raise ValueError(f"{text!r} is not one range: expected {BLOCKS_FORM}")
    first, last = parse_size(parts[0]), parse_size(parts[1])
    if first > last:
        raise ValueError(f"{text!r} is a reversed range, {parts[0]} is more than {parts[1]}: expected {BLOCKS_FORM}")
    sizes = (first,)
    while sizes[-1] * 2 <= last:
        sizes = (*sizes, sizes[-1] * 2)
    if sizes[-1] != last:
        raise ValueError(f"{text!r} does not reach {parts[1]} by doubling {parts[0]}: expected {BLOCKS_FORM}")
    return sizes


def format_blocks(blocks: Sequence[int]) -> str:
    """Print block sizes: as a range ``4KiB..64MiB`` if they double, else as a list."""
    doubling = all(b == 2 * a for a, b in pairwise(blocks))
    if len(blocks) > 2 and doubling:
        return f"{format_size(blocks[0])}..{format_size(blocks[-1])}"
    return ",".join(format_size(block) for block in blocks)


def parse_rate(text: str) -> float:
    """Read a bandwidth in bytes per second: ``12.5 GB/s``, ``100 Gb/s``.

    :raises ValueError: if it is not a number with a known unit.
    """
    return _scaled(text, "bandwidth", RATE_FORM, _RATES)


def parse_time(text: str, *, default_unit: str = "") -> float:
    """Read a time in seconds: ``30s``, ``100 us``.

    :param default_unit: unit of a bare number; if it is empty, a bare number is refused.
    :raises ValueError: if it is not a number with a known unit.
    """
    return _scaled(text, "time", TIME_FORM, _TIMES, default_unit)


def whole_seconds(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of a time of whole seconds; a bare number is seconds.

    :param least: the least accepted number of seconds.
    :param most: the largest.
    """

    def parse(text: str) -> int:
        seconds = parse_time(text, default_unit="s")
        if seconds != int(seconds) or not least <= seconds <= most:
            raise ValueError(f"{text.strip()!r} is not a whole number of seconds from {least} to {most}")
        return int(seconds)

    return parse


def parse_frequency(text: str) -> float:
    """Read how often something happens, per second: ``10000/s``.

    :raises ValueError: if it is not a number with the unit ``/s``.
    """
    return _scaled(text, "frequency", FREQUENCY_FORM, {"/s": 1.0})


def gigabytes(rate: float) -> str:
    """Print bytes per second as GB/s (1e9 bytes) with three significant digits, unit not included."""
    value = rate / 1e9
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def gigabits(rate: float) -> str:
    """Print bytes per second as Gb/s with three significant digits, unit not included."""
    return gigabytes(rate * 8)


def microseconds(seconds: float) -> str:
    """Print a time in microseconds with three significant digits, unit not included."""
    value = seconds * 1e6
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def parse_share(text: str) -> float:
    """Parse a percentage: ``5%`` is 0.05. :raises ValueError: if it is not between 0 % and 100 %."""
    number = text.strip().removesuffix("%").strip()
    if not text.strip().endswith("%") or not re.fullmatch(r"\d+(\.\d+)?", number):
        raise ValueError(f"{text!r} is not a percentage")
    if not 0 < float(number) < 100:
        raise ValueError(f"{text!r} is not between 0 % and 100 %")
    return float(number) / 100
