# SPDX-License-Identifier: Apache-2.0
"""Files that NIXL moves bytes to and from: without a name, so that nothing of them stays, however the worker ends."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from pathlib import Path, PurePath

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.nixl.worker.memory import PatternBuffer

#: What offsets, lengths and addresses must be multiples of where the page cache is passed by.
ALIGNMENT = 4096
_IN_MEMORY = ("tmpfs", "ramfs")


class FileBuffer(PatternBuffer):
    """``size`` bytes of a file, on which room is taken at once.

    :param directory: where it is made; empty: the system's directory for temporary files.
    :param alignment: every offset and length that NIXL will be given is a multiple of it. Of 4 KiB, and where the file
        system can, the page cache is passed by (``O_DIRECT``): what is timed is then the storage.
    :raises NixlPluginError: where no file of this size can be made there.
    """

    memory = "FILE"
    address = 0

    def __init__(self, size: int, directory: str, alignment: int) -> None:
        super().__init__(size)
        directory = os.path.realpath(directory or tempfile.gettempdir())
        try:
            self.device, direct = _open(directory, direct=alignment % ALIGNMENT == 0)
            os.posix_fallocate(self.device, 0, size)
            # For our own reads and writes, which need not be aligned.
            self._ours = os.open(f"/proc/self/fd/{self.device}", os.O_RDWR)
        except OSError as error:
            raise NixlPluginError(
                f"no file of {size} bytes can be made in {directory}: {error.strerror}",
                "name a directory with room for it by --nixl-file-dir, on the storage that is to be measured",
            ) from None
        system = file_system(directory, Path("/proc/self/mountinfo").read_text())
        how = "memory" if system in _IN_MEMORY else "direct" if direct else "cached"
        print(f"pytest-nixl: file {how}/{system}", file=sys.stderr, flush=True)

    def sync(self) -> None:
        """Wait until the storage has what was written."""
        os.fdatasync(self.device)

    def free(self) -> None:
        """Close the file, which has no name: nothing of it stays."""
        os.close(self._ours)
        os.close(self.device)

    def _get(self, offset: int, size: int) -> bytes:
        # From the storage, not from what the kernel still holds of it.
        os.posix_fadvise(self._ours, offset, size, os.POSIX_FADV_DONTNEED)
        return os.pread(self._ours, size, offset)

    def _put(self, offset: int, data: memoryview) -> None:
        written = os.pwrite(self._ours, data, offset)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(self._ours)


def _open(directory: str, *, direct: bool) -> tuple[int, bool]:
    """Open a file without a name; return its descriptor, and whether the page cache is passed by."""
    for flags in (os.O_DIRECT, 0) if direct else (0,):
        with contextlib.suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | flags, 0o600), bool(flags)
    # A file system that has no files without a name.
    made, path = tempfile.mkstemp(prefix="pytest-nixl-", dir=directory)
    try:
        for flags in (os.O_DIRECT, 0) if direct else (0,):
            with contextlib.suppress(OSError):
                return os.open(path, os.O_RDWR | flags), bool(flags)
    finally:
        os.unlink(path)
        os.close(made)
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def file_system(directory: str, mounts: str) -> str:
    """Return the type of the file system that a directory is on.

    :param mounts: the text of ``/proc/self/mountinfo``.
    """
    best, found = -1, "unknown"
    for line in mounts.splitlines():
        fields = line.split(" - ")
        if len(fields) != 2 or len(fields[0].split()) < 5:
            continue
        point = fields[0].split()[4].encode().decode("unicode_escape")
        if PurePath(directory).is_relative_to(point) and len(point) >= best:
            best, found = len(point), fields[1].split()[0]
    return found
