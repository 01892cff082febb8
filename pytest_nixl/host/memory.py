# SPDX-License-Identifier: Apache-2.0
"""The memory that this process may still allocate, as limited by the host and by its control groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pytest_nixl.core.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from pytest_nixl.host.recorded_tree import FactsRoot

#: The kernel writes a larger number if a version 1 control group has no limit.
_NO_LIMIT = 1 << 62
#: By control group version (2, 1): folder, file of the limit, file of the usage, and the line in memory.stat with the
#: part of the usage that is cached files, which the kernel frees when needed.
_FILES = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


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
