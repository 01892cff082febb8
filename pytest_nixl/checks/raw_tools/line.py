# SPDX-License-Identifier: Apache-2.0
"""One line of a raw tool's table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RawToolLine:
    """A line of a raw tool's table.

    :param count: number of blocks that were moved so far.
    :param value: bytes per second over all of them.
    """

    count: int
    value: float
