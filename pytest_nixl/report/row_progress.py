# SPDX-License-Identifier: Apache-2.0
"""Report the progress of a row that takes long: a line now and then, which a thread writes.

The thread asks no worker while it measures. It writes what this process knows already.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from pytest_nixl.core.units import MIB, gigabytes
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.session.requested_links import row_of
from pytest_nixl.session.run import Run

NAME = "nixl-row-progress"
#: The seconds after which a row gets its first line. The time to the next line doubles.
FIRST_LINE_SECONDS = 10.0


@dataclass(frozen=True)
class RowOfRun:
    """A row that is being measured.

    :param number: its number among the rows of the run, from 1.
    :param rows: the number of these rows.
    :param usual: the mean seconds of the rows before it; None: it is the first.
    :param ranks: the number of ranks of the run.
    """

    key: RowKey
    number: int
    rows: int
    usual: float | None
    ranks: int = 1

    def words(self, seconds: float, bandwidth: float | None) -> str:
        """Describe the progress.

        :param seconds: how long the row has taken so far.
        :param bandwidth: bytes per second in its launches so far; None: none has ended.
        """
        parts = [f"row {self.number} of {self.rows}", f"{seconds:.0f} s"]
        if bandwidth is not None:
            parts.append(f"{gigabytes(bandwidth)} GB/s so far")
        if self.usual is not None:
            remaining = max(self.usual - seconds, 0) + self.usual * (self.rows - self.number)
            parts.append(f"about {_duration(remaining)} of rows left")
        # Over a slow link the largest blocks take most of the time, and tell nothing more about a rank.
        hint = "; to name a slow rank, --nixl-blocks=1MiB is enough" if self.ranks > 2 and self.key.block > MIB else ""
        return f"{', '.join(parts)}: {self.key}{hint}"


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
        if not keys or not config.pluginmanager.has_plugin("terminalreporter") or config.get_verbosity() < 0:
            return
        with suppress(OSError, ValueError, AttributeError):  # a stream that is no file, or closed
            # Standard output is redirected while a test runs, and now it is not.
            self._writer = ProgressWriter(os.dup(sys.stdout.fileno()))

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
        results = self._run.record
        results.samples_so_far = None
        ranks = 1 if self._run.rank_session is None else self._run.rank_session.membership.size
        row = RowOfRun(key, number, len(self._keys), usual, ranks)

        def describe(seconds: float) -> str:
            samples = results.samples_so_far
            return row.words(seconds, None if samples is None else samples.bandwidth)

        self._started = time.monotonic()
        self._writer.begin(describe)

    @pytest.hookimpl(tryfirst=True)  # before pytest writes a letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and self._started:
            self._spent.append(time.monotonic() - self._started)
        if report.when != "setup" or not report.passed:  # after it pytest writes nothing, and the measurement follows
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
    """Write, in a thread, how long something has taken: after 10 s, 20 s, 40 s and so on.

    :param descriptor: the file descriptor to write to; it is closed by :meth:`close`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, describe: Callable[[float], str]) -> None:
        """Write progress until :meth:`end` is called.

        :param describe: a function that returns the text, given the seconds since this call.
        """
        self.end()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(describe,), name=NAME, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write nothing more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """End, and close the file descriptor."""
        self.end()
        os.close(self._descriptor)

    def _watch(self, describe: Callable[[float], str]) -> None:
        started, wait = time.monotonic(), FIRST_LINE_SECONDS
        while not self._ended.wait(wait):
            wait = time.monotonic() - started  # the next line comes when the row has taken twice as long
            with suppress(OSError):  # nobody reads it any more, which pytest notices itself
                os.write(self._descriptor, f"\n{describe(wait)}\n".encode())


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
