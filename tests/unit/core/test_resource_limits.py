# SPDX-License-Identifier: Apache-2.0
"""The limits of control groups, of both versions: a host has one of them, so they are folders of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nixl.core.hidden_modules import hidden_module_of_python
from pytest_nixl.core.resource_limits import memory_kills


def test_an_error_that_names_a_module_of_python_itself_is_not_of_a_hidden_one() -> None:
    assert hidden_module_of_python(AttributeError("module 'json' has no attribute 'x'")) is None


@pytest.mark.parametrize(
    ("line", "folder", "files", "count"),
    [
        ("0::/pod/main", "pod/main", {"max": "64", "events": "oom 3\noom_kill 2\noom_group_kill 0"}, 2),
        ("0::/pod/main", "pod/main", {"max": "64", "events": "oom 3\noom_kill 0\noom_group_kill 0"}, 0),
        ("0::/pod/main", "pod/main", {"max": "max", "events": "oom_kill 2"}, 0),
        # The limit is that of the group above, as that of a pod.
        ("0::/pod/main", "pod", {"max": "64", "events": "oom_kill 2"}, 2),
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
    paths = {group / f"memory.{name}": text for name, text in files.items()}
    for path, text in {tmp_path / "proc/self/cgroup": line, **paths}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text.replace('64', str(64 << 20))}\n")
    kills, limit = memory_kills(str(tmp_path))
    assert kills == count
    assert limit.endswith(f"its control group may use 64 MiB of memory ({group})" if count else "")
