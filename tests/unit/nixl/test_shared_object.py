# SPDX-License-Identifier: Apache-2.0
"""Shared libraries that are written without a compiler. The loader takes one in ``test_driver_standin.py``."""

from __future__ import annotations

import io
import struct

import pytest
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

from pytest_nixl.nixl.backends.driver_standin import shared_object

#: The ELF machine of each processor, and the code that returns 100 after a landing pad.
MACHINES = {
    "x86_64": ("EM_X86_64", bytes.fromhex("f30f1efa b864000000 c3 909090909090")),
    "aarch64": ("EM_AARCH64", struct.pack("<4I", 0xD503245F, 0x52800C80, 0xD65F03C0, 0xD503201F)),
}
#: Where the parts of the library begin, in bytes, with two functions and 19 bytes of names.
CODE, HASHES, SYMBOLS, STRINGS, DYNAMIC = 64 + 4 * 56, 304, 336, 408, 432
#: The kernel maps pages of up to 64 KiB, and what is written must be on another page than what is executed.
PAGE = 0x10000


@pytest.mark.parametrize("machine", MACHINES)
def test_a_library_has_its_name_its_functions_and_no_page_that_is_written_and_executed(machine: str) -> None:
    content = shared_object("libany.so.1", ["f1", "f2"], 100, machine)
    elf = ELFFile(io.BytesIO(content))
    name, code = MACHINES[machine]
    assert dict(elf.header) | {"e_ident": None} == {
        **{"e_ident": None, "e_type": "ET_DYN", "e_machine": name, "e_version": "EV_CURRENT", "e_entry": 0},
        **{"e_phoff": 64, "e_shoff": 0, "e_flags": 0, "e_ehsize": 64, "e_phentsize": 56, "e_phnum": 4},
        **{"e_shentsize": 0, "e_shnum": 0, "e_shstrndx": 0},
    }
    # The kind, what is permitted (4: read, 2: write, 1: execute), offset, addresses, sizes and alignment.
    assert [tuple(segment.header.values()) for segment in elf.iter_segments()] == [
        ("PT_LOAD", 4 | 1, 0, 0, 0, DYNAMIC, DYNAMIC, PAGE),
        ("PT_LOAD", 4 | 2, DYNAMIC, DYNAMIC + PAGE, DYNAMIC + PAGE, 7 * 16, 7 * 16, PAGE),
        ("PT_DYNAMIC", 4 | 2, DYNAMIC, DYNAMIC + PAGE, DYNAMIC + PAGE, 7 * 16, 7 * 16, 8),
        ("PT_GNU_STACK", 4 | 2, 0, 0, 0, 0, 0, 16),
    ]
    [dynamic] = (segment for segment in elf.iter_segments() if isinstance(segment, DynamicSegment))
    assert [(tag.entry.d_tag, tag.entry.d_val) for tag in dynamic.iter_tags()] == [
        *[("DT_SONAME", 1), ("DT_HASH", HASHES), ("DT_STRTAB", STRINGS), ("DT_SYMTAB", SYMBOLS)],
        *[("DT_STRSZ", 19), ("DT_SYMENT", 24), ("DT_NULL", 0)],
    ]
    assert struct.unpack("<6I", content[HASHES : HASHES + 24]) == (1, 3, 1, 0, 2, 0), "one bucket has all symbols"
    assert content[SYMBOLS:STRINGS] == bytes(24) + b"".join(
        struct.pack("<IBBHQQ", offset, 0x12, 0, 1, CODE, 16) for offset in (13, 16)
    )
    assert content[STRINGS:DYNAMIC] == b"\0libany.so.1\0f1\0f2\0".ljust(DYNAMIC - STRINGS, b"\0")
    assert (content[CODE:HASHES], len(content)) == (code, DYNAMIC + 7 * 16)
