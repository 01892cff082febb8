# SPDX-License-Identifier: Apache-2.0
"""The memory that the host and control groups of both versions leave to a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fake_sysfs import root_of

from pytest_nixl.core.units import GIB, MIB
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import AvailableMemory, available_memory, in_bytes

MEMINFO = "MemTotal:       65536000 kB\nNoMemAvailable: 1 kB\nMemFree: 1 kB\nMemAvailable:   33554432 kB\n"
POD = "kubepods.slice/pod1/container"


def group(folder: str, limit: str, use: int, files: int = 0) -> dict[str, str]:
    """Return the files of a control group of version 2, in bytes."""
    place = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {f"{place}/memory.max": limit, f"{place}/memory.current": str(use),
            f"{place}/memory.stat": f"anon 1\ninactive_file {files}\nactive_file 7"}  # fmt: skip


def old_group(folder: str, limit: int, use: int, files: int = 0) -> dict[str, str]:
    """Return the files of a control group of version 1, in bytes."""
    place = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {f"{place}/memory.limit_in_bytes": str(limit), f"{place}/memory.usage_in_bytes": str(use),
            f"{place}/memory.stat": f"inactive_file 9\ntotal_inactive_file {files}"}  # fmt: skip


HOST = AvailableMemory(32 * GIB, "MemAvailable")


def limited(place: str, available: int, limit: int) -> AvailableMemory:
    return AvailableMemory(available, f"the limit of {in_bytes(limit)} in /sys/fs/cgroup{place}")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, HOST, id="no-groups"),
        pytest.param({"proc/self/cgroup": f"0::/{POD}", **group(POD, "max", 1)}, HOST, id="no-limit"),
        pytest.param(
            {"proc/self/cgroup": f"0::/{POD}", **group(POD, str(4 * GIB), GIB, 512 * MIB)},
            limited(f"/{POD}/memory.max", 3 * GIB + 512 * MIB, 4 * GIB),
            id="its-own",
        ),
        pytest.param(
            {"proc/self/cgroup": f"0::/{POD}", **group(POD, str(8 * GIB), 0),
             **group("kubepods.slice/pod1", str(2 * GIB), GIB)},
            limited("/kubepods.slice/pod1/memory.max", GIB, 2 * GIB),
            id="one-above",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/", **group("", str(GIB), 2 * GIB)},
            limited("/memory.max", 0, GIB),
            id="in-a-namespace-and-over-its-limit",
        ),
        pytest.param(
            {"proc/self/cgroup": f"0::/{POD}", **group("", str(GIB), 0)},
            limited("/memory.max", GIB, GIB),
            id="the-path-is-the-hosts",
        ),
        pytest.param(
            {"proc/self/cgroup": f"4:cpu,cpuacct:/x\n3:memory:/{POD}\n0::/", **old_group(POD, 2 * GIB, GIB, 10),
             **old_group("", (1 << 63) - 4096, 0)},
            limited(f"/memory/{POD}/memory.limit_in_bytes", GIB + 10, 2 * GIB),
            id="version-1",
        ),
        pytest.param(
            {"proc/self/cgroup": f"3:memory:/{POD}", **old_group(POD, (1 << 63) - 4096, GIB)}, HOST,
            id="version-1-no-limit",
        ),
    ],
)  # fmt: skip
def test_available_memory_is_the_least_of_host_and_control_groups(
    tmp_path: Path, files: dict[str, str], expected: AvailableMemory
) -> None:
    assert available_memory(root_of(tmp_path, {"proc/meminfo": MEMINFO, **files})) == expected


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1023, "1023 bytes"),
        (1024, "1.0 KiB (1024 bytes)"),
        (MIB - 1, "1024.0 KiB (1048575 bytes)"),
        (5 * MIB // 2, "2.5 MiB (2621440 bytes)"),
        (3 * GIB, "3.0 GiB (3221225472 bytes)"),
        (1 << 70, "1.2e+21 bytes"),
    ],
)
def test_a_size_has_its_largest_unit(size: int, text: str) -> None:
    assert in_bytes(size) == text
    assert str(AvailableMemory(size, "MemAvailable")) == f"{text} according to MemAvailable"


def test_available_memory_is_none_if_unknown(tmp_path: Path) -> None:
    assert available_memory(root_of(tmp_path, {"proc/meminfo": "MemAvailable:  kB"})) is None


def test_available_memory_of_this_machine_is_less_than_its_total() -> None:
    memory = available_memory(FactsRoot())
    assert memory is not None
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < memory.size < total
