# SPDX-License-Identifier: Apache-2.0
"""The half of pytest's hooks that only a run with the plugin needs: :mod:`pytest_nixl.plugin` loads and calls it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.strict import printable
from pytest_nixl.core.terminal_output import TerminalOutput
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.fixtures.agent_lines import agents_section
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.results import Result
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.supervisor import SupervisorError, supervisor
from pytest_nixl.processes.worker_parent import parent_of_workers, prepare
from pytest_nixl.report.brief_output import BriefOutput, finish, status_word, without_benchmark_header
from pytest_nixl.report.junit import add_run_cases, name_by_module
from pytest_nixl.report.outputs import rewrite_reports, write_refusal, write_reports, write_session_refusal
from pytest_nixl.report.row_progress import RowProgress
from pytest_nixl.report.terminal import header, repeat_verdict, report_if_unwritten
from pytest_nixl.session.baseline import compare, find, note_missing_baseline
from pytest_nixl.session.benchmark import make_benchmark, read_machine_early, records_figures
from pytest_nixl.session.check_result import add_result, watch_call, watch_load
from pytest_nixl.session.completeness import completeness_of, refuse_exit_code_0
from pytest_nixl.session.ending import write_ending
from pytest_nixl.session.gate import (
    failing_results,
    missing_results,
    refuse_accidents,
    refuse_silence,
    unchecked_requests,
)
from pytest_nixl.session.outcome import Reruns, check_of, refuse_marked
from pytest_nixl.session.preconditions import Preconditions, refuse_agent_options
from pytest_nixl.session.record_writer import add_ours
from pytest_nixl.session.requested_links import NOT_IN_PARALLEL, link_id, row_of
from pytest_nixl.session.run import Run
from pytest_nixl.session.selection import LevelSelection, suite_of

if TYPE_CHECKING:
    from pytest_nixl import cluster_hooks
    from pytest_nixl.etcd_servers import container as etcd_container
else:  # few runs need them
    cluster_hooks = lazy_module("pytest_nixl.cluster_hooks")
    etcd_container = lazy_module("pytest_nixl.etcd_servers.container")

_log = logging.getLogger(__name__)


def _require_image(settings: Settings) -> None:
    """Check that the image of a requested etcd container is available, and fetch it if necessary.

    :raises pytest.UsageError: if the image is neither on this machine nor can be fetched.
    """
    if settings.etcd_server == "container":
        try:
            etcd_container.ensure_image(settings.etcd_image)
        except EtcdError as error:
            raise pytest.UsageError(f"--nixl-etcd-server=container: {error.reason}") from None


class _Results:
    """A pytest plugin that collects the result of each check, from this process or from a worker of pytest-xdist."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reruns = Reruns()

    @pytest.hookimpl(tryfirst=True)  # before pytest writes the report to its JUnit file
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "nixl_module"):
            name_by_module(self._run.config, report)
        result = getattr(report, "nixl_result", None)
        if result is not None:
            self._run.record.add_result(self._reruns.judge(result, report))

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
        """Send a result from a worker of pytest-xdist to its controller as plain data."""
        data = yield
        if data is not None and data.get("nixl_result") is not None:
            data["nixl_result"] = data["nixl_result"].plain()
        return data

    @pytest.hookimpl(wrapper=True)
    def pytest_report_from_serializable(self) -> Generator[None, pytest.TestReport | None, pytest.TestReport | None]:
        report = yield
        plain = getattr(report, "nixl_result", None)
        if plain is not None:
            vars(report)["nixl_result"] = Result.from_plain(plain)
        return report


