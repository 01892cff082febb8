# SPDX-License-Identifier: Apache-2.0
"""What the metrics of a live NIXL, vLLM or Dynamo say of transfers, judged by bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.metrics_text import MetricSample, total
from pytest_nixl.core.strict import printable
from pytest_nixl.model.verdicts import Judgement, Verdict


@dataclass(frozen=True)
class CounterNames:
    """The metrics that count one kind of event.

    :param what: the events, in the plural.
    :param names: the metrics that count them, in NIXL's and vLLM's spelling. Dynamo passes them on unchanged. Older
        clients of Prometheus write vLLM's without ``_total``.
    """

    what: str
    names: tuple[str, ...]


#: vLLM counts the failures of its own calls; NIXL those that it counts at all (not the death of an agent).
FAILED = CounterNames(
    "failed transfers",
    ("vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_transfers", "agent_errors_total"),
)
EXPIRED = CounterNames("expired requests", ("vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_kv_expired_reqs"))
#: Histograms of the time to post a transfer: name without suffix, and microseconds of its unit.
POST_TIMES = (("vllm:nixl_post_time_seconds", 1e6), ("agent_xfer_post_time_us", 1.0))
#: NIXL without histograms: the sum of the times in microseconds, and the counts of transfers.
_POST_SUM, _REQUESTS = "agent_xfer_post_time_total", ("agent_tx_requests_num_total", "agent_rx_requests_num_total")
_MARKS = ("agent_", "vllm:nixl_")


@dataclass(frozen=True)
class EndpointValue:
    """A value of an endpoint with its bound.

    :param name: what it is.
    :param value: None: no metric of the endpoint tells it, or no transfer was made.
    :param source: the metrics that were read; for a missing value, why it is missing.
    :param unit: the unit; empty for a count.
    :param at_most: the bound; None: none was given.
    """

    name: str
    value: float | None
    source: str
    unit: str = ""
    at_most: float | None = None

    @property
    def judgement(self) -> Judgement:
        """PASS within the bound, FAIL above it, NO-EXPECTATION without one, UNKNOWN without a value."""
        if self.value is None or math.isnan(self.value):
            verdict = Verdict.NO_EXPECTATION if self.at_most is None else Verdict.UNKNOWN
            return Judgement(verdict, f"{self.name}: unknown, because {self.source}")
        said = f"{self.name}: {_number(self.value)}{self.unit} ({self.source})"
        if self.at_most is None:
            return Judgement(Verdict.NO_EXPECTATION, f"{said}, no bound")
        if self.value < 0:
            return Judgement(Verdict.UNKNOWN, f"{said}, which is negative")
        if self.value > self.at_most:
            return Judgement(Verdict.FAIL, f"{said}, above its bound of {_number(self.at_most)}{self.unit}")
        return Judgement(Verdict.PASS, f"{said}, at most {_number(self.at_most)}{self.unit}")


def _number(value: float) -> str:
    return f"{value:.15g}" if value.is_integer() else f"{value:.4g}"


def endpoint_values(
    samples: Sequence[MetricSample],
    *,
    max_failed: float | None = None,
    max_expired: float | None = None,
    max_post_us: float | None = None,
) -> list[EndpointValue]:
    """Return the failed transfers, expired requests and mean time to post of an endpoint.

    Counters start with the process. All its agents or engines are added.

    :param max_failed: the most failed transfers; None: no bound.
    :param max_expired: the most expired requests; None: no bound.
    :param max_post_us: the longest mean time to post a transfer in microseconds; None: no bound.
    :raises NixlPluginError: it has no metric of NIXL.
    """
    if not any(each.name.startswith(_MARKS) for each in samples):
        some = ", ".join(sorted({printable(each.name[:60]) for each in samples})[:3])
        raise NixlPluginError(
            f"the endpoint has {len(samples)} series and none of NIXL (it has {some}, …)",
            "set NIXL_TELEMETRY_ENABLE=y and NIXL_TELEMETRY_EXPORTER=prometheus before NIXL is loaded; vLLM has such "
            "metrics only with NixlConnector",
        )
    post, source = _mean_post_time(samples)
    return [
        _counted(samples, FAILED, max_failed),
        _counted(samples, EXPIRED, max_expired),
        EndpointValue("mean post time", post, source, " us", max_post_us),
    ]


def _counted(samples: Sequence[MetricSample], counter: CounterNames, bound: float | None) -> EndpointValue:
    found = [(name, value) for name in counter.names if (value := total(samples, name)) is not None]
    if not found:
        return EndpointValue(counter.what, None, f"the endpoint has none of {', '.join(counter.names)}", "", bound)
    # vLLM's counter and NIXL's count the same failures, so that their sum would count them twice.
    name, value = max(found, key=lambda each: (math.isnan(each[1]), each[1]))
    return EndpointValue(counter.what, value, name, "", bound)


def _mean_post_time(samples: Sequence[MetricSample]) -> tuple[float | None, str]:
    """Return the mean time to post in microseconds with its metrics, or None and why it is unknown."""
    idle = ""
    for name, unit in POST_TIMES:
        spent, count = total(samples, f"{name}_sum"), total(samples, f"{name}_count")
        if spent is not None and count is not None:
            if count > 0:
                return unit * spent / count, f"{name}, {count:.15g} transfers"
            idle = f"{name}_count is {count:.15g}"
    spent, counts = total(samples, _POST_SUM), [total(samples, name) or 0 for name in _REQUESTS]
    if spent is not None and sum(counts) > 0:
        return spent / sum(counts), f"{_POST_SUM}, {sum(counts):.15g} transfers"
    return None, idle or "the endpoint has no metric of it, or no transfer was made"
