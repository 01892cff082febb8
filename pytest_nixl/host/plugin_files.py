# SPDX-License-Identifier: Apache-2.0
"""NIXL's plugin files: which of them can be loaded, and what the others lack."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_nixl.core.resource_limits import let_end_first
from pytest_nixl.host.software import Lacking
from pytest_nixl.nixl.installed import nixl_packages

#: By a pattern of the soname: how to provide the library. ``{0}`` is the number in the soname.
_REMEDIES = (
    (r"libcuda\.so\.1|libnvidia-ml\.so\.1", "give the container the host's driver (`docker run --gpus all`)"),
    (
        r"libcudart\.so\.(\d+)",
        "install the CUDA {0} runtime (apt: cuda-cudart-{0}-*; pip: nvidia-cuda-runtime-cu12 or nvidia-cuda-runtime)",
    ),
    (r"libcufile(?:_rdma)?\.so\.\d+", "install cuFile (apt: libcufile-*; pip: nvidia-cufile-cu12 or nvidia-cufile)"),
    (r"libcuobjclient\.so\.\d+", "install NVIDIA cuObject, GPUDirect Storage for objects (libcuobjclient)"),
    (r"libdoca_telemetry_exporter\.so.*", "install NVIDIA DOCA (apt: doca-sdk-telemetry-exporter)"),
    (r"libdoca_gpunetio\.so.*", "install NVIDIA DOCA (apt: doca-sdk-gpunetio)"),
    (r"libdoca_\w+\.so.*", "install NVIDIA DOCA (apt: doca-sdk-verbs and doca-sdk-common)"),
    (r"libred_\w+\.so.*", "install the client of DDN Infinia, which has it in /opt/ddn/red/lib"),
    (r"libhf3fs\w*\.so.*", "install the client of 3FS (hf3fs_usrbio)"),
    (r"libgusli\w*\.so.*", "install GUSLI (libgusli_clnt)"),
    (r"libfabric\.so\.\d+", "install libfabric 1.18 or newer (EFA installer; apt: libfabric1)"),
    (r"libhwloc\.so\.15", "install hwloc (apt: libhwloc15)"),
    (r"libhwloc\.so\.\d+", "install hwloc (apt: libhwloc-dev)"),
    (r"libibverbs\.so\.1", "install the verbs library (apt: libibverbs1)"),
    (r"lib(?:mlx5|efa)\.so\.1", "install the verbs providers (apt: ibverbs-providers)"),
    (r"librdmacm\.so\.1", "install librdmacm (apt: librdmacm1)"),
    (r"libnuma\.so\.1", "install libnuma (apt: libnuma1)"),
    (r"libaio\.so\.1.*", "install libaio (apt: libaio1, or libaio1t64 on Ubuntu 24.04)"),
    (r"liburing\.so\.2", "install liburing (apt: liburing2)"),
    (r"libgdrapi\.so\.2", "install GDRCopy (apt: libgdrapi)"),
    (r"libuc[pstm]\.so\.\d+", "install the UCX that NIXL was built with"),
    (r"libaws-.*", "install the AWS SDK for C++ that NIXL was built with"),
    (r"libazure-.*", "install the Azure SDK for C++ that NIXL was built with"),
    (r"libetcd-cpp-api.*", "install etcd-cpp-apiv3 (libetcd-cpp-api)"),
    (r"lib(?:nixl\w*|serdes|stream|file_utils|obj_utils)\.so.*", "copy all libraries of NIXL's build into the image"),
)


def remedies(sonames: Iterable[str]) -> dict[str, str]:
    """Return how to provide each library: which installed package has it, or has lost it, or which one to install.

    :param sonames: the names of the libraries, such as ``libcufile.so.0``.
    """
    missing = dict.fromkeys(sonames)
    packages: dict[str, str] = {}
    for package in importlib.metadata.distributions() if missing else ():
        record = package.read_text("RECORD") or ""
        for soname in missing:
            if soname in record and soname not in packages and (remedy := _of_package(package, record, soname)):
                packages[soname] = remedy
    return {soname: packages.get(soname) or _of_soname(soname) for soname in missing}


def _of_package(package: importlib.metadata.Distribution, record: str, soname: str) -> str:
    listed = re.search(rf"^(?:.*/)?{re.escape(soname)}(?=,)", record, re.MULTILINE)
    if listed is None:
        return ""
    name, version = package.metadata["Name"], package.version
    path = os.path.abspath(str(package.locate_file(listed[0])))
    if os.path.exists(path):
        return f"add {os.path.dirname(path)} to LD_LIBRARY_PATH: {name} {version} has {soname} there"
    again = f"`pip install --force-reinstall --no-deps {name}=={version}`"
    return f"reinstall {name}, whose file {path} is missing: {again}"


def _of_soname(soname: str) -> str:
    for pattern, remedy in _REMEDIES:
        if match := re.fullmatch(pattern, soname):
            return remedy.format(*match.groups())
    return f"install the package that has {soname} (`apt-file search {soname}` names it)"


_NAME = re.compile(r"libplugin_(\w+)\.so")
_LIBNIXL = re.compile(r"libnixl(?:-[0-9a-f]{8})?\.so")
#: UCX replaces functions of libc when it is loaded, and for some kinds of replacement it waits 0.4 s. A process that
#: only loads plugins moves no memory.
_WITHOUT_HOOKS = {"UCX_MEM_MMAP_HOOK_MODE": "none"}


@dataclass(frozen=True)
class PluginFile:
    """A plugin file of NIXL.

    :param name: NIXL's name of it, such as ``UCX``.
    :param error: why it cannot be loaded; empty if it can.
    :param missing: the libraries and symbol versions that it lacks.
    :param remedies: how to provide each missing library, by its soname.
    """

    name: str
    path: str
    error: str
    missing: tuple[Lacking, ...]
    remedies: dict[str, str]

    def without(self, sonames: Collection[str]) -> PluginFile:
        """Return the plugin as it is where some libraries are not missing.

        :param sonames: the names of these libraries.
        """
        missing = tuple(lack for lack in self.missing if lack.soname not in sonames)
        return replace(self, missing=missing, error=self.error if missing or not self.missing else "")

    @property
    def words(self) -> str:
        """Why it cannot be loaded, in one line: what it lacks itself, and what other libraries lack."""
        direct = f"which {os.path.basename(self.path)} needs, was not found"
        direct_sonames = [lack.soname for lack in self.missing if direct in lack.words]
        indirect = [lack.words for lack in self.missing if direct not in lack.words]
        return "; ".join(([f"lacks {', '.join(direct_sonames)}"] if direct_sonames else []) + indirect) or self.error


def plugin_name(path: str) -> str:
    """Return NIXL's name of a plugin file."""
    return _NAME.sub(r"\1", os.path.basename(path))


