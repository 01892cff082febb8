# SPDX-License-Identifier: Apache-2.0
"""The verdict of a row names what forbids UCX to copy between processes, such as the defaults of a container."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, Finished, command, environment

from pytest_nixl.nixl.worker.foreign_memory import obstacle

WITHOUT = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "without_ptrace.py")]
CAPABLE, BARE = "000001ffffffffff", "00000000a80425fb"
NAMED = "lacks the capability SYS_PTRACE"

YAMA = "forbids cma to read the other process's memory"


@pytest.mark.long
def test_seccomp_filter_and_missing_capability_are_named() -> None:
    argv = [*WITHOUT, *command(BANDWIDTH, "--nixl-blocks=64KiB", "--nixl-op=WRITE", "--nixl-duration=20ms")]
    ended = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900, check=False)
    done = Finished(ended.returncode, ended.stdout + ended.stderr)
    assert done.verdicts == {"WRITE 64KiB": "WRONG-TRANSPORT"}
    assert re.search("seccomp filter .*process_vm_readv", done.output)
    assert NAMED in done.output
    assert re.search(r"remedy: .*--cap-add SYS_PTRACE", done.output)
    assert done.code == 1


def output_of(*prefix: str, **variables: str) -> str:
    code = "from pytest_nixl.nixl.worker.foreign_memory import obstacle; print(obstacle(), end='')"
    done = subprocess.run([*prefix, sys.executable, "-c", code], cwd=ROOT, env=environment(**variables),
                          capture_output=True, text=True, check=True)  # fmt: skip
    return done.stdout


def test_a_real_filter_is_named() -> None:
    assert NAMED in output_of(*WITHOUT, UCX_TLS="all")


FILTER = "a seccomp filter (the container's) forbids"
#: Values of UCX_TLS that permit cma, and others.
WITH_CMA = ("", "all", "sm,self", "cma", "rc, shm", "^tcp, ud", ",")
WITHOUT_CMA = ("self,posix", "^sm,tcp", "^tcp, all", "tcp^cma")


@pytest.mark.parametrize(
    ("transports", "code", "filtered", "subject"),
    [
        *[(transports, errno.EPERM, "2", FILTER) for transports in WITH_CMA],
        ("", errno.EACCES, "0", "the kernel forbids"),
        ("", errno.ENOSYS, "1", "the kernel forbids"),
        ("", errno.EFAULT, "2", ""),
        *[(transports, errno.EPERM, "2", "") for transports in WITHOUT_CMA],
    ],
)
@pytest.mark.parametrize("capable", [False, True])
def test_a_call_that_is_forbidden_is_named_if_ucx_may_use_cma(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str, code: int, filtered: str, subject: str,
    capable: bool,
) -> None:  # fmt: skip
    (tmp_path / "self").mkdir()
    capabilities = CAPABLE if capable else BARE
    (tmp_path / "self" / "status").write_text(f"CapEff:\t{capabilities}\nSeccomp:\t{filtered}\n")

    def process_vm_readv(pid: int, local: object, count: int, remote: object, remote_count: int, flags: int) -> int:
        return -1 if (pid, count, remote_count, flags) == (os.getpid(), 1, 1, 0) else 6

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace(process_vm_readv=process_vm_readv))
    monkeypatch.setattr("ctypes.get_errno", lambda: code)
    lacks = "" if capable else f", and this container or process {NAMED}"
    sentence = f"{subject} process_vm_readv, with which cma reads the other process's memory{lacks}"
    assert obstacle({"UCX_TLS": transports}, tmp_path) == (sentence if subject else "")


def test_nothing_is_named_if_nothing_forbids_it() -> None:
    assert output_of() == ""
    # Two processes of one user may read each other's memory without the capability.
    assert output_of(*WITHOUT, "--keep-calls", UCX_TLS="all") == ""


@pytest.mark.parametrize(
    ("scope", "capabilities", "expected"),
    [
        ("1", BARE, ""),  # UCX itself permits its peers
        ("2", CAPABLE, ""),
        ("2", BARE, f"kernel.yama.ptrace_scope=2 {YAMA}, and this container or process {NAMED}"),
        ("3", CAPABLE, f"kernel.yama.ptrace_scope=3 {YAMA}"),
        ("3", "", f"kernel.yama.ptrace_scope=3 {YAMA}, and this container or process {NAMED}"),
        ("", BARE, ""),
    ],
)
def test_setting_of_yama_is_named(tmp_path: Path, scope: str, capabilities: str, expected: str) -> None:
    """The test uses a stand-in for /proc: not every kernel has Yama, and its setting applies to the whole machine."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\nSeccomp:\t0\n")
    if scope:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    assert obstacle({}, tmp_path) == expected
