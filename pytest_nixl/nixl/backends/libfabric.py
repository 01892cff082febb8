# SPDX-License-Identifier: Apache-2.0
"""The LIBFABRIC backend: load the libraries that NIXL's plugin needs, and read providers and devices from its log.

The libraries are searched and loaded in a worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.nixl.backends.libraries import (
    FABRIC,
    Finder,
    LibraryError,
    RequiredLibrary,
    find_plugin,
    locate,
    needed,
    open_library,
    remedies,
)

PLUGIN = "libplugin_LIBFABRIC.so"
#: The oldest libfabric release that NIXL supports.
LEAST = (1, 18)
#: The symbol version that NIXL 1.5.1 needs and that no release of libfabric defines.
UNRELEASED = (1, 10)

_RAIL = re.compile(r"Created (?:data )?rail \d+ \(device=(?P<device>[^,)]+), provider=(?P<provider>[^,)]+)\)")
_PROVIDER = re.compile(r"[Cc]reated \d+ (?:data )?rails (?:and \d+ control rails )?using provider=([\w;-]+)")
# Before 1.1 NIXL logs the provider only at DEBUG, and the discovered devices at INFO.
_DISCOVERED = re.compile(r"Discovered [1-9]\d* ([\w;-]+) devices")
_NETWORK = re.compile(r"fabric_attr->name (\d+\.\d+\.\d+\.\d+/[0-9]{1,2})\b")
#: NIXL's names of devices, with the provider's name if it differs.
_DEVICES = {"socket": "sockets", "EFA": "efa", "CXI": "cxi"}
_INTERFACE = re.compile(r"^pytest-nixl: interface (\S+) (\d+\.\d+\.\d+\.\d+)$", re.MULTILINE)
_SIOCGIFADDR = 0x8915
_SYMBOL_VERSION = re.compile(rb"\bFABRIC_(\d+)\.(\d+)\b")


def symbol_versions(path: str) -> set[tuple[int, int]]:
    """Return the symbol versions FABRIC_x.y that a library defines or needs, as ``(x, y)``."""
    return {(int(major), int(two)) for major, two in _SYMBOL_VERSION.findall(Path(path).read_bytes())}


def check_released(candidates: Sequence[str], plugin: str | None, nixl: str) -> None:
    """Refuse a plugin that needs an unreleased libfabric, unless one of the candidates has that symbol version.

    This is checked first, because no other library can help.

    :param candidates: the paths of libfabric that were found.
    :param plugin: the path of NIXL's plugin, or None.
    :param nixl: name and version of NIXL, for the message.
    :raises LibraryError: the plugin needs an unreleased libfabric, and no candidate is one.
    """
    if plugin is None or UNRELEASED not in symbol_versions(plugin):
        return
    if any(UNRELEASED in symbol_versions(path) for path in candidates):
        return
    version = "FABRIC_{}.{}".format(*UNRELEASED)
    subject = f"{' and '.join(candidates)} lacks it" if candidates else "this host has no libfabric"
    raise LibraryError(
        f"LIBFABRIC of {nixl} needs symbol version {version} of libfabric.so.1, which no release of libfabric has: "
        f"{subject}",
        "in a clone run `tox -e validate-libfabric`, whose NIXL fits; or run `pip install --no-deps nixl==1.5.0 "
        "nixl-cu12==1.5.0`, whose plugin needs FABRIC_1.7; or use the image's own build of NIXL; or set "
        "PYTEST_NIXL_LIBFABRIC=/path/to/libfabric.so.1 to the build that the plugin was linked with",
    )


def is_released(finder: Finder, plugin: str | None) -> bool:
    """Return whether :func:`check_released` accepts a plugin with the libfabric of this host."""
    try:
        check_released(finder.found(FABRIC, FABRIC.usual), plugin, "")
    except LibraryError:
        return False
    return True


def choose(candidates: Sequence[str], plugin: str | None, nixl: str) -> str:
    """Return the first libfabric with every symbol version that NIXL's plugin needs.

    :param candidates: the paths of libfabric that were found.
    :param plugin: the path of NIXL's plugin; None accepts any libfabric.
    :param nixl: name and version of NIXL, for the message.
    :raises LibraryError: no candidate has all of them.
    """
    versions_needed = symbol_versions(plugin) if plugin else set()
    rejected = []
    for path in candidates:
        missing = versions_needed - symbol_versions(path)
        if not missing:
            return path
        rejected.append((path, ", ".join("FABRIC_{}.{}".format(*version) for version in sorted(missing))))
    path, versions = rejected[0]
    further = "".join(f"; {other} lacks a needed version, too" for other, _ in rejected[1:])
    raise LibraryError(
        f"{path} is too old for LIBFABRIC of {nixl}: it lacks the symbol version {versions}{further}",
        remedies(FABRIC),
    )


def check_version(number: int, path: str) -> str:
    """Return libfabric's version, such as ``1.22``.

    :param number: the result of ``fi_version()``.
    :param path: the path of the library, for the message.
    :raises LibraryError: the version is too old for NIXL.
    """
    version = (number >> 16, number & 0xFFFF)
    if version < LEAST:
        raise LibraryError(
            f"{path} is libfabric {version[0]}.{version[1]}, but NIXL needs {LEAST[0]}.{LEAST[1]} or newer",
            remedies(FABRIC),
        )
    return f"{version[0]}.{version[1]}"


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield name and IPv4 address of each network interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(answer[20:24])


class LibfabricBackend:
    """The LIBFABRIC backend. DONE of a WRITE means that it was posted; bytes and notification arrive later."""

    NAME = "LIBFABRIC"
    PLUGIN = "LIBFABRIC"
    STORAGE = False
    COMPLETION_IMPLIES_DELIVERY = False
    SHAKES_HANDS = True

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variable that makes NIXL log its provider."""
        return {"NIXL_LOG_LEVEL": "INFO"}

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Log this host's interfaces after the backend is created.

        At level INFO NIXL logs the network but no device. Its DEBUG level logs a dozen lines per transfer.
        """
        yield
        for name, address in _interfaces():
            print(f"pytest-nixl: interface {name} {address}", file=sys.stderr)

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """Load the libraries that NIXL's plugin needs, and return the version and path of libfabric."""
        plugin = find_plugin(os.environ, Path("/proc/self/maps").read_text(), [nixl["nixl_package"]], PLUGIN)
        finder, name = Finder(os.environ), f"{nixl['nixl_package']} {nixl['nixl']}"
        libraries_needed = needed(plugin)
        for library, soname in libraries_needed:
            if library is FABRIC:
                check_released(finder.found(library, soname), plugin, name)
        chosen: dict[RequiredLibrary, str] = {}
        recorded: dict[str, str] = {}
        for library, soname in libraries_needed:
            candidates, origin = locate(finder, library, soname, plugin)
            chosen[library] = choose(candidates, plugin, name) if library is FABRIC else candidates[0]
            recorded |= origin
        loaded = {library: open_library(library, path, "LIBFABRIC of NIXL") for library, path in chosen.items()}
        if FABRIC not in loaded:
            return recorded
        version = loaded[FABRIC].fi_version
        version.restype = ctypes.c_uint32
        return recorded | {"libfabric": check_version(version(), chosen[FABRIC]), "libfabric_path": chosen[FABRIC]}

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return provider and device of each opened rail, such as ``tcp/eth0`` or ``efa/rdmap79s0``.

        If NIXL's log does not name the devices, only the providers are returned.
        """
        rails = dict.fromkeys(f"{match['provider']}/{match['device']}" for match in _RAIL.finditer(log))
        if rails:  # the user's own NIXL_LOG_LEVEL=DEBUG
            return tuple(rails)
        named = _PROVIDER.findall(log) or [_DEVICES.get(kind, kind) for kind in _DISCOVERED.findall(log)]
        return tuple(dict.fromkeys(_with_device(provider, log) for provider in named))

    def mistaken(self, log: str, op: str, memory: MemoryPair) -> str:
        """Return an empty text: LIBFABRIC does not log the type of memory."""
        return ""


def _with_device(provider: str, log: str) -> str:
    """Add the interface to a provider if the network in libfabric's log belongs to exactly one interface."""
    networks = [ipaddress.ip_network(text, strict=False) for text in _NETWORK.findall(log)]
    names = [name for name, text in _INTERFACE.findall(log) if any(ipaddress.ip_address(text) in n for n in networks)]
    return f"{provider}/{names[0]}" if len(names) == 1 else provider


BACKEND = LibfabricBackend()
