# SPDX-License-Identifier: Apache-2.0
"""Find every process that a run has started, and that those have started: all inherit a variable."""

from collections.abc import Iterator
from pathlib import Path

#: The variable.
MARK = "PYTEST_NIXL_TEST_MARK"


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Yield pid and command line of every process with the mark in its environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":  # a zombie only waits for its parent: this test or the init process
                    yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended in the meantime
