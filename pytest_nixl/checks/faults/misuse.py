# SPDX-License-Identifier: Apache-2.0
"""What NIXL does if a program misuses its interface: it refuses, accepts or crashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pytest_nixl.core.strict import Number, StrictError, Text, check
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.processes.worker_errors import WorkerDiedError, WorkerError
from pytest_nixl.processes.worker_process import Pending

_REPORT = "report it with this output at https://github.com/ai-dynamo/nixl/issues, and remove from your program: {}"
_ANSWER = {"raised": Text(256), "after": Text(256), "wrong_bytes": Number(0, 1 << 40, whole=True)}
#: The state of a transfer that missed its deadline.
NEVER_DONE = "PROC"
#: The deadline of one transfer, as a share of the deadline of the whole misuse.
_SHARE = 3


class MisuseEnding(str, Enum):
    """How NIXL answered a misuse."""

    REFUSED = "refused"
    ACCEPTED = "accepted"
    CRASHED = "crashed"


@dataclass(frozen=True)
class MisuseKind:
    """A call that a correct program does not make.

    :param id: the name of its function in the worker.
    :param label: what the program does, as a phrase.
    :param finding: the id of the finding that says what NIXL does; empty: none does.
    :param must_refuse: whether only an error is a right answer, because bytes outside of what was registered would be
        read or written.
    """

    id: str
    label: str
    finding: str = ""
    must_refuse: bool = False


@dataclass(frozen=True)
class MisuseOutcome:
    """What NIXL did.

    :param error: NIXL's error class, or how the process ended; empty if the call was accepted.
    :param wrong_bytes: of a transfer after the misuse; 0 also if NIXL refused it; None if the process has ended.
    :param after: the class of the error with which NIXL refused that transfer, or ``PROC`` if it was never done; empty
        if it was done.
    :param nixl: the release.
    """

    kind: MisuseKind
    backend: str
    nixl: str
    ending: MisuseEnding
    error: str = ""
    wrong_bytes: int | None = None
    after: str = ""

    def __str__(self) -> str:
        """Return it as part of a sentence."""
        detail = f" ({self.error})" if self.error else ""
        return f"{self.kind.label}: {self.ending.value}{detail}"

    @property
    def next_transfer(self) -> str:
        """What became of the transfer after the misuse, as the rest of a sentence; empty: the process has ended."""
        if self.after == NEVER_DONE:
            return f"; after that, a transfer to the peer stays {NEVER_DONE}"
        if self.after:
            return f"; after that, NIXL refuses a transfer to the peer ({self.after})"
        return "" if self.wrong_bytes is None else f", and the next transfer has {self.wrong_bytes} wrong bytes"

    @property
    def fault(self) -> str:
        """What is wrong with this outcome; empty: nothing."""
        if self.ending is MisuseEnding.CRASHED:
            return str(self)
        if self.ending is MisuseEnding.ACCEPTED and self.kind.must_refuse:
            return f"{self.kind.label}: accepted, but only an error is right"
        if self.after:
            return f"{self}{self.next_transfer}"
        if self.wrong_bytes:
            return f"{self}; {self.wrong_bytes} bytes of the next transfer are wrong"
        return ""


#: The misuses that NIXL survives in every release that was tried.
SURVIVED = (
    MisuseKind("registered-twice", "a region is registered twice, and deregistered twice"),
    MisuseKind("deregistered-twice", "a region is deregistered again"),
    MisuseKind("empty-region", "a region of 0 bytes is registered"),
    MisuseKind("overlapping-regions", "two regions overlap, and the first one is deregistered"),
    MisuseKind("beyond-own-region", "a transfer begins beyond its own registered region", must_refuse=True),
    MisuseKind("beyond-peers-region", "a transfer ends beyond the peer's registered region", must_refuse=True),
    MisuseKind("different-lengths", "the two sides of a transfer have different lengths", must_refuse=True),
    MisuseKind("empty-transfer", "a transfer has 0 bytes"),
    MisuseKind("overlapping-transfer", "the descriptors of a transfer overlap"),
    MisuseKind("unknown-agent", "a transfer is prepared to an unknown agent", must_refuse=True),
    MisuseKind("notification-to-unknown-agent", "a notification is sent to an unknown agent", must_refuse=True),
    MisuseKind("index-out-of-range", "a prepared descriptor has an index out of range", must_refuse=True),
    MisuseKind("posted-twice", "a transfer is posted while it is in flight"),
    MisuseKind("released-twice", "a transfer's handle is released twice"),
    MisuseKind("handles-kept", "10,000 transfer handles are not released"),
)
#: The misuses that crash or spoil some backend of some release, each with a finding of its own.
DEFECTIVE = (
    MisuseKind(
        "duplicate-descriptor", "deregister_memory gets a list that names a region twice", "NIXL-DUPLICATE-DESCRIPTOR"
    ),
    MisuseKind("released-handle", "a transfer's handle is posted after it was released", "NIXL-RELEASED-HANDLE"),
    MisuseKind(
        "released-in-flight", "a transfer's handle is released while it is in flight", "LIBFABRIC-RELEASE-STALLS"
    ),
    MisuseKind(
        "deregistered-source", "a transfer is posted after its own region was deregistered", "NIXL-DEREGISTERED-SOURCE"
    ),
    MisuseKind(
        "cut-metadata", "the last byte of another agent's metadata is missing", "NIXL-CUT-METADATA", must_refuse=True
    ),
)
KINDS = {kind.id: kind for kind in (*SURVIVED, *DEFECTIVE)}


def start_misuse(agent: NixlAgent, kind: MisuseKind, backend: str) -> Pending:
    """Start a misuse in the worker of ``agent``, which may crash, without waiting for its end."""
    return agent.worker.request(
        "run",
        agent=agent.ref,
        function="pytest_nixl.checks.faults.worker.misuse:carry_out",
        arguments={"misuse": kind.id, "backend": backend, "seconds": agent.worker.timeout / _SHARE},
    )


def misuse_outcome(agent: NixlAgent, kind: MisuseKind, backend: str, pending: Pending) -> MisuseOutcome:
    """Wait for the end of a misuse, and return what NIXL did.

    :param pending: what :func:`start_misuse` returned.
    :raises WorkerError: it failed in another way: while it was prepared, or it missed its deadline.
    """
    nixl = str(agent.worker.versions.get("nixl", ""))
    try:
        answer = pending.result()
        check(_ANSWER, answer)
    except WorkerDiedError as error:
        return MisuseOutcome(kind, backend, nixl, MisuseEnding.CRASHED, error.ending)
    except StrictError as error:
        raise WorkerError(f"{agent.worker.name} sent a wrong answer to {kind.id}: {error}") from None
    raised = answer["raised"]
    ending = MisuseEnding.REFUSED if raised else MisuseEnding.ACCEPTED
    return MisuseOutcome(kind, backend, nixl, ending, raised, answer["wrong_bytes"], answer["after"])


def misuse(agent: NixlAgent, kind: MisuseKind, backend: str) -> MisuseOutcome:
    """Carry out a misuse in the worker of ``agent``, which may crash, and return what NIXL did.

    :raises WorkerError: it failed in another way, for example while it was prepared.
    """
    return misuse_outcome(agent, kind, backend, start_misuse(agent, kind, backend))


def judge_misuses(outcomes: Sequence[MisuseOutcome]) -> Judgement:
    """Return the verdict on misuses that NIXL should survive."""
    if faults := [outcome for outcome in outcomes if outcome.fault]:
        reason = f"NIXL {faults[0].nixl} with {faults[0].backend}: " + "; ".join(fault.fault for fault in faults)
        return Judgement(Verdict.FAIL, reason, _REPORT.format(", ".join(fault.kind.label for fault in faults)))
    first = outcomes[0]
    parts = []
    for ending in (MisuseEnding.REFUSED, MisuseEnding.ACCEPTED):
        if named := [outcome.kind.id for outcome in outcomes if outcome.ending is ending]:
            parts.append(f"{ending.value}: {', '.join(named)}")
    description = "; ".join(parts)
    return Judgement(
        Verdict.PASS, f"NIXL {first.nixl} with {first.backend} moves correct bytes after each: {description}"
    )


def misuse_reason(outcome: MisuseOutcome) -> str:
    """Return what NIXL did, as the reason of a finding's verdict."""
    return f"with {outcome.backend} of NIXL {outcome.nixl}, {outcome}{outcome.next_transfer}"
