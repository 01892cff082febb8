# SPDX-License-Identifier: Apache-2.0
"""Facts of the operating system, its limits and queues, the processors and the memory of a host.

The memory is also what this process may still allocate, as the host and its control groups limit it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pytest_nixl.core.units import GIB, KIB, MIB
from pytest_nixl.host.recorded_tree import Fact, FactsRoot

#: The kernel writes a larger number if a version 1 control group has no limit.
_NO_LIMIT = 1 << 62
#: By control group version (2, 1): folder, file of the limit, file of the usage, and the line in memory.stat with the
#: part of the usage that is cached files, which the kernel frees when needed.
_FILES = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

_CAP_IPC_LOCK = 14
_STATUS = "/proc/self/status"
_POLICIES = "/sys/devices/system/cpu/cpufreq"
#: No list of processors names a higher number.
_MOST_CPUS = 1 << 16
_DISABLED = "/proc/sys/kernel/io_uring_disabled"
_AIO_MAX, _AIO_USED = "/proc/sys/fs/aio-max-nr", "/proc/sys/fs/aio-nr"
#: The system calls that set up a queue, by architecture. With null arguments a kernel that allows the call answers
#: EFAULT or EINVAL.
_NUMBERS = {"x86_64": {"io_setup": 206, "io_uring_setup": 425}, "aarch64": {"io_setup": 0, "io_uring_setup": 425}}


@dataclass(frozen=True)
class AvailableMemory:
    """A number of bytes that may still be allocated, and its source."""

    size: int
    source: str

    def __str__(self) -> str:
        return f"{in_bytes(self.size)} according to {self.source}"


def available_memory(root: FactsRoot) -> AvailableMemory | None:
    """Return the smallest amount that the host or a control group allows; None if unknown."""
    limits = [*_of_host(root), *_of_groups(root)]
    return min(limits, key=lambda limit: limit.size, default=None)


def in_bytes(size: int) -> str:
    """Format a size in bytes in its largest unit with one decimal, followed by the bytes."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= unit:
            return f"{size / unit:.1f} {name} ({size} bytes)" if size < 1 << 70 else f"{size:.1e} bytes"
    return f"{size} bytes"


def _of_host(root: FactsRoot) -> Iterator[AvailableMemory]:
    match = re.search(r"^MemAvailable:\s*([0-9]+) kB", root.read("/proc/meminfo") or "", re.MULTILINE)
    if match:
        yield AvailableMemory(int(match[1]) * KIB, "MemAvailable")


