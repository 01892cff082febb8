# SPDX-License-Identifier: Apache-2.0
"""Which process started another."""

from pathlib import Path


def parent_of(pid: int) -> int:
    """Return the id of the parent of a process, from ``/proc``."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
