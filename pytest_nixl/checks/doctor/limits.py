# SPDX-License-Identifier: Apache-2.0
"""What a process may lock and share of the memory."""

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

#: Below this UCX itself does without RDMA (openucx/ucx#7930).
_LEAST_LOCKED = 512 * MIB
#: What Docker and Kubernetes give a container that asks for nothing.
_DEFAULT_SHM = 64 * MIB
_LITTLE_SHM = GIB


def amount(size: int) -> str:
    """Print bytes in the unit that suits them: ``64.0 MiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


@check("memlock", "May a process lock as much memory as RDMA registers?")
def memlock(facts: Facts, wanted: Requirements) -> Judgement:
    """RDMA locks what it registers: a limit stops it, mostly with no better word than 'Cannot allocate memory'."""
    if not has_rdma(facts, wanted):
        return not_applicable(f"{NO_RDMA}: nothing has to be locked")
    limit = facts.host.memlock
    if limit.value is None:
        return unknown(f"{limit.source}: {limit.why}", "look at `ulimit -l` where the ranks run")
    soft = limit.value.soft
    if soft is None:
        return passed("a process may lock as much memory as it wants")
    if limit.value.privileged:
        return passed(f"the limit of {amount(soft)} does not hold for this process, which has CAP_IPC_LOCK")
    reason = f"a process may lock {amount(soft)} of memory ({limit.source}), and registered memory is locked"
    remedy = (
        "set it to unlimited where the ranks start: `docker run --ulimit memlock=-1`, LimitMEMLOCK=infinity of "
        "kubelet's, containerd's or slurmd's unit, or /etc/security/limits.conf; or add the "
        "capability IPC_LOCK to the container"
    )
    if soft < _LEAST_LOCKED:
        return failed(f"{reason}: below {amount(_LEAST_LOCKED)} UCX does without RDMA, and EFA does not start", remedy)
    return warned(reason, remedy)


@check("shm", "Is /dev/shm there, and larger than the 64 MiB of a container that asked for nothing?")
def shm(facts: Facts, wanted: Requirements) -> Judgement:
    """Transports of one host keep their queues in /dev/shm; where it is full, they die of SIGBUS."""
    size = facts.host.shm
    remedy = "`docker run --shm-size=8g` or --ipc=host; in Kubernetes mount an emptyDir with medium: Memory at /dev/shm"
    if size.value is None:
        return (
            failed(f"/dev/shm cannot be used: {size.why}", remedy)
            if "not recorded" not in size.why
            else unknown(f"{size.source}: {size.why}", "record the tree again")
        )
    free = f"/dev/shm has {amount(size.value.size)}, {amount(size.value.free)} of it free"
    if size.value.size <= _DEFAULT_SHM:
        reason = f"{free}: that is what a container gets that asks for nothing"
        # Two processes of a laptop can do with it; a rank for each GPU, with a model beside it, cannot.
        if has_rdma(facts, wanted) or has_gpu(facts, wanted):
            return failed(f"{reason}, and too little for a rank of each GPU", remedy)
        return warned(reason, remedy)
    if size.value.free < _DEFAULT_SHM:
        return failed(f"{free}: somebody's shared memory was left behind", "look at `ls -l /dev/shm`; or " + remedy)
    if size.value.size < _LITTLE_SHM:
        return warned(free, remedy)
    return passed(free)


@check("huge-pages", "Are huge pages reserved where EFA wants them for its buffers?")
def huge_pages(facts: Facts, wanted: Requirements) -> Judgement:
    """EFA's provider has its bounce buffers in huge pages, and slower ones where there are none."""
    if not (facts.efa or wanted.efa):
        return not_applicable("there is no EFA here, and the profile names none: nothing else asks for huge pages")
    pages = [each for each in facts.host.huge_pages if each.total]
    remedy = "vm.nr_hugepages = 5128 in /etc/sysctl.d (as EFA's installer sets it); in Kubernetes ask for hugepages-2Mi"
    if not pages:
        return warned("no huge pages are reserved, and EFA's buffers are in them", remedy)
    told = ", ".join(f"{each.free} of {each.total} of {amount(each.size)} free" for each in pages)
    if not any(each.free for each in pages):
        return warned(f"huge pages: {told}: nothing is left for EFA's buffers", remedy)
    return passed(f"huge pages: {told}")
