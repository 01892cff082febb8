# SPDX-License-Identifier: Apache-2.0
"""The messages between ranks, and the valid values of each of their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pytest_nixl.cluster.group import PID, SIZE
from pytest_nixl.core.strict import Every, Form, Number, OneOf, StrictError, Text, check
from pytest_nixl.model.conclusion import MOST_FIGURES

_NUMBER = Number(0, 1 << 53, whole=True)
_NAME = Text(64, "[a-z][a-z0-9_]*")
_LINE = Text(1 << 20)
_CODE = OneOf((None, Number(-128, 255, whole=True)))

_VALUE = Number(-1e300, 1e300)
_FIGURE = {
    "check": Text(256),
    "name": Text(256),
    "labels": Every(Text(256), keys=True),
    "value": _VALUE,
    "unit": Text(64),
    "at_most": OneOf((None, _VALUE)),
    "at_least": OneOf((None, _VALUE)),
    "verdict": Text(16),
}

#: The part of ``verdict.json`` that is the same for every rank; empty if the run did not start.
_CONCLUSION = OneOf(
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
            "figures": Every(_FIGURE, most=MOST_FIGURES),
        },
    )
)
#: The arguments and the answer of each request of rank 0 to a peer. Tests may add requests that are not listed here.
REQUESTS: Mapping[str, tuple[Form, Form]] = {
    "start": ({"worker": _NUMBER, "role": _NAME, "environment": Every(OneOf((None, Text(1 << 15))), keys=True)}, PID),
    "kill": ({"worker": _NUMBER}, _CODE),
    "state": ({"worker": _NUMBER}, Text(255)),
    "output": ({"worker": _NUMBER}, Text()),
    "signal": ({"worker": _NUMBER, "signal": Number(1, 64, whole=True)}, None),
    "end": (
        {"code": Number(0, 255, whole=True), "verdict": Text(), "refusal": Text(), "verdict_fields": _CONCLUSION},
        None,
    ),
    "command": ({}, Text()),
    "address": ({}, Text(255, r"[0-9A-Za-z.:%_-]+")),
    "facts": ({"peers": Every(Text(255))}, Every(Any, keys=True)),
    "devices": ({}, Every(Any, keys=True)),
    "claim": ({"group": Text(128), "size": SIZE, "seconds": Number(0, 86_400)}, _NUMBER),
    "last_words": ({}, Every(Text(), keys=True)),
}


@dataclass(frozen=True)
class PeerRequest:
    """A request of rank 0 to a peer.

    :param request: the name of the request.
    :param number: identifies the request; the answer repeats it.
    :param arguments: JSON values by name.
    """

    request: str
    number: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerLine:
    """A line that is written to a worker, or by one."""

    worker: int
    line: str


@dataclass(frozen=True)
class PeerAnswer:
    """The answer of a peer to one request.

    :param number: the number of the request.
    :param result: a JSON value.
    :param error: why the peer refuses or failed; None if it did neither.
    :param remedy: what to do about the error.
    """

    number: int
    result: Any
    error: str | None = None
    remedy: str = ""


@dataclass(frozen=True)
class WorkerEnded:
    """The news that a worker of a peer has ended.

    :param worker: the number of the worker.
    :param code: its exit code, negative for a signal; None if it is not known.
    """

    worker: int
    code: int | None


@dataclass(frozen=True)
class PeerLeft:
    """The news that a peer leaves before the run is over.

    :param reason: what ended it, such as ``Ctrl-C (SIGINT)``.
    """

    reason: str


Message: TypeAlias = "PeerRequest | WorkerLine | PeerAnswer | WorkerEnded | PeerLeft"
#: The form of each message, and what it is, by the field that tells it from the others.
_MESSAGES: Mapping[str, tuple[Form, Callable[..., Message]]] = {
    "ask": (
        {"ask": _NAME, "number": _NUMBER, "*": Any},
        lambda ask, number, **arguments: PeerRequest(ask, number, arguments),
    ),
    "error": (
        {"answer": _NUMBER, "error": Text(), "remedy?": Text()},
        lambda answer, error, remedy="": PeerAnswer(answer, None, error, remedy),
    ),
    "answer": ({"answer": _NUMBER, "result": Any}, lambda answer, result: PeerAnswer(answer, result)),
    "ended": ({"worker": _NUMBER, "ended": _CODE}, lambda worker, ended: WorkerEnded(worker, ended)),
    "left": ({"left": Text(256)}, lambda left: PeerLeft(left)),
    "line": ({"worker": _NUMBER, "line": _LINE}, WorkerLine),
}


def read_message(plain: Any) -> Message:
    """Return the message in a JSON value.

    :raises StrictError: if the value is not a message.
    """
    if not isinstance(plain, dict):
        raise StrictError("it is not a message: expected a JSON object")
    form, make = next((_MESSAGES[name] for name in _MESSAGES if name in plain), _MESSAGES["line"])
    check(form, plain)
    return make(**plain)


def check_ask(request: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a request.

    :param request: the name of the request; unknown names are not checked.
    :raises StrictError: if an argument is missing, unknown or has a wrong value.
    """
    if request in REQUESTS:
        check(REQUESTS[request][0], dict(arguments))


def check_answer(request: str, result: Any) -> None:
    """Check the answer of a peer to a request.

    :param request: the name of the request; unknown names are not checked.
    :raises StrictError: if the answer has a wrong form.
    """
    if request in REQUESTS:
        check(REQUESTS[request][1], result)
