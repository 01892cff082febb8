# SPDX-License-Identifier: Apache-2.0
"""Find missing dependencies of shared libraries by reading their files, without loading them."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import stat
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

#: The most entries that are read of one file. libc, which defines many versions, has about 150.
_MOST_ENTRIES = 5_000
#: The longest name or list of folders in a file, in bytes.
_LONGEST_TEXT = 1 << 16
_WEAK = 2  # the flag of a symbol version that may be missing
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
        except Exception as error:  # pyelftools does not say what a damaged file makes it raise
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None


@lru_cache(maxsize=16)
def _structs(kind: str = "", machine: str = "", abi: str = "") -> Any:
    """Return pyelftools' structures of a kind of file; without arguments, those of its header.

    They are made once for all files: to make them takes longer than to read a library with them.

    :param kind: the header's ``e_type``, ``machine`` its ``e_machine``, and ``abi`` its ``EI_OSABI``.
    """
    # pyelftools takes 0.2 s to import, and only the worker that looks for missing libraries needs it.
    from elftools.elf.structs import ELFStructs

    structs = ELFStructs(little_endian=True, elfclass=64)
    structs.create_basic_structs()
    if kind:
        structs.create_advanced_structs(kind, machine, abi)
    return structs


class _DynamicSection:
    """What the dynamic loader reads of a file, found as the loader finds it: through the segments.

    A library without section headers has segments too, and to read the headers of all sections takes longer.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = _MOST_ENTRIES
        elf = self._parse(_structs().Elf_Ehdr, 0)
        self._structs = _structs(elf["e_type"], elf["e_machine"], elf["e_ident"]["EI_OSABI"])
        starts = (elf["e_phoff"] + number * elf["e_phentsize"] for number in range(elf["e_phnum"]))
        self._segments = [self._parse(self._structs.Elf_Phdr, start) for start in starts]
        self._tags: dict[str, list[int]] = {}
        for segment in self._segments:
            if segment["p_type"] == "PT_DYNAMIC":
                self._read_tags(segment["p_offset"], segment["p_filesz"])
        self._strings = self._place("DT_STRTAB")

    def read(self, path: str) -> Elf:
        """Return its content.

        :param path: the absolute path of the file.
        """
        [soname] = self._texts("DT_SONAME")[-1:] or [os.path.basename(path)]
        runpath = self._texts("DT_RUNPATH")[-1:]
        rpath = [] if runpath else self._texts("DT_RPATH")[-1:]
        return Elf(
            path=path,
            soname=soname,
            needed=tuple(self._texts("DT_NEEDED")),
            wanted=dict(self._wanted()),
            defined=tuple(self._defined()),
            rpath=_folders(rpath, path),
            runpath=_folders(runpath, path),
        )

    def _parse(self, struct: Any, start: int) -> Any:
        from elftools.common.utils import struct_parse

        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {_MOST_ENTRIES} entries")
        return struct_parse(struct, self._file, start)

    def _read_tags(self, start: int, length: int) -> None:
        for position in range(start, start + length, self._structs.Elf_Dyn.sizeof()):
            entry = self._parse(self._structs.Elf_Dyn, position)
            if entry["d_tag"] == "DT_NULL":
                return
            self._tags.setdefault(entry["d_tag"], []).append(entry["d_val"])

    def _place(self, tag: str) -> int:
        """Return the offset in the file of the table to which a tag points; 0 without the tag."""
        if tag not in self._tags:
            return 0
        address = self._tags[tag][-1]
        for segment in self._segments:
            beyond = address - segment["p_vaddr"]
            if segment["p_type"] == "PT_LOAD" and 0 <= beyond < segment["p_filesz"]:
                return int(segment["p_offset"] + beyond)
        raise ValueError(f"{tag} points to no segment")

    def _text(self, offset: int) -> str:
        self._file.seek(self._strings + offset)
        text, end, _ = self._file.read(_LONGEST_TEXT).partition(b"\0")
        if not end:
            raise ValueError("a text does not end")
        return text.decode(errors="replace")

    def _texts(self, tag: str) -> list[str]:
        return [self._text(offset) for offset in self._tags.get(tag, ())]

    def _chain(self, struct: Any, start: int, count: int, following: str) -> Iterator[tuple[int, Any]]:
        """Yield the entries of a chain, each with its offset in the file.

        :param following: the field with the distance to the next entry.
        """
        for _ in range(count):
            entry = self._parse(struct, start)
            yield start, entry
            start += entry[following]

    def _wanted(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        structs, [count] = self._structs, self._tags.get("DT_VERNEEDNUM", [0])[-1:]
        for start, need in self._chain(structs.Elf_Verneed, self._place("DT_VERNEED"), count, "vn_next"):
            versions = self._chain(structs.Elf_Vernaux, start + need["vn_aux"], need["vn_cnt"], "vna_next")
            names = tuple(self._text(one["vna_name"]) for _, one in versions if not one["vna_flags"] & _WEAK)
            yield self._text(need["vn_file"]), names

    def _defined(self) -> Iterator[str]:
        structs, [count] = self._structs, self._tags.get("DT_VERDEFNUM", [0])[-1:]
        for start, definition in self._chain(structs.Elf_Verdef, self._place("DT_VERDEF"), count, "vd_next"):
            yield self._text(self._parse(structs.Elf_Verdaux, start + definition["vd_aux"])["vda_name"])


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