class RunHooks:
    """The hooks of a run that uses the plugin, and the parts of the plugin that observe it, which it registers.

    Its methods are named like the hooks of pytest that call them.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        #: The exit code with which a verdict failed the run; None: it did not.
        self.failed_code: int | None = None
        self._announced = False
        register = run.config.pluginmanager.register
        register(_Results(run), "nixl-results")
        register(LevelSelection(run), "nixl-levels")
        register(Preconditions(run), "nixl-preconditions")
        register(completeness_of(run), "nixl-completeness")
        register(BriefOutput(run), BriefOutput.name)
        register(RowProgress(run), RowProgress.name)

    @classmethod
    def of(cls, config: pytest.Config) -> RunHooks:
        """Return the hooks of a run without an option of ours."""
        return cls(Run.of(config))

    @classmethod
    def configured(cls, config: pytest.Config) -> RunHooks:
        """Return the hooks of a run with an option or ini value of ours, which must fit together.

        :raises pytest.UsageError: if they do not; the reports then have the refusal.
        """
        run = Run.of(config)
        if not run.configured or run.parallel:
            return cls(run)
        try:
            if run.placement.several:
                cluster_hooks.write_without_colours(config, run)
                cluster_hooks.refuse(config, run)
            if run.settings.judged_by:
                refuse_accidents(config, run.settings)
                find(run)
        except pytest.UsageError as error:
            write_refusal(config, run, str(error))
            raise
        hooks = cls(run)
        if not config.pluginmanager.has_plugin("nixl-output"):
            config.pluginmanager.register(TerminalOutput(), "nixl-output")
        return hooks

    def report_header(self, headers: list[Any]) -> list[Any]:
        """Add the header of the run to pytest's."""
        if not self.run.configured:
            return headers
        self._announced = True
        return [*without_benchmark_header(self.run.config, headers), self._header()]

    def generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Note the suite of a test, and make the links of a run parameters of it."""
        collected = self.run.collected
        if metafunc.definition.get_closest_marker("nixl_check") is not None:
            collected.checks = True
            if (suite := suite_of(metafunc.definition.path)) is not None:
                collected.suites.add(suite)
        if "nixl_link" in metafunc.fixturenames and self.run.usable:
            several = self.run.placement.several
            metafunc.parametrize("nixl_link", self.run.links, ids=partial(link_id, several=several), indirect=True)

    def itemcollected(self, item: pytest.Item) -> None:
        """Note the place of a test that makes a check, and prepare what starts the workers of its agents."""
        if item.get_closest_marker("nixl_check") is not None:
            watch_call(item)
            places = self.run.collected.places
            places[item.nodeid] = len(places)
        if "nixl_agent" in getattr(item, "fixturenames", ()) and not item.config.option.collectonly:
            self._prepare_workers()

    def _prepare_workers(self) -> None:
        """Let the process from which workers are forked import its modules while pytest collects the other tests."""
        if not self.run.usable or self.run.parallel or self.run.in_cluster:
            return
        with contextlib.suppress(SupervisorError, OSError):  # the first worker will raise it
            if not parent_of_workers():
                prepare(supervisor(), os.environ)

    def collection_modifyitems(self, ours: Sequence[pytest.Item]) -> None:
        """Read what is asked of the run, and let pytest-benchmark time the tests that measure.

        :param ours: the tests that use the plugin.
        """
        run = self.run
        if not ours:
            return
        run.collected.used = True
        for item in ours:
            if run.parallel and not run.usable:
                return  # an error here would be lost in the worker of pytest-xdist; the fixtures report it instead
            # A bad value in an environment variable ends the run here.
            _ = run.settings, run.placement
            measures_row = row_of(item) is not None
            if measures_row or records_figures(item):
                make_benchmark(item)
            if measures_row and run.parallel:
                item.add_marker(pytest.mark.skip(reason=NOT_IN_PARALLEL))

    def collection_finish(self, session: pytest.Session) -> None:
        """Refuse what cannot be judged, before the first test runs."""
        run = self.run
        gates = run.collected.used and run.usable and run.settings.gate
        if gates and session.config.pluginmanager.has_plugin("rerunfailures"):
            refuse_marked(session.items, "--nixl-gate")
        used = any("nixl_etcd" in getattr(item, "fixturenames", ()) for item in session.items)
        if used and not run.parallel and not session.config.option.collectonly:
            _require_image(run.settings)
        if run.collected.used and run.usable and not run.parallel:
            # The profile was read before pytest could show what is logged.
            profile = load_profile(run.settings.profile)
            counts = len(profile.required), len(profile.expectations)
            _log.info("profile %s: %d required checks, %d expectations", profile.path_or_origin, *counts)
            if not session.config.option.collectonly:
                refuse_agent_options(run.settings)
                read_machine_early(session.config, stored=bool(run.settings.store))
        if gates and not run.parallel:
            refuse_silence(load_profile(run.settings.profile), session.items)

    def report_collectionfinish(self) -> list[str]:
        """Return the header of a run whose use of the plugin was not known when pytest wrote its own."""
        config = self.run.config
        unwanted = config.option.no_header or config.get_verbosity() < 0
        late = self.run.collected.used and not self._announced and not self.run.parallel
        return self._header() if late and not unwanted else []

    def _header(self) -> list[str]:
        run = self.run
        return [printable(line) for line in header(run.settings, run.placement, run.config.get_verbosity())]

    def runtestloop(self, session: pytest.Session) -> bool | None:
        """Take part in a run of several ranks."""
        if self.run.parallel or session.config.option.collectonly or not self.run.in_cluster:
            return None
        return cluster_hooks.take_part(session, self.run)

    def runtest_setup(self, item: pytest.Item) -> None:
        """Watch what else uses the host's processors while a check runs."""
        if check_of(item) is not None:
            watch_load(item)

    def runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Add the result of a check to its report, and what its agents wrote."""
        add_result(item, call, report)
        if report.failed and call.excinfo is not None and isinstance(item, pytest.Function):
            report.sections += agents_section(item.funcargs.values(), call.excinfo.value)

    def report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Return what pytest shows of a check."""
        return status_word(report)

    def benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """Add our part to the record of pytest-benchmark."""
        if self.run.record.results:
            add_ours(output_json, self.run)

    def sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
        """Judge the run, write its reports, and leave the group of ranks."""
        run = self.run
        if run.rank_session is not None:
            cluster_hooks.conclude(session, run)
        if not run.parallel and not run.serves:
            if exitstatus == pytest.ExitCode.USAGE_ERROR:
                write_session_refusal(session.config, run)
            elif run.usable:  # else the refused settings end the run
                run.record.interrupt(completeness_of(run).interruption(session))
            if run.record.interrupted or ((run.record.results or run.configured) and exitstatus in (0, 1, 5)):
                _ = run.settings  # bad settings that only workers of pytest-xdist have read end the run here
                self._conclude(session)
                self.failed_code = int(session.exitstatus) or None
        try:
            yield
        except BaseException as error:
            if not (run.record.results or run.configured) or run.parallel or run.serves or not run.usable:
                raise
            run.record.interrupt(completeness_of(run).crash(error))
            refuse_exit_code_0(session, error)
            rewrite_reports(session.config, run)
            if not isinstance(error, KeyboardInterrupt):  # after Ctrl-C, what pytest left out is written below
                raise
        if run.rank_session is not None:
            for text in cluster_hooks.leave_group(session, run):
                print(text, file=sys.stderr)
        if run.record.interrupted or run.serves:
            report_if_unwritten(session.config, run)
        if session.exitstatus == pytest.ExitCode.OK:  # another plugin may have changed it
            session.exitstatus = self.failed_code or session.exitstatus
        if not run.parallel:
            write_ending(session)

    def _conclude(self, session: pytest.Session) -> None:
        """Add the results that belong to no test, set the exit status by them, and write record and reports."""
        run, settings = self.run, self.run.settings
        profile = load_profile(settings.profile)
        collected = run.record
        collected.order_rows(run.collected.places)
        if collected.interrupted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        if collected.ended or not collected.interrupted:
            missing = missing_results(profile, run) if settings.gate else unchecked_requests(run)
            run.record.add_run_results(missing)
            if not collected.ended:
                compare(run)
            if failing_results(run.record.results, profile, gate=settings.gate):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if collected.interrupted:
            note_missing_baseline(run)
        add_run_cases(session.config, run)
        write_reports(session.config, run)

    def terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write what remains to be said of the run."""
        finish(terminalreporter, self.run)

    def unconfigure(self) -> None:
        """Leave the group of ranks, and write the reason of an interruption as the very last line."""
        if self.run.rank_session is not None:
            self.run.rank_session.close()
        if self.run.record.interrupted:
            repeat_verdict(self.run.config, self.run)
