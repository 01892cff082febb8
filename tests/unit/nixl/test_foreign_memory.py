# SPDX-License-Identifier: Apache-2.0
"""What forbids that UCX copies between processes, as a container's defaults do, is named in the row's verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, Finished, command, environment

from pytest_nixl.nixl.worker.foreign_memory import obstacle

WITHOUT = [sys.executable, str(Path(__file__).with_name("without_ptrace.py"))]
ROW = (BANDWIDTH, "--nixl-blocks=64KiB", "--nixl-op=WRITE")
NAMED = "lacks the capability SYS_PTRACE"


def run(*prefix: str, **variables: str) -> Finished:
    """Measure one row, with its processes started by another command."""
    done = subprocess.run(
        [*prefix, *command(*ROW)],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return Finished(done.returncode, done.stdout)


def test_a_seccomp_filter_and_the_missing_capability_are_named() -> None:
    done = run(*WITHOUT)
    assert done.verdicts == {"WRITE 64KiB": "WRONG-TRANSPORT"}
    assert "a seccomp filter (the container's) forbids process_vm_readv" in done.output
    assert NAMED in done.output
    assert "remedy: Start the container with --cap-add SYS_PTRACE" in done.output
    assert done.code == 1


def test_a_process_that_only_lacks_the_capability_is_healthy() -> None:
    """Two processes of one user may read each other's memory: the capability alone is not the cause."""
    done = run(*WITHOUT, "--keep-calls")
    assert done.verdicts["WRITE 64KiB"] != "WRONG-TRANSPORT"
    assert "SYS_PTRACE" not in done.output
    assert "cma/memory" in done.output


def test_ucx_tls_that_leaves_cma_out_is_the_cause_and_not_the_filter() -> None:
    done = run(*WITHOUT, UCX_TLS="tcp")
    assert done.verdicts == {"WRITE 64KiB": "WRONG-TRANSPORT"}
    assert NAMED not in done.output
    assert "remedy: Check UCX_TLS" in done.output


def told(*prefix: str, **variables: str) -> str:
    code = "from pytest_nixl.nixl.worker.foreign_memory import obstacle; print(obstacle(), end='')"
    done = subprocess.run([*prefix, sys.executable, "-c", code], cwd=ROOT, env=environment(**variables),
                          capture_output=True, text=True, check=True)  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("transports", ["", "all", "sm,self", "cma", "rc,cma,shm", "^tcp", "^posix"])
def test_the_filter_is_told_where_ucx_would_take_cma(transports: str) -> None:
    assert NAMED in told(*WITHOUT, UCX_TLS=transports)


@pytest.mark.parametrize("transports", ["tcp", "self,posix", "^cma", "^sm,tcp"])
def test_nothing_is_told_where_ucx_would_not_take_cma(transports: str) -> None:
    assert told(*WITHOUT, UCX_TLS=transports) == ""


def test_nothing_is_told_where_nothing_forbids_it() -> None:
    assert told() == ""


CAPABLE, BARE = "000001ffffffffff", "00000000a80425fb"


@pytest.mark.parametrize(
    ("scope", "capabilities", "expected"),
    [
        ("0", BARE, ""),
        ("1", BARE, ""),  # UCX lets its peers in by itself
        ("2", CAPABLE, ""),
        ("2", BARE, "kernel.yama.ptrace_scope=2 forbids"),
        ("3", CAPABLE, "kernel.yama.ptrace_scope=3 forbids"),
        ("", BARE, ""),
    ],
)
def test_yama_is_named(tmp_path: Path, scope: str, capabilities: str, expected: str) -> None:
    """A stand-in for /proc, because not every kernel has Yama, and its setting is the whole machine's."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\nSeccomp:\t0\n")
    if scope:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    said = obstacle({}, tmp_path)
    assert said.startswith(expected)
    assert bool(said) is bool(expected)
    assert (NAMED in said) is (bool(expected) and capabilities == BARE)
