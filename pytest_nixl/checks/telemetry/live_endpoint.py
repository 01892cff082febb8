# SPDX-License-Identifier: Apache-2.0
"""What the metrics of a live NIXL, vLLM or Dynamo say of transfers: is NIXL used, does it fail, and is it slow?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.metrics_text import MetricSample, total
from pytest_nixl.core.strict import printable
from pytest_nixl.core.units import format_size
from pytest_nixl.model.verdicts import Judgement, Verdict

#: Completed requests of vLLM (also by older clients of Prometheus), SGLang and Dynamo's frontend.
REQUESTS = (
    "vllm:request_success_total",
    "vllm:request_success",
    "sglang:num_requests_total",
    "dynamo_frontend_requests_total",
)
_TOKENS = ("vllm:generation_tokens_total", "vllm:generation_tokens", "sglang:generation_tokens_total")
#: Counts of transfers that ended well: the histograms of their times; for a NIXL without these, its requests.
_TRANSFERS = (
    ("vllm:nixl_xfer_time_seconds_count",),
    ("sglang:kv_transfer_latency_ms_count",),
    ("trtllm_kv_transfer_latency_seconds_count",),
    ("agent_xfer_time_us_count",),
    ("agent_tx_requests_num_total", "agent_rx_requests_num_total"),
)
#: The seconds of all transfers, and the seconds of one unit.
_SECONDS = (
    ("vllm:nixl_xfer_time_seconds_sum", 1.0),
    ("agent_xfer_time_us_sum", 1e-6),
    ("agent_xfer_time_total", 1e-6),
)
_POST_SECONDS = (
    ("vllm:nixl_post_time_seconds_sum", 1.0),
    ("agent_xfer_post_time_us_sum", 1e-6),
    ("agent_xfer_post_time_total", 1e-6),
)
_BYTES = (("vllm:nixl_bytes_transferred_sum",), ("agent_tx_bytes_total", "agent_rx_bytes_total"))
#: Counters of failures, in the order of their severity: what happened, and what to do.
_FAILURES = (
    (
        "failed transfers",
        ("vllm:nixl_num_failed_transfers", "agent_errors", "sglang:num_transfer_failed_reqs"),
        "search decode's log for NIXL_ERR, and give that line to pytest-nixl explain; these answers may be wrong",
    ),
    (
        "notifications after the lease, whose blocks may have been reused",
        ("vllm:nixl_num_notifications_after_expiry",),
        "raise kv_lease_duration on prefill; these answers may be wrong",
    ),
    (
        "expired requests",
        ("vllm:nixl_num_kv_expired_reqs",),
        "decode waited longer than prefill's lease: raise kv_lease_duration in kv_connector_extra_config (before vLLM "
        "0.25.0: VLLM_NIXL_ABORT_REQUEST_TIMEOUT), or add decode engines",
    ),
    (
        "failed notifications",
        ("vllm:nixl_num_failed_notifications",),
        "prefill keeps these blocks until the lease ends: search decode's log for NIXL_ERR",
    ),
    (
        "requests that failed at the bootstrap",
        ("sglang:num_bootstrap_failed_reqs",),
        "decode did not reach prefill's bootstrap server: check its --host, its port and network policies",
    ),
    (
        "blocks of KVBM that could not be read or written",
        ("kvbm_object_read_failures", "kvbm_object_write_failures"),
        "check the object store: pytest-nixl doctor",
    ),
)
#: A transfer of fewer bytes shows latency, and not bandwidth.
_LEAST_BYTES = 1 << 20
#: Below this rate a transfer is as slow as TCP, or as a copy through pageable host memory.
_SLOW_RATE = 1e9
#: The share of a transfer's time above which its posting is what takes the time.
_POST_SHARE = 0.5
#: Transfers below this share of the requests do not carry most prompts.
_USED_SHARE = 0.1

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
class Answer:
    """The answer to one question.

    :param verdict: PASS, WARN, or UNKNOWN if the page cannot answer it.
    """

    question: str
    verdict: Verdict
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n    remedy: {self.remedy}" if self.remedy else ""
        return f"{self.verdict}: {self.question} {self.text}{remedy}"


def answer(samples: Sequence[MetricSample]) -> list[Answer]:
    """Answer the three questions from the page of one process. Its counters start with the process."""
    requests, transfers = _first(samples, [(name,) for name in REQUESTS]), _first(samples, _TRANSFERS)
    return [
        _used(samples, requests, transfers),
        _fails(samples, bool(requests) or bool(transfers)),
        _slow(samples, transfers),
    ]


def _first(samples: Sequence[MetricSample], names: Sequence[tuple[str, ...]]) -> float | None:
    """Return the sum of the first group of metrics that the page has; None if it has none."""
    for group in names:
        values = [value for name in group if (value := total(samples, name)) is not None]
        if values:
            return sum(values)
    return None


def _used(samples: Sequence[MetricSample], requests: float | None, transfers: float | None) -> Answer:
    question = "Is NIXL used?"
    counted = "" if requests is None else f" for {requests:.15g} requests"
    if transfers:
        if requests is not None and transfers < requests * _USED_SHARE:
            remedy = "most prompts are computed here: check that the router sends them to prefill first"
            return Answer(question, Verdict.WARN, f"Hardly: {transfers:.15g} transfers{counted}.", remedy)
        return Answer(question, Verdict.PASS, f"Yes: {transfers:.15g} transfers{counted}.")
    if not requests:
        reason = "no request was completed yet" if requests == 0 else "the page has no count of requests"
        return Answer(question, Verdict.UNKNOWN, f"It cannot be said: no transfer, and {reason}.")
    tokens = _first(samples, [(name,) for name in _TOKENS])
    if tokens is not None and tokens <= requests:
        reason = "this is a prefill side (one token a request), which counts no transfers"
        return Answer(question, Verdict.UNKNOWN, f"It cannot be said: {reason}. Give the page of a decode engine.")
    if transfers is None and total(samples, "vllm:nixl_num_failed_transfers_total") is None:
        if _first(samples, [(name,) for name in REQUESTS[:2]]) is None:
            return Answer(question, Verdict.UNKNOWN, f"It cannot be said: the page counts no transfers{counted}.")
        remedy = "start vLLM with --kv-transfer-config and NixlConnector"
        return Answer(question, Verdict.WARN, f"No: the page has no metric of NIXL{counted}.", remedy)
    remedy = "each prompt is computed here: check that the router passes prefill's kv_transfer_params on"
    return Answer(question, Verdict.WARN, f"No: 0 transfers{counted}.", remedy)


def _fails(samples: Sequence[MetricSample], has_worked: bool) -> Answer:
    question, texts, remedies, has_counter = "Does it fail?", [], [], False
    for failure, names, remedy in _FAILURES:
        values = [
            value
            for name in names
            for suffix in ("", "_total")
            if (value := total(samples, f"{name}{suffix}")) is not None
        ]
        has_counter |= bool(values)
        if count := sum(values):
            texts.append(f"{count:.15g} {failure}")
            remedies.append(remedy)
    if texts:
        return Answer(question, Verdict.WARN, f"Yes: {', '.join(texts)}.", "; ".join(remedies))
    if not has_counter:
        return Answer(question, Verdict.UNKNOWN, "It cannot be said: the page has no counter of failures.")
    if not has_worked:
        return Answer(question, Verdict.UNKNOWN, "It cannot be said: nothing was transferred yet.")
    return Answer(question, Verdict.PASS, "No: no counter of failures is above 0.")


def _slow(samples: Sequence[MetricSample], transfers: float | None) -> Answer:
    question = "Is it slow?"
    if not transfers:
        return Answer(question, Verdict.UNKNOWN, "It cannot be said: the page counts no transfer.")
    size = (_first(samples, _BYTES) or 0.0) / transfers
    seconds = next((value * unit for name, unit in _SECONDS if (value := total(samples, name))), 0.0)
    rate = size * transfers / seconds if seconds else 0.0
    speeds, counts = (total(samples, f"sglang:kv_transfer_speed_gb_s_{part}") for part in ("sum", "count"))
    if speeds is not None and counts:
        rate = 1e9 * speeds / counts
    elif not rate:
        return Answer(question, Verdict.UNKNOWN, "It cannot be said: the page has no bytes or no times of transfers.")
    elif size < _LEAST_BYTES:
        return Answer(question, Verdict.UNKNOWN, f"It cannot be said: its transfers are small, {size:.0f} bytes each.")
    mean = f"{rate / 1e9:.3g} GB/s in the mean of {transfers:.15g} transfers"
    descriptors = total(samples, "vllm:nixl_num_descriptors_sum")
    blocks = f", in blocks of {format_size(int(size * transfers / descriptors))}" if descriptors and size else ""
    if rate < _SLOW_RATE:
        remedy = "that is what TCP or host memory gives: pytest-nixl doctor says which transport UCX chooses"
        return Answer(question, Verdict.WARN, f"Yes: {mean}{blocks}.", remedy)
    posting = next((value * unit for name, unit in _POST_SECONDS if (value := total(samples, name))), 0.0)
    if seconds and posting > _POST_SHARE * seconds:
        share = f"to post takes {100 * posting / seconds:.0f} % of the time"
        remedy = "use larger blocks (--block-size), or a layout whose blocks are contiguous over heads (HND)"
        return Answer(question, Verdict.WARN, f"Yes: {share}{blocks} ({mean}).", remedy)
    return Answer(question, Verdict.PASS, f"No: {mean}{blocks}.")


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
