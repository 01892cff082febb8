# SPDX-License-Identifier: Apache-2.0
"""The result of each check, in a form that a worker of pytest-xdist can send to its controller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.model.ceiling import row_ceiling
from pytest_nixl.model.raw_comparison import RawRatio
from pytest_nixl.model.samples import percentile
from pytest_nixl.model.verdicts import Verdict

if TYPE_CHECKING:
    from pytest_nixl.model.expectation import Expectation
    from pytest_nixl.model.machine import Machine
    from pytest_nixl.model.samples import Samples


@dataclass(frozen=True)
class Figures:
    """The measured values of a row.

    :param bandwidth: bytes per second; ``floor`` and ``ceiling`` too, where 0 means that there is none.
    :param p50: seconds, as all latencies; NaN: not known.
    :param transfers: the number of timed transfers.
    """

    bandwidth: float
    p50: float
    p99: float
    transfers: int
    floor: float
    ceiling: float
    transports: tuple[str, ...]
    #: Bytes per second of each launch.
    values: tuple[float, ...] = ()
    p90: float = 0.0
    p999: float = 0.0

    @classmethod
    def of(cls, samples: Samples, expectation: Expectation | None, machine: Machine | None = None) -> Figures:
        """Return the figures of measured samples, with the floor and ceiling of the row."""
        ceiling = row_ceiling(samples, expectation, machine)
        return cls(
            bandwidth=samples.bandwidth,
            p50=samples.p50,
            p99=samples.p99,
            transfers=sum(samples.transfers),
            floor=(expectation and expectation.floor) or 0.0,
            ceiling=ceiling.value if ceiling else 0.0,
            transports=samples.transports,
            values=samples.values,
            p90=percentile(samples.latencies, 90),
            p999=percentile(samples.latencies, 99.9),
        )


_LATENCIES = ("p50", "p90", "p99", "p999")
_NUMBERS = ("bandwidth", "transfers", "floor", "ceiling", *_LATENCIES)
_TEXTS = ("check", "nodeid", "reason", "remedy", "row", "repeat", "finding")

#: The ratios of rows to a raw tool, on the item of the test that compared them.
RATIOS = pytest.StashKey[tuple[RawRatio, ...]]()
#: The figures of a row, on the item of the test that measured it.
FIGURES = pytest.StashKey[Figures]()


@dataclass(frozen=True)
class Result:
    """The result of one check.

    :param check: the id of the check.
    :param nodeid: pytest's node id of its test; empty: no test made it.
    :param reason: one sentence.
    :param remedy: what to do about it; empty: nothing.
    :param row: the key of the row that was measured; empty: none was.
    :param figures: the measured values of that row.
    :param repeat: the command that repeats the check.
    """

    check: str
    nodeid: str
    verdict: Verdict
    reason: str = ""
    remedy: str = ""
    row: str = ""
    figures: Figures | None = None
    repeat: str = ""
    #: The id of the finding that the check looked for.
    finding: str = ""
    #: The ratios of rows to a raw tool over the same transport.
    ratios: tuple[RawRatio, ...] = ()
    #: Whether a known limit of NIXL was seen that does not affect this deployment.
    known_limit: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        found = {**asdict(self), "verdict": self.verdict.value}
        if self.figures is not None:
            # JSON has no NaN.
            found["figures"] |= {name: None for name in _LATENCIES if math.isnan(getattr(self.figures, name))}
        return found

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Result:
        """Restore a result from :meth:`plain`. :raises TypeError: if a value has another type."""
        figures = data["figures"]
        if figures is not None:
            tuples = {
                "transports": tuple(str(name) for name in figures.get("transports", ())),
                "values": tuple(float(value) for value in figures.get("values", ())),
            }
            unknown = {name: math.nan for name in _LATENCIES if name in figures and figures[name] is None}
            figures = Figures(**{**figures, **tuples, **unknown})
            if not all(isinstance(getattr(figures, name), (int, float)) for name in _NUMBERS):
                raise TypeError("a result has figures that are not numbers")
        ratios = tuple(RawRatio.from_plain(ratio) for ratio in data.get("ratios", ()))
        found = cls(**{**data, "verdict": Verdict(data["verdict"]), "figures": figures, "ratios": ratios})
        if not all(isinstance(getattr(found, name), str) for name in _TEXTS):
            raise TypeError("a result has texts that are not strings")
        return found

    def properties(self) -> list[tuple[str, object]]:
        """Return the properties of the result for JUnit XML."""
        shown: list[tuple[str, object]] = [("nixl_check", self.check), ("nixl_verdict", self.verdict.value)]
        if self.reason:
            shown.append(("nixl_reason", self.reason))
        if self.finding:
            shown.append(("nixl_finding", self.finding))
        if self.known_limit:
            shown.append(("nixl_known_limit", "not met"))
        if self.row:
            shown.append(("nixl_row", self.row))
        if self.figures is not None:
            shown.append(("nixl_gigabytes_per_second", round(self.figures.bandwidth / 1e9, 6)))
            for name in ("p50", "p99"):
                if not math.isnan(getattr(self.figures, name)):
                    shown.append((f"nixl_{name}_microseconds", round(getattr(self.figures, name) * 1e6, 3)))
            shown.append(("nixl_transports", ",".join(self.figures.transports)))
        return shown
