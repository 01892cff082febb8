# SPDX-License-Identifier: Apache-2.0
"""Read and write files that a user names: regular files only, of a limited size, without waiting for a FIFO."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pytest_nixl.core.strict import printable

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

#: The most bytes that are read of a file that tells no size.
_MOST_UNSIZED = 4 << 20


@contextmanager
def open_regular(path: Path, largest: int, form: str) -> Iterator[BinaryIO]:
    """Open a regular file to read it. A FIFO or a device is refused without waiting for it.

    :param largest: the most bytes that it may have.
    :param form: what is expected, for the error message.
    :raises ValueError: if it is not a regular file or too large: one sentence that begins with the path.
    :raises OSError: if it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = _regular(descriptor, path, form).st_size
        if size > largest:
            raise _too_large(path, largest, form)
        if not size:
            yield io.BytesIO(_read_unsized(descriptor, path, min(largest, _MOST_UNSIZED), form))
            return
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_regular(path: Path, largest: int, form: str) -> bytes:
    """Return the bytes of a regular file, as :func:`open_regular` opens it."""
    with open_regular(path, largest, form) as file:
        data = file.read(largest + 1)
    if len(data) > largest:  # it may have grown
        raise _too_large(path, largest, form)
    return data


def _read_unsized(descriptor: int, path: Path, largest: int, form: str) -> bytes:
    """Read a file of size 0, which is empty, or in ``/proc``: such a file may be long, and may wait for more."""
    data = bytearray()
    try:
        while piece := os.read(descriptor, 1 << 16):
            data += piece
            if len(data) > largest:
                raise _too_large(path, largest, form)
    except BlockingIOError:
        raise ValueError(f"{printable(str(path))} is a stream that does not end: expected {form}") from None
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror, str(path)) from None
    return bytes(data)


def write_regular(path: Path, text: str, *, append: bool = False) -> None:
    """Write a text to a new file, or replace that of a regular one. A FIFO or a device is refused.

    :param append: whether to write behind what the file has instead.
    :raises ValueError: if there is something else under this name: one sentence that begins with the path.
    :raises OSError: if it cannot be written.
    """
    form = "the name of a new or a regular file"
    if path.exists() and not path.is_file():
        raise ValueError(f"{printable(str(path))} is {_kind(path.stat().st_mode)}: expected {form}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _regular(descriptor, path, form)
        if append:
            os.lseek(descriptor, 0, os.SEEK_END)
        else:
            os.ftruncate(descriptor, 0)
        with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.write(text)
    finally:
        os.close(descriptor)


def _regular(descriptor: int, path: Path, form: str) -> os.stat_result:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{printable(str(path))} is {_kind(status.st_mode)}: expected {form}")
    return status


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def _too_large(path: Path, largest: int, form: str) -> ValueError:
    size = f"{largest >> 20} MiB" if largest >= 1 << 20 else f"{largest >> 10} KiB"
    return ValueError(f"{printable(str(path))} has more than {size}: expected {form}")
