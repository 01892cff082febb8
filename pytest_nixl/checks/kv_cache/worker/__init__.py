# SPDX-License-Identifier: Apache-2.0
"""The commands by which workers fill and compare KV caches, and make requests for their blocks."""

from __future__ import annotations

from pytest_nixl.core.strict import Every, Number, OneOf, RefTo, Text
from pytest_nixl.model.worker_command import (
    AGENT,
    BUFFER,
    BYTE,
    CARRIERS,
    CORES,
    COUNT,
    COUNTS,
    NAME,
    SECONDS,
    SIDE,
    TAKEN,
    WORDS,
    WorkerCommand,
    done_by,
)

_REQUESTS = RefTo("requests")
_LAYOUT = {
    **dict.fromkeys(("tensors", "blocks", "block_bytes", "per_layer", "ranges"), COUNT),
    "pieces": (COUNT, COUNT),
}
_DRAW = {"count": COUNT, "order": Text(64), "seed": COUNT, "sender": Number(0, 1, whole=True)}

COMMANDS = done_by(
    f"{__name__}.commands",
    {
        "kv_compare": WorkerCommand(
            {
                "buffer": BUFFER,
                "layout": _LAYOUT,
                "seed": COUNT,
                "initiator": bool,
                "draws": Every({**_DRAW, "range?": COUNT}),
            },
            OneOf(
                (
                    None,
                    {
                        **dict.fromkeys(("wrong_blocks", "wrong_bytes", "tensor", "block", "offset"), COUNT),
                        **dict.fromkeys(("source", "holds"), Number(-1, 1 << 31, whole=True)),
                        "unchanged": bool,
                        "expected": BYTE,
                        "found": BYTE,
                    },
                )
            ),
        ),
        "kv_fill": WorkerCommand({"buffer": BUFFER, "layout": _LAYOUT, "seed": COUNT, "inverted": bool}),
        "kv_prepare": WorkerCommand(
            {
                "agent": AGENT,
                "target": WORDS,
                "op": NAME,
                "plugin": NAME,
                "layout": _LAYOUT,
                "sides": (SIDE, SIDE),
                "method": NAME,
                "merge": bool,
                "storage": OneOf((None, BUFFER)),
            },
            {"requests": _REQUESTS, "seconds": SECONDS},
        ),
        "kv_release": WorkerCommand({"requests": _REQUESTS}),
        "kv_request": WorkerCommand(
            {
                "requests": _REQUESTS,
                "draws": Every(_DRAW),
                "timeout": SECONDS,
                "own": COUNTS,
                "op": NAME,
                "in_flight": COUNT,
                "interval": SECONDS,
            },
            {
                "times": Every(
                    {
                        "intended": SECONDS,
                        "start": SECONDS,
                        "steps": (SECONDS,) * 5,
                        "range": Number(0, 1 << 16, whole=True),
                    }
                ),
                "seconds": TAKEN,
                "counted": CARRIERS,
                "contention": CORES,
            },
        ),
    },
)
