# SPDX-License-Identifier: Apache-2.0
"""NIXL's Python interface in a worker. :mod:`pytest_nixl.model.nixl_releases` knows how releases differ."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.sentences import named
from pytest_nixl.model import nixl_releases
from pytest_nixl.model.agent_options import THREADED, THREADS_PARAMETER
from pytest_nixl.nixl.backends import plugin_of
from pytest_nixl.nixl.backends.storage import OBJECT_PARAMETERS
from pytest_nixl.nixl.installed import import_fault, nixl_packages, pip_command, torch_version, wheel_for_torch

#: The methods that return a descriptor list, and the class of the list.
LISTS = {"get_reg_descs": "nixlRegDList", "get_xfer_descs": "nixlXferDList"}

_HANDLE, _PREPARED, _REGISTERED, _PLACES, _REMOTE = (
    "nixl_xfer_handle",
    "nixl_prepped_dlist_handle",
    "nixlRegDList",
    "nixlXferDList",
    "nixlRemoteDList",
)
#: The methods that return a handle, and its kind; in some releases a handle is a plain number.
HANDLES = {"initialize_xfer": _HANDLE, "make_prepped_xfer": _HANDLE, "prep_xfer_dlist": _PREPARED}
#: The methods of descriptor lists that change or return their descriptors.
LIST_METHODS = {
    "descCount",
    "isEmpty",
    "getType",
    "index",
    "append",
    "addDesc",
    "remDesc",
    "clear",
    "trim",
    "print",
    "__getitem__",
    "__setitem__",
}
#: The fields of the telemetry of a transfer.
TELEMETRY_FIELDS = ("startTime", "postDuration", "xferDuration", "totalBytes", "descCount")
#: The methods after which NIXL has freed their argument. To use it again would crash the process.
RELEASES = {"release_xfer_handle", "release_dlist_handle"}
#: The kinds of references that a method takes, by the position of the argument.
REFERENCES: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "check_remote_metadata": {1: (_PLACES,)},
    "check_xfer_state": {0: (_HANDLE,)},
    "deregister_memory": {0: (_REGISTERED,)},
    "estimate_xfer_cost": {0: (_HANDLE,)},
    "get_partial_agent_metadata": {0: (_REGISTERED,)},
    "get_reg_descs": {0: (_REGISTERED,)},
    "get_remote_descs": {0: (_REMOTE,)},
    "get_serialized_descs": {0: (_PLACES, _REGISTERED)},
    "get_xfer_descs": {0: (_PLACES,)},
    "get_xfer_telemetry": {0: (_HANDLE,)},
    "initialize_xfer": {1: (_PLACES,), 2: (_PLACES,)},
    "make_prepped_xfer": {1: (_PREPARED,), 3: (_PREPARED,)},
    "prep_mem_view": {0: (_PLACES, _REMOTE)},
    "prep_xfer_dlist": {1: (_PLACES,)},
    "query_memory": {0: (_REGISTERED,)},
    "query_xfer_backend": {0: (_HANDLE,)},
    "register_memory": {0: (_REGISTERED,)},
    "release_dlist_handle": {0: (_PREPARED,)},
    "release_xfer_handle": {0: (_HANDLE,)},
    "send_partial_agent_metadata": {0: (_REGISTERED,)},
    "transfer": {0: (_HANDLE,)},
}


class NixlCallError(Exception):
    """NIXL's Python code raised an error of Python, such as a KeyError for an operation that it does not know.

    :param error: that error.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.type_name = type(error).__name__


