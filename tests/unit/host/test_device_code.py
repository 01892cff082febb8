# SPDX-License-Identifier: Apache-2.0
"""The CUDA code in libraries: of a real plugin of NIXL, of made sections, and of damaged ones."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from helpers.copied_wheel import installed_library

from pytest_nixl.host.elf import DeviceCode, capability, device_code, dotted

PTX, CUBIN = 1, 2


def part(kind: int, arch: int, data: bytes = b"code" * 4) -> bytes:
    """Return a part of a bundle: a header of 64 bytes, and the code."""
    return struct.pack("<HHIQ12xI", kind, 0x101, 64, len(data), arch).ljust(64, b"\0") + data


def bundle(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path: Path, content: bytes) -> str:
    """Write a library with this content of ``.nv_fatbin``: a copy of a real one of NIXL, with its section replaced."""
    real = installed_library("libplugin_GPUNETIO.so")
    with real.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".nv_fatbin")
        assert section is not None
        start, size = section["sh_offset"], section["sh_size"]
    assert len(content) <= size
    data = bytearray(real.read_bytes())
    data[start : start + size] = content.ljust(size, b"\0")
    path.write_bytes(data)
    return str(path)


def test_code_of_a_real_plugin_is_found() -> None:
    code = device_code(str(installed_library("libplugin_GPUNETIO.so")))
    assert code is not None
    # What `cuobjdump --list-elf` lists for NIXL 1.5.1, and parts that every release for these GPUs has.
    assert {90, 100} <= set(code.cubins)
    assert code.runs_on(90)
    assert not code.runs_on(80)
    assert "9.0, 10.0" in code.text


def test_library_without_cuda_code_has_none() -> None:
    assert device_code(str(next(Path(np.__file__).parent.rglob("*.so")))) is None


def test_every_part_of_every_bundle_is_read(tmp_path: Path) -> None:
    first, second = bundle(part(CUBIN, 80), part(CUBIN, 90)), bundle(part(PTX, 90), part(CUBIN, 103, b"12345678"))
    path = library(tmp_path / "lib.so", first + bytes(16) + second)
    assert device_code(path) == DeviceCode(path, (80, 90, 103), (90,))
    assert device_code(library(tmp_path / "none.so", b"")) is None
    # Bundles without parts, and without a header.
    nothing = struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0)
    path = library(tmp_path / "more.so", bundle() + nothing + first)
    assert device_code(path) == DeviceCode(path, (80, 90), ())
    unaligned = (bytes(4) + bundle(part(CUBIN, 75))).ljust(1 << 8, b"\0")
    path = library(tmp_path / "unaligned.so", unaligned + first)
    assert device_code(path) == DeviceCode(path, (80, 90), ())


def test_damaged_code_ends(tmp_path: Path) -> None:
    chance = random.Random(1)
    whole = bundle(part(CUBIN, 80), part(PTX, 90)) * 3
    for _ in range(20):
        content = bytearray(whole)
        for _ in range(8):
            content[chance.randrange(len(content))] = chance.randrange(256)
        code = device_code(library(tmp_path / "lib.so", bytes(content)))
        assert code is None or code.cubins or code.ptx or code == DeviceCode(code.path, (), ())
    empty = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 62) + struct.pack("<HHIQ12xI", CUBIN, 0, 0, 0, 80)
    assert device_code(library(tmp_path / "lib.so", empty)) is None


def test_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("no library, but .nv_fatbin")
    with pytest.raises(ValueError, match="is damaged"):
        device_code(str(tmp_path / "lib.so"))


@pytest.mark.parametrize(
    ("cubins", "ptx", "gpu", "runs"),
    [
        ((80,), (), 80, True),
        ((80,), (), 86, True),  # the same major version
        ((86,), (), 80, False),
        ((80,), (), 90, False),
        ((90, 100), (), 103, True),
        ((), (80,), 90, True),  # the driver compiles it
        ((), (90,), 80, False),
        ((90,), (90,), 120, True),
    ],
)
def test_code_runs_on(cubins: tuple[int, ...], ptx: tuple[int, ...], gpu: int, runs: bool) -> None:
    assert DeviceCode("lib.so", cubins, ptx).runs_on(gpu) is runs


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("NVIDIA H100 80GB HBM3", 90),
        ("NVIDIA A100-SXM4-40GB", 80),
        ("NVIDIA A10G", 86),
        ("NVIDIA L40S", 89),
        ("NVIDIA L4", 89),
        ("NVIDIA B200", 100),
        ("NVIDIA GB300", 103),
        ("h200", 90),
        ("Tesla V100-SXM2-16GB", 70),
        ("Tesla T4", 75),
        ("NVIDIA RTX 6000 Ada Generation", 89),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120),
        ("Some GPU", None),
        ("", None),
    ],
)
def test_capability_of_a_model(name: str, number: int | None) -> None:
    assert capability(name) == number


def test_words_name_machine_code_and_ptx() -> None:
    assert DeviceCode("a", (90, 103), (90,)).text == "9.0, 10.3 and PTX of 9.0"
    assert DeviceCode("a", (), (120,)).text == "PTX of 12.0"
    assert dotted(75) == "7.5"
