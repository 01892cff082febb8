# SPDX-License-Identifier: Apache-2.0
"""Checks of memory, huge pages, the kernel's queues for storage, and the processors that the ranks may use."""

from __future__ import annotations

from collections.abc import Iterable

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
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.units import GIB, MIB
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.gpu import visible
from pytest_nixl.host.rdma import network_cards
from pytest_nixl.host.system import FrequencyPolicy, StorageQueues, cpu_list, cpu_numbers
from pytest_nixl.model.verdicts import Judgement

#: With a lower limit UCX disables RDMA (openucx/ucx#7930).
_LEAST_LOCKED = 512 * MIB
#: The default of Docker and Kubernetes.
_DEFAULT_SHM = 64 * MIB
_LITTLE_SHM = GIB

#: Each agent reserves this many requests or more.
_LEAST_AIO = 1024
#: A ring's pages count as locked memory in kernels before 5.12.
_LEAST_FOR_URING = 8 * MIB
SECCOMP_REMEDY = (
    "allow {call} in the seccomp profile of the container: `docker run --security-opt seccomp=FILE`, or in Kubernetes "
    "securityContext.seccompProfile"
)
#: With these drivers the governor ``powersave`` is the usual one, and the preference decides how fast a core becomes.
_PREFERENCE_DECIDES = ("intel_pstate", "amd-pstate-epp")
_SAVING = ("power", "balance_power")
_STATUS_REMEDY = "run `grep Cpus_allowed_list /proc/self/status` where the ranks run"


def amount(size: int) -> str:
    """Format a size in bytes with a binary unit, such as ``64 MiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


@check("memlock", "May a process lock as much memory as RDMA registers?")
def memlock(facts: Facts, expected: Requirements) -> Judgement:
    """A process may lock as much memory as RDMA registers."""
    if not has_rdma(facts, expected):
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
def shm(facts: Facts, expected: Requirements) -> Judgement:
    """/dev/shm is larger than a container's default of 64 MiB, and has free space."""
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
        if has_rdma(facts, expected) or has_gpu(facts, expected):
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
def huge_pages(facts: Facts, expected: Requirements) -> Judgement:
    """Huge pages are free for EFA's buffers, if there is EFA."""
    if not (facts.efa or expected.efa):
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


@check("storage-queues", "May a process set up the kernel's queues for files, aio and io_uring?")
def storage_queues(facts: Facts, expected: Requirements) -> Judgement:
    """With POSIX, a process may set up the kernel's queues for files, aio and io_uring."""
    if "POSIX" not in expected.backends:
        requested = ",".join(expected.backends)
        return not_applicable(f"--nixl-backend={requested} uses no files: only POSIX does")
    queues = facts.storage_queues
    obstacles = [*_uring(facts, queues), *_aio(queues)]
    if obstacles:
        reasons, remedies = zip(*obstacles, strict=True)
        both = len({reason.split(":")[0] for reason in reasons}) == 2
        # One queue that works is enough for POSIX, which chooses it if it is asked to.
        return (failed if both else warned)("; ".join(reasons), "; ".join(remedies))
    if queues.calls.value is None:
        return unknown(f"{queues.calls.source}: {queues.calls.why}", "record the tree again where the ranks run")
    free = _free(queues)
    return passed(f"io_uring and aio can be set up{'' if free is None else f'; {free} requests of aio are free'}")


def _uring(facts: Facts, queues: StorageQueues) -> list[tuple[str, str]]:
    """Return what forbids io_uring, with the remedy."""
    disabled, answer = queues.uring_disabled.value, (queues.calls.value or {}).get("io_uring_setup", "")
    if disabled and (disabled == 2 or answer in ("EPERM", "")):
        whom = "all processes" if disabled == 2 else "processes without CAP_SYS_ADMIN"
        reason = f"io_uring: kernel.io_uring_disabled={disabled} forbids it to {whom}"
        return [(reason, "set kernel.io_uring_disabled = 0 in /etc/sysctl.d on the host")]
    if answer in ("EPERM", "EACCES"):
        how = "seccomp" if queues.seccomp.value else "a security module"
        return [(f"io_uring: {how} forbids io_uring_setup ({answer})", _remedy("io_uring_setup", answer, queues))]
    if answer == "ENOSYS":
        how = "seccomp hides it" if queues.seccomp.value else "this kernel has none"
        return [(f"io_uring: io_uring_setup answers ENOSYS: {how}", _remedy("io_uring_setup", answer, queues))]
    limit = facts.host.memlock.value
    little = limit is not None and limit.soft is not None and not limit.privileged and limit.soft < _LEAST_FOR_URING
    if limit is not None and little and _old(facts.host.kernel.value or ""):
        return [
            (
                f"io_uring: a process may lock only {limit.soft} bytes of memory, and this kernel counts rings as such",
                "set the limit where the ranks start: `docker run --ulimit memlock=-1`, or LimitMEMLOCK=infinity",
            )
        ]
    return []


def _aio(queues: StorageQueues) -> list[tuple[str, str]]:
    """Return what forbids aio, with the remedy."""
    answer = (queues.calls.value or {}).get("io_setup", "")
    if answer in ("EPERM", "EACCES", "ENOSYS"):
        how = "seccomp forbids" if queues.seccomp.value else "this kernel does not allow"
        return [(f"aio: {how} io_setup ({answer})", _remedy("io_setup", answer, queues))]
    free = _free(queues)
    if free is not None and free < _LEAST_AIO:
        return [
            (
                f"aio: {queues.aio_used.value} of {queues.aio_max.value} requests are reserved on this host "
                f"(fs.aio-nr, fs.aio-max-nr), so that {free} are left for {_LEAST_AIO}",
                "set fs.aio-max-nr = 1048576 in /etc/sysctl.d on the host",
            )
        ]
    return []


