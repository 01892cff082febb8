# SPDX-License-Identifier: Apache-2.0
"""The figure that a raw tool measured, and NIXL's share of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pytest_nixl.model.row_key import RowKey, UnknownKey, read_key


@dataclass(frozen=True)
class RawMeasurement:
    """The measurement of a raw tool.

    :param tool: name of the tool.
    :param test: the tool's name of its test, such as ``ucp_put_bw``.
    :param value: bytes per second.
    :param version: version of the tool's library, such as ``UCX 1.13.1``; empty if unknown.
    :param transports: transports that the tool's library reports, such as ``tcp/eth0``; empty if none.
    :param others: contention: how many of the tool's cores other processes used on the initiator's host.
    """

    tool: str
    test: str
    value: float
    version: str = ""
    transports: tuple[str, ...] = ()
    others: float = 0.0

    @property
    def words(self) -> str:
        """Return its name for messages: ``ucx_perftest (ucp_put_bw, UCX 1.13.1)``."""
        return f"{self.tool} ({', '.join(filter(None, (self.test, self.version)))})"


@dataclass(frozen=True)
class RawRatio:
    """A row of NIXL and the raw figure for the same block, depth and pair of ranks.

    :param row: key of the row.
    :param nixl: NIXL's bytes per second.
    :param raw: the raw figure.
    :param comparable: whether both used the same transport. If not, the ratio has no meaning.
    """

    row: RowKey | UnknownKey
    nixl: float
    raw: RawMeasurement
    comparable: bool = True

    @property
    def value(self) -> float:
        """NIXL's share of the raw figure."""
        return self.nixl / self.raw.value

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> RawRatio:
        """Restore a ratio from JSON values. :raises ValueError, TypeError: if they have another form."""
        raw = RawMeasurement(**{**data["raw"], "transports": tuple(str(name) for name in data["raw"]["transports"])})
        found = cls(read_key(str(data["row"])), float(data["nixl"]), raw, bool(data["comparable"]))
        if not isinstance(raw.value, (int, float)) or not 0 < raw.value < math.inf or not 0 <= found.nixl < math.inf:
            raise ValueError(f"the raw figure of the row {found.row} is not a number above zero")
        if not all(isinstance(text, str) for text in (raw.tool, raw.test, raw.version)):
            raise TypeError(f"the raw tool of the row {found.row} is not a string")
        return found

    def plain(self) -> dict[str, Any]:
        """Return the ratio as JSON values."""
        return {**asdict(self), "row": str(self.row)}
