# SPDX-License-Identifier: Apache-2.0
"""The ways in which a worker fails."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.wire import Ref

#: The remedy if a worker on another rank gives an answer that this version does not expect.
SAME_VERSION = "install the same pytest-nixl on every rank"


class WorkerError(NixlPluginError):
    """A worker died, hung, or could not run a command."""

    @property
    def ending(self) -> str:
        """How the worker ended, without its name and its step; the whole reason if that is not known."""
        return self.reason.partition(") ")[2].partition(" during ")[0] or self.reason


class WorkerDiedError(WorkerError):
    """The worker's process ended, but pytest had not ended it."""


class NixlAbsentError(WorkerError):
    """NIXL cannot be loaded in a worker; nor can it in the next one of that rank."""


class WorkerHungError(WorkerError):
    """The worker missed its deadline, and pytest ended it."""

    late = True


class WorkerLateError(WorkerError):
    """The worker stopped a step at its deadline, and still runs."""

    late = True


class NixlError(WorkerError):
    """NIXL reported an error.

    :param type_name: NIXL's error class, such as ``nixlNotFoundError``.
    """

    def __init__(self, reason: str, remedy: str, detail: str, type_name: str) -> None:
        super().__init__(reason, remedy, detail)
        self.type_name = type_name


def how_it_ended(code: int) -> str:
    """Describe the end of a process, by its exit code (negative for a signal)."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


#: The method of NIXL's agent that a command calls.
_METHODS = {"add_agents": "add_remote_agent", "register": "register_memory", "row_prepare": "initialize_xfer"}


def step_words(command: str, arguments: Mapping[str, Any], agents: Mapping[int, str]) -> str:
    """Describe a worker's step: a call of NIXL by its method and its agent, such as ``'transfer' of agent 'a'``.

    :param agents: the names of the worker's agents, by the numbers of their references.
    """
    agent = arguments.get("agent")
    method = arguments.get("method") if command == "call" else _METHODS.get(command)
    name = agents.get(agent.number) if isinstance(agent, Ref) else None
    return f"{method!r} of agent {name!r}" if method and name else repr(method or command)
