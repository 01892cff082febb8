# SPDX-License-Identifier: Apache-2.0
"""The agents of a fault: how they start, what they transfer, and how the survivor shows that it still works.

The agents are doubles, so that a request is lost and a notification is late when a test says so.
"""

from __future__ import annotations

import itertools
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from pytest_nixl.checks.faults.scene import (
    LOST_REQUEST,
    MOVED,
    REGION,
    REGIONS,
    TAIL,
    EarlyEndError,
    FaultScene,
)
from pytest_nixl.checks.faults.worker.traffic import ENDED_EARLY, FLOWS
from pytest_nixl.core.errors import LateError
from pytest_nixl.core.free_ports import PORT_TRIES, free_ports
from pytest_nixl.core.strict import StrictError
from pytest_nixl.processes.worker_errors import WorkerError

NAMES = ("initiator", "target", "third")
ENVIRONMENT: dict[str, str | None] = {"UCX_TLS": "tcp"}
ENDED = {"said": "nixlBackendError", "completed": 0, "longest": 0.0, "unended": 0}


def doubles() -> MagicMock:
    """Return agents that start at once, and answer with their own names."""
    agents = MagicMock()
    agents.start_each.side_effect = lambda names, **_: [getattr(agents, name) for name in names]
    for name, address in zip(NAMES, (1 << 30, 1 << 40, 1 << 50), strict=True):
        agent = getattr(agents, name)
        agent.name, agent.ref, agent.worker.timeout = name, f"ref of {name}", 60.0
        agent.worker.versions = {"nixl": "1.5.1"}
        agent.get_agent_metadata.return_value = f"metadata of {name}"
        agent.allocate.return_value.address = address
        agent.allocate.return_value.descriptor.return_value = f"memory of {name}"
        agent.get_xfer_descs.side_effect = lambda listed, memory: (listed, memory)
    return agents


def scene(agents: MagicMock, op: str = "WRITE", hosts: Sequence[Any] = (), port: int = 0) -> FaultScene:
    return FaultScene(agents, "UCX", op, ENVIRONMENT, hosts, port)


def start(names: Sequence[str], hosts: Sequence[str] = (), **options: object) -> Any:
    return call(list(names), environment=ENVIRONMENT, hosts=list(hosts), progress_thread=True, **options)


def listens(name: str, port: int, hosts: Sequence[str]) -> Any:
    return start([name], hosts, listen_thread=True, listen_port=port)


@pytest.mark.parametrize(
    ("hosts", "port", "started", "again"),
    [
        ((), 0, [start(NAMES)], start(["target"])),
        (("a", "b"), 0, [start(NAMES, "aba")], start(["target"], "b")),
        (
            ("a", "b"),
            7,
            [listens("initiator", 0, "a"), listens("target", 7, "b"), listens("third", 0, "a")],
            listens("target", 7, "b"),
        ),
    ],
)
def test_agents_start_on_their_hosts_and_only_the_target_listens_on_the_port(
    hosts: Sequence[str], port: int, started: list[Any], again: Any
) -> None:
    agents = doubles()
    fault_scene = scene(agents, "READ", hosts, port)
    assert agents.start_each.mock_calls == started
    signals = agents.third.worker.signal
    assert signals.mock_calls == [call(signal.SIGSTOP)]
    for agent in (agents.initiator, agents.target):
        agent.allocate.assert_called_once_with(REGIONS * REGION)
        agent.register.assert_called_once_with(agent.allocate.return_value)
    assert (fault_scene.source, fault_scene.destination) == (agents.initiator.allocate(), agents.target.allocate())
    if port:
        agents.initiator.fetch_remote_metadata.assert_called_once_with("target", "127.0.0.1", port)
        agents.initiator.add_remote_agent.assert_not_called()
    else:
        agents.initiator.add_remote_agent.assert_called_once_with("metadata of target")
    assert fault_scene.start("target") == [agents.target]
    assert agents.start_each.mock_calls[-1] == again
    assert fault_scene.third is agents.third
    assert signals.mock_calls == [call(signal.SIGSTOP), call(signal.SIGCONT)]
    assert str(fault_scene.outcome) == " (READ, UCX of NIXL 1.5.1 with UCX_TLS=tcp):  after 0.00 s"