def plugin_folder(environ: Mapping[str, str], libraries: Sequence[str]) -> str:
    """Return the folder in which NIXL looks for plugins; empty if there is none beside NIXL's library.

    :param environ: the environment variables: NIXL_PLUGIN_DIR replaces NIXL's own folder.
    :param libraries: the paths of the libraries that a process with NIXL has loaded.
    """
    if chosen := environ.get("NIXL_PLUGIN_DIR"):
        return chosen
    library = libnixl(libraries)
    # Wheels have a second copy in the folder "nixl", beside a library of NIXL that the wheel's linker renamed.
    folders = [os.path.join(os.path.dirname(library), name) for name in ("plugins", "nixl")] if library else []
    return next((folder for folder in folders if os.path.isdir(folder)), "")


def libnixl(libraries: Sequence[str]) -> str:
    """Return the path of NIXL's library among loaded ones; empty if it is not among them."""
    return next((path for path in libraries if _LIBNIXL.fullmatch(os.path.basename(path))), "")


def installed_libnixl() -> list[str]:
    """Return the files of NIXL's library in the package that an import will load; empty if several packages have it."""
    paths = []
    for package in nixl_packages():
        files = importlib.metadata.files(package) or []
        if named := [os.path.abspath(str(file.locate())) for file in files if _LIBNIXL.fullmatch(file.name)]:
            paths.append(named)
    return paths[0] if len(paths) == 1 else []


class PluginLoading:
    """The loading of each plugin of a folder in a process of its own, beside what the caller does meanwhile.

    :param folder: the folder of the plugins.
    :param library: the path of NIXL's library, which is loaded first; empty to load none.
    """

    def __init__(self, folder: str, library: str) -> None:
        self.folder, self.library = folder, library
        self._paths = sorted(str(path) for path in Path(folder).glob("libplugin_*.so"))
        command = [sys.executable, "-m", "pytest_nixl.host.plugin_loader", library, *self._paths]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | _WITHOUT_HOOKS,
        )
        let_end_first(self._process.pid)

    def result(self) -> list[dict[str, Any]]:
        """Wait for the end, and return what each plugin lacks, as JSON values."""
        lines, _ = self._process.communicate()
        answers = {answer["path"]: answer for answer in map(json.loads, lines.splitlines())}
        ended = f"it was not tried: the loading program ended with code {self._process.returncode}"
        results = [answers.get(path, {"path": path, "error": ended, "missing": []}) for path in self._paths]
        lacking = {
            path: [lack["soname"] for lack in missing if not lack["versions"]]
            for path, missing in ((result["path"], result["missing"]) for result in results)
        }
        remedy_of = remedies(soname for sonames in lacking.values() for soname in sonames)
        return [
            {
                "name": plugin_name(result["path"]),
                **result,
                "remedies": {soname: remedy_of[soname] for soname in lacking[result["path"]]},
            }
            for result in results
        ]

    def close(self) -> None:
        """End it, if it has not ended."""
        with self._process:
            self._process.kill()


class PluginsInAdvance:
    """Loads NIXL's plugins while the caller does something else.

    :param environ: the environment variables, which may name the folder of the plugins.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._loading: PluginLoading | None = None

    def start(self, libraries: Sequence[str]) -> None:
        """Start to load the plugins beside NIXL's library, unless these were started before.

        :param libraries: the paths of the libraries that a process with NIXL has loaded, or will load.
        """
        folder = plugin_folder(self._environ, libraries)
        if os.path.isdir(folder):
            self._start(folder, libnixl(libraries))

    def load(self, folder: str, library: str) -> list[dict[str, Any]]:
        """Return what each plugin of a folder lacks; if these were not started in advance, load them now."""
        return self._start(folder, library).result()

    def _start(self, folder: str, library: str) -> PluginLoading:
        if self._loading is None or (self._loading.folder, self._loading.library) != (folder, library):
            self.close()
            self._loading = PluginLoading(folder, library)
        return self._loading

    def close(self) -> None:
        """End what was started."""
        if self._loading is not None:
            self._loading.close()
