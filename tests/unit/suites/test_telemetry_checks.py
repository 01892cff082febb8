# SPDX-License-Identifier: Apache-2.0
"""The suite ``telemetry`` moves known bytes with each exporter, and ends as what was counted demands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of, value_of

from pytest_nixl.checks.telemetry.accounting import FailureCount
from pytest_nixl.checks.telemetry.measured_agents import TransferFailure
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.telemetry import conftest, test_counts, test_overhead, test_ports

JUDGED = Judgement(Verdict.WARN, "reason")


def test_two_agents_of_the_requested_backend_start_for_each_exporter_and_end_with_the_test(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, measured = MagicMock(), MagicMock(side_effect=lambda *arguments: arguments)
    for name, double in {
        "Agents": agents,
        "MeasuredAgents": measured,
        "LocalHost": lambda own: ("host", own),
        "supervisor": lambda: "supervisor",
    }.items():
        monkeypatch.setattr(conftest, name, double)
    settings = make_settings(backend=("POSIX", "LIBFABRIC", "UCX"))
    with ExitStack() as stack:
        start = value_of(conftest.start_measured, stack, nixl_settings=settings, agent_backend="UCX", tmp_path=tmp_path)
        for exporter in ("BUFFER", "prometheus"):
            assert start(exporter) == (agents.return_value.__enter__.return_value, exporter, tmp_path / exporter)
            assert (tmp_path / exporter).is_dir()
        assert [(host, own.backend) for host, own in (started.args for started in agents.call_args_list)] == [
            (("host", "supervisor"), ("UCX",))
        ] * 2
        agents.return_value.__exit__.assert_not_called()
    assert agents.return_value.__exit__.call_count == 2


@pytest.mark.parametrize("of_fixture", [True, False])
def test_storage_alone_has_no_second_agent_with_telemetry(
    of_fixture: bool, make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(backend=("POSIX", "OBJ"))
    arguments: dict[str, Any] = {"nixl_settings": settings, "agent_backend": "POSIX", "tmp_path": tmp_path}
    with pytest.raises(NotApplicableError, match=r"^--nixl-backend=POSIX,OBJ has no second agent$"), ExitStack() as own:
        if of_fixture:
            value_of(conftest.start_measured, own, **arguments)
        else:
            check = test_overhead.test_transfers_with_telemetry_take_hardly_longer
            conclusion_of(check, record_figures=None, **arguments)


def test_known_transfers_and_a_refused_request_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, start = MagicMock(return_value=JUDGED), MagicMock()
    monkeypatch.setattr(test_counts, "judge_counts", judge)
    check = test_counts.test_telemetry_counts_what_was_moved
    assert conclusion_of(check, start_measured=start, exporter="prometheus") == "WARN: reason"
    start.assert_called_once_with("prometheus")
    pair = start.return_value
    assert pair.mock_calls == [
        call.move("WRITE", count=8, size=65536),
        call.move("READ", count=5, size=4096),
        call.ask_an_unknown_agent(),
    ]
    judge.assert_called_once_with(pair)


DEAD, REFUSED = "transfer_to_dead_target", "transfer_of_other_lengths"
SILENT, DISCONNECT = "LIBFABRIC-DEAD-TARGET-SILENT", "NIXL-TELEMETRY-DISCONNECT-UNCOUNTED"
REFUSAL = "NIXL-TELEMETRY-REFUSAL-UNCOUNTED"
RAISED = TransferFailure("nixlRemoteDisconnectError", "ERR")
#: By name what an exporter counts of a failed transfer: the failure, and the counts that grew.
COUNTS: dict[str, tuple[TransferFailure, dict[str, float]]] = {
    "counted": (RAISED, {"remote_disconnect": 1}),
    "uncounted": (RAISED, {}),
    "twice": (RAISED, {"remote_disconnect": 2}),
    "silent": (TransferFailure("", "PROC"), {}),
}


@pytest.mark.parametrize(
    ("fails", "backend", "counted", "conclusion"),
    [
        (DEAD, "UCX", "counted", f"{DISCONNECT} does not occur"),
        (DEAD, "UCX", "uncounted", f"{DISCONNECT} occurs"),
        (DEAD, "UCX", "counted uncounted", f"{DISCONNECT} occurs"),
        (DEAD, "UCX", "counted twice", "FAIL"),
        (DEAD, "UCX", "silent counted", f"{DISCONNECT} does not occur"),
        (DEAD, "UCX", "silent", "NIXL reports no error of transfers with a dead agent"),
        (DEAD, "LIBFABRIC", "counted", f"{DISCONNECT} does not occur"),
        (DEAD, "LIBFABRIC", "silent", f"{SILENT} occurs"),
        (DEAD, "LIBFABRIC", "silent counted counted counted", f"{SILENT} occurs"),
        (DEAD, "LIBFABRIC", "counted counted counted silent", f"{SILENT} occurs"),
        (DEAD, "LIBFABRIC", "silent uncounted", f"{DISCONNECT} occurs"),
        (DEAD, "LIBFABRIC", "silent twice", "FAIL"),
        (REFUSED, "UCX", "counted", f"{REFUSAL} does not occur"),
        (REFUSED, "UCX", "counted uncounted", f"{REFUSAL} occurs"),
        (REFUSED, "UCX", "twice", "FAIL"),
        (REFUSED, "LIBFABRIC", "silent", "NIXL reports no error of transfers whose two sides differ in length"),
    ],
)
def test_the_count_of_failed_transfers_is_a_verdict_or_a_finding(
    fails: str, backend: str, counted: str, conclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter that this NIXL has not is left to the check of counts."""
    pairs: dict[str, MagicMock] = {}
    kinds, counts = counted.split(), list[FailureCount]()

    def start(exporter: str) -> MagicMock:
        if exporter == "prometheus":
            raise NotApplicableError("this NIXL has no such exporter")
        return pairs.setdefault(exporter, MagicMock(exporter=exporter))

    def count(pair: MagicMock, op: str, fail: object) -> FailureCount:
        assert fail is getattr(pair, fails)
        assert pair.mock_calls == [call.move("WRITE", count=1, size=4096)]
        failure, grown = COUNTS[kinds[len(counts) % len(kinds)]]
        counts.append(FailureCount(pair.exporter, op, failure, grown))
        return counts[-1]

    monkeypatch.setattr(test_counts, "count_failure", count)

    def conclude() -> str:
        if fails == DEAD:
            check = test_counts.test_telemetry_counts_a_transfer_with_a_dead_agent
            return conclusion_of(check, start_measured=start, agent_backend=backend)
        return conclusion_of(test_counts.test_telemetry_counts_a_transfer_that_is_refused, start_measured=start)

    if conclusion.startswith("NIXL reports"):
        with pytest.raises(NotApplicableError) as error:
            conclude()
        text = error.value.reason
    else:
        text = conclude()
    wrong = [f"{failure}, expected 1 of status {failure.status}" for failure in counts if 2 in failure.counted.values()]
    assert text == f"{conclusion}: {'; '.join(wrong if conclusion == 'FAIL' else map(str, counts))}"
    assert [(failure.exporter, failure.op) for failure in counts] == [
        (exporter, op) for exporter in ("BUFFER", "prometheus_mp") for op in ("WRITE", "READ")
    ]


