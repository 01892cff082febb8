# SPDX-License-Identifier: Apache-2.0
"""NIXL's backends, found by name. Imports core and model: workers load it too."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pytest_nixl.core import extensions
from pytest_nixl.core.extensions import Extension, Registry
from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.model.nixl_releases import PACKAGES
from pytest_nixl.nixl.backends import driver_standin, libfabric, libraries, ucx
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS, ObjectBackend, PosixBackend

__all__ = ["BACKENDS", "UNSUPPORTED", "Backend", "between_agents", "plugin_of", "shake_hands", "with_driver_standin"]


class Backend(Protocol):
    """What pytest-nixl must know about a NIXL backend.

    The methods take ``log``, everything that the initiator's worker wrote to stdout and stderr.
    """

    NAME: str
    #: NIXL's name of the plugin that it drives; often the same.
    PLUGIN: str
    #: Whether it moves bytes between an agent's memory and the agent's own file, without a second agent.
    STORAGE: bool
    #: Whether DONE means that the bytes have arrived. If not, every transfer carries a notification.
    COMPLETION_IMPLIES_DELIVERY: bool
    #: Whether loading another agent's metadata waits until that agent also makes progress.
    SHAKES_HANDS: bool

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that a worker needs in addition to ``given``."""

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """Load the libraries that NIXL's plugin needs but does not contain, and return their versions to record.

        Called in a worker before NIXL's agent is created.

        :param nixl: NIXL's version (``nixl``) and package (``nixl_package``), from the worker's ``hello``.
        :raises NixlPluginError: a library is missing or unusable.
        """

    def creating(self) -> AbstractContextManager[None]:
        """Return a context manager for the worker, in which NIXL creates the backend."""

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return the transports that carried ``op``, such as ``cma/memory`` or ``tcp/eth0``; empty if unknown.

        :param op: ``WRITE`` or ``READ``.
        :param block: the size of one block in bytes.
        :param memory: the memory types of initiator and target.
        """

    def mistaken(self, log: str, op: str, memory: MemoryPair) -> str:
        """Return a sentence if the log shows that GPU memory was moved as host memory; otherwise an empty text."""


def _accept(extension: Extension, loaded: Any) -> Backend:
    """Return an extension's backend: a class with no parameters, or an instance."""
    backend = extension.call(loaded, "cannot be made") if isinstance(loaded, type) else loaded
    lacking = [name for name in dir(Backend) if not name.startswith("_") and not hasattr(backend, name)]
    lacking += [name for name in Backend.__annotations__ if not hasattr(backend, name)]
    if lacking:
        raise extension.fault(f"is no backend: it lacks {', '.join(lacking)}")
    if extension.name != backend.NAME:
        raise extension.fault(f"has another name in its code, NAME = {backend.NAME!r}")
    accepted: Backend = backend
    return accepted


_OWN: tuple[Backend, ...] = (ucx.BACKEND, libfabric.BACKEND, PosixBackend(), *map(ObjectBackend, OBJECT_PLUGINS))
#: By name: ours, and those that other distributions add.
BACKENDS: Registry[Backend] = Registry(
    extensions.BACKENDS,
    {each.NAME: each for each in _OWN},
    _accept,
)

#: NIXL's plugins that pytest-nixl cannot use, with the reason.
UNSUPPORTED = {
    "GDS": "it needs a GPU, the nvidia-fs driver and a file system with GPUDirect Storage",
    "GDS_MT": "it needs a GPU, the nvidia-fs driver and a file system with GPUDirect Storage",
    "GPUNETIO": "it needs a GPU and an adapter with DOCA GPUNetIO",
    "GUSLI": "it needs a GUSLI block server",
    "HF3FS": "it needs a 3FS cluster",
    "INFINIA": "it needs a DDN Infinia cluster",
    "UCCL": "it needs an RDMA device that UCCL drives, and its transfers hang (ai-dynamo/nixl#1999)",
    "MOONCAKE": "it needs the Mooncake transfer engine",
}


def between_agents(names: Sequence[str]) -> tuple[str, ...]:
    """Return the backends that move bytes from one agent to another.

    :raises KeyError: a backend is not supported.
    """
    return tuple(name for name in names if not BACKENDS[name].STORAGE)


def plugin_of(name: str) -> str:
    """Return NIXL's name of the plugin that a backend drives; a name that is no backend's stays."""
    return BACKENDS[name].PLUGIN if name in BACKENDS else name


def with_driver_standin(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the backends whose plugins need the CUDA driver and get a stand-in for it on this host.

    Nothing is loaded, so a plugin that no package of NIXL contains is not found.

    :param names: the requested backends.
    :param environ: the environment variables of the workers.
    """
    if driver_standin.refusal(environ) or environ.get(libraries.DRIVER.variable):
        return ()
    finder, missing = libraries.Finder(environ), []
    for name in names:
        plugin = libraries.find_plugin(environ, "", PACKAGES, f"libplugin_{plugin_of(name)}.so")
        libraries_needed = dict(libraries.needed(plugin)) if plugin else {}
        if libraries.DRIVER not in libraries_needed or finder.found(
            libraries.DRIVER, libraries_needed[libraries.DRIVER]
        ):
            continue
        if libraries.FABRIC not in libraries_needed or libfabric.is_released(finder, plugin):
            missing.append(name)
    return tuple(missing)


def shake_hands(names: Sequence[str]) -> bool:
    """Return whether agents with these backends wait for each other's progress while they load metadata."""
    return any(name in BACKENDS and BACKENDS[name].SHAKES_HANDS for name in names)
