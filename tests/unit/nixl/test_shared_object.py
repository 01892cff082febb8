# SPDX-License-Identifier: Apache-2.0
"""Shared libraries that are written without a compiler: the loader takes them, and other tools read them."""

from __future__ import annotations

import io
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

from pytest_nixl.nixl.backends.driver_standin import shared_object, supported

#: What ends each function, after its landing pad: "return 100" of both machines.
RETURNS_100 = {"x86_64": bytes.fromhex("b864000000c3"), "aarch64": struct.pack("<2I", 0x52800C80, 0xD65F03C0)}


def symbols(content: bytes) -> dict[str, bytes]:
    """Return the code of each function, by its name."""
    elf = ELFFile(io.BytesIO(content))
    [dynamic] = (segment for segment in elf.iter_segments() if isinstance(segment, DynamicSegment))
    addresses = {}
    for symbol in dynamic.iter_symbols():
        if symbol.name:
            start = symbol["st_value"]
            addresses[symbol.name] = content[start : start + symbol["st_size"]]
    return addresses


@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_function_has_the_code_that_returns_the_number(machine: str, count: int) -> None:
    names = [f"function{number}" for number in range(count)]
    content = shared_object("libany.so.1", names, 100, machine)
    addresses = symbols(content)
    assert list(addresses) == names
    assert all(RETURNS_100[machine] in code for code in addresses.values())
    elf = ELFFile(io.BytesIO(content))
    assert elf.get_machine_arch() == {"x86_64": "x64", "aarch64": "AArch64"}[machine]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_no_segment_can_be_written_and_executed_and_the_stack_is_not_executable(machine: str) -> None:
    elf = ELFFile(io.BytesIO(shared_object("libany.so.1", ["one"], 1, machine)))
    flags = {segment["p_type"]: segment["p_flags"] for segment in elf.iter_segments()}
    assert all(flag & 3 != 3 for flag in flags.values())
    assert not flags["PT_GNU_STACK"] & 1
    loaded = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_LOAD"]
    # The kernel maps pages of up to 64 KiB: offset and address must agree within a page.
    assert all((load_segment["p_vaddr"] - load_segment["p_offset"]) % 0x10000 == 0 for load_segment in loaded)
    assert loaded[1]["p_vaddr"] // 0x10000 > (loaded[0]["p_memsz"] - 1) // 0x10000


@pytest.mark.skipif(not supported(platform.machine()), reason="no code is written for this processor")
def test_loader_finds_it_by_its_soname_and_each_function_answers(tmp_path: Path) -> None:
    names = [f"answer{number}" for number in range(300)]
    path = tmp_path / "under-another-name.so"
    path.write_bytes(shared_object("libanswers.so.7", names, 100, platform.machine()))
    # In another process: a library stays loaded until its process ends.
    script = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "found = ctypes.CDLL('libanswers.so.7')\n"
        "print({getattr(found, f'answer{number}')(None, 5) for number in range(300)}, hasattr(found, 'other'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{100} False\n", "")
