# SPDX-License-Identifier: Apache-2.0
"""The allowed form of a worker's answers. A worker may run on another rank, whose answers are not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_nixl.core.strict import Every, Form, Number, OneOf, StrictError, Text, check
from pytest_nixl.core.wire import Ref

_COUNT = Number(0, 1 << 64, whole=True)
#: Durations in seconds; a timed window takes more than zero.
_SECONDS = Number(0, 1e9)
_TAKEN = Number(1e-9, 1e9)
_WORDS = Text(1 << 16)

#: One line: the answer to a request, or an error.
REPLY: Form = OneOf(
    (
        {"number": _COUNT, "result": Any},
        {
            "number": _COUNT,
            "error": {"kind": Text(64), "type": Text(1024), "message": Text(), "traceback": Text(), "remedy?": Text()},
        },
    )
)

#: The form of the answer by command. Other commands, such as NIXL's own methods, may return any JSON value.
ANSWERS: Mapping[str, Form] = {
    "hello": {"pid": _COUNT, "python": Text(64), "host": Text(255), "*": OneOf((None, _COUNT, bool, _WORDS))},
    "create_agent": {"agent": Ref, "versions": Every(Text(1024), keys=True)},
    "activate": None,
    "allocate": {"buffer": Ref, "address": _COUNT, "device": _COUNT},
    "compare": Every(
        OneOf(
            (
                None,
                {
                    "wrong_bytes": _COUNT,
                    "total_bytes": _COUNT,
                    "offset": _COUNT,
                    "expected": Number(0, 255, whole=True),
                    "found": Number(0, 255, whole=True),
                },
            )
        )
    ),
    "connect": None,
    "devices": {
        "devices": Every({"number": _COUNT, "name": Text(256), "uuid": Text(256), "pci": Text(256)}, most=1024),
        "by": Text(256),
        "why": _WORDS,
        "remedy": _WORDS,
    },
    "fill": None,
    "flows_prepare": Ref,
    "flows_release": None,
    "flows_report": Every(
        OneOf(
            (
                None,
                {
                    "windows": Every((_COUNT, Every(Number(1, 1 << 53, whole=True)), Every(_TAKEN))),
                    "others": Number(0, 1e6),
                },
            )
        )
    ),
    "flows_run": None,
    "prepare_objects": None,
    "probe_objects": None,
    "forget": None,
    "free_port": Number(1, 65535, whole=True),
    "kv_compare": OneOf(
        (
            None,
            {
                **dict.fromkeys(("wrong_blocks", "wrong_bytes", "tensor", "block", "offset"), _COUNT),
                **dict.fromkeys(("source", "holds"), Number(-1, 1 << 31, whole=True)),
                "unchanged": bool,
                "expected": Number(0, 255, whole=True),
                "found": Number(0, 255, whole=True),
            },
        )
    ),
    "kv_fill": None,
    "kv_prepare": {"requests": Ref, "seconds": _SECONDS},
    "kv_release": None,
    "kv_request": {
        "times": Every(
            {"intended": _SECONDS, "start": _SECONDS, "steps": (_SECONDS,) * 5, "range": Number(0, 1 << 16, whole=True)}
        ),
        "seconds": _TAKEN,
        "counted": Every((Text(256), Text(64), Number(0, 1 << 64), OneOf((None, Number(0, 1 << 64))))),
        "others": Number(0, 1e6),
    },
    "measure": {
        "windows": Every(_TAKEN),
        "transfers": Every(Number(1, 1 << 53, whole=True)),
        "latencies": Every(_SECONDS),
        "counted": Every((Text(256), Text(64), Number(0, 1 << 64), OneOf((None, Number(0, 1 << 64))))),
        "others": Number(0, 1e6),
    },
    "move": None,
    "read": bytes,
    "serve": _COUNT,
    "tool_end": None,
    "tool_find": OneOf((None, Every(_WORDS, keys=True))),
    "tool_listens": bool,
    "tool_look": {
        "from": _COUNT,
        "bytes": bytes,
        "more": bool,
        "code": OneOf((None, Number(-128, 255, whole=True))),
        "cost": Every(_SECONDS, keys=True),
    },
    "tool_start": {"program": Ref, "pid": _COUNT},
    "write": None,
}


def check_answer(command: str, result: Any) -> None:
    """Check a worker's answer.

    :param command: the command that was sent.
    :param result: the answer.
    :raises StrictError: the answer does not have the form for this command.
    """
    if command not in ANSWERS:
        return
    check(ANSWERS[command], result)
    if command == "measure" and not 0 < len(result["windows"]) == len(result["transfers"]):
        raise StrictError("it does not contain one number of transfers for each window")
