# SPDX-License-Identifier: Apache-2.0
"""Lists and counts in sentences."""

from __future__ import annotations

from collections.abc import Iterable


def named(names: Iterable[str], most: int = 4) -> str:
    """Join names with commas and shorten a long list: ``a, b, c, d and 28 more``.

    :param most: how many names to print before the rest is only counted.
    """
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed) if more <= 1 else f"{', '.join(listed[:most])} and {more} more"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 GPU``, ``8 GPUs``, ``1,024 keys``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
