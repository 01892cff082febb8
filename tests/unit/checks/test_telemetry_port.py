# SPDX-License-Identifier: Apache-2.0
"""The words about a port of telemetry that two processes share."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.metrics_server import metrics_server

from pytest_nixl import NixlPluginError, NotApplicableError
from pytest_nixl.checks.telemetry import shared_port
from pytest_nixl.checks.telemetry.exporters import PROMETHEUS, TelemetrySink
from pytest_nixl.checks.telemetry.shared_port import (
    NAMES,
    UnmeasuredProcess,
    deployment_port,
    describe_sharing,
    judge_taken_port,
    share_port,
)
from pytest_nixl.host.network import PortHolder
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.processes.worker_errors import WorkerError

ON = {"NIXL_TELEMETRY_ENABLE": "Y", "NIXL_TELEMETRY_EXPORTER": "prometheus"}


def unmeasured(number: int, parent: int, *, pid: int = 8) -> UnmeasuredProcess:
    return UnmeasuredProcess(NAMES[number], pid, 9090, "it cannot be read", PortHolder(7, "vllm serve", parent), "")


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({}, None),
        (ON, 9090),
        ({**ON, "NIXL_TELEMETRY_ENABLE": " TRUE ", "NIXL_TELEMETRY_PROMETHEUS_PORT": "65535"}, 65535),
        ({**ON, "NIXL_TELEMETRY_ENABLE": "no"}, None),
        ({**ON, "NIXL_TELEMETRY_EXPORTER": "prometheus_mp"}, None),
    ],
)
def test_the_port_is_that_of_a_deployment_with_the_exporter(environ: dict[str, str], port: int | None) -> None:
    assert deployment_port(environ) == port


@pytest.mark.parametrize("text", ["", "-1", "0", "65536", "9" * 5000, "٣", "9090\x1b[31m"])
def test_what_is_not_a_port_is_one_sentence(text: str) -> None:
    with pytest.raises(NixlPluginError, match="is not a port") as refused:
        deployment_port({**ON, "NIXL_TELEMETRY_PROMETHEUS_PORT": text})
    assert len(refused.value.reason) < 120
    assert "\x1b" not in refused.value.reason


@pytest.mark.parametrize(
    ("processes", "taken"),
    [
        ([unmeasured(0, parent=1), unmeasured(1, parent=1)], True),
        ([], False),
        ([unmeasured(1, parent=1)], False),
        ([unmeasured(0, parent=os.getpid())], False),
    ],
)
def test_a_port_of_another_program_fails_with_its_process(processes: list[UnmeasuredProcess], taken: bool) -> None:
    judgement = Judgement(
        Verdict.FAIL,
        "agent telemetry-first (pid 8) is not measured: port 9090 is held by pid 7 (vllm serve); NIXL wrote nothing "
        "about it",
        "end that process, or set NIXL_TELEMETRY_PROMETHEUS_PORT to a free port; `ss -ltnp 'sport = :9090'` shows who "
        "has it",
    )
    assert judge_taken_port(processes) == (judgement if taken else None)


def test_what_was_seen_of_a_shared_port_is_one_sentence() -> None:
    unknown = UnmeasuredProcess(NAMES[1], 8, 9090, "it cannot be read", None, "could not be bound")
    assert describe_sharing([unmeasured(1, parent=1, pid=0), unknown], None) == (
        "agent telemetry-second, which was not created, is not measured: port 9090 is held by pid 7 (vllm serve); NIXL "
        "wrote nothing about it; agent telemetry-second (pid 8) is not measured: it cannot be read; NIXL wrote: could "
        "not be bound (with a free port)"
    )
    assert describe_sharing([], 9) == "two processes with one port are both measured (with the variables of this run)"


class SharingAgents:
    """Doubles of agents, of which only some can be created, as if other processes had their port."""

    settings = SimpleNamespace(timeout=5.0)

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.environments: list[dict[str, str | None]] = []

    def start(self, name: str, *, environment: dict[str, str | None], progress_thread: bool) -> Any:
        self.environments.append(environment)
        if name in self.refused:
            raise WorkerError("\a" + "x" * 400)
        output = "one\n\aport 1 could not be bound\nthree"
        return SimpleNamespace(worker=SimpleNamespace(pid=len(self.environments), output=lambda: output))


@pytest.mark.parametrize("deployed", [False, True])
def test_two_agents_share_a_port_and_those_that_are_not_measured_are_returned(
    deployed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = PortHolder(7, "it", os.getpid())
    monkeypatch.setattr(shared_port, "port_holder", lambda port: holder)
    with metrics_server(lambda: b'agent_tx_bytes_total{agent_name="telemetry-second"} 1\n') as port:
        monkeypatch.setattr(shared_port, "free_ports", lambda count: [port])
        agents = SharingAgents()
        unread = f"http://127.0.0.1:{port}/metrics has no metrics of agent {NAMES[0]}: it has those of {NAMES[1]}"
        first = UnmeasuredProcess(NAMES[0], 1, port, unread, holder, "\\x07port 1 could not be bound")
        assert share_port(cast(Any, agents), port if deployed else None) == [first]
        sink = TelemetrySink(PROMETHEUS, Path(), dict.fromkeys(NAMES, port))
        assert agents.environments == ([{}, {}] if deployed else [sink.variables(name) for name in NAMES])
        second = UnmeasuredProcess(NAMES[1], 0, port, "", holder, "\\x07" + "x" * 299)
        assert share_port(cast(Any, SharingAgents(NAMES[1])), port) == [first, second]


def test_another_free_port_is_tried_if_another_program_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = iter([[1], [2], [3], [4]])
    monkeypatch.setattr(shared_port, "free_ports", lambda count: next(ports))
    monkeypatch.setattr(shared_port, "port_holder", lambda port: PortHolder(7, "it", 1))
    for port, tried in ((None, 3), (9, 9)):
        assert [process.port for process in share_port(cast(Any, SharingAgents(*NAMES)), port)] == [tried] * 2


@pytest.mark.parametrize(("lacks_exporter", "error"), [(True, NotApplicableError), (False, WorkerError)])
def test_an_agent_that_no_other_process_hinders_is_an_error(
    lacks_exporter: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(agents: Any, exporter: str) -> None:
        if lacks_exporter and exporter == PROMETHEUS:
            raise NotApplicableError("there is none")

    monkeypatch.setattr(shared_port, "port_holder", lambda port: None)
    monkeypatch.setattr(shared_port, "require_exporter", require)
    with pytest.raises(error):
        share_port(cast(Any, SharingAgents(*NAMES)), 9)
