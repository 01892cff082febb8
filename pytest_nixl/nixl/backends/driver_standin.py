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
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.model.tools import DRIVER_STANDIN

if TYPE_CHECKING:
    from elftools.common import exceptions
    from elftools.elf import dynamic, elffile
else:  # only a host without NVIDIA's driver needs them
    exceptions = lazy_module("elftools.common.exceptions")
    dynamic = lazy_module("elftools.elf.dynamic")
    elffile = lazy_module("elftools.elf.elffile")

SONAME = "libcuda.so.1"
#: The key of a worker's versions by which the stand-in is recorded, and its value.
RECORDED, VALUE = "cuda_driver", f"stand-in for {SONAME}: no NVIDIA driver"

_NO_DEVICE = 100
#: What the CUDA runtime and applications look up by name at run time.
_LOOKED_UP = ("cuDeviceGetCount", "cuDriverGetVersion", "cuGetErrorString", "cuInit")
#: The root of the file system in which the driver's files are looked for.
ROOT = "/"
_FUNCTION = re.compile(r"cu[A-Z]\w*")
#: Files of the driver on Linux, on Windows Subsystem for Linux and on Jetson. A container without GPUs sees the first.
_OF_A_DRIVER = ("proc/driver/nvidia/version", "dev/nvidia*", "dev/dxg", "dev/nvhost-*", "dev/nvgpu")


def real_driver() -> str:
    """Return a file that shows that this host has an NVIDIA driver; empty if there is none."""
    paths = (path for pattern in _OF_A_DRIVER for path in sorted(glob.glob(os.path.join(ROOT, pattern))))
    return next(paths, "")


def refusal(environ: Mapping[str, str]) -> str:
    """Return in one sentence why no stand-in may be used; empty if it may.

    :param environ: the environment variables of the worker.
    """
    if driver := real_driver():
        return f"no stand-in is used for it, because this host has an NVIDIA driver ({driver})"
    if environ.get(DRIVER_STANDIN) == "never":
        return f"no stand-in is used for it, because GPU memory is asked for or {DRIVER_STANDIN}=never"
    if not supported(platform.machine()):
        return f"pytest-nixl has no stand-in for it on {platform.machine()}"
    return ""


def bound_functions(plugins: Sequence[str]) -> set[str]:
    """Return the functions of the CUDA driver that plugins bind.

    :param plugins: the paths of the plugins.
    :raises ValueError: a file is not an ELF file.
    """
    functions = set()
    for path in plugins:
        with open(path, "rb") as file:
            try:
                every_segment = elffile.ELFFile(file).iter_segments()
                segments = [segment for segment in every_segment if isinstance(segment, dynamic.DynamicSegment)]
                for symbol in (symbol for segment in segments for symbol in segment.iter_symbols()):
                    if symbol["st_shndx"] == "SHN_UNDEF" and _FUNCTION.fullmatch(symbol.name):
                        functions.add(symbol.name)
            except exceptions.ELFError as error:
                raise ValueError(f"{path} is damaged: {error}") from None
    return functions


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


_HEADER, _SEGMENT, _SYMBOL, _TAG = "<16sHHIQQQIHHHHHH", "<IIQQQQQQ", "<IBBHQQ", "<qQ"
_HEADER_SIZE, _SEGMENT_SIZE, _SYMBOL_SIZE, _TAG_SIZE = map(struct.calcsize, (_HEADER, _SEGMENT, _SYMBOL, _TAG))
_LITTLE_ENDIAN_64_BIT = b"\x7fELF\x02\x01\x01"
_SHARED_LIBRARY = 3
_LOADED, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_EXECUTE, _WRITE, _READ = 1, 2, 4
_END, _HASH, _STRINGS, _SYMBOLS, _STRINGS_SIZE, _SYMBOL_ENTRY, _SONAME = 0, 4, 5, 6, 10, 11, 14
_GLOBAL_FUNCTION, _NO_SECTION, _ANY_SECTION = 0x12, 0, 1
#: The largest page size of both machines: segments with other permissions start on another page.
_PAGE = 0x10000
#: The ELF machine by the kernel's name, as ``os.uname().machine`` has it.
_MACHINES = {"x86_64": 62, "aarch64": 183}


