# SPDX-License-Identifier: Apache-2.0
"""What a shared library needs and defines, of real libraries and of damaged ones."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from pytest_nixl.host.elf import Elf, find, loader_cache, missing, read_elf


def _needs_versions(path: Path) -> bool:
    with path.open("rb") as file:
        return ELFFile(file).get_section_by_name(".gnu.version_r") is not None


#: Libraries that each test environment has, the smallest first.
REAL = sorted(filter(_needs_versions, Path(np.__file__).parent.rglob("*.so")), key=lambda path: path.stat().st_size)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[ELFFile]:
    """Return the sections of a copy of a real library, whose path is ``tmp_path / "lib.so"``."""
    path = tmp_path / "lib.so"
    path.write_bytes(REAL[0].read_bytes())
    with path.open("rb") as file:
        yield ELFFile(file)


def read(path: Path, content: bytes | bytearray) -> Elf:
    path.write_bytes(content)
    read_elf.cache_clear()
    return read_elf(str(path))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_the_segments_say_the_same_as_the_sections(path: Path) -> None:
    read = read_elf(str(path))
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic, versions = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".gnu.version_r")
        assert isinstance(dynamic, DynamicSection)
        needed = [getattr(tag, "needed") for tag in dynamic.iter_tags("DT_NEEDED")]  # noqa: B009
        assert isinstance(versions, GNUVerNeedSection)
        expected = {need.name: tuple(name.name for name in names) for need, names in versions.iter_versions()}
    assert list(read.needed) == needed
    assert dict(read.versions) == expected
    assert needed
    assert expected


def test_a_renamed_library_keeps_its_soname(tmp_path: Path) -> None:
    path = find("libc.so.6", (), {})
    assert path is not None
    assert read(tmp_path / "renamed.so", Path(path).read_bytes()).soname == "libc.so.6"


LISTED = """3 libs found in cache `/etc/ld.so.cache'
\tlibx.so.1 (libc6,x86-64, hwcap: "x86-64-v3") => /fast/libx.so.1
\tlibx.so.1 (libc6,x86-64) => /usr/with space/libx.so.1
\tliby.so (libc6) => /usr/lib/liby.so
a libz.so (libc6) => /usr/lib/libz.so
\tlibz.so => /usr/lib/libz.so
\t (libc6) => /usr/lib/unnamed.so
\tlibz.so (libc6) =>\x20
"""


def test_the_cache_of_the_loader_is_that_of_the_first_ldconfig_that_runs(tmp_path: Path) -> None:
    fails, lists = tmp_path / "fails", tmp_path / "lists"
    fails.write_text("#!/bin/sh\necho '\tlibw.so (libc6) => /libw.so'\nexit 1\n")
    lists.write_text(f"#!/bin/sh\n[ $1 = -p ] && cat <<'END'\n{LISTED}END\n")
    for program in (fails, lists):
        program.chmod(0o755)
    expected = {"libx.so.1": ("/fast/libx.so.1", "/usr/with space/libx.so.1"), "liby.so": ("/usr/lib/liby.so",)}
    assert loader_cache((str(tmp_path / "none"), str(fails), str(lists), str(fails))) == expected
    assert loader_cache((str(fails),)) == {}


def test_a_library_without_section_headers_is_read(library: ELFFile, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    whole = read_elf(str(path))
    content = bytearray(path.read_bytes())
    content[40:48] = bytes(8)  # e_shoff
    content[60:64] = bytes(4)  # e_shnum and e_shstrndx
    assert read(path, content) == whole


def test_each_version_that_a_library_lacks_is_named(library: ELFFile, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    content = path.read_bytes()
    versions = {version for listed in read_elf(str(path)).versions.values() for version in listed}
    assert len(versions) > 1
    for version in versions:
        strange = version[:-1] + "X"
        path.write_bytes(content.replace(f"\0{version}\0".encode(), f"\0{strange}\0".encode()))
        read_elf.cache_clear()
        lacking = missing(str(path), {})
        assert {(lack.needed_by, lack.versions) for lack in lacking} == {(str(path), (strange,))}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a 64-bit shared library"),
        (b"GROUP ( /lib/libm.so.6 )\n", "is not a 64-bit shared library"),
        (b"\x7fELF\x01\x01" + bytes(60), "is not a 64-bit shared library"),
        (b"\x7fELF\x02\x01", "is damaged"),
    ],
    ids=["empty", "linker script", "32 bits", "cut"],
)
def test_a_file_that_is_no_library_is_a_sentence(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path}/lib.so {reason}"):
        read(tmp_path / "lib.so", content)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lib.so")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_elf(str(tmp_path / "lib.so"))


def test_a_chain_that_does_not_move_on_ends(library: ELFFile, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    content = bytearray(path.read_bytes())
    dynamic, versions = library.get_section_by_name(".dynamic"), library.get_section_by_name(".gnu.version_r")
    assert isinstance(dynamic, DynamicSection)
    assert versions is not None
    [at] = [number for number, tag in enumerate(dynamic.iter_tags()) if tag.entry.d_tag == "DT_VERNEEDNUM"]
    count = dynamic["sh_offset"] + 16 * at + 8
    content[count : count + 8] = (1 << 40).to_bytes(8, "little")
    following = versions["sh_offset"] + 12
    content[following : following + 4] = bytes(4)
    with pytest.raises(ValueError, match=r"is damaged: .* more than \d+ entries"):
        read(path, content)


@pytest.mark.long
def test_a_damaged_library_is_read_or_refused(library: ELFFile, tmp_path: Path) -> None:
    path, chance = tmp_path / "lib.so", random.Random(1)
    good = path.read_bytes()
    places = [range(64 + 56 * library["e_phnum"])]
    for name in (".dynamic", ".gnu.version_r"):
        section = library.get_section_by_name(name)
        assert section is not None
        places.append(range(section["sh_offset"], section["sh_offset"] + section["sh_size"]))
    refused: list[str] = []
    for _ in range(600):
        content = bytearray(good[: chance.choice((len(good), chance.randrange(64, len(good))))])
        for _ in range(chance.randint(1, 4)):
            place = min(chance.choice(chance.choice(places)), len(content) - 1)
            content[place] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        try:
            read(path, content)
        except ValueError as error:
            refused.append(str(error))
    assert 60 < len(refused) < 600
    assert all(message.startswith(str(path)) for message in refused)
