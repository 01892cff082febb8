# SPDX-License-Identifier: Apache-2.0
"""Programs that a worker started end with it, however it ends. The worker is a Python with a guard and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pytest_nixl.core.polling import wait_until

#: It starts three programs, watches the first two, forgets the second, and prints the pids of all and of the guard.
WORKER = """
import os, subprocess, time
from pytest_nixl.nixl.worker.tools import ProgramGuard

extra = os.open("/dev/null", os.O_RDWR)
guard = ProgramGuard()
[own] = open(f"/proc/self/task/{os.getpid()}/children").read().split()
quiet = {"stdout": subprocess.DEVNULL, "start_new_session": True}
programs = [subprocess.Popen(["sleep", "600"], **quiet).pid for _ in range(3)]
guard.watch(programs[0])
guard.watch(programs[1])
guard.forget(programs[1])
print(*programs, own, flush=True)
time.sleep(600)
"""


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_watched_programs_end_with_a_worker_that_is_killed_and_others_do_not() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        watched, forgotten, other, guard = map(int, worker.stdout.readline().split())
        try:
            opened = {os.readlink(link) for link in Path(f"/proc/{guard}/fd").iterdir()}
            assert {target.partition(":")[0] for target in opened} == {"/dev/null", "pipe"}
            assert len(list(Path(f"/proc/{guard}/fd").iterdir())) == 4, "it holds no descriptor of the worker open"
            os.kill(guard, signal.SIGTERM)  # as a launcher does, to each process of the worker's group
            worker.kill()
            wait_until(lambda: _ended(watched), "the watched program to end", seconds=60)
            wait_until(lambda: _ended(guard), "the guard to end", seconds=60)
            assert not _ended(forgotten)
            assert not _ended(other)
        finally:
            for pid in (watched, forgotten, other):
                if not _ended(pid):
                    os.kill(pid, signal.SIGKILL)
            worker.kill()
