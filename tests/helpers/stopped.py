# SPDX-License-Identifier: Apache-2.0
"""Stop a process, for the time of a block or until it is resumed."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.cli_run import eventually


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process stopped until the block ends. None of its threads does anything more when the block begins."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stop(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs: on a busy machine some run on after the signal."""
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: _states(pid) == {"T"})


def _states(pid: int) -> set[str]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}
