# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl telemetry`` with metrics as vLLM, NIXL and Dynamo write them, and with servers of something else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.metrics_server import metrics_server

from pytest_nixl.checks.telemetry.exporters import ScrapeError, scrape
from pytest_nixl.checks.telemetry.live_endpoint import answer_questions, endpoint_values
from pytest_nixl.cli import COULD_NOT_RUN, FAILED, PASSED, main, telemetry
from pytest_nixl.core.metrics_text import read_metrics
from pytest_nixl.model.verdicts import Verdict

VLLM = b"""# TYPE vllm:nixl_num_failed_transfers counter
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 1.0
vllm:nixl_num_failed_transfers_total{engine="1",model_name="m"} 2.0
vllm:nixl_num_failed_transfers_created{engine="0",model_name="m"} 1.7e+09
vllm:nixl_num_kv_expired_reqs_total{engine="0"} 4.0
vllm:nixl_post_time_seconds_bucket{engine="0",le="0.1"} 8.0
vllm:nixl_post_time_seconds_count{engine="0"} 8.0
vllm:nixl_post_time_seconds_sum{engine="0"} 0.002
vllm:nixl_xfer_time_seconds_count{engine="0"} 8.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.004
"""
NIXL = b"""agent_errors_total{agent_name="a",status="backend"} 2
agent_errors_total{agent_name="b",status="not_found"} 1
agent_tx_requests_num_total{agent_name="a"} 3
agent_rx_requests_num_total{agent_name="b"} 1
agent_xfer_post_time_total{agent_name="a"} 100
agent_xfer_time_total{agent_name="a"} 300
"""
#: The runtime's own metrics of a worker of Dynamo: page metrics-comparison of ai-dynamo/dynamo.
DYNAMO = b"""# TYPE dynamo_component_requests_total counter
dynamo_component_requests_total{dynamo_namespace="default",dynamo_component="prefill",dynamo_endpoint="generate"} 42
# TYPE dynamo_component_errors_total counter
dynamo_component_errors_total{dynamo_component="prefill",dynamo_endpoint="generate"} 5
# TYPE dynamo_component_request_duration_seconds histogram
dynamo_component_request_duration_seconds_sum{dynamo_component="prefill"} 2.5
dynamo_component_request_duration_seconds_count{dynamo_component="prefill"} 42
"""
#: What Dynamo adds for TensorRT-LLM: page trtllm-observability of ai-dynamo/dynamo.
TRTLLM = b"""# TYPE trtllm_kv_transfer_success_total counter
trtllm_kv_transfer_success_total{disaggregation_mode="decode",engine_type="trtllm"} 4.0
# TYPE trtllm_kv_transfer_latency_seconds histogram
trtllm_kv_transfer_latency_seconds_bucket{disaggregation_mode="decode",le="0.1"} 4.0
trtllm_kv_transfer_latency_seconds_count{disaggregation_mode="decode",engine_type="trtllm"} 4.0
trtllm_kv_transfer_latency_seconds_sum{disaggregation_mode="decode",engine_type="trtllm"} 0.002
"""
#: What SGLang writes: python/sglang/srt/observability/metrics_collector.py of sgl-project/sglang.
SGLANG = b"""sglang:num_transfer_failed_reqs_total{model_name="m"} 2.0
sglang:kv_transfer_latency_ms_count{model_name="m"} 10.0
sglang:kv_transfer_latency_ms_sum{model_name="m"} 5.0
"""
#: What Dynamo's block manager writes on a port of its own: module kvbm of
#: lib/runtime/src/metrics/prometheus_names.rs of ai-dynamo/dynamo.
KVBM = b"""# TYPE kvbm_object_read_failures counter
kvbm_object_read_failures 1
# TYPE kvbm_object_write_failures counter
kvbm_object_write_failures 2
kvbm_offload_blocks_d2o 40
"""
BOUNDS = ("--max-failed=3", "--max-expired=4", "--max-post-us=250", "--max-transfer-us=500")


