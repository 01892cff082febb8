# SPDX-License-Identifier: Apache-2.0
"""The one table of the commands of a worker: the worker's dispatch, the checks of its answers and what peers may be
asked for all read it. A command without a row here cannot be called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.strict import Every, Form, Number, OneOf, Text
from pytest_nixl.core.wire import Ref

_COUNT = Number(0, 1 << 64, whole=True)
_PORT = Number(0, 65535, whole=True)
_BYTE = Number(0, 255, whole=True)
#: Durations in seconds; a timed window takes more than zero.
_SECONDS = Number(0, 1e9)
_TAKEN = Number(1e-9, 1e9)
_WORDS = Text(1 << 16)
_NAME = Text(256)
_COUNTS, _LINES, _REFS = Every(_COUNT), Every(_WORDS), Every(Ref, most=1 << 20)
#: Of each device counter: its device, its name, and the values before and after.
_COUNTED = Every((_NAME, Text(64), Number(0, 1 << 64), OneOf((None, Number(0, 1 << 64)))))
_CORES = Number(0, 1e6)
#: An offset or a size that users give; the buffer says whether it is inside.
_PLACE = Number(-(1 << 63), 1 << 64, whole=True)
#: Seed, offset and size in bytes.
_PARTS = Every((_COUNT, _PLACE, _PLACE))
#: Address, memory type and device.
_SIDE = (_COUNT, Text(64), _COUNT)
#: Address, length and device.
_DESCRIPTOR = (_COUNT, _COUNT, _COUNT)
_GATE = {"coordinator": _WORDS, "members": _LINES}
_LAYOUT = {
    **dict.fromkeys(("tensors", "blocks", "block_bytes", "per_layer", "ranges"), _COUNT),
    "pieces": (_COUNT, _COUNT),
}
_DRAW = {"count": _COUNT, "order": Text(64), "seed": _COUNT}
_CORRUPTION = {**dict.fromkeys(("wrong_bytes", "total_bytes", "offset"), _COUNT), "expected": _BYTE, "found": _BYTE}
#: The transfers of a row and how the initiator runs them.
_TRANSFERS = {
    "agent": Ref,
    "target": _WORDS,
    "transfers": Ref,
    "patience": _SECONDS,
    "acknowledged": bool,
    "tag_each": bool,
    "announced": bool,
    "depth": _COUNT,
    **dict.fromkeys(("storage", "objects"), Ref | None),
}


@dataclass(frozen=True)
class WorkerCommand:
    """What a command of a worker takes and returns.

    :param arguments: the form of its arguments by name.
    :param answer: the form of its answer.
    :param peers: whether rank 0 may send it to a worker of another rank.
    :param answered: whether a worker answers it. The method ``do_COMMAND`` of the worker's ``Commands`` then runs it.
    """

    arguments: Mapping[str, Form]
    answer: Form = None
    peers: bool = True
    answered: bool = True


#: The methods of NIXL's agent that the command ``call`` accepts.
AGENT_METHODS = frozenset(
    {
        "add_remote_agent",
        "check_remote_metadata",
        "check_remote_xfer_done",
        "check_xfer_state",
        "create_backend",
        "deregister_memory",
        "deserialize_descs",
        "estimate_xfer_cost",
        "fetch_remote_metadata",
        "get_agent_metadata",
        "get_backend_mem_types",
        "get_backend_params",
        "get_new_notifs",
        "get_partial_agent_metadata",
        "get_plugin_list",
        "get_plugin_mem_types",
        "get_plugin_params",
        "get_reg_descs",
        "get_serialized_descs",
        "get_xfer_descs",
        "get_xfer_telemetry",
        "initialize_xfer",
        "invalidate_local_metadata",
        "make_connection",
        "make_prepped_xfer",
        "prep_xfer_dlist",
        "query_memory",
        "query_xfer_backend",
        "register_memory",
        "release_dlist_handle",
        "release_xfer_handle",
        "remove_remote_agent",
        "send_local_metadata",
        "send_notif",
        "send_partial_agent_metadata",
        "transfer",
        "update_notifs",
    }
)

WORKER_COMMANDS: Mapping[str, WorkerCommand] = {
    "activate": WorkerCommand({"device": _COUNT}),
    "add_agents": WorkerCommand({"agent": Ref, "metadata": Every(bytes)}),
    "allocate": WorkerCommand(
        {"size": _COUNT, "memory_type": _NAME, "directory?": _WORDS, "alignment?": _COUNT, "device?": _COUNT},
        {"buffer": Ref, "address": _COUNT, "device": _COUNT},
    ),
    # The methods of NIXL's own agent may take and return any JSON value.
    "call": WorkerCommand(
        {"agent": Ref, "method": _NAME, "arguments": Every(Any), "keywords": Every(Any, keys=True)}, Any
    ),
    "cancel": WorkerCommand({}, answered=False),
    "compare": WorkerCommand({"buffer": Ref, "parts": _PARTS}, Every(OneOf((None, _CORRUPTION)))),
    "connect": WorkerCommand({"agent": Ref, "targets": _LINES, "patience": _SECONDS}),
    "create_agent": WorkerCommand(
        {
            "name": _WORDS,
            "backends": _LINES,
            "progress_thread": bool,
            "listen_thread": bool,
            "listen_port": _PORT,
            "telemetry": bool,
            "threads?": _COUNT,
            "sync_mode?": _NAME,
            "parameters?": Every(Every(_WORDS, keys=True), keys=True),
        },
        {"agent": Ref, "versions": Every(Text(1024), keys=True)},
    ),
    "devices": WorkerCommand(
        {},
        {
            "devices": Every({"number": _COUNT, "name": _NAME, "uuid": _NAME, "pci": _NAME}, most=1024),
            "by": _NAME,
            "why": _WORDS,
            "remedy": _WORDS,
        },
    ),
    "exit": WorkerCommand({}, answered=False),
    "fill": WorkerCommand({"buffer": Ref, "parts": _PARTS, "inverted": bool}),
    "flows_prepare": WorkerCommand(
        {
            "agent": Ref,
            "op": _NAME,
            "plugin": _NAME,
            "memory": (_NAME, _NAME),
            "flows": Every({"number": _COUNT, "partner": _WORDS, "slots": Every((_DESCRIPTOR, _DESCRIPTOR))}),
        },
        Ref,
    ),
    "flows_release": WorkerCommand({"endpoint": Ref}),
    "flows_report": WorkerCommand(
        {"endpoint": Ref},
        Every(
            OneOf(
                (
                    None,
                    {
                        "windows": Every((_COUNT, Every(Number(1, 1 << 53, whole=True)), Every(_TAKEN))),
                        "others": _CORES,
                    },
                )
            )
        ),
    ),
    "flows_run": WorkerCommand(
        {
            "endpoint": Ref,
            "run": _COUNT,
            "everyone": _GATE,
            "own": _COUNTS,
            "patience": _SECONDS,
            "steps": Every(
                OneOf((None, {"group": _GATE, "flows": _COUNTS, "durations": Every(_SECONDS), "busy": _COUNT}))
            ),
        }
    ),
    "forget": WorkerCommand({"objects": _REFS}),
    "free_port": WorkerCommand({}, Number(1, 65535, whole=True)),
    "hello": WorkerCommand(
        {"path": _LINES, "loads?": bool},
        {"pid": _COUNT, "python": Text(64), "host": Text(255), "*": OneOf((None, _COUNT, bool, _WORDS))},
    ),
    "kv_compare": WorkerCommand(
        {
            "buffer": Ref,
            "layout": _LAYOUT,
            "seed": _COUNT,
            "initiator": bool,
            "draws": Every({**_DRAW, "range?": _COUNT}),
        },
        OneOf(
            (
                None,
                {
                    **dict.fromkeys(("wrong_blocks", "wrong_bytes", "tensor", "block", "offset"), _COUNT),
                    **dict.fromkeys(("source", "holds"), Number(-1, 1 << 31, whole=True)),
                    "unchanged": bool,
                    "expected": _BYTE,
                    "found": _BYTE,
                },
            )
        ),
    ),
    "kv_fill": WorkerCommand({"buffer": Ref, "layout": _LAYOUT, "seed": _COUNT, "inverted": bool}),
    "kv_prepare": WorkerCommand(
        {
            "agent": Ref,
            "target": _WORDS,
            "op": _NAME,
            "plugin": _NAME,
            "layout": _LAYOUT,
            "sides": (_SIDE, _SIDE),
            "method": _NAME,
            "merge": bool,
        },
        {"requests": Ref, "seconds": _SECONDS},
    ),
    "kv_release": WorkerCommand({"requests": Ref}),
    "kv_request": WorkerCommand(
        {
            "requests": Ref,
            "draws": Every(_DRAW),
            "timeout": _SECONDS,
            "own": _COUNTS,
            "op": _NAME,
            "in_flight": _COUNT,
            "interval": _SECONDS,
        },
        {
            "times": Every(
                {
                    "intended": _SECONDS,
                    "start": _SECONDS,
                    "steps": (_SECONDS,) * 5,
                    "range": Number(0, 1 << 16, whole=True),
                }
            ),
            "seconds": _TAKEN,
            "counted": _COUNTED,
            "others": _CORES,
        },
    ),
    "measure": WorkerCommand(
        {
            **_TRANSFERS,
            "op": _NAME,
            "own": _COUNTS,
            "iterations": _COUNT,
            "warmup": _COUNT,
            "settle": _SECONDS,
            "duration": _SECONDS,
        },
        {
            "windows": Every(_TAKEN),
            "transfers": Every(Number(1, 1 << 53, whole=True)),
            "latencies": Every(_SECONDS),
            "counted": _COUNTED,
            "others": _CORES,
        },
    ),
    "move": WorkerCommand(_TRANSFERS),
    "prepare_objects": WorkerCommand({"agent": Ref, "buffer": Ref, "block": _COUNT, "count": _COUNT}),
    "probe_objects": WorkerCommand({"buffer": Ref}),
    "read": WorkerCommand({"buffer": Ref, "offset": _PLACE, "size": _PLACE}, bytes),
    "register": WorkerCommand({"agent": Ref, "buffer": Ref}, Ref),
    "row_prepare": WorkerCommand(
        {
            "agent": Ref,
            "op": _NAME,
            "target": _WORDS,
            "plugin": _NAME,
            "sides": (_SIDE, _SIDE),
            "block": _COUNT,
            "batch": _COUNT,
            "transfers": _COUNT,
            "notification": bytes,
            "tag_all": bool,
        },
        Ref,
    ),
    "row_release": WorkerCommand({"transfers": Ref}),
    # It calls any function, so that a peer must not be asked for it.
    "run": WorkerCommand({"agent": Ref, "function": _WORDS, "arguments": Every(Any, keys=True)}, Any, peers=False),
    "serve": WorkerCommand({"agent": Ref, "patience": _SECONDS, "idle?": bool}, _COUNT),
    "tool_end": WorkerCommand({"program": Ref, "number": _COUNT}),
    "tool_find": WorkerCommand({"tool": _NAME}, OneOf((None, Every(_WORDS, keys=True)))),
    "tool_listens": WorkerCommand({"program": Ref, "port": _PORT}, bool),
    "tool_look": WorkerCommand(
        {"program": Ref, "seen": _COUNT, "patience": _SECONDS},
        {
            "from": _COUNT,
            "bytes": bytes,
            "more": bool,
            "cost": Every(_SECONDS, keys=True),
            "code": OneOf((None, Number(-128, 255, whole=True))),
        },
    ),
    "tool_start": WorkerCommand(
        {"tool": _NAME, "arguments": Every(Text()), "variables": Every(OneOf((None, Text())), keys=True)},
        {"program": Ref, "pid": _COUNT},
    ),
    "write": WorkerCommand({"buffer": Ref, "offset": _PLACE, "data": bytes}),
}