def supported(machine: str) -> bool:
    """Return whether :func:`shared_object` can write code for a machine, such as ``x86_64``."""
    return machine in _MACHINES


def shared_object(soname: str, functions: Sequence[str], result: int, machine: str) -> bytes:
    """Return the content of a 64-bit ELF shared library for Linux.

    :param soname: the name by which the dynamic loader finds it once it is loaded.
    :param functions: the names of its functions, which take any arguments.
    :param result: what each function returns, 0 to 65535.
    :param machine: ``x86_64`` or ``aarch64``.
    """
    strings = b"\0"
    offsets = []
    for name in (soname, *functions):
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    code = _code(result, machine)
    count = len(functions) + 1
    hashes = _hash_table(count)
    # One segment has everything that is only read or executed, and the other the dynamic section, which old releases
    # of glibc write to.
    start = _HEADER_SIZE + 4 * _SEGMENT_SIZE
    code_at = start
    hash_at = code_at + len(code)
    symbols_at = _aligned(hash_at + len(hashes))
    strings_at = symbols_at + count * _SYMBOL_SIZE
    dynamic_at = _aligned(strings_at + len(strings))
    symbols = bytes(_SYMBOL_SIZE) + b"".join(
        struct.pack(_SYMBOL, offset, _GLOBAL_FUNCTION, 0, _ANY_SECTION, code_at, len(code)) for offset in offsets[1:]
    )
    tags = (
        (_SONAME, offsets[0]),
        (_HASH, hash_at),
        (_STRINGS, strings_at),
        (_SYMBOLS, symbols_at),
        (_STRINGS_SIZE, len(strings)),
        (_SYMBOL_ENTRY, _SYMBOL_SIZE),
        (_END, 0),
    )
    dynamic = b"".join(struct.pack(_TAG, *tag) for tag in tags)
    segments = b"".join(
        (
            _segment(_LOADED, _READ | _EXECUTE, 0, 0, dynamic_at, _PAGE),
            _segment(_LOADED, _READ | _WRITE, dynamic_at, dynamic_at + _PAGE, len(dynamic), _PAGE),
            _segment(_DYNAMIC, _READ | _WRITE, dynamic_at, dynamic_at + _PAGE, len(dynamic), 8),
            # Without it the loader asks for an executable stack, which many kernels refuse.
            _segment(_STACK, _READ | _WRITE, 0, 0, 0, 16),
        )
    )
    header = struct.pack(
        _HEADER,
        _LITTLE_ENDIAN_64_BIT,
        _SHARED_LIBRARY,
        _MACHINES[machine],
        1,
        0,
        _HEADER_SIZE,
        0,
        0,
        _HEADER_SIZE,
        _SEGMENT_SIZE,
        4,
        0,
        _NO_SECTION,
        0,
    )
    body = header + segments + code + hashes
    return (body.ljust(symbols_at, b"\0") + symbols + strings).ljust(dynamic_at, b"\0") + dynamic


def _code(result: int, machine: str) -> bytes:
    """Return a function that returns ``result``, 16 bytes long."""
    if machine == "aarch64":  # bti c; mov w0, #result; ret; nop
        return struct.pack("<4I", 0xD503245F, 0x52800000 | result << 5, 0xD65F03C0, 0xD503201F)
    return (b"\xf3\x0f\x1e\xfa\xb8" + struct.pack("<I", result) + b"\xc3").ljust(16, b"\x90")  # endbr64; mov eax; ret


def _hash_table(count: int) -> bytes:
    """Return a hash table of ``count`` symbols (two or more) in one bucket, which holds for any names.

    A chain of so few symbols costs the loader nothing.
    """
    return struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)


def _segment(kind: int, flags: int, offset: int, address: int, size: int, alignment: int) -> bytes:
    return struct.pack(_SEGMENT, kind, flags, offset, address, address, size, size, alignment)


def _aligned(offset: int) -> int:
    return -(-offset // 16) * 16
