# SPDX-License-Identifier: Apache-2.0
"""One command of a worker: what it takes and returns, and the forms of values that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pytest_nixl.core.strict import Every, Form, Number, OneOf, RefTo, Text
from pytest_nixl.core.wire import Ref

COUNT = Number(0, 1 << 64, whole=True)
PORT = Number(0, 65535, whole=True)
BYTE = Number(0, 255, whole=True)
#: Durations in seconds; a timed window takes more than zero.
SECONDS = Number(0, 1e9)
TAKEN = Number(1e-9, 1e9)
WORDS = Text(1 << 16)
NAME = Text(256)
COUNTS, LINES, REFS = Every(COUNT), Every(WORDS), Every(Ref, most=1 << 20)
#: References to the objects that several commands take.
AGENT, BUFFER, TRANSFERS = RefTo("agent"), RefTo("buffer"), RefTo("transfers")
#: Of each device: its name, its kind, the bytes that it carried, and those of whole packets.
CARRIERS = Every((NAME, Text(64), Number(0, 1 << 64), OneOf((None, Number(0, 1 << 64)))))
CORES = Number(0, 1e6)
#: Address, memory type and device.
SIDE = (COUNT, Text(64), COUNT)
#: Address, length and device.
DESCRIPTOR = (COUNT, COUNT, COUNT)


@dataclass(frozen=True)
class WorkerCommand:
    """What a command of a worker takes and returns.

    :param arguments: the form of its arguments by name.
    :param answer: the form of its answer.
    :param peers: whether rank 0 may send it to a worker of another rank.
    :param answered: whether a worker answers it.
    :param function: what runs it, as ``module:function``, with the worker's objects (:class:`WorkerObjects`) before the
        arguments; empty: the method ``do_COMMAND`` of the worker's ``Commands``.
    """

    arguments: Mapping[str, Form]
    answer: Form = None
    peers: bool = True
    answered: bool = True
    function: str = ""


def done_by(module: str, entries: Mapping[str, WorkerCommand]) -> dict[str, WorkerCommand]:
    """Return entries whose commands the functions of a module run that are named like them."""
    return {name: replace(entry, function=f"{module}:{name}") for name, entry in entries.items()}


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
