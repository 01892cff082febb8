# SPDX-License-Identifier: Apache-2.0
"""The checks of the suite ``faults`` end as what followed demands, with doubles of the agents."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of, value_of

from pytest_nixl.checks.faults.misuse import KINDS, SURVIVED, MisuseEnding, MisuseOutcome
from pytest_nixl.checks.faults.scene import FaultOutcome, fault_reason
from pytest_nixl.checks.faults.threads import ConcurrentUse
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.worker_errors import NixlError, WorkerDiedError, WorkerHungError
from suites.faults import conftest, test_misuse, test_threads, test_transfers, test_workers

GOOD = FaultOutcome("a-fault", "UCX", "WRITE", "1.5.1", "nixlRemoteDisconnectError", 0.02, wrong_bytes=0)
WRONG = replace(GOOD, wrong_bytes=3)
KILLED = replace(GOOD, fault="target-killed")
SILENT = replace(KILLED, backend="LIBFABRIC", answer="PROC")
ABORTED = replace(GOOD, op="READ", survivor="was ended by SIGABRT", wrong_bytes=None)
HUNG = replace(GOOD, backend="LIBFABRIC", survivor="did not answer for 20 s", wrong_bytes=None)
CHANGED, LOST, STOPPED = replace(GOOD, changed=9), replace(GOOD, lost_requests=2), replace(GOOD, answer="PROC")

#: The rows of a fault without a finding, and of one whose death LIBFABRIC does not report.
PLAIN = [([GOOD, GOOD], "PASS"), ([GOOD, WRONG], "FAIL")]
SILENCE = [
    ([KILLED], "PASS"),
    ([KILLED, SILENT], "LIBFABRIC-DEAD-TARGET-SILENT occurs and affects"),
    ([SILENT, KILLED], "LIBFABRIC-DEAD-TARGET-SILENT occurs and affects"),
    ([replace(SILENT, backend="UCX")], "FAIL"),
    ([SILENT, replace(SILENT, backend="UCX")], "FAIL"),
    ([replace(KILLED, backend="LIBFABRIC")], "PASS"),
    ([SILENT, WRONG], "FAIL"),
    ([WRONG, SILENT], "FAIL"),
    ([replace(SILENT, wrong_bytes=3)], "FAIL"),
]


def of_finding(id: str, occurs: FaultOutcome, *more: FaultOutcome) -> list[tuple[list[FaultOutcome], str]]:
    """Return the rows of a finding; ``more`` looks like it but is another failure."""
    both = replace(occurs, unended=2)
    bad = [[WRONG], [occurs, WRONG], [WRONG, occurs], [both], [GOOD, both], *([outcome] for outcome in more)]
    good = [([GOOD], f"{id} does not occur"), ([GOOD, occurs], f"{id} occurs"), ([occurs, GOOD], f"{id} occurs")]
    return [*good, *((outcomes, "FAIL") for outcomes in bad)]


#: Of each check of faults in flight its fault, and how it ends.
CHECKS: list[tuple[Callable[..., None], str, list[tuple[list[FaultOutcome], str]]]] = [
    (test_transfers.test_the_initiator_is_told_that_its_target_died, "target-killed", SILENCE),
    (
        test_transfers.test_a_target_survives_the_death_of_its_initiator,
        "initiator-killed",
        of_finding(
            "NIXL-DEAD-INITIATOR-ABORTS",
            ABORTED,
            replace(ABORTED, op="WRITE"),
            replace(ABORTED, backend="LIBFABRIC"),
            replace(ABORTED, survivor="was ended by SIGSEGV"),
        ),
    ),
    (test_transfers.test_transfers_go_on_when_a_stopped_target_goes_on, "target-paused", PLAIN),
    (test_transfers.test_transfers_go_on_when_a_stopped_initiator_goes_on, "initiator-paused", PLAIN),
    (
        test_transfers.test_the_initiator_is_told_that_its_target_stopped,
        "target-stopped",
        of_finding("NIXL-STOPPED-TARGET-SILENT", STOPPED),
    ),
    (test_transfers.test_a_target_that_died_during_transfers_comes_back, "target-restarted", SILENCE),
    (
        test_transfers.test_a_target_that_listens_comes_back_on_its_port,
        "listener-restarted",
        of_finding("NIXL-RESTARTED-LISTENER-LOSES-FETCH", LOST),
    ),
    (test_transfers.test_a_target_is_replaced_during_transfers, "target-replaced", PLAIN),
    (test_transfers.test_an_initiator_survives_that_its_target_frees_memory_in_use, "target-unmapped", PLAIN),
    (
        test_transfers.test_a_notification_to_a_dead_agent_returns,
        "notified-after-death",
        of_finding(
            "LIBFABRIC-NOTIFICATION-HANGS",
            HUNG,
            replace(HUNG, backend="UCX"),
            replace(HUNG, survivor="was ended by SIGSEGV"),
        ),
    ),
    (
        test_transfers.test_nothing_is_written_after_an_agent_is_removed,
        "target-removed",
        of_finding("NIXL-REMOVED-IN-FLIGHT", CHANGED),
    ),
    (
        test_transfers.test_nothing_is_written_after_a_handle_is_released,
        "transfer-released",
        of_finding("NIXL-RELEASED-IN-FLIGHT", CHANGED),
    ),
    (test_transfers.test_an_agent_survives_that_memory_in_use_is_deregistered, "source-deregistered", PLAIN),
]


@pytest.mark.parametrize(("check", "fault", "rows"), CHECKS, ids=[fault for _, fault, _ in CHECKS])
def test_a_check_of_faults_in_flight_ends_as_the_outcomes_demand(
    check: Callable[..., None], fault: str, rows: list[tuple[list[FaultOutcome], str]]
) -> None:
    for outcomes, expected in rows:
        make = MagicMock(return_value=outcomes)
        conclusion, _, reason = conclusion_of(check, make=make).partition(": ")
        assert conclusion == expected, outcomes
        assert "occur" not in expected or reason == fault_reason(outcomes)
        options = {"usual_transport": True} if fault == "target-killed" else {}
        assert make.mock_calls == [call(fault, **options)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


TCP: dict[str, str | None] = {"UCX_TLS": "tcp"}


@pytest.mark.parametrize(
    ("fault", "usual", "level", "tries"),
    [
        ("target-killed", False, "standard", [("WRITE", {}), ("READ", {}), ("WRITE", TCP), ("READ", TCP)]),
        ("target-killed", True, "extended", [("WRITE", {}), ("READ", {}), ("WRITE", TCP), ("READ", TCP)]),
        ("target-killed", True, "standard", [("WRITE", {})]),
        ("notified-after-death", False, "standard", [("WRITE", {}), ("WRITE", TCP)]),
    ],
)
def test_a_fault_is_made_with_each_operation_and_transport(
    fault: str,
    usual: bool,
    level: str,
    tries: list[tuple[str, dict[str, str | None]]],
    make_settings: Callable[..., Settings],
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults, started, hosts = MagicMock(), MagicMock(), ["initiator's", "target's", "another"]
    monkeypatch.setattr(test_transfers, "make_fault", faults)
    monkeypatch.setattr(test_transfers, "Agents", started)
    environments = MagicMock(return_value=[{}, TCP])
    monkeypatch.setattr(test_transfers, "environments", environments)
    settings = make_settings(level=level, op=("WRITE", "READ"), backend=("POSIX", "UCX"))
    cluster = SimpleNamespace(hosts=hosts, several=True)
    make = value_of(test_transfers.make, stack, nixl_settings=settings, agent_backend="UCX", nixl_cluster=cluster)
    assert make(fault, usual_transport=usual) == [faults.return_value] * len(tries)
    agents = started.return_value.__enter__.return_value
    assert faults.mock_calls == [call(fault, agents, "UCX", op, variables, hosts[:2]) for op, variables in tries]
    assert [(host, changed.backend) for host, changed in (start.args for start in started.call_args_list)] == [
        ("initiator's", ("UCX",))
    ] * len(tries)
    environments.assert_called_once_with("UCX", other_hosts=True)


@pytest.mark.parametrize("fixture", [test_transfers.make, conftest.agents, conftest.couple])
def test_storage_alone_has_no_second_agent(
    fixture: Any, make_settings: Callable[..., Settings], stack: ExitStack
) -> None:
    arguments: dict[str, Any] = {"nixl_settings": make_settings(backend=("POSIX", "OBJ")), "agent_backend": "POSIX"}
    arguments |= {} if fixture is conftest.agents else {"nixl_cluster": MagicMock()}
    arguments |= {"agent_progress": "auto"} if fixture is conftest.couple else {}
    with pytest.raises(NotApplicableError, match=r"^--nixl-backend=POSIX,OBJ (has|moves bytes to storage and has) no"):
        value_of(fixture, stack, **arguments)


def test_agents_of_one_requested_backend_end_with_the_test(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = MagicMock()
    doubles = {"Agents": agents, "LocalHost": lambda own: ("host", own), "supervisor": lambda: "supervisor"}
    for name, double in doubles.items():
        monkeypatch.setattr(conftest, name, double)
    settings = make_settings(backend=("UCX", "LIBFABRIC"))
    with ExitStack() as stack:
        started = value_of(conftest.agents, stack, nixl_settings=settings, agent_backend="LIBFABRIC")
        assert started is agents.return_value.__enter__.return_value
        host, own_settings = agents.call_args.args
        assert (host, own_settings.backend) == (("host", "supervisor"), ("LIBFABRIC",))
        agents.return_value.__exit__.assert_not_called()
    agents.return_value.__exit__.assert_called_once()


def test_a_couple_is_of_two_ranks_and_the_initiator_knows_the_target(
    make_settings: Callable[..., Settings], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, cluster = MagicMock(), SimpleNamespace(hosts=["first", "second", "third"])
    monkeypatch.setattr(conftest, "Agents", started)
    agents, ends = started.return_value.__enter__.return_value, (MagicMock(), MagicMock())
    agents.start_each.return_value = ends
    settings = make_settings(backend=("UCX", "LIBFABRIC"), progress_thread=("on", "off"))
    couple = value_of(
        conftest.couple, stack, nixl_settings=settings, agent_backend="LIBFABRIC", agent_progress="off",
        nixl_cluster=cluster,
    )  # fmt: skip
    host, changed = started.call_args.args
    assert (host, changed.backend, changed.progress_thread) == ("first", ("LIBFABRIC",), ("off",))
    agents.start_each.assert_called_once_with(["initiator", "target"], hosts=["first", "second"], progress_thread=None)
    assert (couple.initiator, couple.target, couple.agents, couple.cluster) == (*ends, agents, cluster)
    couple.target.allocate_asked.assert_called_once_with(64 << 10)
    couple.target.register.assert_called_once_with(couple.memory)
    couple.target.polled.assert_called_once_with()
    couple.initiator.add_remote_agent.assert_called_once_with(couple.target.get_agent_metadata())
    again, memory = couple.another_target()
    agents.start.assert_called_once_with(couple.target.name, host="second", progress_thread=None)
    again.allocate_asked.assert_called_once_with(couple.memory.size)
    again.register.assert_called_once_with(memory)
    assert couple.seconds is agents.settings.timeout


class Worker:
    """A worker of a couple, whose agent answers, or raises an error of its process."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def signal(self, number: signal.Signals) -> None:
        self._log.append(f"{self.name} gets {number.name} within {getattr(self, 'timeout', 60):g} s")

    def kill(self) -> None:
        self._log.append(f"{self.name} is killed")


