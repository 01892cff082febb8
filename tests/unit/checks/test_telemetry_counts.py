# SPDX-License-Identifier: Apache-2.0
"""The comparison of telemetry with known transfers, with recorded counts; and the event buffer."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from helpers.metrics_server import metrics_server
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nixl import NotApplicableError
from pytest_nixl.checks.telemetry import worker
from pytest_nixl.checks.telemetry.accounting import FailureCount, differences, judge_failures, require_error
from pytest_nixl.checks.telemetry.exporters import (
    BUFFER,
    EVENTS,
    NO_EXPORTER,
    PROMETHEUS,
    TelemetrySink,
    UnreadableTelemetryError,
    read_event_buffer,
)
from pytest_nixl.checks.telemetry.measured_agents import REGION, KnownTransfers, MeasuredAgents, TransferFailure
from pytest_nixl.checks.telemetry.worker import Region, exporter_file, fail, move, time_transfers
from pytest_nixl.core.strict import StrictError
from pytest_nixl.model.nixl_releases import PACKAGES
from pytest_nixl.model.verdicts import Verdict

KNOWN = KnownTransfers(
    Counter({"agent_tx_bytes": 4096, "agent_tx_requests_num": 1, "agent_xfer_time": 90, "agent_xfer_post_time": 30}),
    transfers=1,
    took=100.0,
)
SINK = TelemetrySink(PROMETHEUS, Path("/nowhere"), {"a": 1})


def found(**changes: float | None) -> dict[str, float]:
    """Return the counts that KNOWN expects, changed; None removes one."""
    counts: Mapping[str, float | None] = {**{name: float(KNOWN.counts[name]) for name in EVENTS}, **changes}
    return {name: value for name, value in counts.items() if value is not None}


def buffer(*events: tuple[int, int], start: int = 0, places: int = 8, version: int = 4) -> bytes:
    """Return an event buffer with events from a place on; NIXL leaves garbage between type and value."""
    ring = bytearray(places * 16)
    for number, (kind, value) in enumerate(events):
        struct.pack_into("<B7sQ", ring, (start + number) % places * 16, kind, b"\xfe\x7f garb", value)
    return struct.pack("<QQIIQQ", (start + len(events)) % places, start, version, version, places, places - 1) + ring


def test_equal_counts_differ_in_nothing() -> None:
    assert [*differences(SINK, "a", found(), KNOWN)] == []
    assert [*differences(TelemetrySink(BUFFER, Path("/nowhere")), "a", found(), KNOWN)] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent_tx_bytes": 4095}, "agent_tx_bytes_total of agent a is 4095, expected 4096"),
        ({"agent_tx_bytes": None}, "agent_tx_bytes_total of agent a is missing, expected 4096"),
        ({"agent_rx_bytes": None}, "agent_rx_bytes_total of agent a is missing, expected 0"),
        ({"agent_tx_requests_num": 4}, "agent_tx_requests_num_total of agent a is 4, expected 1"),
        ({"agent_err_backend": 1}, 'agent_errors_total{status="backend"} of agent a is 1, expected 0'),
        ({"agent_telemetry_events_dropped": 2}, "agent_telemetry_events_dropped_total of agent a is 2, expected 0"),
        ({"agent_xfer_time_us_count": 2}, "agent_xfer_time_us_count of agent a is 2, expected 1"),
        ({"agent_xfer_time_us_sum": 91}, "agent_xfer_time_us_sum of agent a is 91, expected 90"),
        ({"agent_tx_bytes": float("nan")}, "agent_tx_bytes_total of agent a is nan, expected 4096"),
    ],
)
def test_a_difference_names_metric_agent_value_and_expectation(changes: dict[str, float | None], message: str) -> None:
    assert [*differences(SINK, "a", found(**changes), KNOWN)] == [message]


def test_a_release_that_counts_no_lost_events_is_right() -> None:
    missing = {"agent_telemetry_events_dropped": None, "agent_err_canceled": None}
    assert [*differences(SINK, "a", found(**missing), KNOWN)] == []


def test_times_in_a_wrong_unit_are_found() -> None:
    transfers = KnownTransfers(Counter({**KNOWN.counts, "agent_xfer_time": 90_000}), transfers=1, took=100.0)
    (message,) = differences(SINK, "a", found(agent_xfer_time=90_000), transfers)
    assert message == (
        "agent_xfer_time_total of agent a is 90000 µs, expected more than 0 and at most 250 for transfers that took "
        "100 µs"
    )


def test_a_time_to_post_beyond_the_whole_transfer_is_found() -> None:
    transfers = KnownTransfers(Counter({**KNOWN.counts, "agent_xfer_post_time": 95}), transfers=1, took=100.0)
    (message,) = differences(SINK, "a", found(agent_xfer_post_time=95), transfers)
    assert message.startswith("agent_xfer_post_time_total of agent a is 95 µs, expected at most the 90 µs")


def failed(raised: str, **counted: float) -> FailureCount:
    return FailureCount(PROMETHEUS, "READ", TransferFailure(raised, "PROC"), counted)


def test_a_failure_that_is_counted_once_under_its_status_is_right() -> None:
    judgement, uncounted, message = judge_failures([failed("nixlRemoteDisconnectError", remote_disconnect=1)])
    assert (judgement, uncounted) == (None, False)
    assert message == (
        "prometheus: a READ raised nixlRemoteDisconnectError, and telemetry counts 1 of status remote_disconnect"
    )


def test_a_failure_that_is_not_counted_is_the_finding() -> None:
    judgement, uncounted, message = judge_failures(
        [failed("nixlBackendError", backend=1), failed("nixlRemoteDisconnectError")]
    )
    assert (judgement, uncounted) == (None, True)
    assert "a READ raised nixlRemoteDisconnectError, and telemetry counts no error" in message


@pytest.mark.parametrize("counted", [{"remote_disconnect": 2}, {"unknown": 1}, {"remote_disconnect": 1, "unknown": 1}])
def test_a_failure_that_is_counted_otherwise_fails(counted: dict[str, float]) -> None:
    judgement, _, _ = judge_failures([failed("nixlRemoteDisconnectError", **counted)])
    assert judgement is not None
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.endswith("expected 1 of status remote_disconnect")


def test_a_transfer_without_an_error_beside_one_with_an_error_is_not_judged() -> None:
    found = [failed("nixlBackendError", backend=1), failed("")]
    require_error(found, "transfers with a dead agent")
    judgement, uncounted, message = judge_failures(found)
    assert (judgement, uncounted) == (None, False)
    assert message.endswith("a READ reported no error (its state is PROC)")


def test_without_an_error_there_is_nothing_to_count() -> None:
    with pytest.raises(NotApplicableError, match=r"of transfers with a dead agent: .* reported no error"):
        require_error([failed("")], "transfers with a dead agent")


class TestEventBuffer:
    def test_each_type_has_the_number_that_nixl_gives_it(self) -> None:
        errors = (
            "not_posted invalid_param backend not_found mismatch not_allowed repost_active unknown not_supported "
            "remote_disconnect canceled no_telemetry"
        )
        names = [
            f"agent_{name}"
            for name in (
                "tx_bytes",
                "rx_bytes",
                "tx_requests_num",
                "rx_requests_num",
                "memory_registered",
                "memory_deregistered",
                "xfer_time",
                "xfer_post_time",
                *(f"err_{error}" for error in errors.split()),
                "telemetry_events_dropped",
            )
        ]
        counts = read_event_buffer(buffer(*((number, number + 1) for number in range(21)), places=32))
        assert counts == {name: number + 1 for number, name in enumerate(names)}

    def test_values_are_added_by_metric(self) -> None:
        counts = read_event_buffer(buffer((0, 4096), (0, 10), (2, 1), (17, 1)))
        assert counts["agent_tx_bytes"] == 4106
        assert counts["agent_tx_requests_num"] == 1
        assert counts["agent_err_remote_disconnect"] == 1
        assert counts["agent_rx_bytes"] == 0

    def test_events_around_the_end_of_the_ring_are_read(self) -> None:
        assert read_event_buffer(buffer((0, 1), (0, 2), (0, 4), start=6))["agent_tx_bytes"] == 7

    def test_another_version_is_not_applicable(self) -> None:
        with pytest.raises(NotApplicableError, match="writes version 1 of the event buffer: pytest-nixl reads 4"):
            read_event_buffer(buffer(version=1))

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", "it has 0 bytes"),
            (buffer()[:-1], "bytes: expected"),
            (buffer((21, 1)), "an event has the unknown type 21"),
            (struct.pack("<QQIIQQ", 9, 0, 4, 4, 8, 7) + bytes(128), "positions 0 to 9"),
            (struct.pack("<QQIIQQ", 0, 0, 4, 4, 1 << 40, (1 << 40) - 1), "its header has"),
        ],
    )
    def test_another_file_is_refused(self, data: bytes, reason: str) -> None:
        with pytest.raises(StrictError, match=reason):
            read_event_buffer(data)

    @settings(deadline=None)
    @given(st.binary(max_size=300))
    def test_any_bytes_are_read_or_refused(self, data: bytes) -> None:
        with suppress(StrictError):
            read_event_buffer(struct.pack("<QQIIQQ", 0, 0, 4, 4, 8, 7)[: len(data)] + data)


class TestSink:
    def test_a_missing_file_is_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(UnreadableTelemetryError, match="cannot be read \\(No such file or directory\\)"):
            TelemetrySink(BUFFER, tmp_path).counts("a")

    def test_an_endpoint_of_other_agents_is_named(self, tmp_path: Path) -> None:
        with metrics_server(lambda: b'agent_tx_bytes_total{agent_name="b"} 1\nother 1\n') as port:
            with pytest.raises(UnreadableTelemetryError, match="has no metrics of agent a: it has those of b"):
                TelemetrySink(PROMETHEUS, tmp_path, {"a": port}).counts("a")

    def test_gauges_and_buckets_are_left_out_and_instances_added(self, tmp_path: Path) -> None:
        text = b"""agent_tx_bytes_total{agent_name="a",agent_instance="0"} 1
