# SPDX-License-Identifier: Apache-2.0
"""Functions that run in a worker and read facts that only a process with NIXL loaded has."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.host import elf
from pytest_nixl.host.loaded_libraries import libraries_of_nixl
from pytest_nixl.host.ucx_rdma import ask_ucx_rdma, has_devices, printed
from pytest_nixl.nixl.backends import BACKENDS, plugin_of
from pytest_nixl.nixl.backends.libraries import find_plugin
from pytest_nixl.nixl.installed import release_of
from pytest_nixl.nixl.worker.commands import ucx_version

#: How long the transfer within one agent may take, in seconds.
_TRANSFER_SECONDS = 30.0
_NIXL_VARIABLE = re.compile(rb"NIXL_[A-Z][A-Z0-9_]*[A-Z0-9]")


def look(agent: Any, plugins: list[str]) -> dict[str, Any]:
    """Return the loaded libraries and the variables that they know.

    :param agent: the raw NIXL agent.
    :param plugins: the plugin files of the backends that were created.
    """
    files = libraries_of_nixl(_maps())
    return {
        "plugins": list(agent.get_plugin_list()),
        "libraries": files,
        "ucx_variables": _ucx_variables(files),
        "fabric_variables": _fabric_variables(files),
        "nixl_variables": _nixl_variables(files, plugins),
        "advertised": _advertised(agent),
        "ucx": ucx_version(),
    }


def _maps() -> str:
    return Path("/proc/self/maps").read_text()


def prepare(agent: Any, name: str, nixl: dict[str, str]) -> dict[str, Any]:
    """Load the libraries of a backend but not its plugin; return its facts, with what is missing.

    :param agent: the raw NIXL agent.
    :param name: the backend, such as ``UCX``.
    :param nixl: the version and the package of NIXL, as the worker reported them.
    """
    plugin = find_plugin(os.environ, _maps(), [nixl["nixl_package"]], f"libplugin_{plugin_of(name)}.so")
    answer: dict[str, Any] = {"plugin": plugin or "", "missing": [], "error": "", "remedy": "", "memories": []}
    versions: dict[str, str] = {}
    try:
        if name in BACKENDS:
            versions = BACKENDS[name].load(nixl)
    except NixlPluginError as error:
        answer |= {"error": error.reason, "remedy": error.remedy}
    answer["versions"] = versions
    if plugin is not None:
        answer["release"] = release_of(plugin)
        # The plugin can use libraries that the worker has already loaded, whatever their folder.
        loaded = [*libraries_of_nixl(_maps()), *(path for path in versions.values() if path.startswith("/"))]
        try:
            lacking = elf.missing(plugin, os.environ, loaded)
        except (OSError, ValueError) as error:
            lacking, answer["error"] = (), str(error)
        answer["missing"] = [
            {"soname": lack.soname, "versions": list(lack.versions), "words": str(lack)} for lack in lacking
        ]
    return {"backend": answer, "libraries": libraries_of_nixl(_maps())}


def ask_rdma(agent: Any, plugin: str) -> dict[str, Any] | None:
    """Ask UCX about the RDMA devices, before the backend is created: that may end the process.

    :param agent: the raw NIXL agent, whose process this is.
    :param plugin: the plugin of UCX.
    :return: JSON values of :func:`ask_ucx_rdma`; None if this host has no RDMA device.
    """
    if not has_devices():
        return None
    for _, soname, file in elf.dependencies(plugin, os.environ, libraries_of_nixl(_maps())):
        if file is not None and soname.startswith("libucp"):
            ctypes.CDLL(file)
            break
    return ask_ucx_rdma(lambda: libraries_of_nixl(_maps()))


def make(agent: Any, name: str) -> dict[str, Any]:
    """Create a backend, and return its memory types or the error."""
    plugins, plugin = list(agent.get_plugin_list()), plugin_of(name)
    if plugin not in plugins:
        return {"error": f"NIXL has no plugin {plugin}: it has {', '.join(plugins) or 'none'}"}
    try:
        agent.create_backend(plugin)
    except Exception as error:  # whatever NIXL raises is reported
        return {"error": f"{type(error).__name__}: {error}"}
    return {"memories": [str(memory) for memory in agent.get_backend_mem_types(plugin)]}


def telemetry(agent: Any, name: str) -> dict[str, Any]:
    """Move bytes of host memory within the agent, and read the transfer's telemetry as engines do after each transfer.

    :param agent: the raw NIXL agent; it was created with ``capture_telemetry``, as engines create theirs.
    :param name: a backend of the agent that can move bytes within one process.
    :returns: the number of ``bytes`` in the telemetry, or the ``error``.
    """
    size = 4096
    source, target = ctypes.create_string_buffer(b"x" * size, size), ctypes.create_string_buffer(size)
    regions = [(ctypes.addressof(buffer), size, 0, "") for buffer in (source, target)]
    handle = None
    registered = agent.register_memory(regions, "DRAM", backends=[name])
    try:
        lists = [agent.get_xfer_descs([region[:3]], "DRAM") for region in regions]
        handle = agent.initialize_xfer("WRITE", *lists, agent.name, backends=[name])
        state, deadline = agent.transfer(handle), time.monotonic() + _TRANSFER_SECONDS
        while state == "PROC" and time.monotonic() < deadline:
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            return {"error": f"a transfer within one agent ended with {state}"}
        return {"bytes": int(agent.get_xfer_telemetry(handle).totalBytes)}
    except Exception as error:  # NIXL's error classes cannot be imported
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        if handle is not None:
            agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)


def _open(files: list[str], name: str) -> ctypes.CDLL | None:
    path = next((file for file in files if os.path.basename(file).startswith(name)), None)
    return ctypes.CDLL(path) if path else None


def _ucx_variables(files: list[str]) -> list[str]:
    """Return the variables of the loaded UCX, as ``ucx_info -caf`` prints them."""
    ucs = _open(files, "libucs.") or _open(files, "libucs-")
    if ucs is None:
        return []
    try:
        # Older releases take one argument less; the extra one does no harm.
        options = ctypes.c_char.in_dll(ucs, "ucs_config_global_list")
        print_all = ucs.ucs_config_parser_print_all_opts
    except (ValueError, AttributeError):
        return []
    hidden_too = 1 | 8  # UCS_CONFIG_PRINT_CONFIG | UCS_CONFIG_PRINT_HIDDEN
    text = printed(lambda stream: print_all(stream, ctypes.c_char_p(b"UCX_"), hidden_too, ctypes.byref(options), None))
    return variables_in(text)


def variables_in(text: str) -> list[str]:
    """Return the variables in the output of ``ucx_info -caf``, which has a description above each."""
    return re.findall(r"^(UCX_\w+)=", text, re.MULTILINE)


class _Parameter(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int),
        ("help", ctypes.c_char_p),
        ("value", ctypes.c_char_p),
    ]


def _fabric_variables(files: list[str]) -> list[str]:
    """Return the variables of the loaded libfabric and its providers, as ``fi_info -e`` prints them."""
    fabric = _open(files, "libfabric.") or _open(files, "libfabric-")
    if fabric is None:
        return []
    parameters, count = ctypes.POINTER(_Parameter)(), ctypes.c_int()
    if fabric.fi_getparams(ctypes.byref(parameters), ctypes.byref(count)):
        return []
    return [parameters[number].name.decode() for number in range(count.value)]


def _nixl_variables(files: list[str], plugins: list[str]) -> list[str]:
    """Return the texts in NIXL's libraries that look like its variables."""
    variables: set[str] = set()
    for path in {*(file for file in files if "libnixl" in file), *filter(None, plugins)}:
        variables |= {match.decode() for match in _NIXL_VARIABLE.findall(Path(path).read_bytes())}
    return sorted(name for name in variables if not name.startswith(("NIXL_ERR", "NIXL_IN")))


def _advertised(agent: Any) -> list[str]:
    """Return the IPv4 addresses of this host that the agent's metadata contains."""
    try:
        metadata = agent.get_agent_metadata()
    except Exception as error:  # NIXL's error class cannot be imported; an agent without backends has no metadata
        if "INVALID_PARAM" not in str(error):
            raise
        return []
    texts = [text.partition("/")[0] for listed in ask_addresses().values() for text in listed]
    return [text for text in texts if ":" not in text and socket.inet_aton(text) in metadata]
