# SPDX-License-Identifier: Apache-2.0
"""The comparison of telemetry with known transfers, with recorded counts; and the event buffer."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, call

import pytest
from helpers.metrics_server import metrics_server
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nixl import NotApplicableError
from pytest_nixl.checks.telemetry import measured_agents, worker
from pytest_nixl.checks.telemetry.accounting import (
    FailureCount,
    count_failure,
    differences,
    judge_counts,
    judge_failures,
    require_error,
)
from pytest_nixl.checks.telemetry.exporters import (
    BUFFER,
    EVENTS,
    NO_EXPORTER,
    PROMETHEUS,
    PROMETHEUS_MP,
    VARIABLES,
    TelemetrySink,
    UnreadableTelemetryError,
    read_event_buffer,
)
from pytest_nixl.checks.telemetry.measured_agents import (
    INITIATOR,
    REGION,
    TARGET,
    KnownTransfers,
    MeasuredAgents,
    TransferFailure,
)
from pytest_nixl.checks.telemetry.worker import Region, exporter_file, fail, move, time_transfers
from pytest_nixl.core.strict import StrictError
from pytest_nixl.host.network import PortHolder
from pytest_nixl.model.nixl_releases import PACKAGES
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.worker_errors import WorkerError

KNOWN = KnownTransfers(
    Counter({"agent_tx_bytes": 4096, "agent_tx_requests_num": 1, "agent_xfer_time": 90, "agent_xfer_post_time": 30}),
    transfers=1,
    took=100.0,
)
SINK = TelemetrySink(PROMETHEUS, Path("/nowhere"), {"a": 1})


def exported(**changes: float | None) -> dict[str, float]:
    """Return the counts that KNOWN expects, changed; None removes one."""
    counts: Mapping[str, float | None] = {**{name: float(KNOWN.counts[name]) for name in EVENTS}, **changes}
    return {name: value for name, value in counts.items() if value is not None}


def buffer(*events: tuple[int, int], start: int = 0, places: int = 8, version: int = 4) -> bytes:
    """Return an event buffer with events from a place on; NIXL leaves garbage between type and value."""
    ring = bytearray(places * 16)
    for number, (kind, value) in enumerate(events):
        struct.pack_into("<B7sQ", ring, (start + number) % places * 16, kind, b"\xfe\x7f garb", value)
    return struct.pack("<QQIIQQ", (start + len(events)) % places, start, version, version, places, places - 1) + ring


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({}, []),
        # A release without a status of errors, or without a count of lost events, counts none.
        ({"agent_telemetry_events_dropped": None, "agent_err_canceled": None}, []),
        ({"agent_tx_bytes": 4095}, ["agent_tx_bytes_total of agent a is 4095, expected 4096"]),
        ({"agent_tx_bytes": None}, ["agent_tx_bytes_total of agent a is missing, expected 4096"]),
        ({"agent_rx_bytes": None}, ["agent_rx_bytes_total of agent a is missing, expected 0"]),
        ({"agent_tx_requests_num": 4}, ["agent_tx_requests_num_total of agent a is 4, expected 1"]),
        ({"agent_err_backend": 1}, ['agent_errors_total{status="backend"} of agent a is 1, expected 0']),
        ({"agent_telemetry_events_dropped": 2}, ["agent_telemetry_events_dropped_total of agent a is 2, expected 0"]),
        ({"agent_xfer_time_us_count": 2, "agent_xfer_time_us_sum": 91, "agent_xfer_post_time_us_count": 1,
          "agent_xfer_post_time_us_sum": 29},
         ["agent_xfer_time_us_count of agent a is 2, expected 1",
          "agent_xfer_time_us_sum of agent a is 91, expected 90",
          "agent_xfer_post_time_us_sum of agent a is 29, expected 30"]),
        ({"agent_tx_bytes": float("nan")}, ["agent_tx_bytes_total of agent a is nan, expected 4096"]),
    ],
)  # fmt: skip
def test_a_difference_names_metric_agent_value_and_expectation(
    changes: dict[str, float | None], messages: list[str]
) -> None:
    assert [*differences(SINK, "a", exported(**changes), KNOWN)] == messages


@pytest.mark.parametrize(
    ("xfer", "post", "messages"),
    [
        (250, 250, []),
        *((time, 0, [f"agent_xfer_time_total of agent a is {time} µs, expected more than 0 and at most 250 for "
                     "transfers that took 100 µs"]) for time in (251, 0)),
        (90, 95, ["agent_xfer_post_time_total of agent a is 95 µs, expected at most the 90 µs of the whole transfers"]),
    ],
)  # fmt: skip
def test_times_in_a_wrong_unit_or_order_are_found(xfer: int, post: int, messages: list[str]) -> None:
    times = {"agent_xfer_time": xfer, "agent_xfer_post_time": post}
    transfers = KnownTransfers(Counter({**KNOWN.counts, **times}), transfers=1, took=100.0)
    assert [*differences(SINK, "a", exported(**times), transfers)] == messages
    assert [*differences(SINK, "a", dict.fromkeys(EVENTS, 0.0), KnownTransfers())] == [], "nothing was moved"


@pytest.mark.parametrize(
    ("wrong", "verdict", "reason"),
    [
        ({}, Verdict.PASS, "prometheus of NIXL 1.5 counts the 4096 bytes of 1 transfers exactly, their times, the "
         "registered memory and the refused request"),
        ({"b": {"agent_rx_bytes": 1.0}, "a": {"agent_rx_bytes": 2.0}}, Verdict.FAIL,
         "prometheus of NIXL 1.5: agent_rx_bytes_total of agent a is 2, expected 0; agent_rx_bytes_total of agent b is "
         "1, expected 0"),
        ({"b": UnreadableTelemetryError("it cannot be read")}, Verdict.FAIL, "prometheus: it cannot be read"),
    ],
)  # fmt: skip
def test_both_agents_are_judged(wrong: dict[str, Any], verdict: Verdict, reason: str) -> None:
    agents = {name: SimpleNamespace(name=name) for name in ("a", "b")}
    transfers = {"a": KNOWN, "b": KnownTransfers(Counter(agent_memory_registered=8))}

    def counts(agent: Any) -> dict[str, float]:
        if isinstance(wrong.get(agent.name), Exception):
            raise wrong[agent.name]
        return {**{name: float(transfers[agent.name].counts[name]) for name in EVENTS}, **wrong.get(agent.name, {})}

    sink = TelemetrySink(PROMETHEUS, Path("/nowhere"))
    pair = SimpleNamespace(
        initiator=agents["a"], target=agents["b"], sink=sink, nixl="1.5", known=transfers, counts=counts
    )
    judged = judge_counts(cast("MeasuredAgents", pair))
    assert (judged.verdict, judged.reason) == (verdict, reason)


def failed(raised: str, **counted: float) -> FailureCount:
    return FailureCount(PROMETHEUS, "READ", TransferFailure(raised, "PROC"), counted)


GONE, BACKEND = "nixlRemoteDisconnectError", failed("nixlBackendError", backend=1)
COUNTED = "prometheus: a READ raised nixlRemoteDisconnectError, and telemetry counts {}"
OF_BACKEND = "prometheus: a READ raised nixlBackendError, and telemetry counts 1 of status backend; "


@pytest.mark.parametrize(
    ("failures", "uncounted", "listing"),
    [
        ([failed(GONE, remote_disconnect=1)], False, COUNTED.format("1 of status remote_disconnect")),
        ([BACKEND, failed(GONE)], True, OF_BACKEND + COUNTED.format("no error")),
        ([BACKEND, failed("")], False, OF_BACKEND + "prometheus: a READ reported no error (its state is PROC)"),
    ],
)
def test_a_failure_is_counted_once_under_its_status_or_not_at_all(
    failures: list[FailureCount], uncounted: bool, listing: str
) -> None:
    require_error(failures, "transfers with a dead agent")
    assert judge_failures(failures) == (None, uncounted, listing)


@pytest.mark.parametrize("counted", [{"remote_disconnect": 2}, {"unknown": 1}, {"remote_disconnect": 1, "unknown": 1}])
def test_a_failure_that_is_counted_otherwise_fails(counted: dict[str, float]) -> None:
    judgement, uncounted, _ = judge_failures([failed(GONE), failed(GONE, **counted)])
    text = ", ".join(f"{value} of status {status}" for status, value in counted.items())
    assert judgement is not None
    assert (judgement.verdict, judgement.reason, uncounted) == (
        Verdict.FAIL, f"{COUNTED.format(text)}, expected 1 of status remote_disconnect", False
    )  # fmt: skip


def test_without_an_error_there_is_nothing_to_count() -> None:
    with pytest.raises(NotApplicableError, match=r"^NIXL reports no error of dead agents: .* reported no error"):
        require_error([failed("")], "dead agents")


def test_only_errors_that_were_counted_more_often_than_before_count() -> None:
    counts = [{"agent_err_a": 1, "agent_err_b": 2, "agent_tx_bytes": 1}, {"agent_tx_bytes": 9, "agent_err_a": 1,
              "agent_err_b": 5, "agent_err_c": 1}]  # fmt: skip
    failure = TransferFailure("nixlBError", "ERR")
    sink = TelemetrySink(BUFFER, Path("/nowhere"))
    pair = SimpleNamespace(initiator="i", sink=sink, counts=lambda agent: counts.pop(0) if agent == "i" else {})
    count = count_failure(cast("MeasuredAgents", pair), "WRITE", lambda op: failure if op == "WRITE" else failed(""))  # type: ignore[arg-type, return-value]
    assert count == FailureCount(BUFFER, "WRITE", failure, {"b": 3, "c": 1})


class TestEventBuffer:
    def test_each_type_has_the_number_that_nixl_gives_it(self) -> None:
        errors = (
            "not_posted invalid_param backend not_found mismatch not_allowed repost_active unknown not_supported "
            "remote_disconnect canceled no_telemetry"
        )
        counted = "tx_bytes rx_bytes tx_requests_num rx_requests_num memory_registered memory_deregistered xfer_time"
        names = [
            *(f"agent_{name}" for name in counted.split()), "agent_xfer_post_time",
            *(f"agent_err_{error}" for error in errors.split()), "agent_telemetry_events_dropped",
        ]  # fmt: skip
        counts = read_event_buffer(buffer(*((number, number + 1) for number in range(21)), places=32))
        assert counts == {name: number + 1 for number, name in enumerate(names)}

    def test_values_are_added_by_metric_also_around_the_end_of_the_ring(self) -> None:
        counts = read_event_buffer(buffer((0, 4096), (0, 10), (2, 1), (17, 1), start=6))
        expected = {"agent_tx_bytes": 4106, "agent_tx_requests_num": 1, "agent_err_remote_disconnect": 1}
        assert counts == {**dict.fromkeys(EVENTS, 0), **expected}
        assert read_event_buffer(buffer(start=3)) == dict.fromkeys(EVENTS, 0), "there was no event"

    def test_another_version_is_not_applicable(self) -> None:
        with pytest.raises(NotApplicableError, match="writes version 1 of the event buffer: pytest-nixl reads 4"):
            read_event_buffer(buffer(version=1))

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", "it has 0 bytes: expected a header of 40"),
            (buffer()[:-1], "it has 167 bytes: expected 168"),
            (buffer((21, 1)), "an event has the unknown type 21"),
            *((struct.pack("<QQIIQQ", end, start, 4, 4, places, mask) + bytes(places % 1024 * 16),
               f"its header has {places} places, mask {mask}, and positions {start} to {end}")
              for end, start, places, mask in ((8, 0, 8, 7), (0, 8, 8, 7), (0, 0, 1 << 40, (1 << 40) - 1), (0, 0, 6, 5),
                                               (0, 0, 8, 6), (0, 0, 0, 0))),
        ],
    )  # fmt: skip
    def test_another_file_is_refused(self, data: bytes, reason: str) -> None:
        with pytest.raises(StrictError, match=f"^{reason}$"):
            read_event_buffer(data)

    @settings(deadline=None)
    @given(st.binary(max_size=300))
    def test_any_bytes_are_read_or_refused(self, data: bytes) -> None:
        with suppress(StrictError):
            read_event_buffer(struct.pack("<QQIIQQ", 0, 0, 4, 4, 8, 7)[: len(data)] + data)


class TestSink:
    @pytest.mark.parametrize(
        ("exporter", "variables", "place", "spelled"),
        [
            (NO_EXPORTER, {}, "http://127.0.0.1:7/metrics", "agent_x_total"),
            (BUFFER, {"DIR": "/folder"}, "/folder/a", "agent_x"),
            (PROMETHEUS, {"EXPORTER": PROMETHEUS, "PROMETHEUS_LOCAL": "y", "PROMETHEUS_PORT": "7"},
             "http://127.0.0.1:7/metrics", "agent_x_total"),
            (PROMETHEUS_MP, {"EXPORTER": PROMETHEUS_MP, "PROMETHEUS_LOCAL": "y", "PROMETHEUS_PORT": "7",
                             "MULTIPROC_DIR": "/folder"}, "http://127.0.0.1:7/metrics", "agent_x_total"),
        ],
    )  # fmt: skip
    def test_an_agent_has_no_other_variables_of_telemetry(
        self, exporter: str, variables: dict[str, str], place: str, spelled: str
    ) -> None:
        sink = TelemetrySink(exporter, Path("/folder"), {"a": 7, "b": 8})
        enabled = {"ENABLE": "y", "RUN_INTERVAL": "50"} if exporter != NO_EXPORTER else {}
        present = {f"NIXL_TELEMETRY_{name}": value for name, value in (variables | enabled).items()}
        assert sink.variables("a") == {**dict.fromkeys(VARIABLES), **present}
        assert " ".join(name.removeprefix("NIXL_TELEMETRY_") for name in VARIABLES) == (
            "ENABLE EXPORTER DIR MULTIPROC_DIR PROMETHEUS_PORT PROMETHEUS_LOCAL ENABLED_METRICS BUFFER_SIZE "
            "RUN_INTERVAL HISTOGRAM_BUCKETS_US"
        )
        assert (sink.place("a"), sink.spelled("agent_x")) == (place, spelled)

    def test_what_cannot_be_read_is_one_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "b").write_bytes(b"")
        reasons = {"a": r"cannot be read \(No such file or directory\)", "b": "is not an event buffer: it has 0 bytes"}
        for name, reason in reasons.items():
            with pytest.raises(UnreadableTelemetryError, match=f"^{tmp_path}/{name} {reason}"):
                TelemetrySink(BUFFER, tmp_path).counts(name)
        with pytest.raises(UnreadableTelemetryError, match=r"^http://127\.0\.0\.1:1/metrics cannot be read: "):
            TelemetrySink(PROMETHEUS, tmp_path, {"a": 1}).counts("a")
        with metrics_server(lambda: b'agent_tx_bytes_total{agent_name="b"} 1\nother 1\n') as port:
            with pytest.raises(UnreadableTelemetryError, match=r"has no metrics of agent a: it has those of b$"):
                TelemetrySink(PROMETHEUS, tmp_path, {"a": port}).counts("a")

    def test_gauges_and_buckets_are_left_out_and_instances_added(self, tmp_path: Path) -> None:
        text = b"""agent_tx_bytes_total{agent_name="a",agent_instance="0"} 1
