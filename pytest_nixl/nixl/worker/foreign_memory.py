# SPDX-License-Identifier: Apache-2.0
"""Find out in a worker what forbids UCX's transport ``cma`` to read another process's memory."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping
from pathlib import Path

#: The bit of CAP_SYS_PTRACE in a capability set, and the value of ``Seccomp:`` for a process with a filter.
_SYS_PTRACE, _FILTERED = 19, 2
#: Values of UCX_TLS that include ``cma``.
_HAVE_CMA = frozenset({"all", "cma", "shm", "sm"})


class _Range(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def obstacle(environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> str:
    """Return a sentence about what forbids ``cma`` in this process; empty if nothing does, or if UCX_TLS excludes cma.

    The system call is tried on this process's own memory, which the kernel always permits, so it fails only if a
    seccomp filter forbids it. Access to other processes' memory is controlled by Yama, if the kernel has it.

    :param environ: the environment variables.
    :param proc: the folder ``/proc``.
    """
    if not _asked_for(environ.get("UCX_TLS", "")):
        return ""
    status = _status(proc)
    capable = bool(int(status.get("CapEff", "0") or "0", 16) >> _SYS_PTRACE & 1)
    lacks = "" if capable else ", and this container or process lacks the capability SYS_PTRACE"
    if _forbidden():
        filtered = status.get("Seccomp") == str(_FILTERED)
        subject = "a seccomp filter (the container's) forbids" if filtered else "the kernel forbids"
        return f"{subject} process_vm_readv, with which cma reads the other process's memory{lacks}"
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return ""
    # With 1, UCX itself permits its peers (PR_SET_PTRACER).
    if scope > 2 or (scope == 2 and not capable):
        return f"kernel.yama.ptrace_scope={scope} forbids cma to read the other process's memory{lacks}"
    return ""


def _asked_for(transports: str) -> bool:
    """Return whether a value of UCX_TLS permits cma."""
    names = {name.strip() for name in transports.removeprefix("^").split(",") if name.strip()}
    named = bool(names & _HAVE_CMA)
    return not named if transports.startswith("^") else named or not names


def _status(proc: Path) -> dict[str, str]:
    try:
        lines = (proc / "self/status").read_text()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines.splitlines())}


def _forbidden() -> bool:
    """Return whether this process cannot even read its own memory with the system call that cma uses."""
    memory = ctypes.create_string_buffer(6)
    ours = ctypes.byref(_Range(ctypes.addressof(memory), 6))
    library = ctypes.CDLL(None, use_errno=True)
    read = library.process_vm_readv(os.getpid(), ours, 1, ours, 1, 0)
    return read != 6 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EACCES)
