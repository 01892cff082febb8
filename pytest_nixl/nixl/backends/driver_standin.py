# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the CUDA driver's library, for host memory on hosts without an NVIDIA driver.

NIXL's LIBFABRIC plugin, and before NIXL 0.10 its UCX plugin, are linked to ``libcuda.so.1``, which is part of the
driver and of no package. Each function of the stand-in answers ``CUDA_ERROR_NO_DEVICE``, as a driver without a GPU
does.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_nixl.core.shared_object import shared_object, supported
from pytest_nixl.model.tools import DRIVER_STANDIN

SONAME = "libcuda.so.1"
#: The key of a worker's versions by which the stand-in is recorded, and its value.
RECORDED, VALUE = "cuda_driver", f"stand-in for {SONAME}: no NVIDIA driver"

_NO_DEVICE = 100
#: What the CUDA runtime and applications look up by name at run time.
_LOOKED_UP = ("cuDeviceGetCount", "cuDriverGetVersion", "cuGetErrorString", "cuInit")
_ROOT = "/"
_FUNCTION = re.compile(r"cu[A-Z]\w*")
#: Files of the driver on Linux, on Windows Subsystem for Linux and on Jetson. A container without GPUs sees the first.
_OF_A_DRIVER = ("proc/driver/nvidia/version", "dev/nvidia*", "dev/dxg", "dev/nvhost-*", "dev/nvgpu")


def real_driver(root: str = "") -> str:
    """Return a file that shows that this host has an NVIDIA driver; empty if there is none.

    :param root: the root of the file system; empty: this host's.
    """
    paths = (path for pattern in _OF_A_DRIVER for path in sorted(glob.glob(os.path.join(root or _ROOT, pattern))))
    return next(paths, "")


def refusal(environ: Mapping[str, str], *, root: str = "", machine: str = "") -> str:
    """Return in one sentence why no stand-in may be used; empty if it may.

    :param environ: the environment variables of the worker.
    :param root: the root of the file system; empty: this host's.
    :param machine: the processor, such as ``x86_64``; empty: this host's.
    """
    machine = machine or platform.machine()
    if driver := real_driver(root):
        return f"no stand-in is used for it, because this host has an NVIDIA driver ({driver})"
    if environ.get(DRIVER_STANDIN) == "never":
        return f"no stand-in is used for it, because GPU memory is asked for or {DRIVER_STANDIN}=never"
    if not supported(machine):
        return f"pytest-nixl has no stand-in for it on {machine}"
    return ""


def bound_functions(plugins: Sequence[str]) -> list[str]:
    """Return the functions of the CUDA driver that plugins bind, sorted.

    :param plugins: the paths of the plugins.
    :raises ValueError: a file is not an ELF file.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.dynamic import DynamicSegment
    from elftools.elf.elffile import ELFFile

    functions = set()
    for path in plugins:
        with open(path, "rb") as file:
            try:
                segments = [segment for segment in ELFFile(file).iter_segments() if isinstance(segment, DynamicSegment)]
                for symbol in (symbol for segment in segments for symbol in segment.iter_symbols()):
                    if symbol["st_shndx"] == "SHN_UNDEF" and _FUNCTION.fullmatch(symbol.name):
                        functions.add(symbol.name)
            except ELFError as error:
                raise ValueError(f"{path} is damaged: {error}") from None
    return sorted(functions)


def write_standin(directory: str, plugin: str) -> str:
    """Write the stand-in for a plugin and its neighbours, and return its path. Workers of one run share it.

    All plugins of a process must find their functions in the same library, because the loader takes the first one.

    :param directory: the private directory of the run.
    :param plugin: the path of the plugin.
    :raises OSError: it cannot be written.
    :raises ValueError: the plugin is damaged.
    """
    plugins = sorted(Path(plugin).parent.glob("libplugin_*.so"))
    # Named by the files that it is made for, because to read their symbols takes half a second.
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in plugins]
    path = os.path.join(directory, f"libcuda-standin-{zlib.crc32(repr(files).encode()):08x}.so.1")
    if not os.path.exists(path):
        functions = bound_functions([str(path) for path in plugins if SONAME.encode() in path.read_bytes()])
        content = shared_object(SONAME, sorted({*functions, *_LOOKED_UP}), _NO_DEVICE, platform.machine())
        # Another worker may do the same: the name appears only when the content is complete.
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(content)
        os.chmod(file.name, 0o755)
        os.replace(file.name, path)
    return path
