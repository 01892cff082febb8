# SPDX-License-Identifier: Apache-2.0
"""Write a shared library whose functions all return the same number, without a compiler."""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
        (_SONAME, offsets[0]), (_HASH, hash_at), (_STRINGS, strings_at), (_SYMBOLS, symbols_at),
        (_STRINGS_SIZE, len(strings)), (_SYMBOL_ENTRY, _SYMBOL_SIZE), (_END, 0),
    )  # fmt: skip
    dynamic = b"".join(struct.pack(_TAG, *tag) for tag in tags)
    segments = b"".join((
        _segment(_LOADED, _READ | _EXECUTE, 0, 0, dynamic_at, _PAGE),
        _segment(_LOADED, _READ | _WRITE, dynamic_at, dynamic_at + _PAGE, len(dynamic), _PAGE),
        _segment(_DYNAMIC, _READ | _WRITE, dynamic_at, dynamic_at + _PAGE, len(dynamic), 8),
        # Without it the loader asks for an executable stack, which many kernels refuse.
        _segment(_STACK, _READ | _WRITE, 0, 0, 0, 16),
    ))  # fmt: skip
    header = struct.pack(
        _HEADER, _LITTLE_ENDIAN_64_BIT, _SHARED_LIBRARY, _MACHINES[machine], 1, 0, _HEADER_SIZE, 0, 0,
        _HEADER_SIZE, _SEGMENT_SIZE, 4, 0, _NO_SECTION, 0,
    )  # fmt: skip
    body = header + segments + code + hashes
    return (body.ljust(symbols_at, b"\0") + symbols + strings).ljust(dynamic_at, b"\0") + dynamic


def _code(result: int, machine: str) -> bytes:
    """Return a function that returns ``result``, 16 bytes long."""
    if machine == "aarch64":  # bti c; mov w0, #result; ret; nop
        return struct.pack("<4I", 0xD503245F, 0x52800000 | result << 5, 0xD65F03C0, 0xD503201F)
    return (b"\xf3\x0f\x1e\xfa\xb8" + struct.pack("<I", result) + b"\xc3").ljust(16, b"\x90")  # endbr64; mov eax; ret


def _hash_table(count: int) -> bytes:
    """Return a hash table of ``count`` symbols in one bucket, which holds for any names.

    A chain of so few symbols costs the loader nothing.
    """
    chain = [0, *range(2, count), 0][:count]
    return struct.pack(f"<{3 + count}I", 1, count, 1 if count > 1 else 0, *chain)


def _segment(kind: int, flags: int, offset: int, address: int, size: int, alignment: int) -> bytes:
    return struct.pack(_SEGMENT, kind, flags, offset, address, address, size, size, alignment)


def _aligned(offset: int) -> int:
    return -(-offset // 16) * 16
