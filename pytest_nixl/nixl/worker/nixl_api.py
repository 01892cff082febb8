# SPDX-License-Identifier: Apache-2.0
"""In a worker: NIXL's Python interface, as this release has it: :mod:`pytest_nixl.model.nixl_releases` knows what differs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model import nixl_releases

#: The methods that make a descriptor list, and the class of what they return.
LISTS = {"get_reg_descs": "nixlRegDList", "get_xfer_descs": "nixlXferDList"}


class NixlImportError(ImportError):
    """NIXL itself cannot be imported; what a user's own function cannot import is another error."""


def load() -> dict[str, str]:
    """Load NIXL, and return its version, the package that it is of, and its file.

    :raises NixlPluginError: where it is a release that wants torch, and there is none.
    :raises NixlImportError: where it cannot be imported for any other reason.
    """
    try:
        module = importlib.import_module("nixl._api")
    except ImportError as error:
        package, version = installed()
        # By itself it says that there is no NIXL for this CUDA: its package hides what that one lacks.
        if nixl_releases.imports_torch(version) and importlib.util.find_spec("torch") is None:
            raise NixlPluginError(
                f"NIXL cannot be loaded: {package} {version} imports torch, as every release before 1.4 does, and "
                "there is none",
                "install the torch that NIXL is used with (on a machine without a GPU its CPU build will do), or NIXL "
                "1.4 or newer",
            ) from error
        raise NixlImportError(str(error)) from error
    package, version = installed()
    return {"nixl": version, "nixl_package": package, "nixl_module": str(module.__file__)}


def installed() -> tuple[str, str]:
    """Return the package that carries the NIXL that is loaded, and its version.

    Where none is loaded, or no package owns it, as with an image's own build: the first one that is installed.
    """
    module = sys.modules.get("nixl._api")
    if module is not None and (owner := _owner(str(module.__file__))):
        return owner
    for name in nixl_releases.PACKAGES:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "nixl", "of no package"


@functools.cache
def _owner(file: str) -> tuple[str, str] | None:
    """Return name and version of the package that installed a file; None where it is none that carries NIXL."""
    for name in nixl_releases.PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.distribution(name)
            if any(os.path.samefile(path, file) for path in _files(found, os.path.basename(file))):
                return name, found.version
    return None


def _files(package: importlib.metadata.Distribution, name: str) -> Iterator[str]:
    """Yield the files of a package that have a name, and are there."""
    for each in package.files or ():
        if each.name == name and os.path.exists(path := os.fspath(each.locate())):
            yield path


def make_agent(
    name: str,
    *,
    progress_thread: bool = False,
    listen_thread: bool = False,
    listen_port: int = 0,
    telemetry: bool = False,
) -> Any:
    """Make an agent without a backend.

    :param listen_port: 0: a free one.
    :raises NixlPluginError: where the port is taken, and this NIXL would make an agent that nobody reaches.
    :raises RuntimeError: where NIXL finds something wrong before there is an agent.
    """
    api = sys.modules["nixl._api"]
    config = api.nixl_agent_config(
        enable_prog_thread=progress_thread,
        enable_listen_thread=listen_thread,
        listen_port=port_for(installed()[1], listen_port) if listen_thread else listen_port,
        capture_telemetry=telemetry,
        backends=[],
    )
    return api.nixl_agent(name, config)


def port_for(version: str, port: int) -> int:
    """Return the port to give to a listener of this version: 0 where NIXL picks a free one for 0.

    :raises NixlPluginError: where ``port`` is taken, and this version would not say so.
    """
    if port == 0:
        return 0 if nixl_releases.picks_a_free_port(version) else _bound(0)
    if not nixl_releases.says_that_a_port_is_taken(version):
        try:
            _bound(port)
        except OSError as error:
            raise NixlPluginError(
                f"the agent's port {port} cannot be had ({error.strerror}), and NIXL {version} would make an agent "
                "that nobody reaches, without a word",
                "choose another listen_port, or 0 for a free one",
            ) from None
    return port


def _bound(port: int) -> int:
    """Bind a port as NIXL's listener does, give it back and return its number."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        asking.bind(("", port))
        return int(asking.getsockname()[1])


def empty_list(agent: Any, method: str, mem_type: str) -> Any:
    """Make a list of no descriptors: metadata of connections alone wants one, and NIXL's own method cannot."""
    bindings = sys.modules[type(agent.agent).__module__]
    return getattr(bindings, LISTS[method])(agent.nixl_mems[mem_type])
