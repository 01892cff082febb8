# SPDX-License-Identifier: Apache-2.0
"""Files without a name as targets of storage backends. They disappear when the worker ends, for any reason."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from pathlib import Path, PurePath

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.nixl.worker.memory import PatternBuffer

#: Offsets, lengths and addresses must be multiples of this (in bytes) to bypass the page cache.
ALIGNMENT = 4096
_IN_MEMORY = {"tmpfs", "ramfs"}


class FileBuffer(PatternBuffer):
    """A file whose space is allocated immediately.

    :param size: in bytes.
    :param directory: the directory of the file; empty for the system's temporary directory.
    :param alignment: a divisor of all offsets and lengths that NIXL will use, in bytes. If it is a multiple of 4 KiB
        and the file system supports ``O_DIRECT``, the page cache is bypassed, so that the storage itself is timed.
    :raises NixlPluginError: the directory cannot hold a file of this size.
    """

    memory = "FILE"
    address = 0

    def __init__(self, size: int, directory: str, alignment: int) -> None:
        super().__init__(size)
        directory = os.path.realpath(directory or tempfile.gettempdir())
        try:
            self.device, direct = _open(directory, direct=alignment % ALIGNMENT == 0)
            os.posix_fallocate(self.device, 0, size)
            # A second descriptor for own reads and writes, which need not be aligned.
            self._ours = os.open(f"/proc/self/fd/{self.device}", os.O_RDWR)
        except OSError as error:
            raise NixlPluginError(
                f"a file of {size} bytes cannot be created in {directory}: {error.strerror}",
                "set --nixl-file-dir to a directory with enough space, on the storage that is to be measured",
            ) from None
        system = file_system(directory, Path("/proc/self/mountinfo").read_text())
        how = "memory" if system in _IN_MEMORY else "direct" if direct else "cached"
        print(f"pytest-nixl: file {how}/{system}", file=sys.stderr)

    def sync(self) -> None:
        """Wait until the storage has all written bytes."""
        os.fdatasync(self.device)

    def free(self) -> None:
        """Close the file, which deletes it because it has no name."""
        os.close(self._ours)
        os.close(self.device)

    def _get(self, offset: int, size: int) -> bytes:
        # Read from the storage, not from the page cache.
        os.posix_fadvise(self._ours, offset, size, os.POSIX_FADV_DONTNEED)
        return os.pread(self._ours, size, offset)

    def _put(self, offset: int, data: memoryview) -> None:
        written = os.pwrite(self._ours, data, offset)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(self._ours)


def _open(directory: str, *, direct: bool) -> tuple[int, bool]:
    """Open a file without a name; return its descriptor, and whether the page cache is bypassed."""
    for flags in (os.O_DIRECT, 0) if direct else (0,):
        with contextlib.suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | flags, 0o600), bool(flags)
    # The file system does not support files without a name: create one and delete its name.
    descriptor, path = tempfile.mkstemp(prefix="pytest-nixl-", dir=directory)
    try:
        for flags in (os.O_DIRECT, 0) if direct else (0,):
            with contextlib.suppress(OSError):
                return os.open(path, os.O_RDWR | flags), bool(flags)
    finally:
        os.unlink(path)
        os.close(descriptor)
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def file_system(directory: str, mounts: str) -> str:
    """Return the type of a directory's file system, such as ``ext4``; ``unknown`` if no mount matches.

    :param directory: its absolute path.
    :param mounts: the text of ``/proc/self/mountinfo``.
    """
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        fields = line.split(" - ")
        if len(fields) != 2 or len(fields[0].split()) < 5:
            continue
        point = fields[0].split()[4].encode().decode("unicode_escape")
        if PurePath(directory).is_relative_to(point) and len(point) >= best:
            best, kind = len(point), fields[1].split()[0]
    return kind
