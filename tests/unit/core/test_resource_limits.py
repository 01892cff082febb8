# SPDX-License-Identifier: Apache-2.0
"""What limits forbid. Control groups that end processes are folders of the test: a host has only one version."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_sysfs import root_of
from helpers.needs import need_programs

from pytest_nixl.core.hidden_modules import hidden_module_of_python
from pytest_nixl.core.resource_limits import (
    ADDRESS_SPACE_REMEDY,
    AGENT_NEEDS,
    CALL_REMEDY,
    DATA_REMEDY,
    FILE_SIZE_REMEDY,
    LITTLE,
    NO_SPACE_REMEDY,
    PROCESSES_REMEDY,
    SHM_REMEDY,
    address_space_fault,
    file_fault,
    file_size_fault,
    full_file_system,
    let_end_first,
    memory_kills,
    no_space,
    shared_memory_fault,
    shared_memory_shortage,
    shortage,
    start_fault,
)

FILTERED = (sys.executable, str(Path(__file__).parents[2] / "helpers" / "without_ptrace.py"))


def test_an_error_that_names_a_module_of_python_itself_is_not_of_a_hidden_one() -> None:
    assert hidden_module_of_python(AttributeError("module 'json' has no attribute 'x'")) is None
    file = os.path.dirname(os.__file__) + "/json/__init__.py"
    assert hidden_module_of_python(ImportError("cannot import name 'x' from 'json'", path=file)) is None
    assert hidden_module_of_python(ImportError("cannot import name 'x' from 'acme'", path="/x/acme.py")) is None


def test_a_file_that_hides_a_module_of_python_is_named() -> None:
    error = ImportError("cannot import name 'x' from 'json' (/home/me/json.py)", path="/home/me/json.py")
    remedy = "rename /home/me/json.py, or take /home/me out of PYTHONPATH and do not start in it"
    assert hidden_module_of_python(error) == ("/home/me/json.py hides the module json of Python", remedy)


@pytest.mark.parametrize(("most", "fault"), [(10, "this user may have 10 (ulimit -u)"), (200, "None")])
def test_a_crash_of_a_user_who_may_start_few_threads_has_that_limit_as_its_cause(most: int, fault: str) -> None:
    """UCX may end by SIGSEGV without a word. A seccomp filter, as containers have, is not the cause."""
    need_programs("setpriv", "prlimit", root=True)
    rights = "-all,+dac_override"
    user = ["setpriv", "--reuid=54321", "--clear-groups", f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    script = "from pytest_nixl.core.resource_limits import shortage; print(shortage(), shortage(crashed=True))"
    limited = [*user, "prlimit", f"--nproc={most}", *FILTERED, "--call=436"]
    done = subprocess.run([*limited, sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("None ")
    assert fault in done.stdout.removeprefix("None ")


SMALL = "this process may write at most {} bytes to a file, and shared memory is one (ulimit -f)"
ADDRESSES = "a process may have at most 511 MiB of address space here (ulimit -v), and NIXL needs more"
NO_START = "the kernel starts no further process or thread"
SECCOMP = f"{NO_START}, though no limit of them is near: the seccomp filter may forbid clone3"
MIB = 1 << 20


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The limits of this process by kind; a kind that a test does not set is unlimited."""
    values: dict[int, int] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (values.get(kind, resource.RLIM_INFINITY), 0))
    return values