def ask(text: bytes, *options: str) -> int:
    with metrics_server(lambda: text) as port:
        return main(["telemetry", f"127.0.0.1:{port}", "--timeout=300", *options])


FAILED_3 = "failed transfers: 3 (vllm:nixl_num_failed_transfers_total)"
EXPIRED = "expired requests: 4 (vllm:nixl_num_kv_expired_reqs_total)"
POST_250 = "mean post time: 250 us (vllm:nixl_post_time_seconds, 8 transfers)"
ALL_500 = "mean transfer time: 500 us (vllm:nixl_xfer_time_seconds, 8 transfers)"
NO_EXPIRED = (
    "expired requests: unknown, because the endpoint has none of vllm:nixl_num_kv_expired_reqs_total, "
    "vllm:nixl_num_kv_expired_reqs"
)
POST_25 = "mean post time: 25 us (agent_xfer_post_time_total, 4 transfers)"
ALL_75 = "mean transfer time: 75 us (agent_xfer_time_total, 4 transfers)"
UNMEASURED = "unknown, because the endpoint has no metric of it, or no transfer was made"
NO_POST, NO_TIME = f"mean post time: {UNMEASURED}", f"mean transfer time: {UNMEASURED}"
NO_BOUND = "NO-EXPECTATION: {}, no bound"
#: Of a page: its values, and for the value at a place the bound that it just keeps, and one that it breaks.
VALUES: list[tuple[bytes, list[str], int, str, str]] = [
    (VLLM, [FAILED_3, EXPIRED, POST_250, ALL_500], 0, "--max-failed=3", "--max-failed=2"),
    (VLLM, [FAILED_3, EXPIRED, POST_250, ALL_500], 1, "--max-expired=4", "--max-expired=3.5"),
    (VLLM, [FAILED_3, EXPIRED, POST_250, ALL_500], 2, "--max-post-us=250", "--max-post-us=249"),
    (VLLM, [FAILED_3, EXPIRED, POST_250, ALL_500], 3, "--max-transfer-us=500", "--max-transfer-us=499"),
    (NIXL, ["failed transfers: 3 (agent_errors_total)", NO_EXPIRED, POST_25, ALL_75], 2, "--max-post-us=25",
     "--max-post-us=24"),
    # An engine with both kinds of metrics is not counted twice.
    (VLLM + NIXL.replace(b" 2\n", b" 9\n"), ["failed transfers: 10 (agent_errors_total)", EXPIRED, POST_250, ALL_500],
     0, "--max-failed=10", "--max-failed=9"),
    # A worker of Dynamo is judged by the metrics of its engine.
    (DYNAMO + VLLM, [FAILED_3, EXPIRED, POST_250, ALL_500], 0, "--max-failed=3", "--max-failed=0"),
    (DYNAMO + SGLANG, ["failed transfers: 2 (sglang:num_transfer_failed_reqs_total)", NO_EXPIRED, NO_POST,
                       "mean transfer time: 500 us (sglang:kv_transfer_latency_ms, 10 transfers)"], 0, "--max-failed=2",
     "--max-failed=1"),
    (DYNAMO + KVBM, ["failed transfers: 3 (kvbm_object_read_failures + kvbm_object_write_failures)", NO_EXPIRED,
                     NO_POST, NO_TIME], 0, "--max-failed=3", "--max-failed=2"),
    (b"agent_errors_total +Inf\n", ["failed transfers: inf (agent_errors_total)", NO_EXPIRED, NO_POST, NO_TIME], 0, "",
     "--max-failed=1e300"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "values", "place", "kept", "broken"), VALUES)
