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
#: A /dev/shm of its own in a mount namespace, as a container has one.
SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm; exec "$@"', "sh")


def said_with(folder: Path, prefix: Sequence[str]) -> str:
    """Return what a test with an agent prints, started by a command."""
    (folder / "test_it.py").write_text(TEST)
    done = subprocess.run(
        [*prefix, *command("-q", "--nixl-backend=UCX", "test_it.py")],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stdout


@pytest.mark.long
def test_a_small_shared_memory_is_named_when_a_worker_crashes(tmp_path: Path) -> None:
    need_programs("unshare", "mount", root=True)
    said = said_with(tmp_path, SMALL_SHM)
    assert "of 16 MiB free, which UCX needs for its queues" in said
    assert "remedy: mount it: `mount -t tmpfs" in said


@pytest.mark.long
def test_a_limit_of_the_size_of_files_is_named(tmp_path: Path) -> None:
    said = said_with(tmp_path, ["prlimit", "--fsize=4096"])
    assert "this process may write at most 4096 bytes to a file" in said
    assert "remedy: raise the limit: `ulimit -f unlimited`" in said
