# SPDX-License-Identifier: Apache-2.0
"""Three questions to a page of metrics: is NIXL used at all, does it fail, and is it slow?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nixl.core.metrics_text import MetricSample, total
from pytest_nixl.core.units import format_size
from pytest_nixl.model.verdicts import Verdict

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
