# SPDX-License-Identifier: Apache-2.0
"""The libraries that UCX's CUDA modules need: found and loaded in a worker, so that UCX can load the modules.

UCX says nothing about a module that it cannot load. It then takes GPU memory for host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_nixl.nixl.backends.libraries import (
    DRIVER,
    LIBRARIES,
    Finder,
    LibraryError,
    RequiredLibrary,
    loader_finds,
    needed,
    open_library,
)

#: The keys of a worker's versions: the CUDA runtime that the worker loaded because the loader does not find it, and
#: what a module of UCX lacks.
LOADED, LACKS = "cuda_runtime", "ucx_cuda_lacks"
RUNTIME = LIBRARIES[0]
#: How to provide each library.
REMEDIES = {
    "libcudart": "run `pip install nvidia-cuda-runtime-cu12` (for nixl-cu13: nvidia-cuda-runtime), or set "
    "PYTEST_NIXL_LIBCUDART=/path/to/libcudart.so.12",
    "libnvidia-ml": "give the container NVML (NVIDIA_DRIVER_CAPABILITIES=compute,utility, `docker run --gpus all`)",
}
_NVML = RequiredLibrary(
    r"libnvidia-ml\.so\.\d+",
    "libnvidia-ml.so.1",
    "PYTEST_NIXL_LIBNVML",
    (),
    "NVML, which is part of the GPU driver",
    ("install the NVIDIA driver on the host", REMEDIES["libnvidia-ml"]),
)
_MODULES = ("libucm_cuda", "libuct_cuda")


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
