# SPDX-License-Identifier: Apache-2.0
"""What the metrics of a live NIXL, vLLM or Dynamo say of transfers, judged by bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nixl.checks.telemetry.questions import REQUESTS, Answer, answer
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.metrics_text import MetricSample, total
from pytest_nixl.core.strict import printable
from pytest_nixl.model.verdicts import Judgement, Verdict


@dataclass(frozen=True)
class CounterNames:
    """The metrics that count one kind of event.

    :param what: the events, in the plural.
    :param names: the metrics that count them, in the spelling of NIXL and of the engines. Older clients of Prometheus
        write vLLM's without ``_total``. Those of one entry count different events, and are added.
    :param remedy: what to do about too many that vLLM has counted.
    """

    what: str
    names: tuple[tuple[str, ...], ...]
    remedy: str = ""


# A worker of Dynamo passes on the metrics of its engine: page metrics-comparison of ai-dynamo/dynamo.
# Those of vLLM are in its page nixl_connector_usage, those of SGLang in
# python/sglang/srt/observability/metrics_collector.py. Dynamo itself adds those of TensorRT-LLM and of its KVBM:
# modules trtllm_additional and kvbm of lib/runtime/src/metrics/prometheus_names.rs.

#: vLLM and SGLang count the failures of their own calls; NIXL those that it counts at all (not the death of an agent).
#: KVBM counts blocks that it could not read from objects, or write to them.
FAILED = CounterNames(
    "failed transfers",
    (
        ("vllm:nixl_num_failed_transfers_total",),
        ("vllm:nixl_num_failed_transfers",),
        ("agent_errors_total",),
        ("sglang:num_transfer_failed_reqs_total",),
        ("kvbm_object_read_failures", "kvbm_object_write_failures"),
    ),
    "Do not trust the answers of these requests: vLLM may have sent them with HTTP 200 and wrong tokens, whatever "
    "kv_load_failure_policy says, if its model has several groups of KV caches, such as attention and Mamba (seen with "
    "vLLM 0.29.0: vllm-project/vllm#52234). Search the decode side's log for NIXL_ERR, and alert on this counter.",
)
EXPIRED = CounterNames(
    "expired requests", (("vllm:nixl_num_kv_expired_reqs_total",), ("vllm:nixl_num_kv_expired_reqs",))
)


@dataclass(frozen=True)
class TimeNames:
    """The metrics of a mean time.

    :param what: the time.
    :param histograms: names without suffix, and the microseconds of their unit; the first that has transfers is read.
    :param sum: for a NIXL without histograms: the sum of the times in microseconds.
    """

    what: str
    histograms: tuple[tuple[str, float], ...]
    sum: str


POST_TIME = TimeNames(
    "mean post time",
    (("vllm:nixl_post_time_seconds", 1e6), ("agent_xfer_post_time_us", 1.0)),
    "agent_xfer_post_time_total",
)
TRANSFER_TIME = TimeNames(
    "mean transfer time",
    (
        ("vllm:nixl_xfer_time_seconds", 1e6),
        ("agent_xfer_time_us", 1.0),
        ("trtllm_kv_transfer_latency_seconds", 1e6),
        ("sglang:kv_transfer_latency_ms", 1e3),
    ),
    "agent_xfer_time_total",
)
#: The counts of transfers of a NIXL without histograms.
_REQUESTS = ("agent_tx_requests_num_total", "agent_rx_requests_num_total")
_MARKS = (
    "agent_",
    "vllm:nixl_",
    "sglang:kv_transfer_",
    "sglang:num_transfer_failed_reqs",
    "trtllm_kv_transfer_",
    "kvbm_",
)


@dataclass(frozen=True)
class EndpointValue:
    """A value of an endpoint with its bound.

    :param name: what it is.
    :param value: None: no metric of the endpoint tells it, or no transfer was made.
    :param source: the metrics that were read; for a missing value, why it is missing.
    :param unit: the unit; empty for a count.
    :param at_most: the bound; None: none was given.
    :param remedy: what to do if it is above the bound.
    """

    name: str
    value: float | None
    source: str
    unit: str = ""
    at_most: float | None = None
    remedy: str = ""

    @property
    def judgement(self) -> Judgement:
        """PASS within the bound, FAIL above it, NO-EXPECTATION without one, UNKNOWN without a value."""
        if self.value is None or math.isnan(self.value):
            verdict = Verdict.NO_EXPECTATION if self.at_most is None else Verdict.UNKNOWN
            return Judgement(verdict, f"{self.name}: unknown, because {self.source}")
        description = f"{self.name}: {_number(self.value)}{self.unit} ({self.source})"
        if self.at_most is None:
            return Judgement(Verdict.NO_EXPECTATION, f"{description}, no bound")
        if self.value < 0:
            return Judgement(Verdict.UNKNOWN, f"{description}, which is negative")
        if self.value > self.at_most:
            above = f"{description}, above its bound of {_number(self.at_most)}{self.unit}"
            return Judgement(Verdict.FAIL, above, self.remedy)
        return Judgement(Verdict.PASS, f"{description}, at most {_number(self.at_most)}{self.unit}")


def _number(value: float) -> str:
    return f"{value:.15g}" if value.is_integer() else f"{value:.4g}"


def endpoint_values(
    samples: Sequence[MetricSample],
    *,
    max_failed: float | None = None,
    max_expired: float | None = None,
    max_post_us: float | None = None,
    max_transfer_us: float | None = None,
) -> list[EndpointValue]:
    """Return the failed transfers, expired requests and mean times to post and to transfer of an endpoint.

    Counters start with the process. All its agents or engines are added.

    :param max_failed: the most failed transfers; None: no bound.
    :param max_expired: the most expired requests; None: no bound.
    :param max_post_us: the longest mean time to post a transfer in microseconds; None: no bound.
    :param max_transfer_us: the longest mean time of a transfer in microseconds; None: no bound.
    :raises NixlPluginError: it has no metric of NIXL or of an engine's transfers.
    """
    require_marks(samples)
    return [
        _counted(samples, FAILED, max_failed),
        _counted(samples, EXPIRED, max_expired),
        _mean_time(samples, POST_TIME, max_post_us),
        _mean_time(samples, TRANSFER_TIME, max_transfer_us),
    ]


def answer_questions(samples: Sequence[MetricSample]) -> list[Answer]:
    """Answer whether NIXL is used, fails and is slow.

    :raises NixlPluginError: the page has no metric of NIXL or of an engine.
    """
    require_marks(samples)
    return answer(samples)


def require_marks(samples: Sequence[MetricSample]) -> None:
    """Refuse a page that has no metric of NIXL or of an engine. :raises NixlPluginError: it has none."""
    if not any(sample.name.startswith((*_MARKS, *REQUESTS)) for sample in samples):
        shown = ", ".join(sorted({printable(sample.name[:60]) for sample in samples})[:3])
        raise NixlPluginError(
            f"the endpoint has {len(samples)} series and none of NIXL or of an engine's transfers (it has {shown}, …)",
            "set NIXL_TELEMETRY_ENABLE=y and NIXL_TELEMETRY_EXPORTER=prometheus before NIXL is loaded; start vLLM with "
            "NixlConnector; for a worker of Dynamo give the port from its variable DYN_SYSTEM_PORT",
        )


def _counted(samples: Sequence[MetricSample], counter: CounterNames, bound: float | None) -> EndpointValue:
    counters = [(name, value) for name in counter.names if (value := _sum(samples, name)) is not None]
    if not counters:
        listed = ", ".join(" + ".join(name) for name in counter.names)
        return EndpointValue(counter.what, None, f"the endpoint has none of {listed}", "", bound)
    # The engine's counter and NIXL's count the same failures, so that their sum would count them twice.
    names, value = max(counters, key=lambda each: (math.isnan(each[1]), each[1]))
    remedy = counter.remedy if names[0].startswith("vllm:") else ""
    return EndpointValue(counter.what, value, " + ".join(names), "", bound, remedy)


def _sum(samples: Sequence[MetricSample], names: Sequence[str]) -> float | None:
    """Return the sum of several metrics; None if the endpoint has none of them."""
    values = [value for name in names if (value := total(samples, name)) is not None]
    return sum(values) if values else None


def _mean_time(samples: Sequence[MetricSample], time: TimeNames, bound: float | None) -> EndpointValue:
    """Return a mean time in microseconds with its metrics, or why it is unknown."""
    idle = ""
    for name, unit in time.histograms:
        spent, count = total(samples, f"{name}_sum"), total(samples, f"{name}_count")
        if spent is not None and count is not None:
            if count > 0:
                source = f"{name}, {count:.15g} transfers"
                return EndpointValue(time.what, unit * spent / count, source, " us", bound)
            idle = f"{name}_count is {count:.15g}"
    spent, counts = total(samples, time.sum), [total(samples, name) or 0 for name in _REQUESTS]
    if spent is not None and sum(counts) > 0:
        source = f"{time.sum}, {sum(counts):.15g} transfers"
        return EndpointValue(time.what, spent / sum(counts), source, " us", bound)
    reason = idle or "the endpoint has no metric of it, or no transfer was made"
    return EndpointValue(time.what, None, reason, " us", bound)
