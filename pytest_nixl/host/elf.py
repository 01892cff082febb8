# SPDX-License-Identifier: Apache-2.0
"""Read shared libraries without loading them: which dependencies are missing, and for which GPUs they have code."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import re
import stat
import struct
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import BinaryIO, TypeVar

from elftools.construct.lib.container import Container
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection
from elftools.elf.sections import Section, StringTableSection

SectionT = TypeVar("SectionT", bound=Section)

#: The most entries that are read of one file. libc, which defines many versions, has about 150.
_MOST_ENTRIES = 5_000
_WEAK = 2  # the flag of a symbol version that may be missing
_DEBIAN = f"{platform.machine()}-linux-gnu"
#: Where the loader looks without its cache, which a minimal image does not have: on Debian first in the folders of the
#: architecture.
_DEFAULT_FOLDERS = (f"/lib/{_DEBIAN}", f"/usr/lib/{_DEBIAN}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")

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
class Elf:
    """The dynamic section of a shared library.

    :param needed: the sonames of the libraries that it needs.
    :param versions: the symbol versions that it needs, by the soname that must define them.
    :param defined: the symbol versions that it defines.
    :param rpath: the folders of its RPATH, with ``$ORIGIN`` resolved; none if it has a RUNPATH, which replaces it.
    :param runpath: the folders of its RUNPATH, likewise.
    """

    path: str
    soname: str
    needed: tuple[str, ...]
    versions: Mapping[str, tuple[str, ...]]
    defined: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]


@dataclass(frozen=True)
class MissingLibraries:
    """A library, or symbol versions of one, that another library needs and that are missing.

    :param soname: the library.
    :param needed_by: the path of the library that needs it.
    :param versions: the missing symbol versions; empty if the library itself is missing.
    :param file: the file that lacks the symbol versions.
    """

    soname: str
    needed_by: str
    versions: tuple[str, ...] = ()
    file: str = ""

    def __str__(self) -> str:
        by = os.path.basename(self.needed_by)
        if self.versions:
            return f"{self.file} lacks the symbol version {', '.join(self.versions)} that {by} needs"
        return f"{self.soname}, which {by} needs, was not found"


@lru_cache(maxsize=1024)
def read_elf(path: str) -> Elf:
    """Read the dynamic section of a shared library.

    :raises OSError: the file cannot be opened.
    :raises ValueError: it is not a 64-bit little-endian ELF file, or it is damaged.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit shared library")
        try:
            return _read(ELFFile(file), os.path.abspath(path))
        except Exception as error:  # pyelftools raises errors of many kinds
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _read(elf: ELFFile, path: str) -> Elf:
    """Read what the dynamic loader reads of a file, found as the loader finds it: through the segments.

    :param path: the absolute path of the file.
    """
    dynamic = next(elf.iter_segments("PT_DYNAMIC"), None)
    if dynamic is None:
        return Elf(path, os.path.basename(path), (), {}, (), (), ())
    assert isinstance(dynamic, DynamicSegment)
    tags: dict[str, list[int]] = {}
    for tag in islice(dynamic.iter_tags(), _MOST_ENTRIES):
        tags.setdefault(tag.entry.d_tag, []).append(tag.entry.d_val)

    def table(kind: type[SectionT], tag: str, count: int = 0, *arguments: Section) -> SectionT:
        """Return the table to which a tag points as a section, which a stripped file does not have."""
        _, offset = dynamic.get_table_offset(tag)
        if offset is None:
            raise ValueError(f"{tag} points to no segment")
        header = Container(sh_offset=offset, sh_info=count, sh_flags=0, sh_size=0, sh_addralign=1)
        return kind(header, "", elf, *arguments)

    def texts(tag: str) -> list[str]:
        return [strings.get_string(offset) for offset in tags.get(tag, ())]

    strings = table(StringTableSection, "DT_STRTAB")
    sections: dict[str, tuple[str, ...]] = {}
    defined: list[str] = []
    if "DT_VERNEED" in tags:
        needs = table(GNUVerNeedSection, "DT_VERNEED", _count(tags["DT_VERNEEDNUM"]), strings)
        for need, versions in needs.iter_versions():
            sections[need.name or ""] = tuple(version.name for version in versions if not version["vna_flags"] & _WEAK)
    if "DT_VERDEF" in tags:
        definitions = table(GNUVerDefSection, "DT_VERDEF", _count(tags["DT_VERDEFNUM"]), strings)
        defined = [next(iter(names)).name for _, names in definitions.iter_versions()]
    runpath = texts("DT_RUNPATH")[-1:]
    rpath = [] if runpath else texts("DT_RPATH")[-1:]
    return Elf(
        path=path,
        soname=(texts("DT_SONAME") or [os.path.basename(path)])[-1],
        needed=tuple(texts("DT_NEEDED")),
        versions=sections,
        defined=tuple(defined),
        rpath=_folders(rpath, path),
        runpath=_folders(runpath, path),
    )


