# SPDX-License-Identifier: Apache-2.0
"""The result of each check, in a form that a worker of pytest-xdist can send to its controller."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.plain import from_plain, to_plain
from pytest_nixl.model.expectation import row_ceiling
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.row_key import RowKey, UnknownKey
from pytest_nixl.model.samples import BUSY_GPU, DISTURBED_CORES, percentile
from pytest_nixl.model.verdicts import Verdict

if TYPE_CHECKING:
    from pytest_nixl.model.expectation import Expectation, Machine
    from pytest_nixl.model.samples import Samples


#: The percentiles of the latency of a single transfer.
PERCENTILES = ("p50", "p90", "p99", "p99.9")


@dataclass(frozen=True)
class RowSummary:
    """The measured values of a row, of this run or of a recorded one.

    :param bandwidth: bytes per second; ``floor`` and ``ceiling`` too, where 0 means that there is none.
    :param p50: seconds, as all latencies; NaN: not known.
    :param transfers: the number of timed transfers; 0: not known.
    :param transports: the transports that carried the bytes; empty: not known.
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
    p90: float = math.nan
    p999: float = math.nan
    #: Median seconds of the steps of a request for KV blocks, by name; empty: the row is not of such requests.
    steps: Mapping[str, float] = field(default_factory=dict)
    #: Of each launch, the cores it needed that other processes used; empty: not known.
    contention: tuple[float, ...] = ()
    #: Of each launch, the seconds of a kernel over 8 bytes on a GPU of the row; empty: it has none, or it is not known.
    gpu_waits: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: Samples, expectation: Expectation | None, machine: Machine | None = None) -> RowSummary:
        """Return the values of measured samples, with the floor and ceiling of the row."""
        ceiling = row_ceiling(samples, expectation, machine)
        return cls.of_launches(
            samples.values,
            samples.transports,
            {name: percentile(samples.latencies, float(name[1:])) for name in PERCENTILES if samples.latencies},
            floor=(expectation and expectation.floor) or 0.0,
            ceiling=ceiling.value if ceiling else 0.0,
            transfers=sum(samples.transfers),
            contention=samples.contention,
            gpu_waits=samples.gpu_waits,
        )

    @classmethod
    def of_launches(
        cls,
        values: tuple[float, ...],
        transports: tuple[str, ...],
        latencies: Mapping[str, float] = MappingProxyType({}),
        *,
        floor: float = 0.0,
        ceiling: float = 0.0,
        transfers: int = 0,
        contention: tuple[float, ...] = (),
        gpu_waits: tuple[float, ...] = (),
    ) -> RowSummary:
        """Return the values of launches. The bandwidth is their median.

        :param values: bytes per second of each launch.
        :param latencies: seconds of the percentiles that are known, by the names in :data:`PERCENTILES`.
        :param contention: of each launch, the cores it needed that other processes used; of another length: not known.
        :param gpu_waits: of each launch, the seconds of a kernel over 8 bytes on its GPU; of another length: not known.
        """
        p50, p90, p99, p999 = (latencies.get(name, math.nan) for name in PERCENTILES)
        cores, waits = (figures if len(figures) == len(values) else () for figures in (contention, gpu_waits))
        return cls(
            median(values),
            p50,
            p99,
            transfers,
            floor,
            ceiling,
            transports,
            values,
            p90,
            p999,
            contention=cores,
            gpu_waits=waits,
        )

    @property
    def undisturbed(self) -> tuple[float, ...]:
        """Bytes per second of each launch for which :attr:`used_by_others` names nothing."""
        return tuple(value for value, by in zip(self.values, self.used_by_others, strict=True) if not by)

    @property
    def used_by_others(self) -> tuple[tuple[str, ...], ...]:
        """Of each launch, what other processes used so much that it may be slower: ``cores``, ``a GPU``, or nothing."""
        cores = [used > DISTURBED_CORES for used in self.contention or [0.0] * len(self.values)]
        gpus = [gpu_wait > BUSY_GPU for gpu_wait in self.gpu_waits or [0.0] * len(self.values)]
        return tuple(
            (*(("cores",) if busy else ()), *(("a GPU",) if taken else ()))
            for busy, taken in zip(cores, gpus, strict=True)
        )

    @property
    def latencies(self) -> dict[str, float]:
        """Seconds of each percentile that is known, by the names in :data:`PERCENTILES`."""
        named = zip(PERCENTILES, (self.p50, self.p90, self.p99, self.p999), strict=True)
        return {name: seconds for name, seconds in named if not math.isnan(seconds)}


