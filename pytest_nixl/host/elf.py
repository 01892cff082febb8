# SPDX-License-Identifier: Apache-2.0
"""Find missing dependencies of shared libraries by reading their files, without loading them."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

_DYNAMIC = 2
_NULL, _NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 0, 1, 5, 10, 14, 15, 29
_VERDEF, _VERDEFNUM, _VERNEED, _VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_DEFAULT_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True)
class Elf:
    """The dynamic section of a shared library.

    :param needed: the sonames of the libraries that it needs.
    :param wanted: the symbol versions that it needs, by the soname that must define them.
    :param defined: the symbol versions that it defines.
    :param paths: its RUNPATH or RPATH, with ``$ORIGIN`` resolved.
    """

    path: str
    soname: str
    needed: tuple[str, ...]
    wanted: Mapping[str, tuple[str, ...]]
    defined: tuple[str, ...]
    paths: tuple[str, ...]


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

    :raises OSError: the file cannot be read.
    :raises ValueError: it is not a 64-bit little-endian ELF file, or it is damaged.
    """
    with open(path, "rb") as file:
        content = file.read()
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is not a 64-bit shared library")
    try:
        return _parse(os.path.abspath(path), content)
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None


def _parse(path: str, content: bytes) -> Elf:
    table, size, count = struct.unpack_from("<Q", content, 32)[0], *struct.unpack_from("<HH", content, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", content, table + number * size) for number in range(count)]

    def place(address: int) -> int:
        """Return the file offset of a load address."""
        for kind, _, offset, start, _, length, _, _ in headers:
            if kind == 1 and start <= address < start + length:
                return int(offset + address - start)
        raise KeyError(address)

    entries: list[tuple[int, int]] = []
    for kind, _, offset, _, _, length, _, _ in headers:
        if kind == _DYNAMIC:
            for position in range(offset, offset + length, 16):
                tag, value = struct.unpack_from("<QQ", content, position)
                if tag == _NULL:
                    break
                entries.append((tag, value))
    tags = dict(entries)
    strings = place(tags[_STRTAB]) if _STRTAB in tags else 0

    def text(offset: int) -> str:
        start = strings + offset
        return content[start : content.index(b"\0", start)].decode(errors="replace")

    paths = [text(tags[tag]) for tag in (_RUNPATH, _RPATH) if tag in tags][:1]
    origin = os.path.dirname(os.path.realpath(path))
    return Elf(
        path=path,
        soname=text(tags[_SONAME]) if _SONAME in tags else os.path.basename(path),
        needed=tuple(text(value) for tag, value in entries if tag == _NEEDED),
        wanted=dict(_wanted(content, tags, place, text)),
        defined=tuple(_defined(content, tags, place, text)),
        paths=tuple(
            os.path.normpath(re.sub(r"\$ORIGIN|\$\{ORIGIN\}", origin, part))
            for listed in paths
            for part in listed.split(":")
            if part
        ),
    )


def _wanted(
    content: bytes, tags: Mapping[int, int], place: object, text: object
) -> Iterator[tuple[str, tuple[str, ...]]]:
    assert callable(place)
    assert callable(text)
    position = place(tags[_VERNEED]) if _VERNEED in tags else 0
    for _ in range(tags.get(_VERNEEDNUM, 0)):
        _, count, file, first, following = struct.unpack_from("<HHIII", content, position)
        versions, entry = [], position + first
        for _ in range(count):
            _, flags, _, name, further = struct.unpack_from("<IHHII", content, entry)
            if not flags & 2:  # a weak version may be missing
                versions.append(text(name))
            entry += further
        yield text(file), tuple(versions)
        position += following


def _defined(content: bytes, tags: Mapping[int, int], place: object, text: object) -> Iterator[str]:
    assert callable(place)
    assert callable(text)
    position = place(tags[_VERDEF]) if _VERDEF in tags else 0
    for _ in range(tags.get(_VERDEFNUM, 0)):
        _, _, _, _, _, first, following = struct.unpack_from("<HHHHIII", content, position)
        yield text(struct.unpack_from("<I", content, position + first)[0])
        position += following


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


def find(soname: str, paths: Sequence[str], environ: Mapping[str, str], loaded: Sequence[str] = ()) -> str | None:
    """Return the file that the dynamic loader would load for a soname; None if there is none.

    :param soname: the library.
    :param paths: the RUNPATH of the library that needs it.
    :param environ: the environment variables, for LD_LIBRARY_PATH.
    :param loaded: files that the process has already loaded, which come first.
    """
    for file in loaded:
        with contextlib.suppress(OSError, ValueError):
            if read_elf(file).soname == soname:
                return file
    folders = [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *paths]
    candidates = [f"{folder}/{soname}" for folder in folders]
    candidates += [*_cache().get(soname, ()), *(f"{folder}/{soname}" for folder in _DEFAULT_FOLDERS)]
    for file in candidates:
        with contextlib.suppress(OSError, ValueError):
            return read_elf(file).path
    return None


def missing(path: str, environ: Mapping[str, str], loaded: Sequence[str] = ()) -> tuple[MissingLibraries, ...]:
    """Return the missing dependencies of a library, direct and indirect, each once.

    :param path: the library.
    :param environ: the environment variables, for LD_LIBRARY_PATH.
    :param loaded: files that the process has already loaded.
    :raises OSError: the library cannot be read.
    :raises ValueError: it is not a library.
    """
    lacking: dict[MissingLibraries, None] = {}
    seen: set[str] = set()
    waiting = [read_elf(path)]
    while waiting:
        elf = waiting.pop()
        for soname in elf.needed:
            file = find(soname, elf.paths, environ, loaded)
            if file is None:
                lacking[MissingLibraries(soname, elf.path)] = None
                continue
            need = read_elf(file)
            absent = tuple(version for version in elf.wanted.get(soname, ()) if version not in need.defined)
            if absent and need.defined:
                lacking[MissingLibraries(soname, elf.path, absent, file)] = None
            if file not in seen:
                seen.add(file)
                waiting.append(need)
    return tuple(lacking)
