# SPDX-License-Identifier: Apache-2.0
"""For which GPUs a library contains CUDA code, read from its section ``.nv_fatbin`` without CUDA's tools."""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from elftools.elf.elffile import ELFFile

_SECTION = ".nv_fatbin"
_MAGIC = 0xBA55ED50
_BUNDLE, _PART = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
_PTX, _CUBIN = 1, 2
#: By a pattern of a GPU's name: its compute capability without the dot, from NVIDIA's list of CUDA GPUs.
_CAPABILITIES = (
    (r"\bGB300\b|\bB300\b", 103),
    (r"\bGB200\b|\bB200\b|\bB100\b", 100),
    (r"\bRTX PRO \d+ Blackwell\b", 120),
    (r"\bGH200\b|\bH200\b|\bH100\b|\bH800\b|\bH20\b", 90),
    (r"\bL40S?\b|\bL4\b|\bL20\b|\bRTX \w+ Ada\b", 89),
    (r"\bA10G?\b|\bA40\b|\bA16\b|\bA2\b", 86),
    (r"\bA100\b|\bA800\b|\bA30\b", 80),
    (r"\bT4\b", 75),
    (r"\bV100\b", 70),
)
#: Nothing larger than this is read of a section, in bytes.
_LARGEST = 1 << 30


@dataclass(frozen=True)
class DeviceCode:
    """The CUDA code in a library. Capabilities are without the dot: 90 is 9.0.

    :param cubins: the capabilities for which it contains machine code.
    :param ptx: the capabilities for which it contains PTX, which the driver compiles for newer GPUs.
    """

    path: str
    cubins: tuple[int, ...]
    ptx: tuple[int, ...]

    def runs_on(self, capability: int) -> bool:
        """Return whether a GPU can run the code: the same major and no newer minor version, or PTX that is no newer."""
        fits = any(cubin // 10 == capability // 10 and cubin <= capability for cubin in self.cubins)
        return fits or any(version <= capability for version in self.ptx)

    @property
    def text(self) -> str:
        """The capabilities as text: ``9.0, 10.0 and PTX of 9.0``."""
        parts = [", ".join(map(dotted, self.cubins))] if self.cubins else []
        return " and ".join([*parts, *([f"PTX of {', '.join(map(dotted, self.ptx))}"] if self.ptx else [])])


def dotted(capability: int) -> str:
    """Return a compute capability as NVIDIA writes it: 103 is ``10.3``."""
    return f"{capability // 10}.{capability % 10}"


def capability(name: str) -> int | None:
    """Return the compute capability of a GPU; None if its name is not known.

    :param name: the name in the driver, such as ``NVIDIA H100 80GB HBM3``, or in a profile, such as ``H100``.
    """
    return next((number for pattern, number in _CAPABILITIES if re.search(pattern, name, re.IGNORECASE)), None)


def device_code(path: str) -> DeviceCode | None:
    """Return the CUDA code in a library; None if it contains none.

    :raises OSError: the file cannot be read.
    :raises ValueError: it has CUDA code, or names its section, and is not a library or is damaged.
    """
    with open(path, "rb") as file:
        if not _mentions(file, _SECTION):
            return None
        try:
            section = ELFFile(file).get_section_by_name(_SECTION)
            content = b""
            if section is not None:
                file.seek(section["sh_offset"])
                content = file.read(min(section["sh_size"], _LARGEST))
        except Exception as error:  # pyelftools does not say what a damaged file makes it raise
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    parts = set(_parts(content))
    if not parts:
        return None
    cubins, ptx = (
        tuple(sorted(arch for kind, arch in parts if kind == kind_of_code)) for kind_of_code in (_CUBIN, _PTX)
    )
    return DeviceCode(path, cubins, ptx)


def _mentions(file: BinaryIO, section: str) -> bool:
    """Return whether the name of a section is in a file."""
    if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
        return False
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(section.encode()) >= 0


def _parts(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield kind and capability of each part of each bundle. Bundles are aligned to 8 bytes."""
    start = 0
    while start + _BUNDLE.size <= len(content):
        magic, _, header, size = _BUNDLE.unpack_from(content, start)
        if magic != _MAGIC:
            start += 8
            continue
        part, end = start + header, min(start + header + size, len(content))
        while part + _PART.size <= end:
            kind, _, length, data, arch = _PART.unpack_from(content, part)
            if length + data == 0:
                break
            yield kind, arch
            part += length + data
        start = max(end, start + 8)