def threads(pid: int, count: object, uid: object = os.getuid()) -> dict[str, str]:
    """Return the file of a process with these threads; :param uid: its user."""
    odd = "Threads:\t\nNoThreads:\t90\nThreads:\t90 x"
    return {f"proc/{pid}/status": f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nThreads:\t{count}\n{odd}"}


FILTER = {"proc/self/status": "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1"}
POD = {"proc/self/cgroup": "0::/pod/x", "sys/fs/cgroup/pod/pids.max": "30"}
NOT_ALLOWED = f"{NO_START}: its control group may have 30 ({{}}/sys/fs/cgroup/pod)", PROCESSES_REMEDY


@pytest.mark.parametrize(
    ("files", "user", "fault"),
    [
        ({**POD, "sys/fs/cgroup/pod/pids.current": "15"}, None, NOT_ALLOWED),
        ({**POD, "sys/fs/cgroup/pod/pids.current": "14"}, None, (NO_START, PROCESSES_REMEDY)),
        (
            {**POD, "sys/fs/cgroup/pod/x/pids.max": "max"},
            99,
            (f"{NO_START}: this user may have 99 (ulimit -u)", PROCESSES_REMEDY),
        ),
        (FILTER, None, (SECCOMP, CALL_REMEDY)),
        ({"proc/self/status": "NoSeccomp:\t2\nSeccomp:\t20"}, None, (NO_START, PROCESSES_REMEDY)),
        ({**FILTER, **threads(7, 20), **threads(8, 3), **threads(9, 50, "7")}, 40, (SECCOMP, CALL_REMEDY)),
        (
            {**FILTER, **threads(7, 20), **threads(8, 3), **threads(9, 50, "7")},
            39,
            (f"{NO_START}: this user may have 39 (ulimit -u)", PROCESSES_REMEDY),
        ),
    ],
    ids=["control group", "room in it", "unlimited", "filter", "no filter", "limit is far", "limit is near"],
)
def test_what_forbids_a_process_is_named(
    tmp_path: Path, limits: dict[int, int], files: Mapping[str, str], user: int | None, fault: tuple[str, str]
) -> None:
    if user is not None:
        limits[resource.RLIMIT_NPROC] = user
    root = str(root_of(tmp_path, files).folder)
    assert start_fault(root) == (fault[0].format(root), fault[1])
    limits[resource.RLIMIT_AS] = AGENT_NEEDS - 1
    assert start_fault(root) == (ADDRESSES, ADDRESS_SPACE_REMEDY)


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [
        (resource.RLIMIT_FSIZE, LITTLE - 1, (SMALL.format(LITTLE - 1), FILE_SIZE_REMEDY)),
        (resource.RLIMIT_FSIZE, LITTLE, None),
        (resource.RLIMIT_AS, AGENT_NEEDS - 1, (ADDRESSES, ADDRESS_SPACE_REMEDY)),
        (resource.RLIMIT_AS, AGENT_NEEDS, None),
        (
            resource.RLIMIT_DATA,
            AGENT_NEEDS - 1,
            ("a process may have at most 511 MiB of data here (ulimit -d), and NIXL needs more", DATA_REMEDY),
        ),
    ],
)
def test_a_limit_that_is_too_low_for_an_agent_is_named(
    limits: dict[int, int], kind: int, limit: int, expected: tuple[str, str] | None
) -> None:
    limits[kind] = limit
    assert shortage() == expected


def test_a_crash_without_room_for_threads_has_the_limit_of_threads_as_its_cause(
    monkeypatch: pytest.MonkeyPatch, limits: dict[int, int]
) -> None:
    limits[resource.RLIMIT_NPROC] = 10
    assert shortage(crashed=True) is None
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse_the_last(thread: threading.Thread) -> None:
        if len(started) == 15:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_last)
    assert shortage() is None
    assert shortage(crashed=True) == (f"{NO_START}: this user may have 10 (ulimit -u)", PROCESSES_REMEDY)
    assert not any(thread.is_alive() for thread in started)


def test_any_limit_of_memory_is_named_if_no_need_is_known(limits: dict[int, int]) -> None:
    assert (address_space_fault(), file_size_fault()) == ("", "")
    limits[resource.RLIMIT_AS] = 3 << 40
    assert address_space_fault() == "a process may have at most 3145728 MiB of address space here (ulimit -v)"