def test_each_value_keeps_its_bound_or_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: bytes,
    values: list[str],
    place: int,
    kept: str,
    broken: str,
) -> None:
    page = tmp_path / "page"
    page.write_bytes(text)

    def shown(*options: str) -> tuple[int, list[str], list[str]]:
        """Return the exit code, the lines of values with what follows, and the remedies of values."""
        code = main(["telemetry", str(page), *options])
        lines = [line for line in capsys.readouterr().out.splitlines() if "? " not in line and line[0] != " "]
        remedies = [line for line in lines if line.startswith("remedy: ")]
        return code, [line for line in lines if line not in remedies], remedies

    file = "transport: unknown, because a file does not say which process wrote it"
    unbounded = [NO_BOUND.format(value) if "unknown" not in value else f"NO-EXPECTATION: {value}" for value in values]
    unit = " us" if values[place].startswith("mean") else ""
    code, lines, remedies = shown()
    look = "WARN: at least one answer needs a look: see its remedy"
    assert (code, lines, remedies) == (PASSED, [*unbounded, file, look], [])
    if kept:
        value = f"PASS: {values[place]}, at most {kept.partition('=')[2]}{unit}"
        expected = [
            *unbounded[:place],
            value,
            *unbounded[place + 1 :],
            file,
            "PASS: no bounded value of 1 is above its bound",
        ]
        assert shown(kept) == shown(kept, "--gate") == (PASSED, expected, [])
    code, lines, remedies = shown(broken)
    bound = f"{float(broken.partition('=')[2]):g}"
    assert lines[place] == f"FAIL: {values[place]}, above its bound of {bound}{unit}"
    assert (code, lines[-1]) == (FAILED, "FAIL: 1 of 1 bounded values do not keep their bounds")
    # vLLM may have sent wrong tokens.
    wrong = "vLLM may have sent them with HTTP 200 and wrong tokens, whatever kv_load_failure_policy says"
    assert [wrong in remedy for remedy in remedies] == ([True] if values[place] == FAILED_3 else [])


def test_all_bounds_are_judged_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(VLLM, *BOUNDS) == PASSED
    lines = capsys.readouterr().out.splitlines()
    # The server is this process. Whether NIXL is loaded in it depends on the tests that run at the same time.
    values = [line for line in lines[4:] if not line.startswith(("transport: ", "NIXL of pid "))]
    assert lines[:2] == [
        "PASS: Is NIXL used? Yes: 8 transfers.",
        "WARN: Does it fail? Yes: 3 failed transfers, 4 expired requests.",
    ]
    assert "raise kv_lease_duration" in lines[2]
    assert lines[3].startswith("UNKNOWN: Is it slow? It cannot be said")
    assert values == [
        f"PASS: {FAILED_3}, at most 3", f"PASS: {EXPIRED}, at most 4", f"PASS: {POST_250}, at most 250 us",
        f"PASS: {ALL_500}, at most 500 us", "PASS: no bounded value of 4 is above its bound",
    ]  # fmt: skip
    assert ask(VLLM, "--max-failed=2", "--max-expired=1", "--max-post-us=250") == FAILED
    assert capsys.readouterr().out.endswith("FAIL: 2 of 3 bounded values do not keep their bounds\n")


_FAILURES = (
    "vllm:nixl_num_failed_transfers agent_errors sglang:num_transfer_failed_reqs vllm:nixl_num_kv_expired_reqs "
    "vllm:nixl_num_notifications_after_expiry vllm:nixl_num_failed_notifications sglang:num_bootstrap_failed_reqs "
    "kvbm_object_read_failures kvbm_object_write_failures"
)


@pytest.mark.parametrize("name", _FAILURES.split())
@pytest.mark.parametrize("suffix", ["", "_total"])
def test_each_counter_of_failures_is_read(name: str, suffix: str) -> None:
    _, fails, _ = answer_questions(read_metrics(f"agent_tx_bytes_total 1\n{name}{suffix} 7\n".encode()))
    assert fails.verdict is Verdict.WARN
    assert fails.text.startswith("Yes: 7 ")
    assert fails.remedy


_TRANSFERS = (
    "vllm:nixl_xfer_time_seconds_count sglang:kv_transfer_latency_ms_count trtllm_kv_transfer_latency_seconds_count "
    "agent_xfer_time_us_count agent_tx_requests_num_total agent_rx_requests_num_total"
)
_REQUESTS = "vllm:request_success_total vllm:request_success sglang:num_requests_total dynamo_frontend_requests_total"


