# SPDX-License-Identifier: Apache-2.0
"""Two agents whose telemetry is on, and what is known of their transfers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nixl.checks.telemetry.exporters import (
    BUFFER,
    NO_EXPORTER,
    PROMETHEUS,
    TelemetrySink,
    UnreadableTelemetryError,
)
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.strict import Every, Number, Text, check
from pytest_nixl.host.network import port_holder
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.processes.worker_errors import WorkerError

#: The module with the functions that agents run in their workers.
_IN_WORKER = "pytest_nixl.checks.telemetry.worker"
#: The regions of one transfer, and the size of the largest. One transfer must count as one request, not as several.
REGIONS, REGION = 4, 64 << 10
#: The bytes of the registration after which all earlier events have been exported.
_MARK = 8192
#: How often agents are started with other ports if another process takes one first.
_ATTEMPTS = 3
#: NIXL reports the death of an agent within milliseconds. After these seconds it reports none.
_SILENCE = 10.0
_TIME, _SECONDS = Number(0, 1e12), Number(0, 1e6)
_MOVES = Every({"took": _TIME, "xfer": _TIME, "post": _TIME})
_FAILURE = {"raised": Text(256), "state": Text(64)}
INITIATOR, TARGET = "telemetry-initiator", "telemetry-target"


@dataclass
class KnownTransfers:
    """What an agent was made to do.

    :param counts: the expected counts by metric, spelled as ``BUFFER`` spells it.
    :param took: the time of all transfers in microseconds, as measured around NIXL's calls.
    """

    counts: Counter[str] = field(default_factory=Counter)
    transfers: int = 0
    took: float = 0.0


@dataclass(frozen=True)
class TransferFailure:
    """What NIXL answered to a transfer that cannot succeed.

    :param raised: the class of the error; empty: there was none.
    :param state: the last state of the transfer.
    """

    raised: str
    state: str


class MeasuredAgents:
    """An initiator and a target in workers of their own, with one exporter, and what is known of their transfers.

    :param agents: makes the agents; their settings give the deadline of each step.
    :param exporter: the exporter of both; :data:`~.exporters.NO_EXPORTER`: they have no telemetry.
    :param folder: an empty folder.
    :raises NotApplicableError: this NIXL has no such exporter.
    :raises WorkerError: the agents cannot be started.
    """

    def __init__(self, agents: Agents, exporter: str, folder: Path) -> None:
        self.seconds = agents.settings.timeout
        self.sink, (self.initiator, self.target) = _start(agents, exporter, folder)
        self.nixl = str(self.initiator.worker.versions.get("nixl", ""))
        self.known = {INITIATOR: KnownTransfers(), TARGET: KnownTransfers()}
        self._memory = {agent.name: self._allocate(agent) for agent in (self.initiator, self.target)}
        self.initiator.add_remote_agent(self.target.get_agent_metadata())

    def _allocate(self, agent: NixlAgent) -> Buffer:
        buffer = agent.allocate_asked(REGIONS * REGION, initiator=agent is self.initiator)
        self._register(agent, buffer)
        return buffer

    def _register(self, agent: NixlAgent, buffer: Buffer) -> None:
        agent.register(buffer)
        self.known[agent.name].counts["agent_memory_registered"] += buffer.size

    def _regions(self, agent: str, size: int) -> list[list[Any]]:
        buffer = self._memory[agent]
        return [[buffer.memory, *buffer.descriptor(number * REGION, size)] for number in range(REGIONS)]

    def _transfer(self, op: str, peer: str, size: int, remote: int = 0) -> dict[str, Any]:
        return {
            "op": op,
            "peer": peer,
            "local": self._regions(INITIATOR, size),
            "remote": self._regions(TARGET, remote or size),
            "timeout": self.seconds / 2,
        }

    def move(self, op: str, count: int, size: int) -> None:
        """Let the initiator make ``count`` transfers, each of :data:`REGIONS` regions of ``size`` bytes."""
        moved = self.initiator.run(f"{_IN_WORKER}:move", count=count, **self._transfer(op, TARGET, size))
        check(_MOVES, moved)
        transfers, direction = self.known[INITIATOR], "tx" if op == "WRITE" else "rx"
        transfers.transfers += count
        transfers.took += sum(transfer["took"] for transfer in moved)
        transfers.counts[f"agent_{direction}_bytes"] += count * REGIONS * size
        transfers.counts[f"agent_{direction}_requests_num"] += count
        transfers.counts["agent_xfer_time"] += round(sum(transfer["xfer"] for transfer in moved))
        transfers.counts["agent_xfer_post_time"] += round(sum(transfer["post"] for transfer in moved))

    def time_transfers(self, op: str, count: int, size: int) -> list[float]:
        """Let the initiator repeat a transfer of :data:`REGIONS` regions of ``size`` bytes; return the seconds of each.

        The counts of telemetry are no longer known then.
        """
        timed = self.initiator.run(
            f"{_IN_WORKER}:time_transfers", count=count, warmup=count // 10, **self._transfer(op, TARGET, size)
        )
        check(Every(_SECONDS), timed)
        return list(map(float, timed))

    def ask_an_unknown_agent(self) -> None:
        """Let the initiator prepare a transfer to an agent that it does not know, which NIXL refuses."""
        failure = self._fail("WRITE", "an-agent-that-nobody-knows")
        if failure.raised != "nixlNotFoundError":
            raise WorkerError(f"NIXL answered {failure.raised or failure.state} to a transfer to an unknown agent")
        self.known[INITIATOR].counts["agent_err_not_found"] += 1

    def transfer_to_dead_target(self, op: str) -> TransferFailure:
        """Kill the target if it is alive, and let the initiator make a transfer with it."""
        self.target.worker.kill()
        return self._fail(op, TARGET)

    def transfer_of_other_lengths(self, op: str) -> TransferFailure:
        """Let the initiator ask for a transfer whose regions are half as long on the side of the target."""
        return self._fail(op, TARGET, remote=REGION // 2)

    def _fail(self, op: str, peer: str, remote: int = REGION) -> TransferFailure:
        timeout = {"timeout": min(_SILENCE, self.seconds / 2)}
        failure = self.initiator.run(f"{_IN_WORKER}:fail", **(self._transfer(op, peer, REGION, remote) | timeout))
        check(_FAILURE, failure)
        return TransferFailure(failure["raised"], failure["state"])

    def counts(self, agent: NixlAgent) -> dict[str, float]:
        """Return what has been exported for an agent after it did all that is known.

        NIXL exports events in their order, some time after they happen. So the agent registers more memory, and when
        that is exported, all before it is.

        :raises UnreadableTelemetryError: the telemetry of the agent cannot be read.
        """
        self._register(agent, agent.allocate(_MARK))
        expected = self.known[agent.name].counts["agent_memory_registered"]
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                counts = self.sink.counts(agent.name)
                if counts.get("agent_memory_registered") == expected or time.monotonic() > deadline:
                    return counts
            except UnreadableTelemetryError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


def _start(agents: Agents, exporter: str, folder: Path) -> tuple[TelemetrySink, list[NixlAgent]]:
    """Start the agents; again with other ports if another process has taken one of them."""
    for attempt in range(1, _ATTEMPTS + 1):
        first, other = free_ports(2)
        ports = {INITIATOR: first, TARGET: other if exporter == PROMETHEUS else first}
        sink = TelemetrySink(exporter, folder, ports, agents.settings.timeout)
        started: list[NixlAgent] = []
        try:
            for name in ports:
                started.append(agents.start(name, environment=sink.variables(name), progress_thread=True))
        except WorkerError:
            if attempt == _ATTEMPTS or not _taken(sink, started):
                require_exporter(agents, exporter)
                raise
        else:
            if attempt == _ATTEMPTS or not _taken(sink, started):
                return sink, started
        for agent in started:
            agent.close()
    raise AssertionError("the last attempt returns or raises")


def _taken(sink: TelemetrySink, agents: Sequence[NixlAgent]) -> bool:
    """Whether a process that is none of the agents' listens on a port of the sink."""
    if sink.exporter in (BUFFER, NO_EXPORTER):
        return False
    our_pids = {agent.worker.pid for agent in agents}
    holders = [port_holder(port) for port in set(sink.ports.values())]
    return any(holder is not None and holder.pid not in our_pids for holder in holders)


def require_exporter(agents: Agents, exporter: str) -> None:
    """Start an agent without telemetry, and look for the exporter's file, after an agent could not be created.

    :raises NotApplicableError: there is none.
    """
    if exporter in (BUFFER, NO_EXPORTER):
        return
    agent = agents.start(environment=dict.fromkeys(TelemetrySink(exporter, Path(), {"": 0}).variables("")))
    file = agent.run(f"{_IN_WORKER}:exporter_file", exporter=exporter)
    nixl = agent.worker.versions.get("nixl", "")
    agent.close()
    if not file:
        raise NotApplicableError(
            f"NIXL {nixl} has no exporter {exporter}: there is no libtelemetry_exporter_{exporter}.so among its plugins"
        )
