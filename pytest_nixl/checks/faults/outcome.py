# SPDX-License-Identifier: Apache-2.0
"""What followed a fault of transfers in flight, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_nixl.model.verdicts import Judgement, Verdict

#: The number of transfers in flight.
REGIONS = 4
#: The faults of which NIXL must tell the initiator by an error.
MUST_REPORT = ("target-killed", "target-restarted", "listener-restarted")


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