@pytest.mark.parametrize("request_name", _REQUESTS.split())
def test_each_count_of_transfers_and_requests_is_read(request_name: str) -> None:
    for name in _TRANSFERS.split():
        for requests, verdict in ((80, Verdict.PASS), (81, Verdict.WARN)):
            used, *_ = answer_questions(read_metrics(f"{name} 8\n{request_name} {requests}\n".encode()))
            assert used.verdict is verdict, (name, used)
            assert f"8 transfers for {requests} requests" in used.text


@pytest.mark.parametrize(
    ("place", "name", "unit"),
    [
        (2, "vllm:nixl_post_time_seconds", 1e6),
        (2, "agent_xfer_post_time_us", 1),
        (3, "vllm:nixl_xfer_time_seconds", 1e6),
        (3, "agent_xfer_time_us", 1),
        (3, "trtllm_kv_transfer_latency_seconds", 1e6),
        (3, "sglang:kv_transfer_latency_ms", 1e3),
    ],
)
def test_each_histogram_of_times_has_its_unit(place: int, name: str, unit: float) -> None:
    page = f"{name}_sum 3\n{name}_count 2\nagent_xfer_time_total 9\nagent_xfer_post_time_total 9\n"
    values = endpoint_values(read_metrics(page.encode()))
    assert (values[place].value, values[place].source) == (1.5 * unit, f"{name}, 2 transfers")
    assert values[5 - place].value is None, "of the other time"


@pytest.mark.parametrize(
    ("count", "seconds", "post", "unit"),
    [
        (
            "vllm:nixl_xfer_time_seconds_count",
            "vllm:nixl_xfer_time_seconds_sum",
            "vllm:nixl_post_time_seconds_sum",
            1.0,
        ),
        ("agent_xfer_time_us_count", "agent_xfer_time_us_sum", "agent_xfer_post_time_us_sum", 1e6),
        ("agent_tx_requests_num_total", "agent_xfer_time_total", "agent_xfer_post_time_total", 1e6),
    ],
)
@pytest.mark.parametrize("size", ["vllm:nixl_bytes_transferred_sum", "agent_tx_bytes_total", "agent_rx_bytes_total"])
@pytest.mark.parametrize(
    ("rate", "posting", "verdict"), [(2e9, 0.4, Verdict.PASS), (2e9, 0.6, Verdict.WARN), (0.9e9, 0.4, Verdict.WARN)]
)
def test_the_rate_is_read_in_each_spelling(
    size: str, count: str, seconds: str, post: str, unit: float, rate: float, posting: float, verdict: Verdict
) -> None:
    page = f"{count} 4\n{seconds} {2 * unit}\n{post} {2 * unit * posting}\n{size} {2 * rate}\n"
    *_, slow = answer_questions(read_metrics(page.encode()))
    assert slow.verdict is verdict, slow
    assert f"{rate / 1e9:g} GB/s in the mean of 4 transfers" in slow.text


