# SPDX-License-Identifier: Apache-2.0
"""A terminal that cannot be written: the run goes on, leaves its record and reports, and does not end with exit code 0.

Standard output may be closed (``>&-``), full (``/dev/full``) or left by its reader (``| head -1``).
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

#: The exit code of a run that nobody could read and that is otherwise good.
UNREADABLE = pytest.ExitCode.INTERNAL_ERROR

#: What a closed standard output is called.
CLOSED = "it is closed"


def reopen_closed_output() -> bool:
    """Have standard output lead nowhere if it is closed; return whether it was."""
    if sys.stdout is not None:
        return False
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(1)
    except OSError:
        os.dup2(null, 1)  # else the next file or socket that is opened would be standard output
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    return True


def lead_nowhere() -> None:
    """Have standard output lead nowhere, so that Python does not fail on what is left in its buffer."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _empty(file: TextIO) -> None:
    """Drop what a stream has in its buffer: pytest flushes it once more at its very end, and would fail on it."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(null, file.fileno())
            file.flush()
    finally:
        os.close(null)


class TerminalOutput:
    """A plugin that keeps the run alive if its terminal cannot be written, and tells so on stderr."""

    def __init__(self, why: str = "") -> None:
        #: Why standard output cannot be written; empty: it can.
        self.why = why
        self._session: pytest.Session | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        writer = getattr(terminal, "_tw", None)
        if writer is not None and hasattr(writer, "_file"):
            writer._file = GuardedStream(writer._file, self)

    def failed(self, error: OSError) -> None:
        """Take note that standard output cannot be written."""
        if not self.why:
            self.why = error.strerror or type(error).__name__
            atexit.register(lead_nowhere)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        session = self._session
        if not self.why or session is None:
            return
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = UNREADABLE
        code = int(session.exitstatus)
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(
                f"pytest-nixl: standard output cannot be written ({self.why}): the run went on, its record and reports "
                f"are where they were asked for, and its exit code is {code}; "
                "give it an output that can be written, such as >run.log\n"
            )


class GuardedStream:
    """A text stream that drops what cannot be written."""

    def __init__(self, file: TextIO, output: TerminalOutput) -> None:
        self._file = file
        self._output = output

    def write(self, text: str) -> int:
        """Write a text, at once, so that a failure is known early."""
        if not self._output.why:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                self._output.failed(error)
                _empty(self._file)
        return len(text)

    def flush(self) -> None:
        """Flush what was written."""
        if not self._output.why:
            try:
                self._file.flush()
            except OSError as error:
                self._output.failed(error)
                _empty(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def keep_a_directory(config: pytest.Config) -> str:
    """Let pytest come to its end if the directory it was started in has been deleted.

    pytest goes back there before it writes its reports, and fails.

    :returns: a sentence if the directory is gone; else an empty text.
    """
    started = config.invocation_params.dir
    if started.is_dir():
        return ""
    left = next((path for path in started.parents if path.is_dir()), Path("/"))
    given = config.invocation_params
    config.invocation_params = config.InvocationParams(args=given.args, plugins=given.plugins, dir=left)
    with suppress(OSError):
        os.chdir(left)
    return f"the directory in which pytest was started, {started}, was deleted, and relative paths lead nowhere"
