# SPDX-License-Identifier: Apache-2.0
"""What happens if several threads, agents or peers use NIXL at the same time: every byte and notification counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.strict import Every, Number, StrictError, Text, check
from pytest_nixl.model import nixl_releases
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.processes.worker_errors import WorkerDiedError, WorkerError
from pytest_nixl.processes.worker_process import Pending, results

_WORKER = "pytest_nixl.checks.faults.worker.threads:"
_COUNT = Number(0, 1 << 40, whole=True)
_ANSWER = {"moved": _COUNT, "wrong_bytes": _COUNT, "lost": _COUNT, "doubled": _COUNT, "errors": Every(Text(256))}
#: The threads of one agent, and the transfers of each.
THREADS, TRANSFERS = 4, 50
#: The agents that are created at once in each process, and the processes.
AGENTS, PROCESSES = 8, 4
#: The notifications of each peer.
NOTIFICATIONS = 250
#: The modes in which NIXL locks its own data, so that several threads may use one agent.
LOCKED = ("strict", "rw")
#: The deadlines of the threads and of their worker, as multiples of a step's: on a busy machine threads take turns.
_THREADS_SHARE, _WORKER_SHARE = 2, 3


@dataclass(frozen=True)
class ConcurrentUse:
    """What followed when NIXL was used at the same time.

    :param label: what was done, as a phrase.
    :param expected: how many transfers, agents or notifications there should be; ``moved``: how many there were.
    :param ended: how the process ended; empty if it lives.
    """

    label: str
    backend: str
    nixl: str
    expected: int
    moved: int = 0
    wrong_bytes: int = 0
    lost: int = 0
    doubled: int = 0
    errors: tuple[str, ...] = ()
    ended: str = ""

    @property
    def faults(self) -> list[str]:
        """What is wrong; empty: nothing."""
        if self.ended:
            return [f"the process {self.ended}"]
        counted = (
            (self.expected - self.moved, "missing"),
            (self.wrong_bytes, "bytes are wrong"),
            (self.lost, "notifications are lost"),
            (self.doubled, "notifications arrived twice"),
        )
        return [f"{count} {description}" for count, description in counted if count] + sorted(set(self.errors))

    def __str__(self) -> str:
        """Return it as a phrase."""
        return f"{self.label} ({self.backend} of NIXL {self.nixl})"


def has_modes(agent: NixlAgent) -> bool:
    """Return whether agents of this NIXL have a synchronization mode."""
    return nixl_releases.has_sync_modes(str(agent.worker.versions["nixl"]))


def transfer_in_threads(agent: NixlAgent, backend: str, mode: str) -> ConcurrentUse:
    """Let threads transfer on one new agent of a synchronization mode, in the worker of ``agent``."""
    subject = f"{THREADS} threads on one agent with the synchronization mode {mode}"
    parameters = {"sync_mode": mode, "threads": THREADS, "per_thread": TRANSFERS}
    pending = _request(agent, "transfer_at_once", backend=backend, **parameters)
    return _outcome(subject, agent, backend, THREADS * TRANSFERS, pending)


def create_in_threads(agents: Sequence[NixlAgent], backend: str) -> list[ConcurrentUse]:
    """Create agents at once in the workers of all ``agents``, which also begin at the same time."""
    subject = f"{AGENTS} agents created at once in each of {len(agents)} processes"
    started = [(agent, _request(agent, "create_at_once", backend=backend, count=AGENTS)) for agent in agents]
    return [_outcome(subject, agent, backend, AGENTS, pending) for agent, pending in started]


def notify_at_once(receiver: NixlAgent, senders: Sequence[NixlAgent], backend: str) -> ConcurrentUse:
    """Let agents in workers of their own notify one agent at the same time."""
    for sender in senders:
        with receiver.polled():
            sender.add_remote_agent(receiver.get_agent_metadata())
        with sender.polled():
            receiver.add_remote_agent(sender.get_agent_metadata())
    names = [sender.name for sender in senders]
    collecting = _request(receiver, "collect", senders=names, count=NOTIFICATIONS)
    sending = [_request(sender, "notify", peer=receiver.name, count=NOTIFICATIONS) for sender in senders]
    subject = f"notifications from {len(senders)} processes at once"
    outcome = _outcome(subject, receiver, backend, len(senders) * NOTIFICATIONS, collecting)
    if not outcome.faults:
        results(sending)
    return outcome


def judge_concurrent_use(outcomes: Sequence[ConcurrentUse]) -> Judgement:
    """Return the verdict: FAIL if a byte is wrong, something is missing or doubled, or a process ended."""
    if wrong := [f"{outcome}: {', '.join(outcome.faults)}" for outcome in outcomes if outcome.faults]:
        remedy = (
            "use each agent in one thread, and create agents one after the other; report this output at "
            "https://github.com/ai-dynamo/nixl/issues"
        )
        return Judgement(Verdict.FAIL, "; ".join(dict.fromkeys(wrong)), remedy)
    descriptions = dict.fromkeys(str(outcome) for outcome in outcomes)
    total = sum(outcome.moved for outcome in outcomes)
    return Judgement(Verdict.PASS, f"{'; '.join(descriptions)}: all {total} are there once, and every byte is correct")


def _request(agent: NixlAgent, function: str, **arguments: Any) -> Pending:
    parameters = {**arguments, "seconds": _THREADS_SHARE * agent.worker.timeout}
    seconds = _WORKER_SHARE * agent.worker.timeout
    return agent.worker.request(
        "run", seconds=seconds, agent=agent.ref, function=_WORKER + function, arguments=parameters
    )


def _outcome(label: str, agent: NixlAgent, backend: str, expected: int, pending: Pending) -> ConcurrentUse:
    """Wait for the answer of a worker.

    :raises WorkerError: it fails in another way than by its death.
    """
    nixl = str(agent.worker.versions.get("nixl", ""))
    try:
        answer = pending.result()
        check(_ANSWER, answer)
    except WorkerDiedError as error:
        return ConcurrentUse(label, backend, nixl, expected, ended=error.ending)
    except StrictError as error:
        raise WorkerError(f"{agent.worker.name} sent a wrong answer about {label}: {error}") from None
    return ConcurrentUse(label, backend, nixl, expected, **{**answer, "errors": tuple(answer["errors"])})
