# SPDX-License-Identifier: Apache-2.0
"""Whether a run was completed: how many of the selected checks ran, and what ended the run early.

A run that ended early is INTERRUPTED. It never passes, because the remaining checks might have failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.core.signals import ending_text, sigterm_ends_in_order
from pytest_nixl.core.terminal_output import keep_a_directory
from pytest_nixl.model.verdicts import INTERRUPTED
from pytest_nixl.session.outcome import check_of
from pytest_nixl.session.selection import left_out_of

if TYPE_CHECKING:
    from pytest_nixl.session.run import Run


#: The cause if pytest ends with an exception.
_CRASH = "pytest or one of its plugins failed"

#: Exit codes of pytest after it ran all of its tests.
_WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Completeness:
    """A pytest plugin that counts the selected tests and the tests that ended, and keeps what ended the run early."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._planned = 0
        self._planned_checks: set[str] = set()
        #: The ids of all checks that were collected, and of those of which no test is to run.
        self._collected: set[str] = set()
        self._deselected: set[str] = set()
        #: Whether ``--lf`` left out the tests that did not fail last time. It does not report them as deselected.
        self._only_failed = False
        self._ended: set[str] = set()
        #: Tests that pytest reported as failed or in error, and files that it could not collect.
        self.failed: set[str] = set()
        #: The report of the setup of the test that runs; None: no test runs.
        self.unfinished: pytest.TestReport | None = None
        #: The seconds of each test, with its setup and teardown, by node id.
        self.durations: dict[str, float] = {}
        #: Whether pytest began to run tests. With --fixtures, for example, it only collects them.
        self._started = False
        self._began = time.monotonic()
        #: What ended the run early; empty: nothing did.
        self._cause = ""
        #: Ends the run if a signal has come and its exception was swallowed.
        self._end_if_signalled: Callable[[], None] = lambda: None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._planned = max(self._planned, len(session.items))
        self._planned_checks = {item.nodeid for item in session.items if check_of(item) is not None}
        self._deselected = self._collected.difference(filter(None, map(check_of, session.items)))
        if getattr(session.config.option, "lf", False):
            failed = session.config.cache.get("cache/lastfailed", {})
            self._only_failed = any(item.nodeid in failed for item in session.items)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._collected.update(filter(None, [check_of(item)]))

    @property
    def deselected(self) -> list[str]:
        """The ids of the checks without a test in this run: by ``-k`` or a plugin, not by the level; and ``--lf``."""
        ran = {result.check for result in self._run.record.results}
        missing = sorted(self._deselected - ran - left_out_of(self._run.config).keys())
        return ["those that did not fail last time (--lf)", *missing] if self._only_failed else missing

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Iterable[str]) -> None:
        """Take the number of tests from a worker of pytest-xdist, because the controller collects none."""
        self._planned = max(self._planned, len(list(ids)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.unfinished = report if report.when == "setup" and report.passed else None
        if report.when == "teardown":
            self._ended.add(report.nodeid)
        if report.failed:
            self.failed.add(report.nodeid)
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0.0) + report.duration

    @property
    def seconds(self) -> float:
        """How long the run has taken so far."""
        return time.monotonic() - self._began

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._cause = self._cause or ending_text(excinfo.value)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._cause = self._cause or f"{_CRASH}: {ending_text(excinfo.value)}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        with self._signals(ours=self._run.configured):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        self._end_if_signalled()
        return report

    def pytest_runtest_logfinish(self) -> None:
        self._end_if_signalled()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        ours = self._run.configured or self._run.collected.used
        self._started = True
        try:
            with self._signals(ours=ours):
                return (yield)
        finally:
            if ours and not self._run.config.invocation_params.dir.is_dir():
                self._cause = self._cause or keep_a_directory(self._run.config)

    @contextmanager
    def _signals(self, *, ours: bool) -> Iterator[None]:
        """End a run of ours with the name of the signal that came, whatever pytest made of its exception."""
        if not ours:
            yield
            return
        with sigterm_ends_in_order() as self._end_if_signalled:
            try:
                yield
            finally:
                self._end_if_signalled()

    def interruption(self, session: pytest.Session) -> str:
        """Describe how far the run came and what ended it, such as ``INTERRUPTED after 2 of 10 checks: Ctrl-C``.

        :returns: an empty text if the run was completed.
        """
        if session.config.option.collectonly:
            return ""
        lost = self._run.rank_session.faults if self._run.rank_session is not None and not self._run.serves else []
        reason = self._cause
        if not reason and lost:
            reason = lost[0].reason
        if not reason and self._started and len(self._ended) < self._planned:
            reason = str(session.shouldfail or session.shouldstop or "") or "the remaining tests did not run"
        if not reason and session.exitstatus not in (*_WHOLE, pytest.ExitCode.USAGE_ERROR):
            reason = f"pytest ended with exit code {int(session.exitstatus)}"
        if not reason:
            return ""
        return f"{INTERRUPTED} {self._progress(lost=bool(lost))}: {reason}"

    def crash(self, error: BaseException) -> str:
        """Describe how far the run came if pytest fails while it writes its reports.

        :param error: the exception.
        """
        how = "" if isinstance(error, KeyboardInterrupt) else f"{_CRASH}: "
        return f"{INTERRUPTED} {self._progress(lost=False)}: {how}{ending_text(error)}"

    def _progress(self, *, lost: bool) -> str:
        if not self._planned:
            return "before any check ran"
        if self._planned_checks:
            ran, planned = self._ended & self._planned_checks, len(self._planned_checks)
            if lost:  # a check that only failed because a rank was lost did not run
                ran -= {result.nodeid for result in self._run.record.results if result.verdict.value == "ERROR"}
            return f"after {len(ran)} of {planned} check{'' if planned == 1 else 's'}"
        return f"after {len(self._ended)} of {self._planned} test{'' if self._planned == 1 else 's'}"


def refuse_exit_code_0(session: pytest.Session, error: BaseException) -> None:
    """Set the exit code of a run that another plugin ended while it wrote its reports; never to 0, but to 2 instead.

    :param error: what the plugin raised, which is changed in place.
    """
    interrupted = pytest.ExitCode.INTERRUPTED
    if isinstance(error, pytest.exit.Exception):
        code = session.exitstatus if error.returncode is None else error.returncode
        error.returncode = session.exitstatus = code or interrupted
    elif isinstance(error, SystemExit):
        error.code = error.code or interrupted
        session.exitstatus = error.code if isinstance(error.code, int) else pytest.ExitCode.TESTS_FAILED
    else:  # Ctrl-C again changes nothing; Python ends with 1 after another traceback
        session.exitstatus = interrupted if isinstance(error, KeyboardInterrupt) else 1


_COMPLETENESS = pytest.StashKey[Completeness]()


def completeness_of(run: Run) -> Completeness:
    """Return the one that counts the tests of ``run``."""
    if _COMPLETENESS not in run.config.stash:
        run.config.stash[_COMPLETENESS] = Completeness(run)
    return run.config.stash[_COMPLETENESS]
