# SPDX-License-Identifier: Apache-2.0
"""Say how far the measurement of rows has come: one live line on a terminal, else a line now and then for a long row.

Nothing asks a worker while it measures. A thread writes once a second, or less, what this process knows already.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_nixl.core.units import gigabytes
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.session.requested_links import row_of
from pytest_nixl.session.run import Run

NAME = "nixl-row-progress"
#: The seconds between two versions of the live line.
LIVE_SECONDS = 1.0
#: The seconds after which a row gets its first plain line. The time to the next line doubles.
PLAIN_SECONDS = 10.0
# The cursor stays where pytest left it: index and cursor up make room for a line below, and save and restore cursor
# enclose what is written there.
_BELOW, _BACK, _ERASE = "\x1bD\x1b[A\x1b7\r\n\x1b[K", "\x1b8", "\x1b7\r\n\x1b[K\x1b8"


@dataclass(frozen=True)
class RowOfRun:
    """A row that is being measured.

    :param number: its number among the rows of the run, from 1.
    :param rows: the number of these rows.
    :param usual: the mean seconds of the rows before it; None: it is the first.
    """

    key: RowKey
    number: int
    rows: int
    usual: float | None

    def words(self, seconds: float, bandwidth: float | None) -> str:
        """Describe the progress.

        :param seconds: how long the row has taken so far.
        :param bandwidth: bytes per second in its launches so far; None: none has ended.
        """
        parts = [f"row {self.number} of {self.rows}", f"{seconds:.0f} s"]
        if bandwidth is not None:
            parts.append(f"{gigabytes(bandwidth)} GB/s so far")
        if self.usual is not None:
            left = max(self.usual - seconds, 0) + self.usual * (self.rows - self.number)
            parts.append(f"about {_duration(left)} of rows left")
        return f"{', '.join(parts)}: {self.key}"


class RowProgress:
    """A pytest plugin that writes the progress while a row is measured."""

    #: The name under which the plugin is registered.
    name = NAME

    def __init__(self, run: Run) -> None:
        self._run = run
        self._keys: dict[str, tuple[int, RowKey]] = {}
        self._writer: ProgressWriter | None = None
        self._spent: list[float] = []
        self._started = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        config = session.config
        if self._run.parallel or config.option.collectonly:
            return
        keys = [(item.nodeid, key) for item in session.items if (key := row_of(item)) is not None]
        self._keys = {nodeid: (number, key) for number, (nodeid, key) in enumerate(keys, 1)}
        terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        if not keys or terminal is None or terminal.verbosity < 0:
            return
        file: Any = getattr(terminal._tw, "_file", None)
        with suppress(OSError, ValueError, AttributeError):  # a stream that is no file, or closed
            # Standard output is redirected while a test runs, and now it is not.
            self._writer = ProgressWriter(os.dup(file.fileno()), live=_is_live(config, terminal._tw))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._writer is None or item.nodeid not in self._keys:
            return
        number, key = self._keys[item.nodeid]
        usual = sum(self._spent) / len(self._spent) if self._spent else None
        found = self._run.found
        found.samples_so_far = None
        self._started = time.monotonic()

        def bandwidth() -> float | None:
            samples = found.samples_so_far
            return None if samples is None else samples.bandwidth

        row = RowOfRun(key, number, len(self._keys), usual)
        self._writer.begin(lambda seconds: row.words(seconds, bandwidth()))

    @pytest.hookimpl(tryfirst=True)  # before pytest writes a letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" and report.passed:
            return  # pytest writes nothing, and the measurement follows
        if report.when == "call" and self._started:
            self._spent.append(time.monotonic() - self._started)
        self._end()

    def _end(self) -> None:
        self._started = 0.0
        if self._writer is not None:
            self._writer.end()

    def pytest_unconfigure(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class ProgressWriter:
    """Write to a terminal or a file, in a thread, how long something has taken.

    :param descriptor: the file descriptor to write to; it is closed by :meth:`close`.
    :param live: whether to keep one line below the cursor up to date; else lines are added.
    """

    def __init__(self, descriptor: int, *, live: bool) -> None:
        self._descriptor = descriptor
        self._live = live
        self._shown = False
        self._words: Any = None
        #: When :meth:`begin` was called, and how many seconds later the next line is due.
        self._started = self._due = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, words: Any) -> None:
        """Write progress until :meth:`end` is called.

        :param words: a function that returns the text, given the seconds since this call.
        """
        self.end()
        with self._lock:
            self._words, self._started, self._due = words, time.monotonic(), self._pause
            if self._live:
                self._show(words(0.0))
        if self._thread is None:
            # One for all rows: its start takes longer than some rows.
            self._thread = threading.Thread(target=self._tick, name="nixl-row-progress", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Write nothing more, and remove the live line."""
        with self._lock:
            self._words = None
            if self._shown:
                self._write(_ERASE)
                self._shown = False

    def close(self) -> None:
        """End, and close the file descriptor."""
        self.end()
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):
            os.close(self._descriptor)

    @property
    def _pause(self) -> float:
        return LIVE_SECONDS if self._live else PLAIN_SECONDS

    def _tick(self) -> None:
        pause = self._pause
        while not self._closed.wait(pause):
            with self._lock:
                pause = self._look()

    def _look(self) -> float:
        """Write the line that is due, and return the seconds until the next may be."""
        if self._words is None:
            return self._pause
        seconds = time.monotonic() - self._started
        if seconds < self._due:
            return self._due - seconds
        if self._live:
            self._show(self._words(seconds))
            self._due = seconds + self._pause
        else:
            self._write(f"\n{self._words(seconds)}\n")
            self._due = 2 * seconds  # the next line comes when the row has taken twice as long
        return self._due - seconds

    def _show(self, text: str) -> None:
        try:
            columns = os.get_terminal_size(self._descriptor).columns
        except OSError:
            columns = 0
        self._write(f"{_BELOW}{text[: (columns or 80) - 1]}{_BACK}")
        self._shown = True

    def _write(self, text: str) -> None:
        with suppress(OSError):  # nobody reads it any more, which pytest notices itself
            os.write(self._descriptor, text.encode())


def _is_live(config: pytest.Config, writer: Any) -> bool:
    """Whether a live line may be written: to a terminal that understands it, where nothing else writes meanwhile."""
    quiet = config.getoption("capture", "no") != "no" and not config.getoption("setupshow", False)
    logs = config.getini("log_cli") or config.getoption("log_cli_level", None) or config.getini("log_cli_level")
    return bool(writer.hasmarkup and writer._file.isatty() and quiet and not logs and takes_live_line(os.environ))


def takes_live_line(environ: Mapping[str, str]) -> bool:
    """Return whether these environment variables allow control characters on a terminal."""
    in_ci = any(environ.get(name) for name in ("CI", "BUILD_NUMBER"))
    return not in_ci and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") not in ("", "dumb")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
