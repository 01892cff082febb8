# SPDX-License-Identifier: Apache-2.0
"""What this process holds: memory, file descriptors, threads and shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

_SELF = Path("/proc/self")
#: How the names of shared memory begin in the list of mappings: POSIX, anonymous files, System V.
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV")


class _Mallinfo2(ctypes.Structure):
    """The C structure ``mallinfo2``: each member is a size or a count."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def held() -> dict[str, float]:
    """Return what this process holds, after it gave back what it can.

    :return: ``heap`` (bytes in use by ``malloc``; it is missing if the C library cannot tell), ``memory`` (bytes of
        anonymous memory, in swap too), and the numbers of ``descriptors`` other than sockets, ``sockets``, ``threads``
        and ``shared-memory`` files that are mapped.
    """
    gc.collect()
    library = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library than glibc
        library.malloc_trim(0)
    found = _heap(library)
    links = [_link(name) for name in os.listdir(_SELF / "fd")]
    sockets = sum(link.startswith("socket:") for link in links)
    return {
        **found,
        "memory": _anonymous(),
        "descriptors": len(links) - sockets,
        "sockets": sockets,
        "threads": len(os.listdir(_SELF / "task")),
        "shared-memory": _shared_files(),
    }


def _heap(library: ctypes.CDLL) -> dict[str, float]:
    """Return the bytes in use by ``malloc``, exactly; empty with a glibc before 2.33, which has no ``mallinfo2``."""
    try:
        function = library.mallinfo2
    except AttributeError:
        return {}
    function.restype = _Mallinfo2
    told = function()
    return {"heap": float(told.uordblks + told.hblkhd)}


def _anonymous() -> float:
    """Return the bytes of anonymous memory in RAM and in swap."""
    try:
        lines, wanted = (_SELF / "smaps_rollup").read_text().splitlines(), ("Anonymous:", "Swap:")
    except OSError:  # a kernel before 4.14
        lines, wanted = (_SELF / "status").read_text().splitlines(), ("RssAnon:", "VmSwap:")
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith(wanted))


def _shared_files() -> int:
    """Return how many files of shared memory are mapped, each counted once."""
    fields = [line.split(None, 5) for line in (_SELF / "maps").read_text().splitlines()]
    return len({(each[3], each[4]) for each in fields if len(each) > 5 and each[5].startswith(_SHARED)})


def _link(name: str) -> str:
    try:
        return os.readlink(_SELF / "fd" / name)
    except OSError:  # the descriptor by which the folder was listed
        return ""
