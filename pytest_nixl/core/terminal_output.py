# SPDX-License-Identifier: Apache-2.0
"""Keep a run alive if its standard output cannot be written: it still writes its record and reports.

Standard output may be closed (``>&-``), full (``/dev/full``) or without a reader (``| head -1``). Such a run does not
end with exit code 0.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

#: The exit code of a run that would have passed, but whose output could not be written.
UNREADABLE = pytest.ExitCode.INTERNAL_ERROR

#: The reason if standard output is closed.
CLOSED = "it is closed"


def fill_closed_descriptors() -> None:
    """Open the null device where stdin, stdout or stderr is closed: else the next file takes its number."""
    with suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)


def reopen_closed_output() -> None:
    """Redirect standard output, which is closed, to the null device."""
    fill_closed_descriptors()
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends


def discard_stdout() -> None:
    """Redirect standard output to the null device, so that Python does not fail when it flushes the rest at exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()


class GuardedStream:
    """A text stream that discards what cannot be written."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        #: Why the stream cannot be written; empty: it can.
        self.failure = ""

    def write(self, text: str) -> int:
        """Write a text and flush it, so that a failure is noticed at once."""
        if not self.failure:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                self.failure = error.strerror or type(error).__name__
                discard_stdout()
                atexit.register(discard_stdout)  # pytest's capture restores the descriptor until then
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TerminalOutput:
    """A pytest plugin that reports on stderr that standard output could not be written.

    Register it before pytest's terminal reporter takes ``sys.stdout``.

    :param closed: whether standard output is closed.
    """

    def __init__(self, *, closed: bool = False) -> None:
        self._closed = closed
        if not closed:
            self._guarded = sys.stdout = GuardedStream(sys.stdout)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        try:
            yield
        finally:
            self._report(session)

    def _report(self, session: pytest.Session) -> None:
        reason = CLOSED if self._closed else self._guarded.failure
        if not reason:
            return
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = UNREADABLE
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(
                f"pytest-nixl: standard output cannot be written ({reason}): the run was completed, its record and "
                f"reports were written where requested, and its exit code is {int(session.exitstatus)}; "
                "redirect standard output to a file, such as >run.log\n"
            )


def keep_a_directory(config: pytest.Config) -> str:
    """Let pytest finish even if the directory in which it was started has been deleted.

    pytest changes to that directory before it writes its reports, and would fail.

    :returns: a sentence if the directory was deleted; else an empty text.
    """
    started = config.invocation_params.dir
    if started.is_dir():
        return ""
    existing = next((path for path in started.parents if path.is_dir()), Path("/"))
    invocation = config.invocation_params
    config.invocation_params = config.InvocationParams(args=invocation.args, plugins=invocation.plugins, dir=existing)
    with suppress(OSError):
        os.chdir(existing)
    return f"the directory in which pytest was started, {started}, was deleted, so relative paths are not valid"
