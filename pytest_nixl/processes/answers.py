# SPDX-License-Identifier: Apache-2.0
"""The allowed form of a worker's answers. A worker may run on another rank, whose answers are not trusted."""

from __future__ import annotations

from typing import Any

from pytest_nixl.core.strict import Form, Number, OneOf, StrictError, Text, check
from pytest_nixl.model.worker_commands import WORKER_COMMANDS

_COUNT = Number(0, 1 << 64, whole=True)

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


def check_answer(command: str, result: Any) -> None:
    """Check a worker's answer.

    :param command: the command that was sent.
    :param result: the answer.
    :raises StrictError: the answer does not have the form for this command.
    """
    check(WORKER_COMMANDS[command].answer, result)
    if command == "measure" and not 0 < len(result["windows"]) == len(result["transfers"]):
        raise StrictError("it does not contain one number of transfers for each window")
