# SPDX-License-Identifier: Apache-2.0
"""Agents with transfers in flight, of which a fault disturbs some, and the verdict on what followed."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pytest_nixl.checks.faults.worker.traffic import ENDED_EARLY, FLOWS
from pytest_nixl.core.errors import LateError, NixlPluginError
from pytest_nixl.core.free_ports import PORT_TRIES, free_ports, is_free
from pytest_nixl.core.polling import wait_until
from pytest_nixl.core.strict import Number, Text, check
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.processes.worker_process import Pending

#: The number of transfers in flight.
REGIONS = 4
#: The faults of which NIXL must tell the initiator by an error.
MUST_REPORT = ("target-killed", "target-restarted", "listener-restarted")

#: The functions of the initiator's worker.
TRAFFIC = "pytest_nixl.checks.faults.worker.traffic:"
#: The size in bytes of each transfer in flight, and of the transfer that shows that an agent still works.
REGION, MOVED = 16 << 20, 1 << 16
#: The size in bytes of the end of each transfer, which arrives last, so that late bytes are seen there.
TAIL = 64 << 10
#: The address of a target that listens.
LOOPBACK = "127.0.0.1"
#: What NIXL writes if it could not send a request for metadata, and how many requests are made at most.
LOST_REQUEST, FETCHES = "Failed to send message to peer", 3
#: The deadline of the initiator's traffic, as a multiple of a step's: it begins before transfers flow.
_WORKER_SHARE = 3
#: What the traffic of the initiator ended with.
SECONDS, COUNT = Number(0, 1e9), Number(0, 1 << 53, whole=True)
OUTCOME = {"said": Text(256), "completed": COUNT, "longest": SECONDS, "unended": COUNT}
#: Numbers of patterns.
seeds = itertools.count(1)


@dataclass(frozen=True)
class FaultOutcome:
    """What followed a fault.

    :param answer: what NIXL's interface answered: an error class, ``PROC`` (no answer), or ``DONE``.
    :param seconds: from the fault to that answer.
    :param survivor: empty if the surviving agent lives; otherwise how it ended.
    :param wrong_bytes: of a transfer between the survivor and a third agent, or a new target; None if there was none.
    :param transports: the value of ``UCX_TLS`` that the check set; empty for none.
    :param unended: how many transfers in flight did not end some seconds after NIXL had reported the first error.
    :param changed: the number of bytes that were written to the destination after NIXL had reported the end.
    :param lost_requests: how many requests for the metadata of a restarted target NIXL lost without an error.
    :param early: NIXL reported the error before the fault was made, and nothing was observed after that.
    """

    fault: str
    backend: str
    op: str
    nixl: str
    answer: str = ""
    seconds: float = 0.0
    survivor: str = ""
    wrong_bytes: int | None = None
    changed: int = 0
    transports: str = ""
    unended: int = 0
    lost_requests: int = 0
    early: bool = False

    @property
    def defects(self) -> list[str]:
        """What is wrong with this outcome."""
        if self.early:
            return ["the transfers ended before the fault was made, although the target runs"]
        defects = []
        if self.survivor:
            defects.append(f"the surviving agent {self.survivor}")
        elif self.wrong_bytes is None:
            defects.append("the surviving agent could not move bytes to another agent")
        elif self.wrong_bytes:
            defects.append(f"{self.wrong_bytes} bytes of the survivor's next transfer are wrong")
        if self.unended:
            defects.append(f"{self.unended} of {REGIONS} transfers did not end")
        if self.changed:
            defects.append(f"{self.changed} bytes were written after NIXL had reported the end of the transfers")
        if self.lost_requests:
            defects.append(f"{lost_requests_text(self.lost_requests)} without an error")
        if self.fault in MUST_REPORT and not self.survivor and self.answer in ("PROC", "DONE"):
            defects.append(f"NIXL did not tell the initiator of the target's death in {self.seconds:.0f} s")
        return defects

    def __str__(self) -> str:
        """Return it as a sentence without a full stop."""
        over = f" with UCX_TLS={self.transports}" if self.transports else ""
        where = f"{self.op}, {self.backend} of NIXL {self.nixl}{over}"
        return f"{self.fault} ({where}): {self.answer} after {self.seconds:.2f} s"


def judge_faults(outcomes: Sequence[FaultOutcome]) -> Judgement:
    """Return the verdict on what followed a fault with several operations and transports."""
    if wrong := [f"{outcome}; {'; '.join(outcome.defects)}" for outcome in outcomes if outcome.defects]:
        remedy = (
            "restart the process that survived the fault; report this output at "
            "https://github.com/ai-dynamo/nixl/issues"
        )
        return Judgement(Verdict.FAIL, ". ".join(wrong), remedy)
    return Judgement(Verdict.PASS, f"{fault_reason(outcomes)}; the survivor moves correct bytes to another agent")


def fault_reason(outcomes: Sequence[FaultOutcome]) -> str:
    """Return what followed a fault, as the reason of a verdict."""
    return "; ".join(f"{outcome}{_after(outcome)}" for outcome in outcomes)


def lost_requests_text(count: int) -> str:
    """Return how many requests for metadata were lost, as the start of a sentence without a full stop."""
    requests = "request" if count == 1 else "requests"
    return f"NIXL lost {count} {requests} for the metadata of the restarted target"


def _after(outcome: FaultOutcome) -> str:
    """Return the known defects that showed after the answer, as the rest of a sentence."""
    facts = [f"the surviving agent {outcome.survivor}"] if outcome.survivor else []
    if outcome.changed:
        facts.append(f"{outcome.changed} bytes were written after that")
    if outcome.lost_requests:
        facts.append(lost_requests_text(outcome.lost_requests))
    return "".join(f", and {fact}" for fact in facts)


def without(outcomes: Sequence[FaultOutcome], **conditions: Any) -> list[FaultOutcome]:
    """Return outcomes without the defect of a finding, to judge what else is wrong.

    :param conditions: the fields of an outcome in which the defect shows, with the values of an outcome without it.
    """
    return [replace(outcome, **conditions) for outcome in outcomes]


class EarlyEndError(NixlPluginError):
    """NIXL reported an error of the transfers before the fault was made.

    :param answer: NIXL's error class.
    :param seconds: from the beginning of the transfers.
    """

    def __init__(self, answer: str, seconds: float) -> None:
        super().__init__(f"the transfers ended in {answer} before the fault")
        self.answer, self.seconds = answer, seconds


class FaultScene:
    """An initiator that transfers to a target, and a third agent that shows whether the survivor still works.

    :param agents: makes the agents; their settings give the deadline of each step.
    :param backend: the backend of all agents.
    :param op: ``WRITE`` or ``READ``.
    :param environment: variables of the workers, such as ``UCX_TLS``.
    :param hosts: the hosts of initiator and target; the third agent is beside the initiator. Empty for this host.
    :param port: the port on which the target listens, and from which the initiator fetches its metadata; 0: the
        target does not listen, and its metadata is passed on.
    """

    def __init__(
        self,
        agents: Agents,
        backend: str,
        op: str,
        environment: dict[str, str | None],
        hosts: Sequence[Host] = (),
        port: int = 0,
    ) -> None:
        self.op, self.backend = op, backend
        self._agents, self._environment, self._hosts, self._port = agents, environment, hosts, port
        self.initiator, self.target, self._third = self.start("initiator", "target", "third")
        self._third.worker.signal(signal.SIGSTOP)  # its progress thread spins, and would take a core from the others
        self.source, self.destination = (self.allocate(agent) for agent in (self.initiator, self.target))
        if port:
            self.fetch(self.target)
        else:
            self.initiator.add_remote_agent(self.target.get_agent_metadata())

    @property
    def third(self) -> NixlAgent:
        """The third agent, which is stopped until it is needed."""
        self._third.worker.signal(signal.SIGCONT)
        return self._third

    @property
    def outcome(self) -> FaultOutcome:
        """An outcome in which nothing has been observed yet."""
        nixl = str(self.initiator.worker.versions.get("nixl", ""))
        return FaultOutcome("", self.backend, self.op, nixl, transports=self._environment.get("UCX_TLS") or "")

    def start(self, *names: str) -> list[NixlAgent]:
        """Start agents; one with the name ``target`` on the target's host, and on the target's port if it listens."""
        if self._port and len(names) > 1:  # those that start together would have the same port
            starts = {"target": self._start_listening}
            return [agent for name in names for agent in starts.get(name, self.start)(name)]
        hosts = [self._hosts[name == "target"] for name in names] if self._hosts else []
        listen: dict[str, Any] = {}
        if self._port:
            listen = {"listen_thread": True, "listen_port": self._port if "target" in names else 0}
        return self._agents.start_each(
            list(names), environment=self._environment, hosts=hosts, progress_thread=True, **listen
        )

    def _start_listening(self, name: str) -> list[NixlAgent]:
        """Start the target, on another port if a process has taken its port since it was found free."""
        for _ in range(PORT_TRIES - 1):
            try:
                return self.start(name)
            except WorkerError:
                if is_free(self._port):
                    raise
                (self._port,) = free_ports(1)
        return self.start(name)

    def fetch(self, target: NixlAgent) -> int:
        """Let the initiator fetch the metadata of an agent from its listener, again if NIXL loses the request.

        :returns: how many requests were lost.
        :raises LateError: the metadata did not arrive in response to the last of them.
        """
        worker = self.initiator.worker
        for lost in range(FETCHES):
            complaints = worker.output().count(LOST_REQUEST)
            self.initiator.fetch_remote_metadata(target.name, LOOPBACK, self._port)

            def over(complaints: int = complaints) -> bool:
                is_known = self.initiator.check_remote_metadata(target.name)
                return is_known or worker.output().count(LOST_REQUEST) > complaints

            awaited = f"{self.initiator.name} to fetch the metadata of {target.name} from port {self._port}"
            try:
                wait_until(over, awaited, seconds=worker.timeout)
            except LateError:
                if lost + 1 == FETCHES:
                    raise
            if self.initiator.check_remote_metadata(target.name):
                return lost
        raise LateError(f"NIXL lost {FETCHES} requests of {self.initiator.name} for the metadata of {target.name}")

    @staticmethod
    def allocate(agent: NixlAgent, size: int = REGIONS * REGION) -> Buffer:
        """Return registered memory of an agent."""
        buffer = agent.allocate(size)
        agent.register(buffer)
        return buffer

    def request(self, function: str, **arguments: Any) -> Pending:
        """Start transfers of the initiator, without waiting for their end."""
        local, remote = (
            [[buffer.address + number * REGION, REGION] for number in range(REGIONS)]
            for buffer in (self.source, self.destination)
        )
        parameters = {"op": self.op, "local": local, "remote": remote, "peer": self.target.name, **arguments}
        return self.initiator.worker.request(
            "run",
            seconds=_WORKER_SHARE * self.initiator.worker.timeout,
            agent=self.initiator.ref,
            function=TRAFFIC + function,
            arguments=parameters,
        )

    @contextmanager
    def traffic(self, *, quiet: float, limit: float) -> Iterator[Pending]:
        """Keep transfers in flight; the body begins when the first ones are completed.

        :raises LateError: no transfer is completed before the deadline.
        :raises EarlyEndError: NIXL reports an error before that, while the target still runs.
        """
        worker = self.initiator.worker
        began = time.monotonic()
        pending = self.request("keep_transferring", quiet=quiet, limit=limit, timeout=worker.timeout)
        awaited = f"{self.initiator.name} to complete transfers to {self.target.name}"
        wait_until(
            lambda: FLOWS in (log := worker.output()) or ENDED_EARLY in log or not worker.alive,
            awaited,
            seconds=worker.timeout,
        )
        if ENDED_EARLY in worker.output():
            answer = pending.result()
            check(OUTCOME, answer)
            if answer["said"] in ("PROC", "DONE"):
                raise LateError(f"waited {worker.timeout:g} s for {awaited}")
            raise EarlyEndError(answer["said"], time.monotonic() - began)
        yield pending

    def mark(self, buffer: Buffer, seed: int) -> None:
        """Write a pattern to the ends of all transfers' regions in a buffer."""
        for pending in [buffer.fill(seed + offset, offset=offset, size=TAIL) for offset in self._tails()]:
            pending.result()

    def changed(self, buffer: Buffer, seed: int) -> int:
        """Return how many bytes were changed since :meth:`mark`."""
        comparisons = [buffer.compare(seed + offset, offset=offset, size=TAIL) for offset in self._tails()]
        return sum(comparison["wrong_bytes"] for comparison in comparisons if comparison)

    @staticmethod
    def _tails() -> list[int]:
        return [number * REGION - TAIL for number in range(1, REGIONS + 1)]

    def move(self, source: NixlAgent, target: NixlAgent, remote: Buffer | None = None) -> int:
        """Write new bytes from one agent to another, and return how many are wrong there.

        :param remote: memory of the target that the source knows; None: allocate some, and pass on the metadata.
        :raises LateError: the transfer misses the deadline.
        :raises WorkerError: NIXL reports an error, or a worker dies or hangs.
        """
        local, memory, seed = self.allocate(source, MOVED), remote or self.allocate(target, MOVED), next(seeds)
        local.fill(seed).result()
        memory.fill(seed, inverted=True).result()
        if remote is None:
            source.add_remote_agent(target.get_agent_metadata())
        handle = source.initialize_xfer(
            "WRITE",
            source.get_xfer_descs([local.descriptor()], "DRAM"),
            source.get_xfer_descs([memory.descriptor()], "DRAM"),
            target.name,
            b"moved",
        )
        state, notified = source.transfer(handle), False

        def delivered() -> bool:
            nonlocal state, notified
            state = state if state == "DONE" else source.check_xfer_state(handle)
            notified = notified or bool(target.get_new_notifs().get(source.name))
            return state == "DONE" and notified

        try:
            wait_until(delivered, f"a WRITE from {source.name} to {target.name}", seconds=source.worker.timeout)
        except LateError as error:
            arrived = "arrived" if notified else "did not arrive"
            raise LateError(
                f"{error.reason}: the state of the transfer is {state}, and its notification {arrived}",
                "repeat it with NIXL_LOG_LEVEL=debug, and read what both agents write",
            ) from None
        wrong = memory.compare(seed)
        return wrong["wrong_bytes"] if wrong else 0