@pytest.mark.parametrize(
    ("text", "options", "code", "end"),
    [
        (NIXL, ("--gate",), FAILED, "FAIL: 1 of 3 questions has no answer"),
        (TRTLLM, (), PASSED, "PASS: no answer is a warning; bounds for an alert: --max-failed, --max-expired"),
        (TRTLLM, ("--gate",), FAILED, "FAIL: 2 of 3 questions have no answer"),
        (b"agent_memory_registered 1\n", (), PASSED, "NOTHING CHECKED: this page answers none of the questions"),
    ],
)  # fmt: skip
def test_without_bounds_the_answers_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, options: tuple[str, ...], code: int, end: str
) -> None:
    (tmp_path / "page").write_bytes(text)
    assert main(["telemetry", str(tmp_path / "page"), *options]) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(end)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (NIXL, "the endpoint has none of vllm:nixl_num_kv_expired_reqs_total"),
        (NIXL + b"vllm:nixl_num_kv_expired_reqs_total NaN\n", "unknown, because vllm:nixl_num_kv_expired_reqs_total"),
        (NIXL + b"vllm:nixl_num_kv_expired_reqs_total -1\n", "which is negative"),
    ],
)
def test_a_bounded_value_that_is_unknown_fails_only_the_gate(
    text: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(text, "--max-expired=0") == PASSED
    out = capsys.readouterr().out
    assert "UNKNOWN: expired requests: " in out
    assert out.endswith("NOTHING CHECKED: none of 1 bounded values is known\n")
    assert reason in out
    assert ask(text, "--max-expired=0", "--gate") == FAILED


def test_json_has_the_same_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page"
    page.write_bytes(VLLM + b"agent_errors_total +Inf\n")
    assert main(["telemetry", str(page), "--json", "--max-expired=1"]) == FAILED
    values = [
        ("failed transfers", "NO-EXPECTATION", None, "", None, "agent_errors_total"),
        ("expired requests", "FAIL", 4.0, "", 1.0, "vllm:nixl_num_kv_expired_reqs_total"),
        ("mean post time", "NO-EXPECTATION", 250.0, "us", None, "vllm:nixl_post_time_seconds, 8 transfers"),
        ("mean transfer time", "NO-EXPECTATION", 500.0, "us", None, "vllm:nixl_xfer_time_seconds, 8 transfers"),
    ]
    names = ("name", "verdict", "value", "unit", "at_most", "source")
    assert json.loads(capsys.readouterr().out) == {
        "verdict": "FAIL", "url": str(page), "processes": [], "why": "a file does not say which process wrote it",
        "answers": [asdict(answer) for answer in answer_questions(read_metrics(page.read_bytes()))],
        "values": [dict(zip(names, value, strict=True)) for value in values],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://10.0.0.1:90/metrics", 90), ("localhost", 80), ("https://10.0.0.2/metrics", 443), ("http://[::1]:9", 9),
        ("http://10.0.0.3:90", None), ("http://node-a:90", None),
    ],
)  # fmt: skip
def test_the_processes_of_an_endpoint_of_this_host_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, port: int | None
) -> None:
    asked: list[int] = []
    addresses = {"eth0": ["10.0.0.1/16", "10.0.0.2/16"], "lo": ["::1/128"]}
    monkeypatch.setattr(telemetry, "scrape", lambda url, timeout: read_metrics(TRTLLM))
    monkeypatch.setattr(telemetry, "ask_addresses", lambda: addresses)

    def live_nixl(port: int) -> tuple[list[object], str]:
        asked.append(port)
        return [], "nobody listens"

    monkeypatch.setattr(telemetry, "live_nixl", live_nixl)
    assert main(["telemetry", url]) == PASSED
    reason = "the endpoint is not an address of this host: run the command beside the engine"
    transport = f"transport: unknown, because {'nobody listens' if port else reason}"
    assert transport in capsys.readouterr().out.splitlines()
    assert asked == [port] * (port is not None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"<html>hello</html>", "is not Prometheus metrics: line 1 is '<html>hello</html>'"),
        (b"\xff\xfe", "is not Prometheus metrics: it is not UTF-8"),
        (b"", "is not Prometheus metrics: it has no series"),
        (
            b"go_threads 7\n",
            "has 1 series and none of NIXL or of an engine's transfers (it has go_threads, …)",
        ),
        # A frontend of Dynamo has no metrics of transfers.
        (DYNAMO, "series and none of NIXL or of an engine's transfers (it has dynamo_component_errors_total, dynamo_"),
        (VLLM + b"broken{\n", "is not Prometheus metrics: line 11 has the labels"),
        (b"#" * ((16 << 20) + 1), "has more than 16 MiB"),
    ],
    ids=["html", "binary", "empty", "another-program", "a-frontend", "one-broken-line", "large"],
)
def test_what_is_not_metrics_of_nixl_is_one_sentence(
    tmp_path: Path, text: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page"
    page.write_bytes(text)
    assert (ask(text), main(["telemetry", str(page)])) == (COULD_NOT_RUN, COULD_NOT_RUN)
    lines = capsys.readouterr().err.splitlines()
    sentences = [line for line in lines if not line.startswith("remedy: ")]
    assert (len(sentences), lines[1][:8]) == (2, "remedy: ")
    assert ("of Dynamo give the port from its variable DYN_SYSTEM_PORT" in lines[1]) is ("none of NIXL" in message)
    assert [message in sentence for sentence in sentences] == [True, True]


@pytest.mark.parametrize(("text", "status"), [(VLLM, 404), (b"<html>", 200), (b"#" * ((16 << 20) + 1), 200)])
def test_no_message_has_the_secret_of_a_url(text: bytes, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with metrics_server(lambda: text, status=status) as port:
        assert main(["telemetry", f"http://127.0.0.1:{port}/?token=Sw0rdfish", "--timeout=300"]) == COULD_NOT_RUN
        with pytest.raises(ScrapeError) as error:
            scrape(f"http://127.0.0.1:{port}/metrics?token=Sw0rdfish", 300)
    output = capsys.readouterr()
    assert f"http://127.0.0.1:{port}/metrics?token=***" in output.err
    assert ("?token=*** answers with HTTP status 404" in output.err) is (status == 404)
    assert "Sw0rdfish" not in f"{output.out}{output.err}{error.value}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "is not the URL of a host"),
        ("ftp://h/metrics", "has the scheme 'ftp': expected http or https"),
        ("http://user:secret@h:1/metrics", "contains a user"),
        ("http://h:99999/", "is not a URL"),
        ("http://[::1", "is not a URL"),
        ("http://h:0/", "is not the URL of a host"),
        ("http://h/\x1b[31m", "is not the URL of a host"),
    ],
)
def test_a_bad_url_is_one_sentence(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["telemetry", url]) == COULD_NOT_RUN
    error = capsys.readouterr().err
    assert message in error
    assert "secret" not in error
    assert "\x1b" not in error


