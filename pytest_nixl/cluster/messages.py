# SPDX-License-Identifier: Apache-2.0
"""The messages of the ranks, and what each may hold: whatever else comes by the mailbox is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pytest_nixl.cluster.group import PID, SIZE
from pytest_nixl.core.strict import Every, Form, Number, OneOf, StrictError, Text, check

_NUMBER = Number(0, 1 << 53, whole=True)
_NAME = Text(64, "[a-z][a-z0-9_]*")
_LINE = Text(1 << 20)
_CODE = OneOf((None, Number(-128, 255, whole=True)))

#: The part of ``verdict.json`` that is the same for every rank; nothing of a run that did not start.
_TOLD = OneOf(
    (
        {},
        {
            "verdict": Text(16),
            "gate": bool,
            "warnings": _NUMBER,
            "interrupted": Text(),
            "checks": Every(_NUMBER, keys=True),
            "rows": _NUMBER,
            "failing": Every({name: Text() for name in ("check", "row", "verdict", "reason", "remedy")}, most=1024),
            "known_limits": Every(Text(256), most=1024),
            "failing_left_out": _NUMBER,
        },
    )
)
#: What rank 0 may ask a peer for, and with which arguments; of services that only a test brings nothing is known.
ASKS: Mapping[str, Form] = {
    "start": {"worker": _NUMBER, "role": _NAME, "environment": Every(OneOf((None, Text(1 << 15))), keys=True)},
    "kill": {"worker": _NUMBER},
    "state": {"worker": _NUMBER},
    "output": {"worker": _NUMBER},
    "signal": {"worker": _NUMBER, "signal": Number(1, 64, whole=True)},
    "end": {"code": Number(0, 255, whole=True), "verdict": Text(), "refusal": Text(), "told": _TOLD},
    "command": {},
    "address": {},
    "facts": {"peers": Every(Text(255))},
    "claim": {"group": Text(128), "size": SIZE, "seconds": Number(0, 86_400)},
    "last_words": {},
}
#: What a peer may answer.
ANSWERS: Mapping[str, Form] = {
    "start": PID,
    "kill": _CODE,
    "state": Text(255),
    "output": Text(),
    "signal": None,
    "end": None,
    "command": Text(),
    "address": Text(255, r"[0-9A-Za-z.:%_-]+"),
    "facts": Every(Any, keys=True),
    "claim": _NUMBER,
    "last_words": Every(Text(), keys=True),
}
_ASK = {"ask": _NAME, "number": _NUMBER, "*": Any}
_WORKER_LINE = {"worker": _NUMBER, "line": _LINE}
_ANSWER = {"answer": _NUMBER, "result": Any}
_REFUSAL = {"answer": _NUMBER, "error": Text(), "remedy?": Text()}
_ENDED = {"worker": _NUMBER, "ended": _CODE}


@dataclass(frozen=True)
class PeerRequest:
    """Rank 0 asks a peer for something."""

    what: str
    number: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerLine:
    """A line that is written to a worker, or by one."""

    worker: int
    line: str


@dataclass(frozen=True)
class PeerAnswer:
    """A peer's answer; with ``error`` it refuses."""

    number: int
    result: Any
    error: str | None = None
    remedy: str = ""


@dataclass(frozen=True)
class WorkerEnded:
    """A worker of a peer has ended; ``code`` is None where it is not known."""

    worker: int
    code: int | None


Message: TypeAlias = "PeerRequest | WorkerLine | PeerAnswer | WorkerEnded"


def read_message(plain: Any) -> Message:
    """Return the message that a JSON value is. :raises StrictError: where it is none."""
    if not isinstance(plain, dict):
        raise StrictError("it is no message: expected an object")
    if "ask" in plain:
        check(_ASK, plain)
        arguments = {name: value for name, value in plain.items() if name not in ("ask", "number")}
        return PeerRequest(plain["ask"], plain["number"], arguments)
    if "error" in plain:
        check(_REFUSAL, plain)
        return PeerAnswer(plain["answer"], None, plain["error"], plain.get("remedy", ""))
    if "answer" in plain:
        check(_ANSWER, plain)
        return PeerAnswer(plain["answer"], plain["result"])
    if "ended" in plain:
        check(_ENDED, plain)
        return WorkerEnded(plain["worker"], plain["ended"])
    check(_WORKER_LINE, plain)
    return WorkerLine(plain["worker"], plain["line"])


def check_ask(what: str, arguments: Mapping[str, Any]) -> None:
    """Compare the arguments of an ask with what they may be. :raises StrictError: where they are something else."""
    if what in ASKS:
        check(ASKS[what], dict(arguments))


def check_answer(what: str, result: Any) -> None:
    """Compare a peer's answer with what it may be. :raises StrictError: where it is something else."""
    if what in ANSWERS:
        check(ANSWERS[what], result)
