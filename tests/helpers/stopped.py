# SPDX-License-Identifier: Apache-2.0
"""Stop a process for the time of a block."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.cli_run import eventually


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process stopped until the block ends. None of its threads does anything more when the block begins."""
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: _states(pid) == {"T"})
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}
