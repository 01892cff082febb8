# SPDX-License-Identifier: Apache-2.0
"""What limits forbid. Control groups that end processes are folders of the test: a host has only one version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import eventually
from helpers.needs import need_programs

from pytest_nixl.core.hidden_modules import hidden_module_of_python
from pytest_nixl.core.resource_limits import memory_kills

FILTERED = (sys.executable, str(Path(__file__).parents[2] / "helpers" / "without_ptrace.py"))


def test_an_error_that_names_a_module_of_python_itself_is_not_of_a_hidden_one() -> None:
    assert hidden_module_of_python(AttributeError("module 'json' has no attribute 'x'")) is None


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


@pytest.mark.parametrize(("most", "named"), [(10, True), (200, False)])
def test_threads_that_a_control_group_forbids_have_its_limit_as_their_cause(most: int, named: bool) -> None:
    group = Path("/sys/fs/cgroup/pids/pytest-nixl-test")
    if not group.parent.is_dir():
        pytest.skip("this host has no control groups of version 1")
    need_programs(root=True)
    group.mkdir(exist_ok=True)
    try:
        (group / "pids.max").write_text(str(most))
        script = "from pytest_nixl.core.resource_limits import start_fault; print(*start_fault())"
        inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "-", sys.executable, "-c", script]
        done = subprocess.run(inside, capture_output=True, text=True, check=True)
        assert (f"thread: its control group may have {most} ({group})" in done.stdout) is named
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


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
