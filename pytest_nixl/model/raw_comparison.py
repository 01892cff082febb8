# SPDX-License-Identifier: Apache-2.0
"""What a raw tool measured, and what NIXL did of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RawMeasurement:
    """What a raw tool moved.

    :param value: bytes per second.
    :param version: of the library below the tool, by its own word: ``UCX 1.13.1``; empty: it did not say.
    :param transports: what carried the bytes, as the tool's library reports it (``tcp/eth0``); empty: it does not.
    :param others: cores that others of the initiator's host took meanwhile, of those that the tool needed.
    :param test: what the tool calls what it did, such as ``ucp_put_bw``.
    """

    tool: str
    test: str
    value: float
    version: str = ""
    transports: tuple[str, ...] = ()
    others: float = 0.0

    @property
    def words(self) -> str:
        """Name it in a sentence: ``ucx_perftest (ucp_put_bw, UCX 1.13.1)``."""
        return f"{self.tool} ({', '.join(filter(None, (self.test, self.version)))})"


@dataclass(frozen=True)
class RawRatio:
    """A row of NIXL beside the raw figure of the same block, depth and pair of ranks.

    :param row: the row's key, which this is no part of.
    :param nixl: NIXL's bytes per second.
    :param comparable: whether both went the same way; where not, the ratio says nothing.
    """

    row: str
    nixl: float
    raw: RawMeasurement
    comparable: bool = True

    @property
    def value(self) -> float:
        """NIXL's share of the raw figure."""
        return self.nixl / self.raw.value

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> RawRatio:
        """Restore it from its JSON values. :raises ValueError, TypeError: where they are something else."""
        raw = RawMeasurement(**{**data["raw"], "transports": tuple(str(name) for name in data["raw"]["transports"])})
        found = cls(str(data["row"]), float(data["nixl"]), raw, bool(data["comparable"]))
        if not isinstance(raw.value, (int, float)) or not 0 < raw.value < math.inf or not 0 <= found.nixl < math.inf:
            raise ValueError(f"the raw figure of the row {found.row} is not a number above zero")
        if not all(isinstance(text, str) for text in (raw.tool, raw.test, raw.version)):
            raise TypeError(f"the raw tool of the row {found.row} is named by no string")
        return found

    def plain(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)
