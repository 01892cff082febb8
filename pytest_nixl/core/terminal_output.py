# SPDX-License-Identifier: Apache-2.0
"""Keep a run alive if its standard output cannot be written: it still writes its record and reports.

Standard output may be closed (``>&-``), full (``/dev/full``) or without a reader (``| head -1``). Such a run does not
end with exit code 0.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

#: The exit code of a run that would have passed, but whose output could not be written.
UNREADABLE = pytest.ExitCode.INTERNAL_ERROR

#: The reason if standard output is closed.
CLOSED = "it is closed"


def reopen_closed_output() -> bool:
    """Redirect standard output to the null device if it is closed; return whether it was."""
    if sys.stdout is not None:
        return False
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(1)
    except OSError:
        os.dup2(null, 1)  # else the next file or socket that is opened would become standard output
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    return True


def lead_nowhere() -> None:
    """Redirect standard output to the null device, so that Python does not fail when it flushes the rest at exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _empty(file: TextIO) -> None:
    """Discard what is buffered in a stream, because pytest flushes it again at its end and would fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(null, file.fileno())
            file.flush()
    finally:
        os.close(null)


class TerminalOutput:
    """A pytest plugin that keeps the run alive if standard output cannot be written, and reports that on stderr.

    :param why: why standard output cannot be written; empty: it can.
    """

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
        """Note that standard output cannot be written."""
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
                f"pytest-nixl: standard output cannot be written ({self.why}): the run was completed, its record and "
                f"reports were written where requested, and its exit code is {code}; "
                "redirect standard output to a file, such as >run.log\n"
            )


class GuardedStream:
    """A text stream that discards what cannot be written."""

    def __init__(self, file: TextIO, output: TerminalOutput) -> None:
        self._file = file
        self._output = output

    def write(self, text: str) -> int:
        """Write a text and flush it, so that a failure is noticed at once."""
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
    """Let pytest finish even if the directory in which it was started has been deleted.

    pytest changes to that directory before it writes its reports, and would fail.

    :returns: a sentence if the directory was deleted; else an empty text.
    """
    started = config.invocation_params.dir
    if started.is_dir():
        return ""
    left = next((path for path in started.parents if path.is_dir()), Path("/"))
    given = config.invocation_params
    config.invocation_params = config.InvocationParams(args=given.args, plugins=given.plugins, dir=left)
    with suppress(OSError):
        os.chdir(left)
    return f"the directory in which pytest was started, {started}, was deleted, so relative paths are not valid"
