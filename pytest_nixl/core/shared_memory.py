# SPDX-License-Identifier: Apache-2.0
"""Whether shared memory can be used here: UCX cannot start without it, and names no cause that can be typed."""

from __future__ import annotations

import os

#: Where POSIX shared memory is.
SHM = "/dev/shm"

#: How a host or container gets it.
SHM_REMEDY = (
    f"mount it: `mount -t tmpfs -o rw tmpfs {SHM}`; `docker run --shm-size=8g`; in Kubernetes mount an emptyDir with "
    f"medium: Memory at {SHM}"
)
#: Bytes below which free shared memory, or the size of a file, may be too small for the queues of one agent. With
#: 16 MiB of shared memory an agent with UCX 1.23 crashes when it is created.
LITTLE = 32 << 20


def shared_memory_shortage(path: str = SHM) -> str:
    """Return a sentence if little shared memory is free, which UCX notices only by a crash; else an empty text."""
    try:
        found = os.statvfs(path)
    except OSError:
        return ""
    free, size = (blocks * found.f_frsize for blocks in (found.f_bavail, found.f_blocks))
    return f"{path} has {free >> 20} of {size >> 20} MiB free, which UCX needs for its queues" if free < LITTLE else ""


def shared_memory_fault(path: str = SHM) -> str:
    """Return a sentence if shared memory cannot be used; an empty text if it can."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"{path} cannot be used ({error.strerror})"
    if found.f_flag & os.ST_RDONLY:
        return f"{path} is mounted read-only"
    return "" if os.access(path, os.W_OK) else f"{path} cannot be written by this user"
