# SPDX-License-Identifier: Apache-2.0
"""Find missing dependencies of shared libraries by reading their files, without loading them."""

from __future__ import annotations

import contextlib
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
from struct import Struct
from typing import BinaryIO

#: The most entries that are read of one file. libc, which defines many versions, has about 150.
_MOST_ENTRIES = 5_000
#: The longest name or list of folders in a file, in bytes.
_LONGEST_TEXT = 1 << 16
#: What is read of a text at first, in bytes.
_USUAL_TEXT = 128
_WEAK = 2  # the flag of a symbol version that may be missing
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 14, 15, 29
_DT_VERDEF, _DT_VERDEFNUM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_DEBIAN = f"{platform.machine()}-linux-gnu"
#: Where the loader looks without its cache, which a minimal image does not have: on Debian first in the folders of the
#: architecture.
_DEFAULT_FOLDERS = (f"/lib/{_DEBIAN}", f"/usr/lib/{_DEBIAN}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True)
class Elf:
    """The dynamic section of a shared library.

    :param needed: the sonames of the libraries that it needs.
    :param wanted: the symbol versions that it needs, by the soname that must define them.
    :param defined: the symbol versions that it defines.
    :param rpath: the folders of its RPATH, with ``$ORIGIN`` resolved; none if it has a RUNPATH, which replaces it.
    :param runpath: the folders of its RUNPATH, likewise.
    """

    path: str
    soname: str
    needed: tuple[str, ...]
    wanted: Mapping[str, tuple[str, ...]]
    defined: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]


@dataclass(frozen=True)
class MissingLibraries:
    """A library, or symbol versions of one, that another library needs and that are missing.

    :param soname: the library.
    :param needed_by: the path of the library that needs it.
    :param versions: the missing symbol versions; empty if the library itself is missing.
    :param found: the file that lacks the symbol versions.
    """

    soname: str
    needed_by: str
    versions: tuple[str, ...] = ()
    found: str = ""

    def __str__(self) -> str:
        by = os.path.basename(self.needed_by)
        if self.versions:
            return f"{self.found} lacks the symbol version {', '.join(self.versions)} that {by} needs"
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
            return _DynamicSection(file).read(os.path.abspath(path))
        except (OSError, ValueError, OverflowError, struct.error) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None


