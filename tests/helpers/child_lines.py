# SPDX-License-Identifier: Apache-2.0
"""Record which lines the processes run that a test starts: workers, runs of pytest and commands.

coverage.py writes what it saw when a process ends; most workers are killed, or leave by ``os._exit``. Here a line is
written when it first runs. A process knows its test by a variable, which this file sets as a plugin of pytest; a
``.pth`` file in site-packages starts the tracing in each process that has the variable (:func:`installed`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

#: The file of the lines, for the tests' process.
FILE = "CHILD_LINES_FILE"
#: The file and the test, for the processes that it starts.
TEST = "CHILD_LINES_OF"
#: A frame that has run this many lines without a new one is not traced any more.
_OLD = 2000
_ROOT = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_SAMPLED = (f"{_ROOT}pytest_nixl{os.sep}", f"{_ROOT}suites{os.sep}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Name the test to all processes that start before the next one."""
    os.environ[TEST] = json.dumps([os.environ[FILE], item.nodeid])


class _Tracer:
    """Writes each line once for each test."""

    def __init__(self) -> None:
        self._test = ""
        self._seen: dict[CodeType, set[int]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_SAMPLED):
            return None
        test = os.environ.get(TEST, "")
        if test != self._test:  # a forked process has other variables
            self._test, self._seen = test, {}
        visited = self._seen.setdefault(code, set())
        remaining = {line for _, _, line in code.co_lines() if line} - visited
        return self._of(visited, remaining) if remaining else None

    def _of(self, visited: set[int], remaining: set[int]) -> Any:
        old = 0

        def line_runs(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal old
            line = frame.f_lineno
            if line in remaining:
                remaining.discard(line)
                visited.add(line)
                self._write(frame.f_code.co_filename, line)
                old = 0
            old += 1
            if not remaining or old > _OLD:
                frame.f_trace_lines = False
                return None
            return line_runs

        return line_runs

    def _write(self, file: str, line: int) -> None:
        with contextlib.suppress(Exception):
            path, test = json.loads(self._test)
            text = json.dumps([test, file.removeprefix(_ROOT).removesuffix(".py"), line])
            number = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(number, text.encode() + b"\n")
            finally:
                os.close(number)


def start() -> None:
    """Trace this process and its threads."""
    tracer = _Tracer()
    threading.settrace(tracer)
    sys.settrace(tracer)


@contextlib.contextmanager
def installed(clone: Path, file: Path) -> Iterator[None]:
    """Let each Python of this environment that has the variable trace itself, until the block ends.

    :param clone: that of the tests.
    :param file: gets the lines.
    """
    helpers = str(clone / "tests" / "helpers")
    pth = Path(sysconfig.get_path("purelib")) / f"child_lines_{os.getpid()}.pth"
    code = f"sys.path.append({helpers!r}); import child_lines; sys.path.remove({helpers!r}); child_lines.start()"
    file.touch()
    pth.write_text(f"import os, sys; {TEST!r} in os.environ and exec({code!r})\n")
    try:
        yield
    finally:
        pth.unlink()


def read(file: Path) -> dict[str, dict[int, set[str]]]:
    """Return the tests whose processes ran each line of each module."""
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for text in file.read_text().splitlines():
        test, module, line = json.loads(text)
        lines[module][line].add(test)
    return lines
