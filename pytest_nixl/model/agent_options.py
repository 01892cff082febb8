# SPDX-License-Identifier: Apache-2.0
"""How a run's agents are created: progress thread, worker threads, synchronization mode, parameters of backends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pytest_nixl.core.redaction import is_secret, redact
from pytest_nixl.model.row_key import Variant

#: The values of ``--nixl-progress-thread``, with what :class:`AgentOptions` has for them.
PROGRESS_THREAD: Mapping[str, bool | None] = {"auto": None, "off": False, "on": True}
#: NIXL's plugins to which an agent passes its number of worker threads, as the parameter :data:`THREADS_PARAMETER`.
THREADED = ("UCX", "LIBFABRIC")
THREADS_PARAMETER = "num_threads"
#: By plugin: the parameters that say where the objects are, and not how they are moved.
LOCATION: Mapping[str, tuple[str, ...]] = {
    "OBJ": ("bucket", "ca_bundle", "endpoint_override", "region", "scheme"),
    "AZURE_BLOB": ("ca_bundle", "container_name"),
}
#: Parameters with secrets, and the variable that is set instead.
_BY_VARIABLE = {
    ("AZURE_BLOB", "connection_string"): "AZURE_STORAGE_CONNECTION_STRING",
    ("AZURE_BLOB", "account_url"): "AZURE_STORAGE_ACCOUNT_URL",
    ("OBJ", "access_key"): "AWS_ACCESS_KEY_ID",
    ("OBJ", "secret_key"): "AWS_SECRET_ACCESS_KEY",
    ("OBJ", "session_token"): "AWS_SESSION_TOKEN",
}
#: The largest accepted number of worker threads. Each has a UCX worker or a queue of its own.
MOST_THREADS = 256


class BackendParameter(NamedTuple):
    """A parameter with which a backend is created, such as ``UCX:num_workers=4``."""

    backend: str
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.backend}:{self.name}={self.value}"


class ThreadCounts(NamedTuple):
    """The numbers of worker threads of the initiator's agent and of the target's agent."""

    initiator: int
    target: int

    def __str__(self) -> str:
        return str(self.initiator) if self.initiator == self.target else f"{self.initiator}:{self.target}"


def parse_progress_thread(text: str) -> tuple[str, ...]:
    """Parse the value of ``--nixl-progress-thread``. :raises ValueError: a value is unknown or named twice."""
    values = tuple(part.strip() for part in text.split(","))
    for value in values:
        if value not in PROGRESS_THREAD:
            raise ValueError(f"{value!r} is neither auto, off nor on")
        if values.count(value) > 1:
            raise ValueError(f"{value} is named twice")
    if len(values) > 1 and "auto" in values:
        raise ValueError(f"{text!r} has auto and another value")
    return values


def parse_threads(text: str) -> ThreadCounts | None:
    """Parse the value of ``--nixl-threads``. :raises ValueError: a number is not 1 to 256; one of a pair may be 0."""
    if text.strip() == "none":
        return None
    parts = [part.strip() for part in text.split(":")]
    least = 0 if len(parts) == 2 else 1
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,9}", part, re.ASCII) or not least <= int(part) <= MOST_THREADS:
            raise ValueError(f"{part[:40]!r} is not a number of threads from {least} to {MOST_THREADS}")
    counts = [int(part) for part in parts]
    if len(counts) > 2 or not any(counts):
        raise ValueError(f"{text[:40]!r} does not give threads to one side or both")
    return ThreadCounts(counts[0], counts[-1])


def parse_parameters(text: str) -> tuple[BackendParameter, ...]:
    """Parse the value of ``--nixl-backend-params``, and return it in order.

    :raises ValueError: a part has not the form BACKEND:NAME=VALUE, or a name or value that cannot be in a row key; or
        it is named twice.
    """
    parameters: list[BackendParameter] = []
    for part in (part.strip() for part in text.split(",")):
        backend, colon, setting = part.partition(":")
        name, equals, value = setting.partition("=")
        if not colon or "=" in backend or not backend:
            raise ValueError(f"{redact(part)[:80]!r} names no backend")
        if not equals or not value:
            raise ValueError(f"{redact(part)[:80]!r} has no value")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,60}", name, re.ASCII):
            raise ValueError(f"{name[:80]!r} is not the name of a parameter")
        if name == THREADS_PARAMETER:
            raise ValueError(f"{part[:80]!r} is set by another option: expected --nixl-threads=N")
        if variable := _BY_VARIABLE.get((backend.upper(), name)):
            raise ValueError(f"{name} may hold a secret, and parameters are recorded: set {variable} instead")
        if not re.fullmatch(r"[^/\s\x00-\x1f\x7f]{1,200}", value):
            raise ValueError(
                f"{redact(value)[:80]!r} has a space or a /, or over 200 characters, which a row key cannot hold"
            )
        if is_secret(name) or redact(value) != value:
            raise ValueError(
                f"{name} may hold a secret, and parameters are recorded: give it by the backend's own variable"
            )
        if any((parameter.backend, parameter.name) == (backend.upper(), name) for parameter in parameters):
            raise ValueError(f"{backend.upper()}:{name} is named twice")
        parameters.append(BackendParameter(backend.upper(), name, value))
    return tuple(sorted(parameters))


@dataclass(frozen=True)
class AgentOptions:
    """How an agent is created. The defaults are those of an agent without options.

    :param progress_thread: whether NIXL makes progress in a thread of its own; None: as the caller needs it.
    :param threads: the worker threads of backends that have them; None: none.
    :param sync_mode: a value of ``--nixl-sync-mode``. NIXL's own choice (auto) is strict with a listener or an etcd,
        and else none.
    :param parameters: the parameters of backends, in order.
    :param telemetry: whether the agent asks for the telemetry of its transfers.
    """

    progress_thread: bool | None = None
    threads: ThreadCounts | None = None
    sync_mode: str = "auto"
    parameters: tuple[BackendParameter, ...] = ()
    telemetry: bool = False

    def threads_of(self, role: str) -> int:
        """Return the number of worker threads of an agent; 0 for none.

        :param role: the role of its worker. Every agent that is no target has the initiator's number.
        """
        if self.threads is None:
            return 0
        return self.threads.target if role == "target" else self.threads.initiator

    def parameters_of(self, backend: str) -> dict[str, str]:
        """Return the parameters with which a backend is created."""
        return {parameter.name: parameter.value for parameter in self.parameters if parameter.backend == backend}

    def variant(self, backend: str, plugin: str) -> Variant:
        """Return what differs from the default in how the rows of a backend are measured, for their keys.

        :param plugin: NIXL's name of the plugin that the backend drives.
        """
        place = LOCATION.get(plugin, ())
        settings = {name: value for name, value in self.parameters_of(backend).items() if name not in place}
        if self.progress_thread:
            settings["progress-thread"] = "on"
        if self.threads is not None and plugin in THREADED:
            settings["threads"] = str(self.threads)
        if self.sync_mode not in ("auto", "none"):
            settings["sync-mode"] = self.sync_mode
        return tuple(sorted(settings.items()))

    def __str__(self) -> str:
        settings = {
            "progress-thread": "" if self.progress_thread is None else "on" if self.progress_thread else "off",
            "threads": str(self.threads or ""),
            "sync-mode": "" if self.sync_mode == "auto" else self.sync_mode,
            "telemetry": "on" if self.telemetry else "",
        }
        parts = [f"{name}={value}" for name, value in settings.items() if value]
        return ",".join((*parts, *map(str, self.parameters))) or "default"


#: How inference engines create their agents, by the value of ``--nixl-agent``, if UCX is their only backend.
#: docs/how-to/production-agents.md has the source of each value.
_ENGINES: Mapping[str, AgentOptions] = {
    "default": AgentOptions(),
    "vllm": AgentOptions(progress_thread=True, threads=ThreadCounts(4, 4), telemetry=True),
    "dynamo": AgentOptions(progress_thread=True),
    "sglang": AgentOptions(progress_thread=True, threads=ThreadCounts(8, 0), sync_mode="strict"),
}


def engine_agent(engine: str, backends: tuple[str, ...]) -> AgentOptions:
    """Return how an inference engine creates its agents.

    :param engine: a value of ``--nixl-agent``.
    :param backends: the requested backends. Worker threads are left out unless UCX is the only one.
    """
    agent = _ENGINES[engine]
    return agent if backends == ("UCX",) else replace(agent, threads=None)