agent_tx_bytes_total{agent_name="a",agent_instance="1"} 2
agent_tx_bytes_total{agent_name="b"} 20
agent_tx_last_bytes{agent_name="a"} 9
agent_errors_total{agent_name="a",status="backend"} 3
agent_xfer_time_us_bucket{agent_name="a",le="10"} 4
agent_xfer_time_us_count{agent_name="a"} 5
agent_xfer_time_us_sum{agent_name="a"} 6
"""
        with metrics_server(lambda: text) as port:
            counts = TelemetrySink(PROMETHEUS, tmp_path, {"a": port}).counts("a")
        assert counts == {"agent_tx_bytes": 3, "agent_err_backend": 3, "agent_xfer_time_us_count": 5,
                          "agent_xfer_time_us_sum": 6}  # fmt: skip


LOCAL: list[Region] = [["DRAM", 4096, 8, 0], ["DRAM", 4104, 8, 0]]
TRANSFER: Any = {"op": "READ", "peer": "b", "local": LOCAL, "remote": [["VRAM", 64, 8, 1]], "timeout": 60}


def doubled() -> MagicMock:
    """Return a double of a raw agent, whose transfers are done at once."""
    agent = MagicMock()
    agent.get_xfer_descs.side_effect, agent.transfer.return_value = lambda *side: side, "DONE"
    return agent


@pytest.mark.parametrize(
    ("make", "more"), [(move, {"count": 1}), (time_transfers, {"count": 1, "warmup": 0}), (fail, {})]
)
def test_each_transfer_has_its_sides_and_its_peer(make: Callable[..., object], more: dict[str, int]) -> None:
    agent = doubled()
    make(agent, **TRANSFER, **more)
    agent.initialize_xfer.assert_called_once_with(
        "READ", ([(4096, 8, 0), (4104, 8, 0)], "DRAM"), ([(64, 8, 1)], "VRAM"), "b", b""
    )


def test_known_transfers_are_each_made_once_and_released_and_a_timed_one_is_posted_again() -> None:
    agent = doubled()
    agent.initialize_xfer.side_effect = handles = ["one", "two", "three"]
    agent.transfer.return_value, agent.check_xfer_state.side_effect = "PROC", ["PROC", "DONE"] * 3
    agent.get_xfer_telemetry.return_value = MagicMock(xferDuration=7, postDuration=3)
    transfers = move(agent, count=3, **TRANSFER)
    assert [(transfer["xfer"], transfer["post"]) for transfer in transfers] == [(7.0, 3.0)] * 3
    assert agent.release_xfer_handle.call_args_list == [call(handle) for handle in handles]
    assert agent.transfer.call_args_list == [call(handle) for handle in handles]

    agent = doubled()
    assert len(time_transfers(agent, count=3, warmup=2, **TRANSFER)) == 3
    assert (agent.initialize_xfer.call_count, agent.transfer.call_count) == (1, 5)
    agent.release_xfer_handle.assert_called_once_with(agent.initialize_xfer.return_value)
    agent.transfer.side_effect = ["DONE", "ERR"]
    with pytest.raises(RuntimeError, match=r"^READ 2 to b ended with ERR$"):
        time_transfers(agent, count=1, warmup=1, **TRANSFER)


def test_a_transfer_is_timed_to_its_end_and_late_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, now, states = doubled(), [100.0], ["DONE", "DONE", "DONE", "PROC"]

    def take(seconds: float, state: str) -> str:
        now[0] += seconds
        return state

    monkeypatch.setattr(worker, "time", MagicMock(perf_counter=lambda: now[0]))
    agent.transfer.side_effect = lambda _: take(len(agent.transfer.mock_calls), "PROC")
    agent.check_xfer_state.side_effect = lambda _: take(60.0, states.pop(0))
    assert time_transfers(agent, warmup=1, count=1, **TRANSFER) == [62.0], "without the first"
    assert move(agent, count=1, **TRANSFER)[0]["took"] == 63e6, "microseconds, as NIXL's times"
    with pytest.raises(TimeoutError, match=r"^READ 1 to b was not complete within 60 s$"):
        time_transfers(agent, warmup=0, count=1, **TRANSFER)


def test_a_transfer_that_must_fail_is_watched_to_its_end() -> None:
    agent = doubled()
    agent.transfer.return_value, agent.check_xfer_state.side_effect = "PROC", ["PROC", "ERR"]
    assert fail(agent, **TRANSFER) == {"raised": "", "state": "ERR"}
    agent.check_xfer_state.side_effect = ["PROC", KeyError("gone")]
    assert fail(agent, **TRANSFER) == {"raised": "KeyError", "state": "PROC"}
    agent.transfer.side_effect = ValueError
    assert fail(agent, **TRANSFER) == {"raised": "ValueError", "state": ""}
    agent.transfer.side_effect, agent.check_xfer_state.side_effect = None, None
    agent.check_xfer_state.return_value = "PROC"
    assert fail(agent, **{**TRANSFER, "timeout": 0.01}) == {"raised": "", "state": "PROC"}


class DoubledAgents:
    """Agents that only keep what is asked of them: what they are asked decides what is known.

    :param answers: what a function answers in a worker, by its name.
    :param starts: by the number of the start, from 0, the error that it raises.
    """

    def __init__(self, answers: Mapping[str, Any], starts: Mapping[int, Exception] | None = None) -> None:
        self.settings = SimpleNamespace(timeout=60.0)
        self.answers, self.errors = answers, starts or {}
        self.started: list[tuple[str, dict[str, str | None]]] = []
        self.closed: list[str] = []
        self.runs: list[tuple[str, dict[str, Any]]] = []
        self.registered: dict[str, list[int]] = {}

    def start(self, name: str = "", *, environment: dict[str, str | None], **_: object) -> Any:
        self.started.append((name, environment))
        if error := self.errors.get(len(self.started) - 1):
            raise error
        self.registered[name] = []
        agent = MagicMock()
        agent.name, agent.worker.pid, agent.worker.versions = name, 70 + len(self.started), {"nixl": "1.5"}
        agent.close = lambda: self.closed.append(name)
        agent.allocate = lambda size: SimpleNamespace(size=size)
        agent.allocate_asked = lambda size, initiator: SimpleNamespace(
            size=size,
            memory="DRAM" if initiator else "VRAM",
            descriptor=lambda at, length: (at, length, int(initiator)),
        )
        agent.register = lambda buffer: self.registered[name].append(buffer.size)
        agent.run = self._run if name in (INITIATOR, "") else None
        return agent

    def _run(self, function: str, **arguments: Any) -> Any:
        self.runs.append((function.partition(":")[2], arguments))
        return self.answers[function.partition(":")[2]]

    def measured(self, exporter: str, folder: Path) -> MeasuredAgents:
        return MeasuredAgents(cast(Any, self), exporter, folder)


def regions(memory: str, size: int) -> list[list[object]]:
    return [[memory, at * 65536, size, int(memory == "DRAM")] for at in range(4)]


def test_what_agents_are_made_to_do_is_known(tmp_path: Path) -> None:
    moved = [{"took": 3.5, "xfer": 2.6, "post": 1.2}, {"took": 4.0, "xfer": 2.6, "post": 1.4}]
    agents = DoubledAgents({"move": moved, "time_transfers": [1, 2.5], "fail": {"raised": "nixlNotFoundError",
                                                                               "state": "x"}})  # fmt: skip
    pair = agents.measured(NO_EXPORTER, tmp_path)
    pair.move("WRITE", count=2, size=100)
    pair.move("READ", count=2, size=10)
    pair.ask_an_unknown_agent()
    registered = {"agent_memory_registered": 4 * REGION}
    assert pair.known[TARGET] == KnownTransfers(Counter(registered))
    assert pair.known[INITIATOR] == KnownTransfers(Counter({
        **registered, "agent_tx_bytes": 800, "agent_tx_requests_num": 2, "agent_rx_bytes": 80,
        "agent_rx_requests_num": 2, "agent_xfer_time": 10, "agent_xfer_post_time": 6, "agent_err_not_found": 1,
    }), 4, 15.0)  # fmt: skip
    assert pair.time_transfers("READ", 35, 5) == [1.0, 2.5]
    write = {"op": "WRITE", "peer": TARGET, "local": regions("DRAM", 100), "remote": regions("VRAM", 100)}
    assert agents.runs[0] == ("move", {"count": 2, "timeout": 30.0, **write})
    assert agents.runs[2][1]["op"] == "WRITE"
    assert agents.runs[2][1]["peer"] not in (TARGET, INITIATOR)
    read = {"op": "READ", "local": regions("DRAM", 5), "remote": regions("VRAM", 5)}
    assert agents.runs[3] == ("time_transfers", {**write, **read, "count": 35, "warmup": 3, "timeout": 30.0})
    cast(MagicMock, pair.initiator.add_remote_agent).assert_called_once_with(pair.target.get_agent_metadata())
    agents.answers = {
        "fail": {"raised": "", "state": "DONE"},
        "move": [{**moved[0], "took": -1}],
        "time_transfers": [-1],
    }
    for ask in (lambda: pair.move("READ", count=1, size=1), lambda: pair.time_transfers("READ", 1, 1)):
        with pytest.raises(StrictError):
            ask()
    with pytest.raises(WorkerError, match="NIXL answered DONE to a transfer to an unknown agent"):
        pair.ask_an_unknown_agent()


def test_a_transfer_that_must_fail_goes_to_the_target(tmp_path: Path) -> None:
    agents = DoubledAgents({"fail": {"raised": "nixlBackendError", "state": "ERR"}})
    pair = agents.measured(NO_EXPORTER, tmp_path)
    kill = cast(MagicMock, pair.target.worker.kill)
    assert pair.transfer_of_other_lengths("WRITE") == TransferFailure("nixlBackendError", "ERR")
    kill.assert_not_called()
    pair.transfer_to_dead_target("READ")
    kill.assert_called_once_with()
    whole = {"peer": TARGET, "timeout": 10.0, "local": regions("DRAM", REGION)}
    assert agents.runs == [
        ("fail", {"op": "WRITE", **whole, "remote": regions("VRAM", REGION // 2)}),
        ("fail", {"op": "READ", **whole, "remote": regions("VRAM", REGION)}),
    ]


def test_counts_are_read_again_until_the_last_registration_is_exported(tmp_path: Path) -> None:
    agents = DoubledAgents({})
    pair = agents.measured(BUFFER, tmp_path)
    file, reads = tmp_path / INITIATOR, list[int]()

    def counts(name: str) -> dict[str, float]:
        reads.append(len(reads))
        if len(reads) > 1:
            file.write_bytes(buffer(*((4, size) for size in agents.registered[name][: len(reads) - 1])))
        return TelemetrySink(BUFFER, tmp_path).counts(name)

    pair.sink = cast(TelemetrySink, SimpleNamespace(counts=counts))
    assert pair.counts(pair.initiator)["agent_memory_registered"] == 4 * REGION + 8192
    assert (agents.registered[INITIATOR], len(reads)) == ([4 * REGION, 8192], 3)
    pair.seconds = 0.0
    assert pair.counts(pair.initiator)["agent_memory_registered"] == 4 * REGION + 2 * 8192
    pair.sink = TelemetrySink(BUFFER, tmp_path / "absent")
    with pytest.raises(UnreadableTelemetryError):
        pair.counts(pair.initiator)


REFUSED = WorkerError("NIXL cannot create an agent")


@pytest.mark.parametrize(
    ("exporter", "errors", "holders", "ports", "closed"),
    [
        (PROMETHEUS, {}, {11: 71, 12: 72}, [(11, 12)], []),
        (PROMETHEUS_MP, {}, {11: 71}, [(11, 11)], []),
        (PROMETHEUS, {}, {11: 71, 12: 9}, [(11, 12), (13, 14)], [INITIATOR, TARGET]),
        (PROMETHEUS, {}, dict.fromkeys(range(11, 17), 9), [(11, 12), (13, 14), (15, 16)], [INITIATOR, TARGET] * 2),
        (PROMETHEUS, {1: REFUSED}, {11: 71, 12: 9}, [(11, 12), (13, 14)], [INITIATOR]),
        (BUFFER, {}, {11: 9}, [(11, 11)], []),
        (NO_EXPORTER, {}, {11: 9}, [(11, 11)], []),
    ],
)
def test_agents_start_again_with_other_ports_if_another_process_has_taken_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exporter: str, errors: dict[int, Exception],
    holders: dict[int, int], ports: list[tuple[int, int]], closed: list[str],
) -> None:  # fmt: skip
    free = iter([[11, 12], [13, 14], [15, 16]])
    monkeypatch.setattr(measured_agents, "free_ports", lambda count: next(free))
    monkeypatch.setattr(
        measured_agents, "port_holder", lambda port: PortHolder(holders[port], "it") if port in holders else None
    )
    agents = DoubledAgents({}, errors)
    pair = agents.measured(exporter, tmp_path)
    sinks = [TelemetrySink(exporter, tmp_path, {INITIATOR: first, TARGET: second}, 60) for first, second in ports]
    assert pair.sink == sinks[-1]
    assert (agents.closed, pair.nixl) == (closed, "1.5")
    assert agents.started == [(name, sink.variables(name)) for sink in sinks for name in (INITIATOR, TARGET)]


@pytest.mark.parametrize(
    ("exporter", "file", "error", "reason"),
    [
        (PROMETHEUS, "", NotApplicableError, "NIXL 1.5 has no exporter prometheus: there is no "
         "libtelemetry_exporter_prometheus.so among its plugins"),
        (PROMETHEUS, "/x.so", WorkerError, "NIXL cannot create an agent"),
        (BUFFER, "", WorkerError, "NIXL cannot create an agent"),
    ],
)  # fmt: skip
def test_a_nixl_without_the_exporter_is_not_accused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exporter: str, file: str, error: type[Exception], reason: str
) -> None:
    monkeypatch.setattr(measured_agents, "port_holder", lambda port: None)
    agents = DoubledAgents({"exporter_file": file}, {0: REFUSED})
    with pytest.raises(error, match=f"^{reason}$"):
        agents.measured(exporter, tmp_path)
    assert agents.started[1:] == [("", dict.fromkeys(VARIABLES))] * (exporter == PROMETHEUS)
    assert agents.runs == [("exporter_file", {"exporter": PROMETHEUS})] * (exporter == PROMETHEUS)


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
