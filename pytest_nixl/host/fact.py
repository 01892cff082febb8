# SPDX-License-Identifier: Apache-2.0
"""A fact with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A value and its source.

    :param value: the value; None if it is unknown.
    :param source: the path or the interface that it was read from, such as ``/proc/meminfo`` or ``NVML``.
    :param why: why the value is unknown; otherwise empty.
    """

    value: T | None
    source: str
    why: str = ""