def file_system(**changes: int) -> SimpleNamespace:
    healthy = {"f_flag": 0, "f_frsize": 4096, "f_blocks": 64 * 256, "f_bavail": 32 * 256, "f_files": 9, "f_favail": 1}
    return SimpleNamespace(**{**healthy, **changes})


LITTLE_SHM = "/dev/shm has 31 of 64 MiB free, which UCX needs for its queues"


@pytest.mark.parametrize(
    ("changes", "fault", "when_crashed"),
    [
        ({}, None, None),
        ({"f_bavail": 32 * 256 - 1}, None, (LITTLE_SHM, SHM_REMEDY)),
        (
            {"f_flag": os.ST_RDONLY},
            ("/dev/shm is mounted read-only", SHM_REMEDY),
            ("/dev/shm is mounted read-only", SHM_REMEDY),
        ),
    ],
    ids=["enough", "little", "read-only"],
)
def test_shared_memory_is_a_cause_of_a_crash_if_little_is_free(
    monkeypatch: pytest.MonkeyPatch, limits: dict[int, int], changes: dict[str, int], fault: Any, when_crashed: Any
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: file_system(**changes) if path == "/dev/shm" else None)
    assert (shortage(), shortage(crashed=True)) == (fault, when_crashed)


def test_only_shared_memory_that_is_there_can_be_used(tmp_path: Path) -> None:
    absent = f"{tmp_path}/none"
    assert (shared_memory_shortage(absent), shared_memory_fault(str(tmp_path))) == ("", "")
    assert shared_memory_fault(absent) == f"{absent} cannot be used (No such file or directory)"


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, ""),
        ({"f_bavail": 0}, "its file system is full: `df {0}`"),
        ({"f_favail": 0}, "all 9 inodes of its file system are in use: `df -i {0}`"),
        ({"f_files": 0, "f_favail": 0}, ""),
    ],
    ids=["room", "no space", "no inodes", "no count of inodes"],
)
def test_a_full_file_system_has_no_space_or_no_inodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, int], full: str
) -> None:
    assert full_file_system(f"{tmp_path}/none") == ""
    monkeypatch.setattr(os, "statvfs", lambda _: file_system(**changes))
    expected = f"nothing more can be written to {tmp_path}: {full.format(tmp_path)}" if full else ""
    assert full_file_system(str(tmp_path)) == expected
    either = f"its file system had no space or no inode left: `df {tmp_path}; df -i {tmp_path}`"
    assert no_space(f"{tmp_path}/none/file") == (full.format(tmp_path) or either)


TMPDIR = "set TMPDIR to a directory in which this user can make files"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError(errno.EAGAIN, "again"), (NO_START, PROCESSES_REMEDY)),
        *(
            (
                OSError(number, "Too many"),
                ("Too many: a process may have 7 (ulimit -n)", "raise the limit: `ulimit -n 65536`"),
            )
            for number in (errno.EMFILE, errno.ENFILE)
        ),
        (
            OSError(errno.EPERM, "Not permitted"),
            ("the system refuses a call (EPERM: Not permitted)", CALL_REMEDY),
        ),
        (ValueError, ("the system refuses a call (OSError: odd)", CALL_REMEDY)),
        (OSError(errno.EACCES, "Denied", "/x/y"), ("/x/y: Denied", TMPDIR)),
        (OSError(errno.EACCES, "Denied", b"/x/y"), ("/x/y: Denied", TMPDIR)),
        (OSError(errno.ENOENT, "No such file", "/x/y"), ("/x/y: No such file", TMPDIR)),
        (
            OSError(errno.ENOENT, "No such file", "/dev/ptmx"),
            ("/dev/ptmx: No such file", "give the container its device files: `mount -t devtmpfs devtmpfs /dev`"),
        ),
        (
            OSError(errno.EACCES, "Denied", sys.executable),
            (
                f"{sys.executable}: Denied",
                "let this user execute it, and search each of its folders (`namei -l` shows their rights)",
            ),
        ),
        *(
            (
                OSError(number, "None left", "/none"),
                ("/none: None left (its file system is full: `df /`)", NO_SPACE_REMEDY),
            )
            for number in (errno.ENOSPC, errno.EDQUOT)
        ),
        (OSError(errno.ENOSPC, "None left"), ("None left (its file system is full: `df .`)", NO_SPACE_REMEDY)),
    ],
)
def test_a_file_or_a_process_that_cannot_be_made_has_a_cause_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, limits: dict[int, int], error: Any, fault: tuple[str, str]
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: file_system(f_bavail=0))
    limits[resource.RLIMIT_NOFILE] = 7
    raised = OSError("odd") if error is ValueError else error
    assert file_fault(raised) == fault


