# SPDX-License-Identifier: Apache-2.0
"""Checks of locked memory, shared memory and huge pages."""

from __future__ import annotations

from pytest_nixl.checks.doctor.check import (
    NO_RDMA,
    Requirements,
    check,
    failed,
    has_gpu,
    has_rdma,
    not_applicable,
    passed,
    unknown,
    warned,
)
from pytest_nixl.core.units import GIB, MIB
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement

#: With a lower limit UCX disables RDMA (openucx/ucx#7930).
_LEAST_LOCKED = 512 * MIB
#: The default of Docker and Kubernetes.
_DEFAULT_SHM = 64 * MIB
_LITTLE_SHM = GIB


def amount(size: int) -> str:
    """Format a size in bytes with a binary unit, such as ``64 MiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


@check("memlock", "May a process lock as much memory as RDMA registers?")
def memlock(facts: Facts, wanted: Requirements) -> Judgement:
    """A process may lock as much memory as RDMA registers.

    Judge the limit of locked memory. Above it RDMA registration fails, often only with 'Cannot allocate memory'.
    """
    if not has_rdma(facts, wanted):
        return not_applicable(f"{NO_RDMA}: no memory has to be locked")
    limit = facts.host.memlock
    if limit.value is None:
        return unknown(f"{limit.source}: {limit.why}", "run `ulimit -l` where the ranks run")
    soft = limit.value.soft
    if soft is None:
        return passed("a process may lock any amount of memory")
    if limit.value.privileged:
        return passed(f"this process has CAP_IPC_LOCK, so the limit of {amount(soft)} does not apply")
    reason = f"a process may lock only {amount(soft)} of memory ({limit.source}), and RDMA locks what it registers"
    remedy = (
        "set the limit to unlimited where the ranks start: `docker run --ulimit memlock=-1`, LimitMEMLOCK=infinity in "
        "the unit of kubelet, containerd or slurmd, or /etc/security/limits.conf; or add the "
        "capability IPC_LOCK to the container"
    )
    if soft < _LEAST_LOCKED:
        return failed(f"{reason}; below {amount(_LEAST_LOCKED)} UCX disables RDMA and EFA does not start", remedy)
    return warned(reason, remedy)


@check("shm", "Does /dev/shm exist, and is it larger than a container's default of 64 MiB?")
def shm(facts: Facts, wanted: Requirements) -> Judgement:
    """/dev/shm is larger than a container's default of 64 MiB, and has free space.

    Judge the size of /dev/shm. Transports within a host keep queues there, and die of SIGBUS when it is full.
    """
    size = facts.host.shm
    remedy = (
        "start the container with `docker run --shm-size=8g` or --ipc=host; in Kubernetes mount an emptyDir with "
        "medium: Memory at /dev/shm"
    )
    if size.value is None:
        return (
            failed(f"/dev/shm cannot be used: {size.why}", remedy)
            if "not recorded" not in size.why
            else unknown(f"{size.source}: {size.why}", "record the tree again")
        )
    free = f"/dev/shm has {amount(size.value.size)}, of which {amount(size.value.free)} are free"
    if size.value.size <= _DEFAULT_SHM:
        reason = f"{free}; 64 MiB is the default of a container"
        # Enough for two processes on a laptop, but not for one rank per GPU.
        if has_rdma(facts, wanted) or has_gpu(facts, wanted):
            return failed(f"{reason}, which is too little for one rank per GPU", remedy)
        return warned(reason, remedy)
    if size.value.free < _DEFAULT_SHM:
        return failed(
            f"{free}: other processes fill it or left files behind",
            "run `ls -l /dev/shm` and delete what is stale; or " + remedy,
        )
    if size.value.size < _LITTLE_SHM:
        return warned(free, remedy)
    return passed(free)


@check("huge-pages", "Are huge pages free for EFA's buffers?")
def huge_pages(facts: Facts, wanted: Requirements) -> Judgement:
    """Huge pages are free for EFA's buffers, if there is EFA.

    Judge the free huge pages. EFA's provider keeps its bounce buffers there, and without them in slower pages.
    """
    if not (facts.efa or wanted.efa):
        return not_applicable("this host has no EFA, and the profile expects none: only EFA uses huge pages")
    pages = [page for page in facts.host.huge_pages if page.total]
    remedy = (
        "set vm.nr_hugepages = 5128 in /etc/sysctl.d (the value of EFA's installer); in Kubernetes request "
        "hugepages-2Mi"
    )
    if not pages:
        return warned("no huge pages are reserved, and EFA keeps its buffers in huge pages", remedy)
    listing = ", ".join(f"{page.free} of {page.total} of {amount(page.size)} free" for page in pages)
    if not any(page.free for page in pages):
        return warned(f"huge pages: {listing}; none is left for EFA's buffers", remedy)
    return passed(f"huge pages: {listing}")