@pytest.mark.parametrize("refused", [1, PORT_TRIES - 1, PORT_TRIES])
def test_a_target_whose_port_was_taken_meanwhile_gets_another(refused: int) -> None:
    agents = doubles()
    begin, ports = agents.start_each.side_effect, []

    def start_each(names: Sequence[str], **options: Any) -> Any:
        if port := options["listen_port"]:
            ports.append(port)
            if len(ports) <= refused:
                if port != taken_port:
                    taken.enter_context(socket.socket()).bind(("", port))
                raise WorkerError("the port is taken", "")
        return begin(names, **options)

    with ExitStack() as taken:
        first = taken.enter_context(socket.socket())
        first.bind(("", 0))
        taken_port = first.getsockname()[1]
        agents.start_each.side_effect = start_each
        if refused == PORT_TRIES:
            with pytest.raises(WorkerError):
                scene(agents, port=taken_port)
        else:
            scene(agents, port=taken_port)
            agents.initiator.fetch_remote_metadata.assert_called_once_with("target", "127.0.0.1", ports[-1])
    assert (len(ports), len(set(ports)), ports[0]) == (min(refused + 1, PORT_TRIES),) * 2 + (taken_port,)


def test_a_target_that_does_not_start_although_its_port_is_free_is_not_tried_again() -> None:
    agents = doubles()
    agents.start_each.side_effect = [[agents.initiator], WorkerError("no memory", "")]
    with pytest.raises(WorkerError, match="no memory"):
        scene(agents, port=free_ports(1)[0])
    assert len(agents.start_each.mock_calls) == 2


NO_ANSWER = "waited 0.01 s for initiator to fetch the metadata of target from port 7"
LOST = "NIXL lost 3 requests of initiator for the metadata of target"


@pytest.mark.parametrize(
    ("answers", "lost"),
    [
        (["loaded"], 0),
        (["lost", "loaded"], 1),
        (["silent", "loaded"], 1),
        (["lost", "silent", "loaded"], 2),
        (["lost"] * 3, LOST),
        (["silent"] * 3, NO_ANSWER),
        (["silent", "silent", "lost"], LOST),
    ],
)
def test_metadata_is_fetched_again_if_the_request_was_lost(answers: list[str], lost: int | str) -> None:
    agents = doubles()
    fault_scene = scene(agents, port=7)
    agents.initiator.fetch_remote_metadata.reset_mock()
    agents.initiator.worker.timeout = 0.01
    agents.initiator.worker.output.return_value = LOST_REQUEST  # of an earlier fetch
    remaining = iter(answers)

    def fetch(*_: object) -> None:
        answer = next(remaining)
        agents.initiator.check_remote_metadata.return_value = answer == "loaded"
        agents.initiator.worker.output.return_value += LOST_REQUEST * (answer == "lost")

    agents.initiator.fetch_remote_metadata.side_effect = fetch
    if isinstance(lost, int):
        assert fault_scene.fetch(agents.target) == lost
    else:
        with pytest.raises(LateError) as late:
            fault_scene.fetch(agents.target)
        assert late.value.reason == lost
    assert agents.initiator.fetch_remote_metadata.mock_calls == [call("target", "127.0.0.1", 7)] * len(answers)


def test_transfers_in_flight_are_of_all_regions_and_have_three_times_the_deadline_of_a_step() -> None:
    agents = doubles()
    pending = scene(agents, "READ").request("interrupt", action="replace")
    assert pending is agents.initiator.worker.request.return_value
    sizes = range(0, REGIONS * REGION, REGION)
    agents.initiator.worker.request.assert_called_once_with(
        "run",
        seconds=180.0,
        agent="ref of initiator",
        function="pytest_nixl.checks.faults.worker.traffic:interrupt",
        arguments={
            "op": "READ",
            "local": [[(1 << 30) + offset, REGION] for offset in sizes],
            "remote": [[(1 << 40) + offset, REGION] for offset in sizes],
            "peer": "target",
            "action": "replace",
        },
    )