def test_the_overhead_of_telemetry_is_measured_on_this_host_and_judged_by_the_profile(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, record = MagicMock(return_value="figures"), MagicMock(return_value=JUDGED)
    for name, double in {
        "measure_overhead": measure,
        "LocalHost": lambda own: ("host", own),
        "supervisor": lambda: "supervisor",
    }.items():
        monkeypatch.setattr(test_overhead, name, double)
    settings = make_settings(backend=("LIBFABRIC", "UCX"))
    check = test_overhead.test_transfers_with_telemetry_take_hardly_longer
    conclusion = conclusion_of(
        check, nixl_settings=settings, agent_backend="UCX", tmp_path=tmp_path, record_figures=record
    )
    assert conclusion == "WARN: reason"
    ((host, own_settings, exporter, folder),) = (measured.args for measured in measure.call_args_list)
    assert (host, own_settings.backend, exporter, folder) == (("host", "supervisor"), ("UCX",), "prometheus", tmp_path)
    record.assert_called_once_with("figures")


@pytest.mark.parametrize(
    ("port", "taken", "unmeasured", "conclusion"),
    [
        (None, None, [], "does not occur: description"),
        (None, None, ["a process"], "occurs: description"),
        (9090, None, ["a process"], "occurs and affects: description"),
        (9090, JUDGED, ["a process"], None),
    ],
)
def test_a_shared_port_is_a_finding_and_one_that_another_process_took_a_verdict(
    port: int | None,
    taken: Judgement | None,
    unmeasured: list[str],
    conclusion: str | None,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubles: dict[str, Any] = {
        "deployment_port": MagicMock(return_value=port),
        "Agents": MagicMock(),
        "LocalHost": lambda own: ("host", own),
        "supervisor": lambda: "supervisor",
        "share_port": MagicMock(return_value=unmeasured),
        "judge_taken_port": MagicMock(return_value=taken),
        "describe_sharing": MagicMock(return_value="description"),
    }
    for name, double in doubles.items():
        monkeypatch.setattr(test_ports, name, double)
    done = conclusion_of(
        test_ports.test_each_process_with_telemetry_is_measured,
        nixl_settings=make_settings(backend=("LIBFABRIC", "UCX")),
        agent_backend="UCX",
    )
    assert done == ("WARN: reason" if conclusion is None else f"NIXL-TELEMETRY-PORT-SHARED {conclusion}")
    host, own_settings = doubles["Agents"].call_args.args
    assert (host, own_settings.backend) == (("host", "supervisor"), ("UCX",))
    agents = doubles["Agents"].return_value.__enter__.return_value
    assert doubles["share_port"].mock_calls == [call(agents, port)]
    assert doubles["judge_taken_port"].mock_calls == [call(unmeasured)]
    assert doubles["describe_sharing"].mock_calls == ([] if taken else [call(unmeasured, port)])