@pytest.fixture
def couple(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An initiator and a target that only keep what is done with them, in order."""
    log: list[str] = []
    initiator, target, again = (
        MagicMock(worker=Worker(name, log), name=name) for name in ("initiator", "target", "target-again")
    )
    for agent in (initiator, target, again):
        agent.name = agent.worker.name
    again.polled = nullcontext

    def write(source: MagicMock, destination: MagicMock, memory: str, seconds: float) -> None:
        log.append(f"write {source.name} to {memory} of {destination.name} within {seconds:g} s")

    monkeypatch.setattr(test_workers, "write_and_compare", write)
    return SimpleNamespace(
        log=log, initiator=initiator, target=target, again=again, memory="memory", seconds=30.0,
        another_target=lambda: (again, "new memory"),
    )  # fmt: skip


WRITTEN = "write initiator to memory of target within 30 s"


@pytest.mark.parametrize(
    ("error", "plugins", "conclusion"),
    [
        (WorkerDiedError("target (pid 7) was ended by SIGKILL\nmore"), ["UCX"],
         "PASS: reported: target (pid 7) was ended by SIGKILL"),
        (WorkerHungError("target was ended by SIGKILL"), ["UCX"],
         "FAIL: a dead target is reported as WorkerHungError('target was ended by SIGKILL')"),
        (WorkerDiedError("it was ended by SIGKILL"), ["UCX"],
         "FAIL: target was ended by SIGKILL, but the error says: it was ended by SIGKILL"),
        (WorkerDiedError("target ended"), [],
         "FAIL: target was ended by SIGKILL, but the error says: target ended; initiator does not answer after the "
         "death of the target"),
        (None, ["UCX"],
         "FAIL: a dead target is reported as None; target was ended by SIGKILL, but the error says: None"),
    ],
)  # fmt: skip
def test_a_dead_target_is_to_be_named_by_its_error(
    couple: Any, error: Exception | None, plugins: list[str], conclusion: str
) -> None:
    couple.target.get_plugin_list.side_effect = error
    couple.initiator.get_plugin_list.return_value = plugins
    check = test_workers.test_a_target_that_dies_is_named_and_the_initiator_lives
    assert conclusion_of(check, couple=couple) == conclusion
    assert couple.log == [WRITTEN, "target gets SIGKILL within 60 s"]


@pytest.mark.parametrize(
    ("error", "seconds", "conclusion"),
    [
        (WorkerHungError("target is stopped by a signal\nmore"), 62,
         "PASS: reported within the deadline: target is stopped by a signal"),
        (WorkerHungError("stopped by a signal"), 62.1,
         "FAIL: the error came after 62.1 s, and the deadline is 2 s"),
        (WorkerDiedError("stopped by a signal"), 1,
         "FAIL: a stopped target is reported as WorkerDiedError('stopped by a signal')"),
        (WorkerHungError("no answer"), 1,
         "FAIL: target was stopped by a signal, but the error says: no answer"),
    ],
)  # fmt: skip
def test_a_stopped_target_is_to_be_named_in_time(
    couple: Any, error: Exception, seconds: float, conclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, stop = [100.0], couple.target.worker.signal

    def stop_slowly(number: signal.Signals) -> None:
        now[0] += 1000
        stop(number)

    couple.target.worker.signal = stop_slowly
    monkeypatch.setattr(test_workers, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def hang() -> None:
        now[0] += seconds
        raise error

    couple.target.get_plugin_list.side_effect = hang
    check = test_workers.test_a_target_that_stops_is_told_before_its_deadline_is_long_over
    assert conclusion_of(check, couple=couple) == conclusion
    assert couple.log == ["target gets SIGSTOP within 2 s"]


GONE = "nixlRemoteDisconnectError"
BACK = "target-again was written to under the name of the one that was killed"
ONCE = f"PASS: {BACK}; before that NIXL raised {GONE} once, which tells of the killed one"
NEVER = (
    "FAIL: initiator gets {} from NIXL when it writes to target-again, which came back under the name of a killed one"
)


@pytest.mark.parametrize("method", ["remove_remote_agent", "add_remote_agent"])
@pytest.mark.parametrize(
    ("errors", "conclusion"),
    [
        ([], f"PASS: {BACK}"),
        ([GONE], ONCE),
        ([GONE, GONE], NEVER.format(GONE)),
        (["nixlBackendError"], NEVER.format("nixlBackendError")),
        ([GONE, "nixlBackendError"], NEVER.format("nixlBackendError")),
    ],
)
def test_a_target_that_came_back_is_written_to_at_once_or_after_one_error(
    couple: Any, method: str, errors: list[str], conclusion: str
) -> None:
    """Over some transports NIXL tells of the death of the former one only now."""
    raised = [NixlError(f"{kind} raised", "", "", kind) for kind in errors]
    getattr(couple.initiator, method).side_effect = [*raised, None]
    check = test_workers.test_a_target_that_comes_back_under_its_name_is_written_to
    assert conclusion_of(check, couple=couple) == conclusion
    written = ["write initiator to new memory of target-again within 30 s"] * conclusion.startswith("PASS")
    assert couple.log == [WRITTEN, "target is killed", *written]
    couple.initiator.remove_remote_agent.assert_called_with("target-again")
    couple.initiator.polled.assert_not_called()
    if written:
        couple.initiator.add_remote_agent.assert_called_with(couple.again.get_agent_metadata.return_value)


def outcome(id: str, ending: MisuseEnding = MisuseEnding.ACCEPTED) -> MisuseOutcome:
    return MisuseOutcome(KINDS[id], "UCX", "1.5.1", ending, wrong_bytes=0)


@pytest.mark.parametrize(
    ("check", "id", "finding"),
    [
        (test_misuse.test_a_region_that_is_named_twice_is_freed_once, "duplicate-descriptor", ""),
        (test_misuse.test_a_released_handle_is_refused, "released-handle", ""),
        (
            test_misuse.test_a_transfer_is_done_after_another_was_released_in_flight,
            "released-in-flight",
            "LIBFABRIC-RELEASE-STALLS",
        ),
        (test_misuse.test_a_transfer_of_deregistered_memory_is_survived, "deregistered-source", ""),
        (test_misuse.test_an_agent_can_be_added_after_cut_metadata, "cut-metadata", ""),
    ],
)
def test_a_misuse_with_a_finding_is_made_in_a_worker_of_its_own(
    check: Callable[..., None], id: str, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, kind, name = MagicMock(), KINDS[id], finding or f"NIXL-{id.upper()}"
    agents.start_each.return_value = [MagicMock()]
    for ending in (MisuseEnding.REFUSED, MisuseEnding.CRASHED):
        done = MagicMock(return_value=outcome(id, ending))
        monkeypatch.setattr(test_misuse, "misuse", done)
        misused = value_of(test_misuse.misused, ExitStack(), agents=agents, agent_backend="UCX")
        occurs = "occurs" if ending is MisuseEnding.CRASHED else "does not occur"
        reason = f"with UCX of NIXL 1.5.1, {kind.label}: {ending.value}, and the next transfer has 0 wrong bytes"
        assert conclusion_of(check, misused=misused) == f"{name} {occurs}: {reason}"
        done.assert_called_once_with(agents.start_each.return_value[0], kind, "UCX")
    assert agents.start_each.mock_calls == [call([None], progress_thread=None)] * 2


def test_every_other_misuse_is_judged_and_four_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def agent(number: int) -> Any:
        return SimpleNamespace(close=lambda: log.append(f"close {number}"), number=number)

    agents = MagicMock()
    agents.start_each.side_effect = lambda names, progress_thread: [agent(number) for number in range(len(names))]

    def begin(started: Any, kind: Any, backend: str) -> str:
        log.append(f"start {kind.id} {started.number} {backend}")
        return f"pending {kind.id}"

    def end(started: Any, kind: Any, backend: str, pending: str) -> MisuseOutcome:
        log.append(f"{pending} {started.number} {backend}")
        return outcome(kind.id, MisuseEnding.CRASHED if kind is SURVIVED[-1] else MisuseEnding.REFUSED)

    monkeypatch.setattr(test_misuse, "start_misuse", begin)
    monkeypatch.setattr(test_misuse, "misuse_outcome", end)
    check = test_misuse.test_every_other_misuse_is_refused_or_survived
    conclusion = conclusion_of(check, agents=agents, agent_backend="UCX")
    assert conclusion == f"FAIL: NIXL 1.5.1 with UCX: {SURVIVED[-1].label}: crashed"
    expected: list[str] = []
    for first in range(0, len(SURVIVED), 4):
        ids = list(enumerate(kind.id for kind in SURVIVED[first : first + 4]))
        expected += [f"start {id} {number} UCX" for number, id in ids]
        expected += [text for number, id in ids for text in (f"pending {id} {number} UCX", f"close {number}")]
    assert log == expected


@pytest.mark.parametrize(
    ("chosen", "nixl", "modes"),
    [
        ("auto", "1.5.1", ["strict", "rw"]),
        ("rw", "1.5.1", ["rw"]),
        ("none", "1.5.1", "with --nixl-sync-mode=none NIXL does not let several threads use one agent"),
        ("auto", "0.9.0", "an agent of NIXL 0.9.0 has no synchronization mode"),
    ],
)
def test_threads_share_an_agent_of_each_mode_with_a_lock(
    chosen: str,
    nixl: str,
    modes: Sequence[str],
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents, used = MagicMock(), list[str]()
    agents.start.return_value.worker.versions = {"nixl": nixl}

    def transfer(agent: object, backend: str, mode: str) -> ConcurrentUse:
        used.append(mode)
        return ConcurrentUse(f"threads {mode}", backend, nixl, 8, moved=8)

    monkeypatch.setattr(test_threads, "transfer_in_threads", transfer)

    def conclude() -> str:
        settings = make_settings(sync_mode=chosen)
        check = test_threads.test_threads_share_an_agent
        return conclusion_of(check, agents=agents, agent_backend="UCX", nixl_settings=settings)

    if isinstance(modes, str):
        with pytest.raises(NotApplicableError) as error:
            conclude()
        assert error.value.reason == modes
    else:
        names = "; ".join(f"threads {mode} (UCX of NIXL 1.5.1)" for mode in modes)
        assert conclude() == f"PASS: {names}: all {8 * len(modes)} are there once, and every byte is correct"
        assert used == modes
        assert agents.start.return_value.close.call_count == len(modes)


def test_many_agents_and_many_notifiers_are_judged_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = MagicMock()
    agents.start_each.side_effect = lambda names, progress_thread: [f"agent {number}" for number in range(len(names))]

    def create(started: list[Any], backend: str) -> list[ConcurrentUse]:
        return [ConcurrentUse(f"{len(started)} processes", backend, "1.5.1", 8, moved=8) for _ in started]

    monkeypatch.setattr(test_threads, "create_in_threads", create)
    assert conclusion_of(test_threads.test_many_agents_are_created_at_once, agents=agents, agent_backend="UCX") == (
        "PASS: 1 processes (UCX of NIXL 1.5.1); 4 processes (UCX of NIXL 1.5.1): all 40 are there once, and every byte "
        "is correct"
    )
    agents.start.return_value.close.assert_called_once_with()
    notify = MagicMock(return_value=ConcurrentUse("notifications", "UCX", "1.5.1", 8, moved=7))
    monkeypatch.setattr(test_threads, "notify_at_once", notify)
    check = test_threads.test_notifications_of_many_peers_arrive_once
    assert conclusion_of(check, agents=agents, agent_backend="UCX") == (
        "FAIL: notifications (UCX of NIXL 1.5.1): 1 missing"
    )
    notify.assert_called_once_with("agent 0", [f"agent {number}" for number in range(1, 5)], "UCX")