def test_a_file_may_be_too_large_or_its_directory_deleted(
    monkeypatch: pytest.MonkeyPatch, limits: dict[int, int], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    gone = OSError(errno.ENOENT, "No such file")
    assert file_fault(gone)[0] == "the system refuses a call (ENOENT: No such file)"
    tmp_path.rmdir()
    assert file_fault(gone) == ("the working directory has been deleted", "change to another one")
    limits[resource.RLIMIT_FSIZE] = 1024
    reason = "this process may write at most 1024 bytes to a file"
    assert file_fault(OSError(errno.EFBIG, "File too large", "/x")) == (reason, FILE_SIZE_REMEDY)


def test_a_process_may_let_another_end_first() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        let_end_first(child.pid)
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"
        child.communicate(b"\n")
    let_end_first(child.pid)  # it has ended


@pytest.mark.parametrize(("call", "fault"), [(435, "no limit of them is near: the seccomp filter"), (436, "None")])
def test_threads_that_a_seccomp_filter_forbids_are_not_blamed_on_a_limit(call: int, fault: str) -> None:
    """As that of a container engine which does not know clone3; 436 is close_range."""
    script = "from pytest_nixl.core.resource_limits import shortage; print(shortage(crashed=True))"
    done = subprocess.run(
        [*FILTERED, f"--call={call}", sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert fault in done.stdout


@pytest.mark.parametrize(
    ("line", "folder", "files", "count"),
    [
        ("0::/pod/main", "pod/main", {"max": "64", "events": "oom 3\noom_kill 2\noom_group_kill 0"}, 2),
        ("0::/pod/main", "pod/main", {"max": "64", "events": "oom 3\noom_kill 0\noom_group_kill 0"}, 0),
        ("0::/pod/main", "pod/main", {"max": "max", "events": "oom_kill 2"}, 0),
        # The limit is that of the group above, as that of a pod.
        ("0::/pod/main", "pod", {"max": "64", "events": "x_oom_kill 9\noom_kill 8 x\noom_kill \noom_kill 2"}, 2),
        # In a container the path is the host's, and the mounted root is the container's.
        ("0::/host/path", "", {"max": "64", "events": "oom_kill 2"}, 2),
        (
            "5:cpu:/a\n4:memory:/pod",
            "memory/pod",
            {"limit_in_bytes": "64", "oom_control": "under_oom 0\noom_kill 2"},
            2,
        ),
        ("5:cpu:/pod", "cpu/pod", {"limit_in_bytes": "64", "oom_control": "oom_kill 2"}, 0),
    ],
)
def test_processes_that_a_control_group_ended_are_counted(
    line: str, folder: str, files: dict[str, str], count: int, tmp_path: Path
) -> None:
    group = tmp_path / "sys/fs/cgroup" / folder
    place = f"sys/fs/cgroup/{folder}/memory."
    limits = {f"{place}{name}": text.replace("64", str(64 << 20)) for name, text in files.items()}
    root_of(tmp_path, {"proc/self/cgroup": line, **limits})
    kills, limit = memory_kills(str(tmp_path))
    words = (
        f"the kernel ends processes here for want of memory, and its control group may use 64 MiB of memory ({group})"
    )
    assert (kills, limit) == (count, words if count else "")
