# SPDX-License-Identifier: Apache-2.0
"""The words about a port of telemetry that two processes share."""

from __future__ import annotations

import os

import pytest

from pytest_nixl import NixlPluginError
from pytest_nixl.checks.telemetry.shared_port import (
    NAMES,
    UnmeasuredProcess,
    deployment_port,
    describe_sharing,
    judge_taken_port,
)
from pytest_nixl.host.network import PortHolder

ON = {"NIXL_TELEMETRY_ENABLE": "Y", "NIXL_TELEMETRY_EXPORTER": "prometheus"}


def unmeasured(number: int, parent: int, *, pid: int = 8) -> UnmeasuredProcess:
    return UnmeasuredProcess(NAMES[number], pid, 9090, "it cannot be read", PortHolder(7, "vllm serve", parent), "")


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({}, None),
        (ON, 9090),
        ({**ON, "NIXL_TELEMETRY_PROMETHEUS_PORT": "19090"}, 19090),
        ({**ON, "NIXL_TELEMETRY_ENABLE": "no"}, None),
        ({**ON, "NIXL_TELEMETRY_EXPORTER": "prometheus_mp"}, None),
    ],
)
def test_the_port_is_that_of_a_deployment_with_the_exporter(environ: dict[str, str], port: int | None) -> None:
    assert deployment_port(environ) == port


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "65536", "9" * 5000, "٣", "9090\x1b[31m"])
def test_what_is_not_a_port_is_one_sentence(text: str) -> None:
    with pytest.raises(NixlPluginError, match="is not a port") as refused:
        deployment_port({**ON, "NIXL_TELEMETRY_PROMETHEUS_PORT": text})
    assert len(refused.value.reason) < 120
    assert "\x1b" not in refused.value.reason


def test_a_port_of_another_program_fails_with_its_process_and_the_one_that_is_not_measured() -> None:
    judgement = judge_taken_port([unmeasured(0, parent=1), unmeasured(1, parent=1)])
    assert judgement is not None
    assert judgement.reason == (
        "agent telemetry-first (pid 8) is not measured: port 9090 is held by pid 7 (vllm serve); NIXL wrote nothing "
        "about it"
    )
    assert "NIXL_TELEMETRY_PROMETHEUS_PORT" in judgement.remedy


@pytest.mark.parametrize("processes", [[], [unmeasured(1, parent=os.getpid())], [unmeasured(0, parent=os.getpid())]])
def test_a_port_of_this_run_is_not_one_of_another_program(processes: list[UnmeasuredProcess]) -> None:
    assert judge_taken_port(processes) is None


def test_an_agent_that_was_not_created_is_described() -> None:
    assert "agent telemetry-second, which was not created, is not measured: port 9090 is held by pid 7" in (
        describe_sharing([unmeasured(1, parent=1, pid=0)], None)
    )
    assert (
        describe_sharing([], 9090) == "two processes with one port are both measured (with the variables of this run)"
    )
