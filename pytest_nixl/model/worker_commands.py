# SPDX-License-Identifier: Apache-2.0
"""The one table of the commands of a worker: the worker's dispatch, the checks of arguments and answers, and what peers
may be asked for all read it. A command without an entry cannot be called.

A command is its function: the annotations are the forms of its arguments and of its answer. The modules that have
these functions import nothing that is large, because pytest imports them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import isfunction, signature
from typing import Annotated, Any, Protocol, TypeAlias, get_type_hints

from pytest_nixl.core.extensions import WORKER_COMMANDS as POINT
from pytest_nixl.core.extensions import Extension, Registry
from pytest_nixl.core.strict import Every, Form, Number, RefTo, Text, form_of
from pytest_nixl.core.wire import Ref

Count: TypeAlias = Annotated[int, Number(0, 1 << 64, whole=True)]
#: A number of transfers.
TransferCount: TypeAlias = Annotated[int, Number(1, 1 << 53, whole=True)]
Byte: TypeAlias = Annotated[int, Number(0, 255, whole=True)]
Port: TypeAlias = Annotated[int, Number(0, 65535, whole=True)]
#: An offset or a size that users give; the buffer says whether it is inside.
Place: TypeAlias = Annotated[int, Number(-(1 << 63), 1 << 64, whole=True)]
#: Durations in seconds; a timed window takes more than zero.
Seconds: TypeAlias = Annotated[float, Number(0, 1e9)]
WindowSeconds: TypeAlias = Annotated[float, Number(1e-9, 1e9)]
Cores: TypeAlias = Annotated[float, Number(0, 1e6)]
Line: TypeAlias = Annotated[str, Text(1 << 16)]
Name: TypeAlias = Annotated[str, Text(256)]
ShortName: TypeAlias = Annotated[str, Text(64)]
#: References to objects of the worker.
AgentRef: TypeAlias = Annotated[Ref, RefTo("agent")]
BufferRef: TypeAlias = Annotated[Ref, RefTo("buffer")]
TransfersRef: TypeAlias = Annotated[Ref, RefTo("transfers")]
Refs: TypeAlias = Annotated[list[Ref], Every(Ref, most=1 << 20)]
_CarriedBytes: TypeAlias = Annotated[float, Number(0, 1 << 64)]
#: Of each device: its name, its kind, the bytes that it carried, and those of whole packets.
Carriers: TypeAlias = list[tuple[Name, ShortName, _CarriedBytes, _CarriedBytes | None]]
#: Address, memory type and device.
Side: TypeAlias = tuple[Count, ShortName, Count]
#: NIXL's classes of descriptor lists.
DESCRIPTOR_LISTS = ("nixlXferDList", "nixlRegDList", "nixlRemoteDList")


@dataclass(frozen=True)
class WorkerCommand:
    """What a command of a worker takes and returns.

    :param arguments: the form of its arguments by name.
    :param answer: the form of its answer.
    :param peers: whether rank 0 may send it to a worker of another rank.
    :param answered: whether a worker answers it.
    :param function: what runs it, or its name as ``module:function``. It gets the worker's objects
        (:class:`WorkerObjects`) before the arguments.
    """

    arguments: Mapping[str, Form]
    answer: Form = None
    peers: bool = True
    answered: bool = True
    function: Callable[..., Any] | str = ""


class WorkerObjects(Protocol):
    """What a worker keeps between commands: agents, buffers, and what commands prepare."""

    def keep(self, value: Any, kind: str) -> Ref:
        """Keep an object, and return the reference by which later commands name it.

        :param kind: a noun for messages.
        """

    def get(self, ref: Ref) -> Any:
        """Return a kept object."""

    def cancelled(self) -> bool:
        """Return whether pytest has asked to end the running command."""


def command_of(function: Callable[..., Any], *, peers: bool = True) -> WorkerCommand:
    """Return the command that a function runs, from the annotations of what follows the worker's objects."""
    hints = get_type_hints(function, include_extras=True)
    _, *parameters = signature(function).parameters.values()
    arguments = {
        parameter.name + "?" * (parameter.default is not parameter.empty): form_of(hints.get(parameter.name, Any))
        for parameter in parameters
    }
    return WorkerCommand(arguments, form_of(hints.get("return", Any)), peers, function=function)


#: The modules of rooms whose workers have commands: each function there is one.
_ROOMS = tuple(f"pytest_nixl.checks.{room}.worker.commands" for room in ("faults", "kv_cache", "pattern"))
#: The methods ``do_COMMAND`` of a class are the kernel's commands.
_KERNEL = "pytest_nixl.nixl.worker.commands"
#: It calls any function, so that a peer must not be asked for it.
_NOT_OF_PEERS = ("run",)
_UNANSWERED = ("cancel", "exit")


def _load() -> Iterator[tuple[str, WorkerCommand]]:
    for name in _UNANSWERED:
        yield name, WorkerCommand({}, answered=False)
    for name, method in vars(import_module(_KERNEL).Commands).items():
        if name.startswith("do_"):
            command = name.removeprefix("do_")
            yield command, command_of(method, peers=command not in _NOT_OF_PEERS)
    for room in _ROOMS:
        for name, function in vars(import_module(room)).items():
            if isfunction(function) and function.__module__ == room and not name.startswith("_"):
                yield name, command_of(function)


def _accept(extension: Extension, loaded: Any) -> WorkerCommand:
    if isfunction(loaded):
        return command_of(loaded)
    if not isinstance(loaded, WorkerCommand) or not loaded.function:
        raise extension.fault("is not an annotated function, and not a WorkerCommand with a function")
    return loaded


#: The entries by the command's name. An entry point of another package is one of them.
WORKER_COMMANDS: Registry[WorkerCommand] = Registry(POINT, lambda: dict(_load()), _accept)