class NixlImportError(ImportError):
    """NIXL cannot be imported. A failed import in a user's function is another error.

    :param remedy: what to do; empty to install the NIXL that this Python can load.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy or f"install NIXL for this Python: `{pip_command()}`, or use the image's own build"


def load() -> dict[str, str]:
    """Load NIXL, and return its version, its package and its file.

    :raises NixlPluginError: this release needs torch, which is not installed.
    :raises NixlImportError: it cannot be imported for another reason.
    """
    try:
        module = importlib.import_module("nixl._api")
    except (Exception, SystemExit) as error:  # a module that only has the name of one of NIXL's may do anything
        package, version = installed()
        # NIXL's own message would only say that there is no NIXL for this CUDA version.
        if nixl_releases.imports_torch(version) and importlib.util.find_spec("torch") is None:
            raise NixlPluginError(
                f"NIXL cannot be loaded: {package} {version} imports torch, like every release before 1.4, "
                "but torch is not installed",
                "install NIXL 1.4 or newer, or run `pip install torch` (without a GPU, its CPU build is enough)",
            ) from error
        wheel, packages = wheel_for_torch(), nixl_packages()
        cuda = torch_version().get("cuda", "").partition(".")[0]
        if "nixl" in packages and cuda and not wheel:
            raise NixlPluginError(
                f"NIXL cannot be loaded: torch is built for CUDA {cuda}, for which there is no package of NIXL",
                "install a torch that is built for CUDA 12 or newer",
            ) from error
        if "nixl" in packages and wheel and wheel not in packages:
            have = named(f"{name} {release}" for name, release in packages.items() if name != "nixl")
            raise NixlImportError(
                f"torch is built for CUDA {cuda}, and beside it NIXL loads only {wheel}; installed: {have or 'none'}"
            ) from error
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        fault, remedy = import_fault(error)
        raise NixlImportError("; ".join(filter(None, (reason, fault))), remedy) from error
    package, version = installed()
    return {"nixl": version, "nixl_package": package, "nixl_module": str(module.__file__)}


def installed() -> tuple[str, str]:
    """Return the package and the version of the loaded NIXL.

    If NIXL is not loaded, or belongs to no package (like an image's own build), this is the first installed package.
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
    """Return name and version of the NIXL package that installed a file; None if there is none."""
    for name in nixl_releases.PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            if any(os.path.samefile(path, file) for path in _files(distribution, os.path.basename(file))):
                return name, distribution.version
    return None


def _files(package: importlib.metadata.Distribution, name: str) -> Iterator[str]:
    """Yield the existing files of a package with a given name."""
    for file in package.files or ():
        if file.name == name and os.path.exists(path := os.fspath(file.locate())):
            yield path


def make_agent(
    name: str,
    *,
    progress_thread: bool = False,
    listen_thread: bool = False,
    listen_port: int = 0,
    telemetry: bool = False,
    sync_mode: str = "auto",
) -> Any:
    """Create an agent without a backend.

    :param name: the agent's name for other agents.
    :param listen_port: the port of its listener; 0 for a free one.
    :param sync_mode: ``none``, ``strict`` or ``rw``; ``auto`` for NIXL's own choice.
    :raises NixlPluginError: the port is in use, and this NIXL would create an agent that no peer can reach; or the
        agents of this NIXL have no synchronization mode.
    :raises RuntimeError: NIXL refuses to create the agent.
    """
    api = sys.modules["nixl._api"]
    config = api.nixl_agent_config(
        enable_prog_thread=progress_thread,
        enable_listen_thread=listen_thread,
        listen_port=port_for(installed()[1], listen_port) if listen_thread else listen_port,
        capture_telemetry=telemetry,
        backends=[],
        **({} if sync_mode == "auto" else {"sync_mode": _sync_mode(api, sync_mode)}),
    )
    return api.nixl_agent(name, config)


def _sync_mode(api: Any, name: str) -> Any:
    modes = getattr(api, "nixl_thread_sync_t", None)
    if modes is None:
        raise NixlPluginError(
            f"an agent of NIXL {installed()[1]} has no synchronization mode",
            "set --nixl-sync-mode=auto, or install NIXL 1.2 or newer",
        )
    return getattr(modes, f"NIXL_THREAD_SYNC_{name.upper()}")


#: Parameters that NIXL's UCX plugin reads and does not list; engines set them.
_UNLISTED = {"device_list", "engine_config"}


def backend_parameters(agent: Any, backend: str, requested: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the parameters to create a backend with. NIXL ignores a parameter that its plugin does not know.

    :param backend: the backend's name.
    :param requested: the requested parameters.
    :param threads: the number of worker threads; 0 for none. A backend without threads ignores it.
    :raises NixlPluginError: the plugin does not list a parameter.
    """
    plugin = plugin_of(backend)
    known_parameters = [*agent.get_plugin_params(plugin), *OBJECT_PARAMETERS.get(plugin, ())]
    for name in requested:
        if name not in known_parameters and not (plugin == "UCX" and name in _UNLISTED):
            has = f"it has {', '.join(sorted(known_parameters))}" if known_parameters else "it has none"
            raise NixlPluginError(
                f"{backend} of NIXL {installed()[1]} has no parameter {name!r}: {has}", "correct --nixl-backend-params"
            )
    if threads and plugin in THREADED:
        # UCX of every release takes it without listing it.
        if plugin != "UCX" and THREADS_PARAMETER not in known_parameters:
            raise NixlPluginError(f"{backend} of NIXL {installed()[1]} has no worker threads", "omit --nixl-threads")
        return {**requested, THREADS_PARAMETER: str(threads)}
    return {**requested}


def port_for(version: str, port: int) -> int:
    """Return the port to give to a listener of this NIXL version; 0 if NIXL itself chooses a free one.

    :param version: the version of NIXL.
    :param port: the requested port; 0 for a free one.
    :raises NixlPluginError: the port is in use, and this version would not report it.
    """
    if port == 0:
        return 0 if nixl_releases.picks_a_free_port(version) else _bound(0)
    if not nixl_releases.says_that_a_port_is_taken(version):
        try:
            _bound(port)
        except OSError as error:
            raise NixlPluginError(
                f"the agent cannot listen on port {port} ({error.strerror}), and NIXL {version} would silently create "
                "an agent that no peer can reach",
                "set another listen_port, or 0 for a free one",
            ) from None
    return port


def _bound(port: int) -> int:
    """Bind a port like NIXL's listener, release it, and return its number."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        asking.bind(("", port))
        bound: int = asking.getsockname()[1]
    return bound


def empty_list(agent: Any, method: str, mem_type: str) -> Any:
    """Return an empty descriptor list, which NIXL's own method cannot create, for metadata with only connections."""
    bindings = sys.modules[type(agent.agent).__module__]
    return getattr(bindings, LISTS[method])(agent.nixl_mems[mem_type])


def creation_remedy(error: str, port: int) -> str:
    """Return what to do if NIXL refuses to create an agent with this error."""
    if "bind metadata listener" in error:
        return (
            f"find the process that has port {port} with `ss -tanp 'sport = :{port}'`; or create the agent with another"
        )
    if "telemetry" in error or "Conversion to bool" in error:
        return "correct or unset the variables NIXL_TELEMETRY_…"
    if "filesystem error" in error and "/.nixl.cfg" in error:
        return (
            "set HOME to a directory that this user can read, or NIXL_CONFIG_FILE to NIXL's configuration file: NIXL "
            "searches HOME for one"
        )
    return plugin_remedy()


def plugin_remedy() -> str:
    """Return what to do if NIXL does not find a plugin."""
    folder = os.environ.get("NIXL_PLUGIN_DIR")
    advice = f"unset NIXL_PLUGIN_DIR (now {folder}), or set it" if folder else "set NIXL_PLUGIN_DIR"
    return f"{advice} to the plugin folder of this NIXL build; run with NIXL_LOG_LEVEL=info to see why a plugin fails"
