# SPDX-License-Identifier: Apache-2.0
"""Rows between memory and files, on the real NIXL and real file systems."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, profile, run

from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.agent_options import BackendParameter
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.worker.files import file_system
from pytest_nixl.processes.worker_errors import WorkerError

FILE = MemoryPair("DRAM", "FILE")
MakePairs = Callable[..., Launches]
ACCEPTS_ANY = "backend = ['POSIX']\ntransports = ['direct', 'cached', 'memory']"


def link(pairs: Launches, op: str = "WRITE") -> Link:
    return pairs.link("POSIX", op, FILE)


@pytest.mark.long
def test_bandwidth_suite_passes_with_the_gate_and_records(tmp_path: Path) -> None:
    written = tmp_path / "run.json"
    (tmp_path / "files").mkdir()
    done = run(
        BANDWIDTH, "--nixl-backend=posix", "--nixl-blocks=64KiB,4KiB", "--nixl-batch=2", "--nixl-depth=3",
        f"--nixl-file-dir={tmp_path / 'files'}", f"--nixl-profile={profile(tmp_path / 'p.toml', ACCEPTS_ANY)}",
        "--nixl-gate", f"--benchmark-json={written}",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.verdicts == dict.fromkeys(("WRITE 64KiB", "WRITE 4KiB", "READ 64KiB", "READ 4KiB"), "PASS")
    recorded = json.loads(written.read_text())["benchmarks"]
    assert recorded[0]["fullname"] == "POSIX/WRITE/DRAM:FILE/64KiB/batch2/depth3/0-0"
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.long
def test_other_suites_skip_checks_that_storage_cannot_run() -> None:
    done = run("-v", "suites/metadata", "suites/infrastructure", "--nixl-backend=POSIX")
    assert done.code == 0, done.output
    skipped = re.findall(r"^NOT-APPLICABLE (.+?): --nixl-backend=POSIX .* storage", done.output, re.MULTILINE)
    assert len(skipped) == 1
    assert "metadata-by-etcd" in skipped[0].split(", ")


@pytest.mark.parametrize(
    ("backend", "log", "transports"),
    [
        ("POSIX", "pytest-nixl: file direct/ext4\npytest-nixl: file memory/tmpfs\n", ("memory/tmpfs",)),
        ("OBJ", "pytest-nixl: objects http/h:1\npytest-nixl: objects https/h:2\n", ("https/h:2",)),
        ("POSIX", "x pytest-nixl: file direct/ext4\npytest-nixl: file direct/ext4 x\npytest-nixl: file \n", ()),
        ("OBJ", "x pytest-nixl: objects http/h:1\npytest-nixl: objects http/h:1 x\npytest-nixl: objects \n", ()),
    ],
)
def test_the_last_line_of_a_worker_says_how_storage_is_reached(
    backend: str, log: str, transports: tuple[str, ...]
) -> None:
    assert BACKENDS[backend].transports(log, "WRITE", 4096) == transports


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_every_byte_is_compared_in_the_file(make_pairs: MakePairs, op: str) -> None:
    samples = link(make_pairs(iterations=1000, blocks=(12345,), batch=(3,), depth=(5,)), op).measure(
        12345, batch=3, depth=5
    )
    assert samples.corruption is None
    assert sum(samples.transfers) >= 1000


@pytest.mark.long
def test_page_cache_is_bypassed_if_blocks_are_whole_pages(make_pairs: MakePairs, tmp_path: Path) -> None:
    system = file_system(str(tmp_path.resolve()), Path("/proc/self/mountinfo").read_text())
    whole = link(make_pairs(blocks=(4096, 12288), file_dir=str(tmp_path))).measure(4096)
    assert whole.transports in ((f"direct/{system}",), (f"cached/{system}",), (f"memory/{system}",))
    odd = link(make_pairs(blocks=(4096, 1000), file_dir=str(tmp_path))).measure(4096)
    assert odd.transports in ((f"cached/{system}",), (f"memory/{system}",))
    assert (whole.transports == odd.transports) == (system == "tmpfs" or whole.transports[0].startswith("cached"))


def test_directory_in_which_no_file_can_be_created_is_reported_with_a_remedy(make_pairs: MakePairs) -> None:
    with pytest.raises(WorkerError, match=r"65536 bytes .* /proc: .*initiator") as caught:
        link(make_pairs(file_dir="/proc"))
    assert "--nixl-file-dir" in caught.value.remedy


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /dev/shm rw - tmpfs tmpfs rw
42 22 0:41 / /data/two\\040words rw - xfs /dev/vdb rw
broken line
"""


@pytest.mark.parametrize(
    ("mounts", "directory", "system"),
    [
        (MOUNTS, "/dev/shm", "tmpfs"),
        (MOUNTS, "/dev/shmem", "ext4"),
        (MOUNTS, "/data/two words/kv", "xfs"),
        ("", "/tmp", "unknown"),
        ("1 0 0:1 / / - ext4 /dev/vda rw", "/a", "ext4"),  # without options and tags: five fields are enough
        ("1 0 0:1 / - ext4 /dev/vda rw", "/a", "unknown"),
        ("1 0 0:1 / / rw - ext4 - rw", "/a", "unknown"),
        ("1 0 0:1 / / rw - ext4 a rw\n2 0 0:1 / / rw - xfs b rw", "/a", "xfs"),  # the later mount hides the earlier one
        ("1 0 0:1 / /data/a rw - ext4 a rw\n2 0 0:1 / / rw - xfs b rw", "/data/a", "ext4"),
    ],
)
def test_a_file_system_is_that_of_the_nearest_mount(mounts: str, directory: str, system: str) -> None:
    assert file_system(directory, mounts) == system


@pytest.mark.parametrize(
    ("queue", "trace"), [("use_uring", "anon_inode:[io_uring]"), ("use_aio", "/[aio]"), ("use_posix_aio", "")]
)
def test_queue_is_a_variant_of_the_row_and_is_really_used(make_pairs: MakePairs, queue: str, trace: str) -> None:
    moved = link(make_pairs(backend_params=(BackendParameter("POSIX", queue, "true"),)))
    assert moved.move(65536) is None
    assert str(moved.key(65536)) == f"POSIX/WRITE/DRAM:FILE/64KiB/batch1/depth1/0-0/{queue}=true"
    process = Path(f"/proc/{moved.initiator.worker.pid}")
    used = "\n".join(os.readlink(path) for path in (process / "fd").iterdir()) + (process / "maps").read_text()
    assert [target for target in ("anon_inode:[io_uring]", "/[aio]") if target in used] == ([trace] if trace else [])
