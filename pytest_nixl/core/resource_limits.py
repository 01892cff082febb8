# SPDX-License-Identifier: Apache-2.0
"""What a process may not have: a file, a byte or memory, because of a limit of its own or of a file system.

UCX cannot start without shared memory, and names no cause that can be typed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

FILE_SIZE_REMEDY = "raise the limit: `ulimit -f unlimited`"
ADDRESS_SPACE_REMEDY = "raise the limit: `ulimit -v unlimited`"
PROCESSES_REMEDY = (
    "raise the limit of processes: `ulimit -u`, `docker run --pids-limit=-1`, or podPidsLimit of the kubelet; or end "
    "other processes of this user"
)
MEMORY_REMEDY = "raise the limit of memory: `docker run --memory`, or resources.limits.memory of the pod's container"
DATA_REMEDY = "raise the limit: `ulimit -d unlimited`"
CALL_REMEDY = (
    "if this is a container, `docker run --security-opt seccomp=unconfined` shows whether its seccomp filter has to "
    "allow it; `strace -f -Z` names the call"
)
#: What a limit of this host forbids fails with one attempt and not with the next.
REMEDIES_OF_LIMITS = (
    PROCESSES_REMEDY,
    MEMORY_REMEDY,
    ADDRESS_SPACE_REMEDY,
    DATA_REMEDY,
    FILE_SIZE_REMEDY,
    CALL_REMEDY,
)
NO_SPACE_REMEDY = "delete files there, or set TMPDIR to a directory on another file system"
_NO_START = "the kernel starts no further process or thread"
#: Bytes of address space below which an agent may crash. One with UCX 1.23 does with 200 MB, and not with 256 MiB.
AGENT_NEEDS = 512 << 20
#: Processes and threads that two agents with UCX start at most.
_THREADS_NEEDED = 16
#: Bytes of address space that an etcd maps for its data when it starts, before it has any.
ETCD_NEEDS = 10 << 30
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
        file_system = os.statvfs(path)
    except OSError:
        return ""
    free, size = (blocks * file_system.f_frsize for blocks in (file_system.f_bavail, file_system.f_blocks))
    return f"{path} has {free >> 20} of {size >> 20} MiB free, which UCX needs for its queues" if free < LITTLE else ""


def shared_memory_fault(path: str = SHM) -> str:
    """Return a sentence if shared memory cannot be used; an empty text if it can."""
    try:
        file_system = os.statvfs(path)
    except OSError as error:
        return f"{path} cannot be used ({error.strerror})"
    if file_system.f_flag & os.ST_RDONLY:
        return f"{path} is mounted read-only"
    return "" if os.access(path, os.W_OK) else f"{path} cannot be written by this user"


def memory_kills(root: str = "") -> tuple[int, str]:
    """Return how many processes of this control group the kernel has ended for want of memory, and the limit in words.

    :param root: the folder of /proc and /sys.
    """
    for path in _control_groups("memory", root):
        most = _read(f"{path}/memory.max") or _read(f"{path}/memory.limit_in_bytes")
        events = _read(f"{path}/memory.events") or _read(f"{path}/memory.oom_control")
        ended = re.search(r"^oom_kill ([1-9][0-9]*)$", events, re.MULTILINE)
        if ended and most.isdecimal():
            limit = f"its control group may use {int(most) >> 20} MiB of memory ({path})"
            return int(ended[1]), f"the kernel ends processes here for want of memory, and {limit}"
    return 0, ""


def _control_groups(controller: str, root: str = "") -> Iterator[str]:
    """Yield the folders of this process' control group and of those above it, whose limits count for it, too.

    In a container the path may be the host's; then only the mounted root of the control groups exists.
    """
    for line in _read(f"{root}/proc/self/cgroup").splitlines():
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers in ("", controller):
            folder = f"{root}/sys/fs/cgroup{controllers and f'/{controllers}'}"
            yield from (os.path.normpath(f"{folder}/{above}") for above in (group, *map(str, Path(group).parents)))


def let_end_first(pid: int) -> None:
    """Let the kernel end a process that was just started, and its children, before this one if memory is short.

    The process cannot do this for itself: while Python starts in it, it already needs memory.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def file_size_fault() -> str:
    """Return a sentence if this process may write only small files, which shared memory consists of; else nothing."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most == resource.RLIM_INFINITY or most >= LITTLE:
        return ""
    return f"this process may write at most {most} bytes to a file, and shared memory is one (ulimit -f)"


def address_space_fault(needed: float = float("inf"), kind: int = resource.RLIMIT_AS) -> str:
    """Return a sentence if this process may have less memory than ``needed`` bytes; else an empty text.

    :param kind: the limit: of its address space, or of its data (RLIMIT_DATA).
    """
    most = resource.getrlimit(kind)[0]
    if most == resource.RLIM_INFINITY or most >= needed:
        return ""
    name = "address space here (ulimit -v)" if kind == resource.RLIMIT_AS else "data here (ulimit -d)"
    return f"a process may have at most {most >> 20} MiB of {name}"


def start_fault(root: str = "") -> tuple[str, str]:
    """Say why the kernel starts no further process or thread, and what to do.

    :param root: the folder of /proc and /sys.
    """
    if fault := address_space_fault(AGENT_NEEDS):
        return f"{fault}, and NIXL needs more", ADDRESS_SPACE_REMEDY
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limit = "" if most == resource.RLIM_INFINITY else f": this user may have {most} (ulimit -u)"
    for path in _control_groups("pids", root):
        allowed, used = _read(f"{path}/pids.max"), _read(f"{path}/pids.current")
        if allowed.isdecimal() and used.isdecimal() and int(allowed) - int(used) < _THREADS_NEEDED:
            return f"{_NO_START}: its control group may have {allowed} ({path})", PROCESSES_REMEDY
    is_far = most == resource.RLIM_INFINITY or _threads_of_this_user(root) + _THREADS_NEEDED < most
    if is_far and re.search(r"^Seccomp:\s*2$", _read(f"{root}/proc/self/status"), re.MULTILINE):
        return f"{_NO_START}, though no limit of them is near: the seccomp filter may forbid clone3", CALL_REMEDY
    return f"{_NO_START}{limit}", PROCESSES_REMEDY


def _threads_of_this_user(root: str) -> int:
    """Return how many threads of this user run, as far as /proc shows them."""
    texts = (_read(str(path)) for path in Path(f"{root}/proc").glob("[0-9]*/status"))
    own = [text for text in texts if re.search(rf"^Uid:\s+{os.getuid()}\s", text, re.MULTILINE)]
    return sum(int(count) for text in own for count in re.findall(r"^Threads:\s+(\d+)$", text, re.MULTILINE))


def shortage(*, crashed: bool = False) -> tuple[str, str] | None:
    """Return what this process has too little of for an agent, and what to do; None if nothing is known.

    :param crashed: whether a process with the limits of this one was ended by a signal.
    """
    if fault := shared_memory_fault():
        return fault, SHM_REMEDY
    if fault := file_size_fault():
        return fault, FILE_SIZE_REMEDY
    if fault := address_space_fault(AGENT_NEEDS):
        return f"{fault}, and NIXL needs more", ADDRESS_SPACE_REMEDY
    if fault := address_space_fault(AGENT_NEEDS, resource.RLIMIT_DATA):
        return f"{fault}, and NIXL needs more", DATA_REMEDY
    if crashed and not _can_start_threads():
        return start_fault()
    if crashed and (fault := shared_memory_shortage()):
        return fault, SHM_REMEDY
    return None


def _can_start_threads() -> bool:
    """Return whether as many threads as agents start can be started now."""
    end, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(_THREADS_NEEDED):
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    return True


def file_fault(error: OSError) -> tuple[str, str]:
    """Say why a file or a process cannot be made, and what to do.

    A full file system is told from one without inodes.
    """
    if error.errno == errno.EAGAIN:
        return start_fault()
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{error.strerror}: a process may have {most} (ulimit -n)", "raise the limit: `ulimit -n 65536`"
    if error.filename is None and error.errno == errno.ENOENT and _is_gone():
        return "the working directory has been deleted", "change to another one"
    if fault := file_size_fault():
        return fault.partition(", and ")[0], FILE_SIZE_REMEDY
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    description = f"{path}: {error.strerror or error}" if path else str(error.strerror or error)
    if not path and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return f"the system refuses a call ({name}: {description})", CALL_REMEDY
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{description} ({no_space(path)})", NO_SPACE_REMEDY
    if path.startswith("/dev/"):
        return description, "give the container its device files: `mount -t devtmpfs devtmpfs /dev`"
    if path == sys.executable:
        return description, "let this user execute it, and search each of its folders (`namei -l` shows their rights)"
    return description, "set TMPDIR to a directory in which this user can make files"


def _is_gone() -> bool:
    """Return whether the working directory has been deleted."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def full_file_system(folder: str) -> str:
    """Return a sentence if nothing more can be written to a folder's file system; an empty text if it can."""
    try:
        file_system = os.statvfs(folder)
    except OSError:
        return ""
    full = not file_system.f_bavail or (file_system.f_files and not file_system.f_favail)
    return f"nothing more can be written to {folder}: {no_space(folder)}" if full else ""


def no_space(path: str) -> str:
    """Say of what the file system of a path has nothing left: inodes or space."""
    folder = next((parent for parent in (Path(path), *Path(path).parents) if parent.is_dir()), Path("/"))
    with contextlib.suppress(OSError):
        file_system = os.statvfs(folder)
        if file_system.f_files and not file_system.f_favail:
            return f"all {file_system.f_files} inodes of its file system are in use: `df -i {folder}`"
        if not file_system.f_bavail:
            return f"its file system is full: `df {folder}`"
    return f"its file system had no space or no inode left: `df {folder}; df -i {folder}`"
