# SPDX-License-Identifier: Apache-2.0
"""What a host gives too little of is named in one sentence with a remedy, although NIXL and UCX only crash."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.cli_run import command, environment
from helpers.needs import need_programs

TEST = "def test_it(nixl_agent):\n    assert nixl_agent.get_plugin_list()\n"
#: A /dev/shm of its own in a mount namespace, as a container has one. The run takes 4 KiB of it. With less than 16 MiB
#: free UCX does not use it, and does not crash.
SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16388k tmpfs /dev/shm; exec "$@"', "sh")


#: A directory for temporary files with few inodes. Pytest takes two of them, a supervisor three, an etcd six.
FEW_INODES = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o nr_inodes="$0" tmpfs "$TMPDIR"; exec "$@"')
ETCD_TEST = f"def test_it(nixl_etcd, nixl_agent):\n    {TEST.partition('    ')[2]}"
LATE_TEST = """
import pytest

@pytest.fixture
def late(request):
    return request.getfixturevalue("nixl_agent")

def test_it(late):
    assert late.get_plugin_list()
"""
BUFFER_TEST = "def test_it(nixl_buffer, nixl_agent):\n    nixl_buffer(nixl_agent, 256 << 20)\n"


def said_with(folder: Path, prefix: Sequence[str], test: str = TEST, **env: str) -> str:
    """Return what a test with an agent prints, started by a command."""
    (folder / "test_it.py").write_text(test)
    done = subprocess.run(
        [*prefix, *command("-q", "--nixl-backend=UCX", "test_it.py")],
        cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    return done.stdout


@pytest.mark.long
def test_a_small_shared_memory_is_named_when_a_worker_crashes(tmp_path: Path) -> None:
    need_programs("unshare", "mount", root=True)
    output = said_with(tmp_path, SMALL_SHM)
    assert "of 16 MiB free, which UCX needs for its queues" in output
    assert "remedy: mount it: `mount -t tmpfs" in output


@pytest.mark.long
def test_a_limit_of_the_size_of_files_is_named(tmp_path: Path) -> None:
    output = said_with(tmp_path, ["prlimit", "--fsize=4096"])
    assert "this process may write at most 4096 bytes to a file" in output
    assert "remedy: raise the limit: `ulimit -f unlimited`" in output


@pytest.mark.long
@pytest.mark.parametrize(
    ("inodes", "message", "test"),
    [
        (5, "the supervisor of this run cannot be started", ETCD_TEST),
        (13, "the embedded etcd 3.", ETCD_TEST),
        # The process from which workers are forked is started with the first of them, and not during collection.
        (7, "a worker cannot be started", LATE_TEST),
        (7, "the log of a worker cannot be made", TEST),
    ],
)
def test_a_file_system_without_inodes_is_named(inodes: int, message: str, test: str, tmp_path: Path) -> None:
    need_programs("unshare", "mount", root=True)
    (tmp_path / "tmp").mkdir()
    prefix = (*FEW_INODES, str(inodes))
    output = said_with(tmp_path, prefix, test=test, TMPDIR=str(tmp_path / "tmp"))
    assert message in output
    assert f"df -i {tmp_path / 'tmp'}" in output
    assert "delete files there, or set TMPDIR to a directory" in output
    assert "Traceback" not in output
    assert "def test_it" not in output


@pytest.mark.long
@pytest.mark.parametrize("kib", [200_000, 2_000_000])  # with less `etcd --version` ends, too
def test_an_etcd_with_too_little_address_space_is_named(kib: int, tmp_path: Path) -> None:
    output = said_with(tmp_path, ["prlimit", f"--as={kib << 10}"], test=ETCD_TEST)
    assert (
        f"a process may have at most {kib >> 10} MiB of address space here (ulimit -v), and etcd maps 10 GiB" in output
    )
    assert "remedy: raise the limit: `ulimit -v unlimited`; or use an etcd that is already running" in output


@pytest.mark.long
@pytest.mark.parametrize(("kib", "test"), [(200_000, TEST), (262_144, BUFFER_TEST)])  # the doctor has less, and data
def test_a_worker_with_too_little_memory_is_named(kib: int, test: str, tmp_path: Path) -> None:
    output = said_with(tmp_path, ["prlimit", f"--as={kib << 10}"], test=test)
    assert f"a process may have at most {kib >> 10} MiB of address space here (ulimit -v)" in output
    assert "remedy: raise the limit: `ulimit -v unlimited`" in output