agent_tx_bytes_total{agent_name="a",agent_instance="1"} 2
agent_tx_last_bytes{agent_name="a"} 9
agent_errors_total{agent_name="a",status="backend"} 3
agent_xfer_time_us_bucket{agent_name="a",le="10"} 4
agent_xfer_time_us_count{agent_name="a"} 5
"""
        with metrics_server(lambda: text) as port:
            counts = TelemetrySink(PROMETHEUS, tmp_path, {"a": port}).counts("a")
        assert counts == {"agent_tx_bytes": 3, "agent_err_backend": 3, "agent_xfer_time_us_count": 5}


def test_known_transfers_are_each_made_once_and_released() -> None:
    agent = MagicMock()
    agent.initialize_xfer.side_effect = handles = ["one", "two", "three"]
    agent.transfer.return_value, agent.check_xfer_state.side_effect = "PROC", ["PROC", "DONE"] * 3
    agent.get_xfer_telemetry.return_value = MagicMock(xferDuration=7, postDuration=3)
    local: list[Region] = [["DRAM", 4096, 8, 0], ["DRAM", 4104, 8, 0]]
    remote: list[Region] = [["VRAM", 64, 8, 1], ["VRAM", 72, 8, 1]]
    found = move(agent, op="WRITE", peer="b", local=local, remote=remote, count=3, timeout=60)
    assert [call.args for call in agent.get_xfer_descs.call_args_list] == 3 * [
        ([(4096, 8, 0), (4104, 8, 0)], "DRAM"),
        ([(64, 8, 1), (72, 8, 1)], "VRAM"),
    ]
    assert [(each["xfer"], each["post"]) for each in found] == [(7.0, 3.0)] * 3
    assert min(each["took"] for each in found) > 0
    assert [call.args for call in agent.release_xfer_handle.call_args_list] == [(handle,) for handle in handles]
    assert agent.transfer.call_count == 3


@pytest.mark.parametrize(
    ("make", "more"), [(move, {"count": 1}), (time_transfers, {"count": 1, "warmup": 0}), (fail, {})]
)
def test_each_transfer_has_its_sides_and_its_peer(make: Callable[..., object], more: dict[str, int]) -> None:
    agent = MagicMock()
    agent.get_xfer_descs.side_effect, agent.transfer.return_value = lambda *side: side, "DONE"
    local: list[Region] = [["DRAM", 4096, 8, 0], ["DRAM", 4104, 8, 0]]
    make(agent, op="READ", peer="b", local=local, remote=[["VRAM", 64, 8, 1]], timeout=60, **more)
    agent.initialize_xfer.assert_called_once_with(
        "READ", ([(4096, 8, 0), (4104, 8, 0)], "DRAM"), ([(64, 8, 1)], "VRAM"), "b", b""
    )


def test_a_transfer_that_must_fail_goes_to_the_target(tmp_path: Path) -> None:
    """The agents are doubles, because they only pass on what is asked."""

    def start(name: str, **_: object) -> MagicMock:
        buffer = MagicMock(memory="DRAM", size=8, descriptor=lambda offset, size: (offset, size, 0))
        agent = MagicMock(allocate_asked=MagicMock(return_value=buffer))
        agent.name, agent.run.return_value = name, {"raised": "nixlBackendError", "state": "ERR"}
        return agent

    agents = MeasuredAgents(MagicMock(start=start, settings=MagicMock(timeout=60.0)), NO_EXPORTER, tmp_path)
    run, target = cast(MagicMock, agents.initiator.run), cast(MagicMock, agents.target.worker.kill)
    assert agents.transfer_of_other_lengths("WRITE") == TransferFailure("nixlBackendError", "ERR")
    target.assert_not_called()
    agents.transfer_to_dead_target("READ")
    target.assert_called_once_with()
    assert [(call.kwargs["op"], call.kwargs["peer"]) for call in run.call_args_list] == [
        ("WRITE", agents.target.name),
        ("READ", agents.target.name),
    ]
    lengths = [
        {region[2] for region in call.kwargs[side]} for call in run.call_args_list for side in ("local", "remote")
    ]
    assert lengths == [{REGION}, {REGION // 2}, {REGION}, {REGION}]


def test_one_timed_transfer_is_posted_again_and_again_and_released_once() -> None:
    agent = MagicMock()
    agent.transfer.return_value = "DONE"
    regions: list[Region] = [["DRAM", 4096, 8, 0]]
    transfer: Any = {"op": "READ", "peer": "b", "local": regions, "remote": regions, "timeout": 60}
    assert len(time_transfers(agent, count=3, warmup=2, **transfer)) == 3
    assert (agent.initialize_xfer.call_count, agent.transfer.call_count) == (1, 5)
    agent.release_xfer_handle.assert_called_once_with(agent.initialize_xfer.return_value)
    agent.transfer.return_value = "ERR"
    with pytest.raises(RuntimeError, match=r"^READ 1 to b ended with ERR$"):
        time_transfers(agent, count=1, warmup=0, **transfer)


def test_a_transfer_is_timed_to_its_end_and_late_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, now, states = MagicMock(), [100.0], ["DONE", "DONE", "PROC"]

    def take(seconds: float, state: str) -> str:
        now[0] += seconds
        return state

    monkeypatch.setattr(worker, "time", MagicMock(perf_counter=lambda: now[0]))
    agent.transfer.side_effect = lambda _: take(1.5, "PROC")
    agent.check_xfer_state.side_effect = lambda _: take(60.0, states.pop(0))
    regions: list[Region] = [["DRAM", 4096, 8, 0]]
    transfer: Any = {"op": "READ", "peer": "b", "local": regions, "remote": regions, "timeout": 60, "count": 1}
    assert time_transfers(agent, warmup=0, **transfer) == [61.5]
    assert move(agent, **transfer)[0]["took"] == 61.5e6, "microseconds, as NIXL's times"
    with pytest.raises(TimeoutError, match=r"^READ 1 to b was not complete within 60 s$"):
        time_transfers(agent, warmup=0, **transfer)


def test_a_transfer_that_must_fail_is_watched_to_its_end() -> None:
    regions: list[Region] = [["DRAM", 4096, 8, 0]]
    transfer: Any = {"op": "WRITE", "peer": "b", "local": regions, "remote": regions}
    agent = MagicMock()
    agent.transfer.return_value, agent.check_xfer_state.side_effect = "PROC", ["PROC", "ERR"]
    assert fail(agent, timeout=60, **transfer) == {"raised": "", "state": "ERR"}
    agent.check_xfer_state.side_effect = ["PROC", KeyError("gone")]
    assert fail(agent, timeout=60, **transfer) == {"raised": "KeyError", "state": "PROC"}
    agent.transfer.side_effect = ValueError
    assert fail(agent, timeout=60, **transfer) == {"raised": "ValueError", "state": ""}
    agent.transfer.side_effect, agent.check_xfer_state.side_effect = None, None
    agent.check_xfer_state.return_value = "PROC"
    assert fail(agent, timeout=0.01, **transfer) == {"raised": "", "state": "PROC"}


def test_an_exporter_is_a_file_of_the_folder_that_is_named_or_of_nixl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    monkeypatch.setattr(worker, "find_plugin", lambda *_: "/nixl/of.so")
    assert exporter_file(None, exporter="x") == "", "NIXL looks for it in that folder alone"
    file = tmp_path / "libtelemetry_exporter_x.so"
    file.touch()
    assert exporter_file(None, exporter="x") == str(file)
    monkeypatch.delenv("NIXL_PLUGIN_DIR")
    for path in ("/nixl/of.so", None):
        monkeypatch.setattr(
            worker,
            "find_plugin",
            lambda environ, _, packages, name, path=path: (
                path if (environ, packages, name) == (os.environ, PACKAGES, file.name) else "/other"
            ),
        )
        assert exporter_file(None, exporter="x") == (path or "")