class _DynamicSection:
    """What the dynamic loader reads of a file, found as the loader finds it: through the segments.

    The layouts are those of ``elf.h``. pyelftools has them, too, but each process that looks for missing libraries
    would take 0.2 s to import it.
    """

    _HEADER = Struct("<32xQ14xHH")  # e_phoff, e_phentsize, e_phnum
    _SEGMENT = Struct("<I4xQQ8xQ")  # p_type, p_offset, p_vaddr, p_filesz
    _TAG = Struct("<qQ")  # d_tag, d_val
    _NEED = Struct("<2xHIII")  # vn_cnt, vn_file, vn_aux, vn_next
    _NEEDED_VERSION = Struct("<4xH2xII")  # vna_flags, vna_name, vna_next
    _DEFINITION = Struct("<12xII")  # vd_aux, vd_next
    _DEFINED_VERSION = Struct("<I")  # vda_name

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = _MOST_ENTRIES
        first, size, count = self._parse(self._HEADER, 0)
        self._segments = [self._parse(self._SEGMENT, first + number * size) for number in range(count)]
        self._tags: dict[int, list[int]] = {}
        for kind, start, _, length in self._segments:
            if kind == _PT_DYNAMIC:
                self._read_tags(start, length)
        self._strings = self._place(_DT_STRTAB)

    def read(self, path: str) -> Elf:
        """Return its content.

        :param path: the absolute path of the file.
        """
        [soname] = self._texts(_DT_SONAME)[-1:] or [os.path.basename(path)]
        runpath = self._texts(_DT_RUNPATH)[-1:]
        rpath = [] if runpath else self._texts(_DT_RPATH)[-1:]
        return Elf(
            path=path,
            soname=soname,
            needed=tuple(self._texts(_DT_NEEDED)),
            wanted=dict(self._wanted()),
            defined=tuple(self._defined()),
            rpath=_folders(rpath, path),
            runpath=_folders(runpath, path),
        )

    def _parse(self, struct: Struct, start: int) -> tuple[int, ...]:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {_MOST_ENTRIES} entries")
        self._file.seek(start)
        return struct.unpack(self._file.read(struct.size))

    def _read_tags(self, start: int, length: int) -> None:
        for position in range(start, start + length, self._TAG.size):
            tag, value = self._parse(self._TAG, position)
            if tag == _DT_NULL:
                return
            self._tags.setdefault(tag, []).append(value)

    def _place(self, tag: int) -> int:
        """Return the offset in the file of the table to which a tag points; 0 without the tag."""
        if tag not in self._tags:
            return 0
        address = self._tags[tag][-1]
        for kind, start, first, length in self._segments:
            if kind == _PT_LOAD and 0 <= address - first < length:
                return start + address - first
        raise ValueError(f"the tag {tag:#x} points to no segment")

    def _text(self, offset: int) -> str:
        for size in (_USUAL_TEXT, _LONGEST_TEXT):
            self._file.seek(self._strings + offset)
            text, end, _ = self._file.read(size).partition(b"\0")
            if end:
                return text.decode(errors="replace")
        raise ValueError("a text does not end")

    def _texts(self, tag: int) -> list[str]:
        return [self._text(offset) for offset in self._tags.get(tag, ())]

    def _chain(self, struct: Struct, start: int, count: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the entries of a chain, each with its offset in the file. The last field leads to the next entry."""
        for _ in range(count):
            entry = self._parse(struct, start)
            yield start, entry
            start += entry[-1]

    def _wanted(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        [count] = self._tags.get(_DT_VERNEEDNUM, [0])[-1:]
        for start, (versions, file, first, _) in self._chain(self._NEED, self._place(_DT_VERNEED), count):
            chain = self._chain(self._NEEDED_VERSION, start + first, versions)
            yield self._text(file), tuple(self._text(name) for _, (flags, name, _) in chain if not flags & _WEAK)

    def _defined(self) -> Iterator[str]:
        [count] = self._tags.get(_DT_VERDEFNUM, [0])[-1:]
        for start, (first, _) in self._chain(self._DEFINITION, self._place(_DT_VERDEF), count):
            [name] = self._parse(self._DEFINED_VERSION, start + first)
            yield self._text(name)


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
def _cache() -> Mapping[str, tuple[str, ...]]:
    """Return the libraries in the loader's cache, by soname."""
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=10, check=True).stdout
            found: dict[str, tuple[str, ...]] = {}
            for soname, file in re.findall(r"^\s*(\S+) \([^)]*\) => (\S+)$", listed, re.MULTILINE):
                found[soname] = (*found.get(soname, ()), file)
            return found
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
    for file in loaded:
        with contextlib.suppress(OSError, ValueError):
            if read_elf(file).soname == soname:
                return file
    folders = [*rpath, *filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *paths]
    candidates = [f"{folder}/{soname}" for folder in folders]
    candidates += [*_cache().get(soname, ()), *(f"{folder}/{soname}" for folder in _DEFAULT_FOLDERS)]
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
    found: dict[str, str] = {}
    whole = read_elf(path)
    # Each with the RPATHs of itself and of the libraries through which it was loaded.
    waiting = deque([(whole, (*whole.rpath, *_rpath_of_program()))])
    while waiting:
        elf, rpath = waiting.popleft()
        for soname in elf.needed:
            file = found.get(soname)
            if file is None:
                file = find(soname, elf.runpath, environ, loaded, () if elf.runpath else rpath)
                if file is not None:
                    need = read_elf(file)
                    if file not in found.values():
                        waiting.append((need, (*need.rpath, *rpath)))
                    found[soname] = file
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
        absent = tuple(version for version in elf.wanted.get(soname, ()) if version not in defined)
        if absent and defined:
            lacking[MissingLibraries(soname, elf.path, absent, file)] = None
    return tuple(lacking)