@pytest.mark.parametrize(
    ("output", "alive", "answer", "error", "message"),
    [
        (FLOWS, True, ENDED, None, ""),
        ("", False, ENDED, None, ""),
        (ENDED_EARLY, True, ENDED, EarlyEndError, "the transfers ended in nixlBackendError before the fault"),
        (
            ENDED_EARLY,
            True,
            {**ENDED, "said": "PROC"},
            LateError,
            "waited 60 s for initiator to complete transfers to ",
        ),
        (
            ENDED_EARLY,
            True,
            {**ENDED, "said": "DONE"},
            LateError,
            "waited 60 s for initiator to complete transfers to ",
        ),
        (ENDED_EARLY, True, {**ENDED, "longest": -1}, StrictError, "longest"),
    ],
)
def test_a_fault_is_made_when_transfers_flow_or_their_worker_has_died(
    output: str,
    alive: bool,
    answer: Mapping[str, object],
    error: type[Exception] | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = doubles()
    fault_scene, worker = scene(agents), agents.initiator.worker
    times = itertools.count(100.0, 0.5)
    monkeypatch.setattr("pytest_nixl.checks.faults.scene.time.monotonic", lambda: next(times))
    worker.output.return_value, worker.alive = f"a line\n{output}\n", alive
    worker.request.return_value.result.return_value = answer
    if error is None:
        with fault_scene.traffic(quiet=3.0, limit=6.0) as pending:
            assert pending is worker.request.return_value
    else:
        with pytest.raises(error, match=message) as caught, fault_scene.traffic(quiet=3.0, limit=6.0):
            pytest.fail("no fault is to be made")
        if isinstance(caught.value, EarlyEndError):
            assert (caught.value.answer, caught.value.seconds) == ("nixlBackendError", 1.0)
    arguments = worker.request.call_args.kwargs["arguments"]
    assert {name: arguments[name] for name in ("quiet", "limit", "timeout")} == {
        "quiet": 3.0, "limit": 6.0, "timeout": 60.0,
    }  # fmt: skip


def test_late_bytes_are_searched_at_the_end_of_each_region() -> None:
    agents = doubles()
    fault_scene, buffer = scene(agents), MagicMock()
    tails = [number * REGION - TAIL for number in (1, 2, 3, 4)]
    fault_scene.mark(buffer, 9)
    assert buffer.fill.call_args_list == [call(9 + tail, offset=tail, size=TAIL) for tail in tails]
    assert buffer.fill().result.call_count == 4
    buffer.compare.side_effect = [None, {"wrong_bytes": 3}, None, {"wrong_bytes": 4}]
    assert fault_scene.changed(buffer, 9) == 7
    assert buffer.compare.mock_calls == [call(9 + tail, offset=tail, size=TAIL) for tail in tails]


@pytest.mark.parametrize("knows_memory", [True, False])
@pytest.mark.parametrize(("comparison", "wrong"), [(None, 0), ({"wrong_bytes": 3}, 3)])
def test_a_move_writes_new_bytes_over_their_complement_and_counts_wrong_ones(
    knows_memory: bool, comparison: dict[str, int] | None, wrong: int
) -> None:
    agents = doubles()
    fault_scene, source, target = scene(agents), agents.third, agents.initiator
    target.allocate.reset_mock()
    memory = MagicMock() if knows_memory else target.allocate.return_value
    memory.descriptor.return_value = "memory"
    memory.compare.return_value = comparison
    source.transfer.return_value = "PROC"
    source.check_xfer_state.side_effect = ["PROC", "DONE"]
    target.get_new_notifs.side_effect = [{"other": [b"x"]}, {"third": [b"moved"]}, {}, {}]
    assert fault_scene.move(source, target, memory if knows_memory else None) == wrong
    source.allocate.assert_called_once_with(MOVED)
    source.register.assert_called_once_with(source.allocate())
    assert target.allocate.mock_calls[:1] == ([] if knows_memory else [call(MOVED)])
    assert source.add_remote_agent.mock_calls == ([] if knows_memory else [call("metadata of initiator")])
    (seed,), _ = source.allocate().fill.call_args
    memory.fill.assert_called_once_with(seed, inverted=True)
    source.initialize_xfer.assert_called_once_with(
        "WRITE", (["memory of third"], "DRAM"), (["memory"], "DRAM"), "initiator", b"moved"
    )
    source.transfer.assert_called_once_with(source.initialize_xfer())
    source.check_xfer_state.assert_called_with(source.initialize_xfer())
    memory.compare.assert_called_once_with(seed)
    assert source.allocate().fill().result.called
    assert memory.fill().result.called


@pytest.mark.parametrize(
    ("state", "notified", "text"),
    [
        ("PROC", True, "the state of the transfer is PROC, and its notification arrived"),
        ("DONE", False, "the state of the transfer is DONE, and its notification did not arrive"),
    ],
)
def test_a_move_that_is_only_done_or_only_notified_is_late(state: str, notified: bool, text: str) -> None:
    agents = doubles()
    fault_scene, source, target = scene(agents), agents.initiator, agents.target
    source.worker.timeout = 0.01
    source.transfer.return_value = source.check_xfer_state.return_value = state
    target.get_new_notifs.return_value = {"initiator": [b"moved"]} if notified else {}
    with pytest.raises(LateError) as late:
        fault_scene.move(source, target)
    assert late.value.reason == f"waited 0.01 s for a WRITE from initiator to target: {text}"
    assert "NIXL_LOG_LEVEL=debug" in late.value.remedy