_LATENCIES = ("p50", "p90", "p99", "p999")


@dataclass(frozen=True)
class Result:
    """The result of one check. For a check that measures a row it is the row's result, from measurement to report.

    :param check: the id of the check.
    :param nodeid: pytest's node id of its test; empty: no test made it.
    :param reason: one sentence.
    :param remedy: what to do about it; empty: nothing.
    :param row: the key of the row that the check is about; None: it is about no row.
    :param summary: the measured values of that row.
    :param repeat: the command that repeats the check.
    """

    check: str
    nodeid: str
    verdict: Verdict
    reason: str = ""
    remedy: str = ""
    row: RowKey | UnknownKey | None = None
    summary: RowSummary | None = None
    repeat: str = ""
    #: The id of the finding that the check looked for.
    finding: str = ""
    #: The ratios of rows to a raw tool over the same transport.
    ratios: tuple[RawRatio, ...] = ()
    #: Whether a known limit of NIXL was seen that does not affect this deployment.
    known_limit: bool = False
    #: The named figures that the check measured, each with the bound that applies to it.
    measured: tuple[Figure, ...] = ()
    #: What distinguishes a result without a row from others of its check, such as the row that regressed.
    subject: str = ""

    @property
    def name(self) -> str:
        """The name of the result in reports for programs: the same in each run."""
        subject = self.row or self.subject
        return f"{self.check}[{subject}]" if subject else self.check

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        plain = to_plain(replace(self, measured=()))
        # Records call the summary "figures".
        fields: dict[str, Any] = {"figures" if name == "summary" else name: part for name, part in plain.items()}
        fields["row"] = fields["row"] or ""
        del fields["measured"]
        if not self.subject:
            del fields["subject"]
        if self.measured:
            fields["measured"] = [figure.plain() for figure in self.measured]
        if self.summary is not None:
            del fields["figures"]["contention"], fields["figures"]["gpu_waits"]  # the record of the row has them
            if not self.summary.steps:
                del fields["figures"]["steps"]
        return fields

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Result:
        """Restore a result from :meth:`plain`. :raises ValueError: if a value has another form."""
        plain = {**data, "row": data.get("row") or None}
        values, summary = plain.pop("figures"), None
        if values is not None:
            unknown = {name: math.nan for name in _LATENCIES if values.get(name, 0.0) is None}
            summary = from_plain(RowSummary, {**values, **unknown})
        return replace(from_plain(cls, plain), summary=summary)

    def properties(self) -> list[tuple[str, object]]:
        """Return the properties of the result for JUnit XML."""
        shown: list[tuple[str, object]] = [("nixl_check", self.check), ("nixl_verdict", self.verdict.value)]
        if self.reason:
            shown.append(("nixl_reason", self.reason))
        if self.finding:
            shown.append(("nixl_finding", self.finding))
        if self.known_limit:
            shown.append(("nixl_known_limit", "not met"))
        if self.row is not None:
            shown.append(("nixl_row", str(self.row)))
        if self.summary is not None:
            shown.append(("nixl_gigabytes_per_second", round(self.summary.bandwidth / 1e9, 6)))
            for name in ("p50", "p99"):
                if not math.isnan(getattr(self.summary, name)):
                    shown.append((f"nixl_{name}_microseconds", round(getattr(self.summary, name) * 1e6, 3)))
            shown.append(("nixl_transports", ",".join(self.summary.transports)))
        return shown


def measured_rows(results: Iterable[Result]) -> Iterator[tuple[RowKey, Result]]:
    """Yield each result of a row that was measured, after the row's key."""
    for result in results:
        if isinstance(result.row, RowKey) and result.summary is not None:
            yield result.row, result


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
