# SPDX-License-Identifier: Apache-2.0
"""One line of a raw tool's table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RawToolLine:
    """How many blocks it moved so far, and at how many bytes per second over all of them."""

    count: int
    value: float
