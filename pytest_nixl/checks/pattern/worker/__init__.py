# SPDX-License-Identifier: Apache-2.0
"""The commands by which workers move the flows of a traffic pattern."""

from __future__ import annotations

from pytest_nixl.core.strict import Every, Number, OneOf, RefTo
from pytest_nixl.model.worker_command import (
    AGENT,
    CORES,
    COUNT,
    COUNTS,
    DESCRIPTOR,
    LINES,
    NAME,
    SECONDS,
    TAKEN,
    WORDS,
    WorkerCommand,
    done_by,
)

_FLOWS = RefTo("flows")
_GATE = {"coordinator": WORDS, "members": LINES}

COMMANDS = done_by(
    f"{__name__}.commands",
    {
        "flows_prepare": WorkerCommand(
            {
                "agent": AGENT,
                "op": NAME,
                "plugin": NAME,
                "memory": (NAME, NAME),
                "flows": Every({"number": COUNT, "partner": WORDS, "slots": Every((DESCRIPTOR, DESCRIPTOR))}),
            },
            _FLOWS,
        ),
        "flows_release": WorkerCommand({"endpoint": _FLOWS}),
        "flows_report": WorkerCommand(
            {"endpoint": _FLOWS},
            Every(
                OneOf(
                    (
                        None,
                        {
                            "windows": Every((COUNT, Every(Number(1, 1 << 53, whole=True)), Every(TAKEN))),
                            "contention": CORES,
                        },
                    )
                )
            ),
        ),
        "flows_run": WorkerCommand(
            {
                "endpoint": _FLOWS,
                "run": COUNT,
                "everyone": _GATE,
                "own": COUNTS,
                "timeout": SECONDS,
                "steps": Every(
                    OneOf((None, {"group": _GATE, "flows": COUNTS, "durations": Every(SECONDS), "busy": COUNT}))
                ),
            }
        ),
    },
)
