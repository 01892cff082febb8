# SPDX-License-Identifier: Apache-2.0
"""The figure that a raw tool measured, and NIXL's share of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_nixl.model.row_key import RowKey, UnknownKey


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

    def check_plain(self) -> None:
        """Refuse a ratio of no numbers. :raises ValueError: with the row."""
        if not 0 < self.raw.value < math.inf or not 0 <= self.nixl < math.inf:
            raise ValueError(f"the raw figure of the row {self.row} is not a number above zero")
