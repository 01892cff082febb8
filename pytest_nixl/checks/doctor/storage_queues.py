# SPDX-License-Identifier: Apache-2.0
"""The check of the kernel's queues with which POSIX reads and writes files."""

from __future__ import annotations

from pytest_nixl.checks.doctor.check import Requirements, check, failed, not_applicable, passed, unknown, warned
from pytest_nixl.core.units import MIB
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.storage_queues import StorageQueues
from pytest_nixl.model.verdicts import Judgement

#: Each agent reserves this many requests or more.
_LEAST_AIO = 1024
#: A ring's pages count as locked memory in kernels before 5.12.
_LEAST_LOCKED = 8 * MIB
_SECCOMP = (
    "allow {call} in the seccomp profile of the container: `docker run --security-opt seccomp=FILE`, or in Kubernetes "
    "securityContext.seccompProfile"
)


@check("storage-queues", "May a process set up the kernel's queues for files, aio and io_uring?")
def storage_queues(facts: Facts, wanted: Requirements) -> Judgement:
    """With POSIX, a process may set up the kernel's queues for files, aio and io_uring.

    Judge aio and io_uring, which POSIX uses. If they are forbidden, NIXL reports only NIXL_ERR_BACKEND.
    """
    if "POSIX" not in wanted.backends:
        asked = ",".join(wanted.backends)
        return not_applicable(f"--nixl-backend={asked} uses no files: only POSIX does")
    queues = facts.storage_queues
    found = [*_uring(facts, queues), *_aio(queues)]
    if found:
        reasons, remedies = zip(*found, strict=True)
        both = len({reason.split(":")[0] for reason in reasons}) == 2
        # One queue that works is enough for POSIX, which chooses it if it is asked to.
        return (failed if both else warned)("; ".join(reasons), "; ".join(remedies))
    if queues.calls.value is None:
        return unknown(f"{queues.calls.source}: {queues.calls.why}", "record the tree again where the ranks run")
    free = _free(queues)
    return passed(f"io_uring and aio can be set up{'' if free is None else f'; {free} requests of aio are free'}")


def _uring(facts: Facts, queues: StorageQueues) -> list[tuple[str, str]]:
    """Return what forbids io_uring, with the remedy."""
    disabled, told = queues.uring_disabled.value, (queues.calls.value or {}).get("io_uring_setup", "")
    if disabled and (disabled == 2 or told in ("EPERM", "")):
        whom = "all processes" if disabled == 2 else "processes without CAP_SYS_ADMIN"
        reason = f"io_uring: kernel.io_uring_disabled={disabled} forbids it to {whom}"
        return [(reason, "set kernel.io_uring_disabled = 0 in /etc/sysctl.d on the host")]
    if told in ("EPERM", "EACCES"):
        how = "seccomp" if queues.seccomp.value else "a security module"
        return [(f"io_uring: {how} forbids io_uring_setup ({told})", _SECCOMP.format(call="io_uring_setup"))]
    if told == "ENOSYS":
        how = "seccomp hides it" if queues.seccomp.value else "this kernel has none"
        return [(f"io_uring: io_uring_setup answers ENOSYS: {how}", _SECCOMP.format(call="io_uring_setup"))]
    limit = facts.host.memlock.value
    little = limit is not None and limit.soft is not None and not limit.privileged and limit.soft < _LEAST_LOCKED
    if limit is not None and little and _old(facts.host.kernel.value or ""):
        return [(
            f"io_uring: a process may lock only {limit.soft} bytes of memory, and this kernel counts rings as such",
            "set the limit where the ranks start: `docker run --ulimit memlock=-1`, or LimitMEMLOCK=infinity",
        )]  # fmt: skip
    return []


def _aio(queues: StorageQueues) -> list[tuple[str, str]]:
    """Return what forbids aio, with the remedy."""
    told = (queues.calls.value or {}).get("io_setup", "")
    if told in ("EPERM", "EACCES", "ENOSYS"):
        how = "seccomp forbids" if queues.seccomp.value else "this kernel does not allow"
        return [(f"aio: {how} io_setup ({told})", _SECCOMP.format(call="io_setup"))]
    free = _free(queues)
    if free is not None and free < _LEAST_AIO:
        return [(
            f"aio: {queues.aio_used.value} of {queues.aio_max.value} requests are reserved on this host (fs.aio-nr, "
            f"fs.aio-max-nr), so that {free} are left for {_LEAST_AIO}",
            "set fs.aio-max-nr = 1048576 in /etc/sysctl.d on the host",
        )]  # fmt: skip
    return []


def _free(queues: StorageQueues) -> int | None:
    if queues.aio_max.value is None or queues.aio_used.value is None:
        return None
    return queues.aio_max.value - queues.aio_used.value


def _old(kernel: str) -> bool:
    """Whether the kernel counts the memory of rings as locked: before 5.12."""
    parts = kernel.split(".")[:2]
    return len(parts) == 2 and all(part.isdecimal() for part in parts) and [int(part) for part in parts] < [5, 12]