def _remedy(call: str, answer: str, queues: StorageQueues) -> str:
    """Return what to do if a call that sets up a queue is forbidden, by what forbids it."""
    if queues.seccomp.value:
        return SECCOMP_REMEDY.format(call=call)
    if answer == "ENOSYS":
        option = {"io_setup": "CONFIG_AIO", "io_uring_setup": "CONFIG_IO_URING"}[call]
        return f"use a kernel that is built to allow {call} ({option})"
    return f"allow {call} in the policy of the host's security module: `dmesg | grep -i denied` names it"


def _free(queues: StorageQueues) -> int | None:
    if queues.aio_max.value is None or queues.aio_used.value is None:
        return None
    return queues.aio_max.value - queues.aio_used.value


def _old(kernel: str) -> bool:
    """Whether the kernel counts the memory of rings as locked: before 5.12."""
    parts = kernel.split(".")[:2]
    return len(parts) == 2 and all(part.isdecimal() for part in parts) and [int(part) for part in parts] < [5, 12]


@check("cpu-governor", "Do the processors that this process may use run at full speed while they work?")
def cpu_governor(facts: Facts, expected: Requirements) -> Judgement:
    """The kernel does not slow down the cores that a process may use to save power."""
    allowed = facts.host.cores.allowed
    policies = facts.host.cores.policies
    if not policies:
        return not_applicable("the kernel does not set the frequency of the processors, as in most virtual machines")
    if allowed.value is None:
        return unknown(f"{allowed.source}: {allowed.why}", _STATUS_REMEDY)
    ours = cpu_numbers(allowed.value)
    used = [(policy, ours & cpu_numbers(policy.cpus)) for policy in policies]
    used = [(policy, cpus) for policy, cpus in used if cpus]
    saving = [(policy, cpus) for policy, cpus in used if _saves(policy)]
    if saving:
        cpus = frozenset().union(*(cpus for _, cpus in saving))
        return warned(
            f"{plural(len(cpus), 'core')} of the {len(ours)} that this process may use save power: {cpu_list(cpus)} "
            f"({named(dict.fromkeys(map(_describe, (policy for policy, _ in saving))))}; {saving[0][0].source})",
            "while you measure, run `cpupower frequency-set --governor performance` on the host, or write performance "
            "into each /sys/devices/system/cpu/cpufreq/policy*/scaling_governor; in Kubernetes set it in the node's "
            "image or its tuned profile",
        )
    listing = named(dict.fromkeys(_describe(policy) for policy, _ in used)) or "none of these cores has a governor"
    return passed(f"frequency of cores {allowed.value}: {listing}")


def _saves(policy: FrequencyPolicy) -> bool:
    if policy.governor != "powersave":
        return False
    return policy.driver not in _PREFERENCE_DECIDES or policy.preference in _SAVING


def _describe(policy: FrequencyPolicy) -> str:
    of = f" of {policy.driver}" if policy.driver else ""
    return f"governor {policy.governor}{of}" + (f", preference {policy.preference}" if policy.preference else "")


@check("numa-cores", "May this process use cores of the NUMA nodes of its GPUs and of a network card?")
def numa_cores(facts: Facts, expected: Requirements) -> Judgement:
    """A process may use cores of the NUMA nodes of its GPUs and of a network card."""
    nodes = {node.number: cpu_numbers(node.cpus) for node in facts.host.numa}
    with_cores = [number for number, cpus in nodes.items() if cpus]
    if len(with_cores) < 2:
        return not_applicable(f"this host has {plural(len(with_cores), 'NUMA node')} with cores")
    shown = visible(facts.gpu.gpus, facts.environment.values).gpus
    gpus = {f"GPU {gpu.index}": gpu.numa for gpu in shown if gpu is not None and gpu.numa in nodes}
    cards = {card.name: card.numa for card in network_cards(facts.rdma) if card.numa in nodes}
    if not gpus and not cards:
        return not_applicable("no GPU and no RDMA device with a known NUMA node was found")
    allowed = facts.host.cores.allowed
    if allowed.value is None:
        return unknown(f"{allowed.source}: {allowed.why}", _STATUS_REMEDY)
    ours = cpu_numbers(allowed.value)
    near = {number for number, cpus in nodes.items() if cpus & ours}
    may_use = f"this process may use cores {allowed.value} of {_nodes(near)}"
    far = {name: node for name, node in gpus.items() if node not in near}
    if cards and not near & set(cards.values()):
        far |= cards
    if far:
        return warned(
            f"{may_use}, but {named(f'{name} is at node {node}' for name, node in far.items())}",
            f"give the ranks cores of {_nodes(far.values())}: `numactl --cpunodebind`, `srun --cpu-bind`, a cpuset of "
            "the container with cores of each node, or in Kubernetes the topologyManagerPolicy single-numa-node; or "
            "give this process only GPUs and cards of its own node",
        )
    other = [name for name, node in cards.items() if node not in near]
    suffix = f"; network cards at other nodes: {named(other)}" if other else ""
    return passed(
        f"{may_use}, where its {plural(len(gpus), 'GPU')} and a network card are{suffix}"
        if gpus and cards
        else f"{may_use}, where {named([*gpus, *(name for name in cards if name not in other)])} are{suffix}"
    )


def _nodes(numbers: Iterable[int]) -> str:
    listed = sorted(set(numbers))
    return f"NUMA node{'' if len(listed) == 1 else 's'} {', '.join(map(str, listed)) or 'none'}"