def _of_groups(root: FactsRoot) -> Iterator[AvailableMemory]:
    """Yield the free memory of each control group, from that of this process to the outermost visible one."""
    for line in (root.read("/proc/self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, limit_file, use_file, given_back = _FILES[1 if controllers else 0]
        # In a container the path may be the host's; then only the mounted root of the control groups exists.
        innermost = PurePosixPath(path)
        for group in (innermost, *innermost.parents):
            place = f"{folder}{'' if str(group) == '/' else group}"
            limit, use = root.number(f"{place}/{limit_file}"), root.number(f"{place}/{use_file}")
            if limit is None or use is None or limit >= _NO_LIMIT:
                continue
            match = re.search(rf"^{given_back} ([0-9]+)$", root.read(f"{place}/memory.stat") or "", re.MULTILINE)
            available = max(0, limit - use + (int(match[1]) if match else 0))
            yield AvailableMemory(available, f"the limit of {in_bytes(limit)} in {place}/{limit_file}")


@dataclass(frozen=True)
class Numa:
    """A NUMA node: its processors as the kernel lists them (such as ``0-47``), and its memory in bytes."""

    number: int
    cpus: str
    memory: int | None
    source: str


@dataclass(frozen=True)
class HugePages:
    """Huge pages of one size in bytes; ``total`` are reserved, of which ``free`` are free."""

    size: int
    total: int
    free: int
    source: str


@dataclass(frozen=True)
class Memlock:
    """The limits of locked memory in bytes; None means unlimited.

    :param privileged: whether the process has CAP_IPC_LOCK, which lifts the limits.
    """

    soft: int | None
    hard: int | None
    privileged: bool


@dataclass(frozen=True)
class Shm:
    """The size and the free space of /dev/shm, in bytes."""

    size: int
    free: int


@dataclass(frozen=True)
class HostFacts:
    """One host, or one container on it. Memory sizes are in bytes."""

    name: Fact[str]
    system: Fact[str]
    kernel: Fact[str]
    architecture: Fact[str]
    container: Fact[str]
    processor: Fact[str]
    cpus: Fact[int]
    numa: tuple[Numa, ...]
    memory: Fact[int]
    available: Fact[int]
    huge_pages: tuple[HugePages, ...]
    memlock: Fact[Memlock]
    shm: Fact[Shm]
    ptrace_scope: Fact[int]
    cores: Cores


def read_host(root: FactsRoot) -> HostFacts:
    machine = root.ask("machine", lambda: {"architecture": platform.machine()})
    memory = root.read("/proc/meminfo") or ""
    info = root.read("/proc/cpuinfo") or ""
    return HostFacts(
        name=_text(root, "/proc/sys/kernel/hostname"),
        system=_system(root),
        kernel=_text(root, "/proc/sys/kernel/osrelease"),
        architecture=Fact(machine.get("architecture"), "uname", machine.get("why", "")),
        container=_container(root),
        processor=_match_of(r"^model name\s*: (.*)$", info, "/proc/cpuinfo"),
        cpus=_cpus(root),
        numa=tuple(_numa(root)),
        memory=_kilobytes("MemTotal", memory),
        available=_kilobytes("MemAvailable", memory),
        huge_pages=tuple(_huge_pages(root)),
        memlock=_memlock(root),
        shm=_shm(root),
        ptrace_scope=integer_in(root, "/proc/sys/kernel/yama/ptrace_scope"),
        cores=read_cores(root),
    )


def _text(root: FactsRoot, path: str) -> Fact[str]:
    return Fact.read(root.read(path), path, "it cannot be read")


def integer_in(root: FactsRoot, path: str) -> Fact[int]:
    """Return the integer in a file."""
    return Fact.read(root.number(path), path, "it cannot be read")


def _match_of(pattern: str, text: str, source: str) -> Fact[str]:
    match = re.search(pattern, text, re.MULTILINE)
    return Fact.read(match and match[1], source, "it has no such line")


def _system(root: FactsRoot) -> Fact[str]:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        text = root.read(path)
        if text is not None:
            return _match_of(r'^PRETTY_NAME="?([^"\n]*)"?$', text, path)
    return Fact(None, "/etc/os-release", "it cannot be read")


def _container(root: FactsRoot) -> Fact[str]:
    """Return the kind of this container; ``no`` if nothing indicates a container."""
    for path, kind in (
        ("/var/run/secrets/kubernetes.io/serviceaccount/namespace", "kubernetes"),
        ("/.dockerenv", "docker"),
        ("/run/.containerenv", "podman"),
    ):
        if root.exists(path):
            return Fact(kind, path)
    groups = root.read("/proc/1/cgroup") or ""
    match = re.search(r"(kubepods|docker|containerd|crio|lxc)", groups)
    if match:
        return Fact("kubernetes" if match[1] == "kubepods" else match[1], "/proc/1/cgroup")
    return Fact("no", "/.dockerenv, /run/.containerenv, /proc/1/cgroup")


def _cpus(root: FactsRoot) -> Fact[int]:
    path = "/sys/devices/system/cpu/online"
    text = root.read(path)
    return Fact.read(len(cpu_numbers(text)) if text else None, path, "it cannot be read")


def _numa(root: FactsRoot) -> list[Numa]:
    nodes = []
    for name in root.entries("/sys/devices/system/node"):
        if re.fullmatch(r"node\d+", name):
            path = f"/sys/devices/system/node/{name}"
            memory = re.search(r"MemTotal:\s*(\d+) kB", root.read(f"{path}/meminfo") or "")
            total = int(memory[1]) << 10 if memory else None
            nodes.append(Numa(int(name[4:]), root.read(f"{path}/cpulist") or "", total, path))
    return nodes


def _kilobytes(name: str, text: str) -> Fact[int]:
    match = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
    return Fact.read(int(match[1]) << 10 if match else None, "/proc/meminfo", "it has no such line")


def _huge_pages(root: FactsRoot) -> list[HugePages]:
    folder = "/sys/kernel/mm/hugepages"
    pages = []
    for name in root.entries(folder):
        match = re.fullmatch(r"hugepages-(\d+)kB", name)
        total = root.number(f"{folder}/{name}/nr_hugepages")
        if match and total is not None:
            free = root.number(f"{folder}/{name}/free_hugepages") or 0
            pages.append(HugePages(int(match[1]) << 10, total, free, f"{folder}/{name}"))
    return pages


def _memlock(root: FactsRoot) -> Fact[Memlock]:
    path = "/proc/self/limits"
    match = re.search(r"^Max locked memory +(\w+) +(\w+)", root.read(path) or "", re.MULTILINE)
    if match is None:
        return Fact(None, path, "it has no limit of locked memory")
    soft, hard = (None if text == "unlimited" else int(text) for text in match.groups())
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", root.read("/proc/self/status") or "", re.MULTILINE)
    privileged = effective is not None and bool(int(effective[1], 16) >> _CAP_IPC_LOCK & 1)
    return Fact(Memlock(soft, hard, privileged), path)


def _shm(root: FactsRoot) -> Fact[Shm]:
    answer = root.ask("shm", _ask_shm)
    if "why" in answer:
        return Fact(None, "statvfs of /dev/shm", answer["why"])
    return Fact(Shm(answer["size"], answer["free"]), "statvfs of /dev/shm")


def _ask_shm() -> dict[str, int | str]:
    try:
        file_system = os.statvfs("/dev/shm")
    except OSError as error:
        return {"why": error.strerror or str(error)}
    if file_system.f_flag & os.ST_RDONLY:
        return {"why": "it is mounted read-only"}
    return {"size": file_system.f_blocks * file_system.f_frsize, "free": file_system.f_bavail * file_system.f_frsize}


@dataclass(frozen=True)
class FrequencyPolicy:
    """How the kernel sets the frequency of some processors.

    :param cpus: the processors, such as ``0-3``.
    :param governor: such as ``performance`` or ``powersave``.
    :param driver: such as ``intel_pstate`` or ``acpi-cpufreq``; empty if unknown.
    :param preference: the energy-performance preference, such as ``balance_power``; empty if the driver has none.
    """

    cpus: str
    governor: str
    driver: str
    preference: str
    source: str


@dataclass(frozen=True)
class Cores:
    """The processors that this process may use.

    :param allowed: the processors as the kernel lists them, such as ``0-47``.
    :param policies: how their frequency is set, of all processors of the host; none where the kernel does not set it,
        as in most virtual machines.
    """

    allowed: Fact[str]
    policies: tuple[FrequencyPolicy, ...]


def read_cores(root: FactsRoot) -> Cores:
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", root.read(_STATUS) or "", re.MULTILINE)
    allowed = Fact.read(match and match[1], _STATUS, "it has no line Cpus_allowed_list")
    return Cores(allowed, tuple(_policies(root)))


def _policies(root: FactsRoot) -> Iterable[FrequencyPolicy]:
    names = [name for name in root.entries(_POLICIES) if re.fullmatch(r"policy\d+", name)]
    for name in sorted(names, key=lambda name: int(name.removeprefix("policy"))):
        place = f"{_POLICIES}/{name}"
        governor = root.read(f"{place}/scaling_governor")
        if governor:
            # The kernel separates these processors by spaces.
            cpus = ",".join((root.read(f"{place}/affected_cpus") or "").split())
            driver = root.read(f"{place}/scaling_driver") or ""
            yield FrequencyPolicy(
                cpus, governor, driver, root.read(f"{place}/energy_performance_preference") or "", place
            )


def cpu_numbers(listed: str) -> frozenset[int]:
    """Return the processors in a list of the kernel: ``0-3,8`` are five; none if it is not such a list."""
    numbers: set[int] = set()
    for part in filter(None, listed.split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII)
        if match is None:
            return frozenset()
        first, last = int(match[1]), int(match[2] or match[1])
        numbers.update(range(first, min(last, _MOST_CPUS) + 1))
    return frozenset(numbers)


def cpu_list(numbers: Iterable[int]) -> str:
    """Return processors as the kernel lists them: five of them are ``0-3,8``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


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
        uring_disabled=integer_in(root, _DISABLED),
        aio_max=integer_in(root, _AIO_MAX),
        aio_used=integer_in(root, _AIO_USED),
        seccomp=Fact.read(int(mode) if mode.isdecimal() else None, _STATUS, "it has no line Seccomp"),
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
