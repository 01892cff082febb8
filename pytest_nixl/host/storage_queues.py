# SPDX-License-Identifier: Apache-2.0
"""Facts of the kernel's queues for reads and writes of files: asynchronous I/O (aio) and io_uring."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from dataclasses import dataclass

from pytest_nixl.host.fact import Fact
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import whole

_DISABLED = "/proc/sys/kernel/io_uring_disabled"
_AIO_MAX, _AIO_USED = "/proc/sys/fs/aio-max-nr", "/proc/sys/fs/aio-nr"
_STATUS = "/proc/self/status"
#: The system calls that set up a queue, by architecture. With null arguments a kernel that allows the call answers
#: EFAULT or EINVAL.
_NUMBERS = {"x86_64": {"io_setup": 206, "io_uring_setup": 425}, "aarch64": {"io_setup": 0, "io_uring_setup": 425}}


@dataclass(frozen=True)
class StorageQueues:
    """What decides whether a process may set up the kernel's queues.

    :param uring_disabled: ``kernel.io_uring_disabled``: 0 for nobody, 1 for unprivileged processes, 2 for all.
    :param aio_max: ``fs.aio-max-nr``: the requests that all processes together may reserve.
    :param aio_used: ``fs.aio-nr``: the requests that they have reserved.
    :param seccomp: ``0`` if no filter applies to this process, otherwise the mode.
    :param calls: the answer to each call that sets up a queue, as a name of errno.
    """

    uring_disabled: Fact[int]
    aio_max: Fact[int]
    aio_used: Fact[int]
    seccomp: Fact[int]
    calls: Fact[dict[str, str]]


def read_storage_queues(root: FactsRoot) -> StorageQueues:
    """Read what decides about the kernel's queues."""
    answer = root.ask("storage-queues", _try_calls)
    queues = {str(name): str(value) for name, value in answer.items() if name != "why"}
    status = root.read(_STATUS) or ""
    mode = next((line.split()[1] for line in status.splitlines() if line.startswith("Seccomp:")), "")
    return StorageQueues(
        uring_disabled=whole(root, _DISABLED),
        aio_max=whole(root, _AIO_MAX),
        aio_used=whole(root, _AIO_USED),
        seccomp=Fact(int(mode), _STATUS) if mode.isdecimal() else Fact(None, _STATUS, "it has no line Seccomp"),
        calls=Fact(queues or None, "io_setup and io_uring_setup", str(answer.get("why", ""))),
    )


def _try_calls() -> dict[str, str]:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return {"why": f"the numbers of the system calls of {platform.machine()} are not known"}
    library = ctypes.CDLL(None, use_errno=True)
    queues = {}
    for name, number in numbers.items():
        result = library.syscall(ctypes.c_long(number), ctypes.c_long(1), ctypes.c_void_p(None))
        code = 0 if result >= 0 else ctypes.get_errno()
        if result > 0:
            os.close(result)
        queues[name] = errno.errorcode.get(code, str(code)) if code else "OK"
    return queues