def _count(values: Sequence[int]) -> int:
    """Return the last number of entries. :raises ValueError: no library has so many."""
    if values[-1] > _MOST_ENTRIES:
        raise ValueError(f"it has more than {_MOST_ENTRIES} entries")
    return values[-1]


def _folders(lists: Sequence[str], path: str) -> tuple[str, ...]:
    """Return the folders of lists of a file, with ``$ORIGIN`` resolved.

    :param path: the absolute path of the file.
    """
    origin = os.path.dirname(os.path.realpath(path))
    return tuple(
        os.path.normpath(re.sub(r"\$ORIGIN|\$\{ORIGIN\}", lambda _: origin, part))
        for listed in lists
        for part in listed.split(":")
        if part
    )


@lru_cache(maxsize=1)
def loader_cache(programs: tuple[str, ...] = ("/sbin/ldconfig", "/usr/sbin/ldconfig")) -> Mapping[str, tuple[str, ...]]:
    """Return the libraries in the loader's cache, by soname; of each the files in the loader's order.

    :param programs: the places of ldconfig; the first that runs is asked.
    """
    for program in programs:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=10, check=True).stdout
            paths: dict[str, tuple[str, ...]] = {}
            for soname, file in re.findall(r"^\s*(\S+) \([^)]*\) => (.+)", listed, re.MULTILINE):
                paths[soname] = (*paths.get(soname, ()), file)
            return paths
    return {}


def find(
    soname: str,
    paths: Sequence[str],
    environ: Mapping[str, str],
    loaded: Sequence[str] = (),
    rpath: Sequence[str] = (),
) -> str | None:
    """Return the file that the dynamic loader would load for a soname; None if there is none.

    :param soname: the library.
    :param paths: the RUNPATH of the library that needs it, whose folders come after LD_LIBRARY_PATH.
    :param environ: the environment variables, for LD_LIBRARY_PATH.
    :param loaded: files that the process has already loaded, which come first.
    :param rpath: the RPATH of the library that needs it, and of those that loaded that one, whose folders come before
        LD_LIBRARY_PATH. None count if the library that needs it has a RUNPATH.
    """
    # To read all loaded files would take longer than to load the plugins: the name of a file begins like its soname.
    name = soname.partition(".so")[0]
    for file in (path for path in loaded if os.path.basename(path).startswith(name)):
        with contextlib.suppress(OSError, ValueError):
            if read_elf(file).soname == soname:
                return file
    folders = [*rpath, *filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *paths]
    candidates = [f"{folder}/{soname}" for folder in folders]
    candidates += [*loader_cache().get(soname, ()), *(f"{folder}/{soname}" for folder in _DEFAULT_FOLDERS)]
    for file in candidates:
        with contextlib.suppress(OSError, ValueError):
            return read_elf(file).path
    return None


def dependencies(
    path: str, environ: Mapping[str, str], loaded: Sequence[str] = ()
) -> Iterator[tuple[Elf, str, str | None]]:
    """Yield each dependency of a library, direct and indirect: what needs it, its soname, and the file or None.

    They are searched as the loader does, breadth first. A soname that was found once is the same file for all.

    :param path: the library.
    :param environ: the environment variables, for LD_LIBRARY_PATH.
    :param loaded: files that the process has already loaded.
    :raises OSError: the library cannot be read.
    :raises ValueError: it is not a library.
    """
    libraries: dict[str, str] = {}
    whole = read_elf(path)
    # Each with the RPATHs of itself and of the libraries through which it was loaded.
    waiting = deque([(whole, (*whole.rpath, *_rpath_of_program()))])
    while waiting:
        elf, rpath = waiting.popleft()
        for soname in elf.needed:
            file = libraries.get(soname)
            if file is None:
                file = find(soname, elf.runpath, environ, loaded, () if elf.runpath else rpath)
                if file is not None:
                    need = read_elf(file)
                    if file not in libraries.values():
                        waiting.append((need, (*need.rpath, *rpath)))
                    libraries[soname] = file
            yield elf, soname, file


def _rpath_of_program() -> tuple[str, ...]:
    """Return the RPATH of the program that runs, whose folders count for every library without a RUNPATH."""
    with contextlib.suppress(OSError, ValueError):
        return read_elf(os.path.realpath("/proc/self/exe")).rpath
    return ()


def missing(path: str, environ: Mapping[str, str], loaded: Sequence[str] = ()) -> tuple[MissingLibraries, ...]:
    """Return the missing dependencies of a library, direct and indirect, each once.

    The parameters and errors are those of :func:`dependencies`.
    """
    lacking: dict[MissingLibraries, None] = {}
    for elf, soname, file in dependencies(path, environ, loaded):
        if file is None:
            lacking[MissingLibraries(soname, elf.path)] = None
            continue
        defined = read_elf(file).defined
        absent = tuple(version for version in elf.versions.get(soname, ()) if version not in defined)
        if absent and defined:
            lacking[MissingLibraries(soname, elf.path, absent, file)] = None
    return tuple(lacking)


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