def test_a_refused_connection_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and connections are refused
        bound.bind(("127.0.0.1", 0))
        assert main(["telemetry", f"127.0.0.1:{bound.getsockname()[1]}"]) == COULD_NOT_RUN
    assert "/metrics cannot be read: Connection refused\n" in capsys.readouterr().err


@contextmanager
def talking(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """Accept one connection, and let a function answer it until the body ends; yield the port."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    talk(connection, ended)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield listening.getsockname()[1]
        finally:
            ended.set()
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            serving.join()


def drips(connection: socket.socket, ended: threading.Event) -> None:
    """Send an answer without an end, a byte at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while not ended.wait(0.05):
        connection.sendall(b"#")


def pours(connection: socket.socket, ended: threading.Event) -> None:
    """Send an answer without an end, as fast as possible."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while not ended.is_set():
        connection.sendall(b"#" * 65536)


def breaks_off(connection: socket.socket, _: threading.Event) -> None:
    """End an answer before its length."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nagent_errors_total 0\n")


@pytest.mark.parametrize(
    ("talk", "seconds", "message"),
    [
        (drips, 1, "did not complete its answer within 1 s"),
        (lambda _, ended: ended.wait(), 1, "did not complete its answer within 1 s"),
        (pours, 300, "has more than 16 MiB"),
        (breaks_off, 300, "/metrics cannot be read: "),
    ],
    ids=["drips", "silent", "pours", "breaks-off"],
)
def test_an_answer_without_an_end_is_ended_at_the_deadline_or_its_limit(
    talk: Callable[[socket.socket, threading.Event], None],
    seconds: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with talking(talk) as port:
        assert main(["telemetry", f"127.0.0.1:{port}", f"--timeout={seconds}"]) == COULD_NOT_RUN
    assert message in capsys.readouterr().err
