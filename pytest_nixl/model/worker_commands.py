# SPDX-License-Identifier: Apache-2.0
"""The one table of the commands of a worker: the worker's dispatch, the checks of its answers and what peers may be
asked for all read it. A command without an entry cannot be called.

Each room whose workers have commands has entries of its own, and so has each installed package that adds some.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pytest_nixl.core.extensions import WORKER_COMMANDS as POINT
from pytest_nixl.core.extensions import Extension, Registry
from pytest_nixl.core.strict import Every, Number, OneOf, RefTo, Text
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.worker_command import (
    AGENT,
    BUFFER,
    BYTE,
    CARRIERS,
    CORES,
    COUNT,
    COUNTS,
    LINES,
    NAME,
    PORT,
    REFS,
    SECONDS,
    SIDE,
    TAKEN,
    TRANSFERS,
    WORDS,
    WorkerCommand,
)

#: An offset or a size that users give; the buffer says whether it is inside.
_PLACE = Number(-(1 << 63), 1 << 64, whole=True)
#: Seed, offset and size in bytes.
_PARTS = Every((COUNT, _PLACE, _PLACE))
_PROGRAM = RefTo("program")
_CORRUPTION = {**dict.fromkeys(("wrong_bytes", "total_bytes", "offset"), COUNT), "expected": BYTE, "found": BYTE}
#: NIXL's classes of descriptor lists.
DESCRIPTOR_LISTS = ("nixlXferDList", "nixlRegDList", "nixlRemoteDList")
#: What :class:`pytest_nixl.nixl.worker.transfer.RowEnd` is made of.
_ROW_END = {"buffer": BUFFER, "size": COUNT, "seed": COUNT, "receives": bool, "new_patterns": bool}

KERNEL_COMMANDS: Mapping[str, WorkerCommand] = {
    "activate": WorkerCommand({"device": COUNT}),
    "add_agents": WorkerCommand({"agent": AGENT, "metadata": Every(bytes)}),
    "allocate": WorkerCommand(
        {
            "size": COUNT,
            "memory_type": NAME,
            "directory?": WORDS,
            "alignment?": COUNT,
            "device?": COUNT,
            "pages?": NAME,
        },
        {"buffer": BUFFER, "address": COUNT, "device": COUNT},
    ),
    # The methods of NIXL's own agent may take and return any JSON value.
    "call": WorkerCommand(
        {"agent": AGENT, "method": NAME, "arguments": Every(Any), "keywords": Every(Any, keys=True)}, Any
    ),
    "cancel": WorkerCommand({}, answered=False),
    "compare": WorkerCommand({"buffer": BUFFER, "parts": _PARTS}, Every(OneOf((None, _CORRUPTION)))),
    "connect": WorkerCommand({"agent": AGENT, "targets": LINES, "timeout": SECONDS}),
    "create_agent": WorkerCommand(
        {
            "name": WORDS,
            "backends": LINES,
            "progress_thread": bool,
            "listen_thread": bool,
            "listen_port": PORT,
            "telemetry": bool,
            "threads?": COUNT,
            "sync_mode?": NAME,
            "parameters?": Every(Every(WORDS, keys=True), keys=True),
        },
        {"agent": AGENT, "versions": Every(Text(1024), keys=True)},
    ),
    "descriptor_list": WorkerCommand({"descriptors": Ref, "method": NAME, "arguments": Every(Any)}, Any),
    "devices": WorkerCommand(
        {},
        {
            "devices": Every({"number": COUNT, "name": NAME, "uuid": NAME, "pci": NAME}, most=1024),
            "by": NAME,
            "why": WORDS,
            "remedy": WORDS,
        },
    ),
    "exit": WorkerCommand({}, answered=False),
    "fill": WorkerCommand({"buffer": BUFFER, "parts": _PARTS, "inverted": bool}),
    "forget": WorkerCommand({"objects": REFS}),
    "free_port": WorkerCommand({}, Number(1, 65535, whole=True)),
    "gpu_wait": WorkerCommand({"buffer": BUFFER}, SECONDS),
    "hello": WorkerCommand(
        {"path": LINES, "loads": bool},
        {"pid": COUNT, "python": Text(64), "host": Text(255), "*": OneOf((None, COUNT, bool, WORDS))},
    ),
    "loss_counters": WorkerCommand({}, Every((NAME, NAME, COUNT))),
    "measure": WorkerCommand(
        {
            "transfers": TRANSFERS,
            "timeout": SECONDS,
            "op": NAME,
            "own": COUNTS,
            "iterations": COUNT,
            "warmup": COUNT,
            "warmup_seconds": SECONDS,
            "duration": SECONDS,
            "end?": OneOf((None, _ROW_END)),
        },
        {
            "corruption": OneOf((None, _CORRUPTION)),
            "windows": Every(TAKEN),
            "transfers": Every(Number(1, 1 << 53, whole=True)),
            "latencies": Every(SECONDS),
            "counted": CARRIERS,
            "contention": CORES,
        },
    ),
    "move": WorkerCommand({"transfers": TRANSFERS, "timeout": SECONDS}),
    "move_each": WorkerCommand(
        {"transfers": TRANSFERS, "timeout": SECONDS, "count": COUNT, "end": _ROW_END},
        {"corrupt": COUNT, "first": OneOf((None, {"transfer": COUNT, **_CORRUPTION}))},
    ),
    "prepare_objects": WorkerCommand({"agent": AGENT, "buffer": BUFFER, "block": COUNT, "count": COUNT}),
    "probe_objects": WorkerCommand({"buffer": BUFFER}),
    "read": WorkerCommand({"buffer": BUFFER, "offset": _PLACE, "size": _PLACE}, bytes),
    "register": WorkerCommand({"agent": AGENT, "buffer": BUFFER}, Ref),
    "row_prepare": WorkerCommand(
        {
            "agent": AGENT,
            "op": NAME,
            "target": WORDS,
            "plugin": NAME,
            "sides": (SIDE, SIDE),
            "block": COUNT,
            "batch": COUNT,
            "count": COUNT,
            "depth": COUNT,
            **dict.fromkeys(("acknowledged", "notify_each", "announced"), bool),
            **dict.fromkeys(("storage", "objects"), OneOf((None, BUFFER))),
        },
        TRANSFERS,
    ),
    "row_release": WorkerCommand({"transfers": TRANSFERS}),
    # It calls any function, so that a peer must not be asked for it.
    "run": WorkerCommand(
        {"agent": AGENT, "function": WORDS, "arguments": Every(Any, keys=True), "file?": WORDS}, Any, peers=False
    ),
    "serve": WorkerCommand({"agent": AGENT, "timeout": SECONDS, "idle?": bool, "end?": OneOf((None, _ROW_END))}, COUNT),
    "tool_end": WorkerCommand({"program": _PROGRAM, "number": COUNT}),
    "tool_find": WorkerCommand({"tool": NAME}, OneOf((None, Every(WORDS, keys=True)))),
    "tool_listens": WorkerCommand({"program": _PROGRAM, "port": PORT}, bool),
    "tool_look": WorkerCommand(
        {"program": _PROGRAM, "seen": COUNT, "timeout": SECONDS},
        {
            "from": COUNT,
            "bytes": bytes,
            "more": bool,
            "cost": Every(SECONDS, keys=True),
            "code": OneOf((None, Number(-128, 255, whole=True))),
        },
    ),
    "tool_start": WorkerCommand(
        {"tool": NAME, "arguments": Every(Text()), "variables": Every(OneOf((None, Text())), keys=True)},
        {"program": _PROGRAM, "pid": COUNT},
    ),
    "write": WorkerCommand({"buffer": BUFFER, "offset": _PLACE, "data": bytes}),
}

#: The packages of rooms whose workers have commands: each has them in ``COMMANDS``.
_ROOMS = ("pytest_nixl.checks.faults.worker", "pytest_nixl.checks.kv_cache.worker", "pytest_nixl.checks.pattern.worker")


def _accept(extension: Extension, loaded: Any) -> WorkerCommand:
    if not isinstance(loaded, WorkerCommand) or ":" not in loaded.function:
        raise extension.fault("is not a WorkerCommand whose function is given as module:function")
    return loaded


#: The entries by the command's name. An entry point of another package is one of them.
WORKER_COMMANDS: Registry[WorkerCommand] = Registry(
    POINT,
    {**KERNEL_COMMANDS, **{name: entry for room in _ROOMS for name, entry in import_module(room).COMMANDS.items()}},
    _accept,
)
