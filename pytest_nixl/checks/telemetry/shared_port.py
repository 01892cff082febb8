# SPDX-License-Identifier: Apache-2.0
"""Whether each of two processes is measured if both have the exporter ``prometheus`` and the same port."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.checks.telemetry.exporters import PROMETHEUS, TelemetrySink, UnreadableTelemetryError
from pytest_nixl.checks.telemetry.measured_agents import require_exporter
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.strict import printable
from pytest_nixl.host.network import PortHolder, port_holder
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.processes.worker_parent import starts_workers

#: The port that NIXL uses if none is set.
DEFAULT_PORT = 9090
_ON = frozenset(("y", "yes", "on", "true", "enable", "1"))
NAMES = ("telemetry-first", "telemetry-second")
#: What NIXL writes if it cannot bind the port.
_NOT_BOUND = "could not be bound"
_SHOWN = 300
#: The deadline of an answer. A program that has the port and is no endpoint of metrics may never answer.
_SECONDS = 20.0
#: How often agents are started with another port if another process takes it first.
_ATTEMPTS = 3


@dataclass(frozen=True)
class UnmeasuredProcess:
    """A process whose telemetry nobody can read.

    :param agent: the name of its agent.
    :param pid: the process; 0 if NIXL created no agent in it.
    :param why: why its metrics cannot be read, as a clause.
    :param holder: the process that has the port; None: it is unknown.
    :param wrote: what NIXL wrote about it; empty: nothing.
    """

    agent: str
    pid: int
    port: int
    why: str
    holder: PortHolder | None
    wrote: str

    def __str__(self) -> str:
        subject = f"agent {self.agent} (pid {self.pid})" if self.pid else f"agent {self.agent}, which was not created,"
        held = f"port {self.port} is held by {self.holder}" if self.holder else self.why
        wrote = f"; NIXL wrote: {self.wrote}" if self.wrote else "; NIXL wrote nothing about it"
        return f"{subject} is not measured: {held}{wrote}"


def deployment_port(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the port of the deployment's exporter ``prometheus``; None if its variables do not turn it on.

    :raises NixlPluginError: NIXL_TELEMETRY_PROMETHEUS_PORT is not a port.
    """
    enabled = environ.get("NIXL_TELEMETRY_ENABLE", "").strip().lower() in _ON
    if not enabled or environ.get("NIXL_TELEMETRY_EXPORTER") != PROMETHEUS:
        return None
    text = environ.get("NIXL_TELEMETRY_PROMETHEUS_PORT", str(DEFAULT_PORT))
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) < 1 << 16):
        raise NixlPluginError(
            f"NIXL_TELEMETRY_PROMETHEUS_PORT={printable(text[:40])} is not a port", "set it to a number from 1 to 65535"
        )
    return int(text)


def share_port(agents: Agents, port: int | None) -> list[UnmeasuredProcess]:
    """Start two agents with one port in workers of their own; return those that are not measured.

    :param agents: makes the agents; they run until it ends them.
    :param port: the port of the deployment, whose variables the workers then have; None for a free one.
    :raises NotApplicableError: this NIXL has no such exporter.
    """
    for _ in range(_ATTEMPTS):
        unmeasured = _share_port(agents, free_ports(1)[0] if port is None else port, chosen_here=port is None)
        # A port that was free may have been taken since.
        if port is not None or judge_taken_port(unmeasured) is None:
            break
    return unmeasured


def _share_port(agents: Agents, requested: int, *, chosen_here: bool) -> list[UnmeasuredProcess]:
    sink = TelemetrySink(PROMETHEUS, Path(), dict.fromkeys(NAMES, requested), min(_SECONDS, agents.settings.timeout))
    unmeasured = []
    for name in NAMES:
        environment = sink.variables(name) if chosen_here else {}
        try:
            agent = agents.start(name, environment=environment, progress_thread=True)
        except WorkerError as error:
            holder = port_holder(requested)
            if holder is None:
                require_exporter(agents, PROMETHEUS)
                raise
            unmeasured.append(UnmeasuredProcess(name, 0, requested, "", holder, printable(error.reason[:_SHOWN])))
            continue
        try:
            sink.counts(name)
        except UnreadableTelemetryError as error:
            wrote = next((line for line in agent.worker.output().splitlines() if _NOT_BOUND in line), "")
            pid = agent.worker.pid
            unmeasured.append(
                UnmeasuredProcess(name, pid, requested, str(error), port_holder(requested), printable(wrote[:_SHOWN]))
            )
    return unmeasured


def judge_taken_port(unmeasured: list[UnmeasuredProcess]) -> Judgement | None:
    """Return a failure if a process that is not of this run has the port; None if no such process has it."""
    for process in unmeasured:
        if process.agent == NAMES[0] and (process.holder is None or not starts_workers(process.holder.parent)):
            return Judgement(
                Verdict.FAIL,
                str(process),
                f"end that process, or set NIXL_TELEMETRY_PROMETHEUS_PORT to a free port; "
                f"`ss -ltnp 'sport = :{process.port}'` shows who has it",
            )
    return None


def describe_sharing(unmeasured: list[UnmeasuredProcess], port: int | None) -> str:
    """Return what was seen of two processes with one port, as one sentence.

    :param port: the port of the deployment; None if its variables do not turn the exporter on.
    """
    where = "with the variables of this run" if port is not None else "with a free port"
    if not unmeasured:
        return f"two processes with one port are both measured ({where})"
    return f"{'; '.join(map(str, unmeasured))} ({where})"
