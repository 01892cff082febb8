# SPDX-License-Identifier: Apache-2.0
"""The pytest hooks of the plugin. Each only calls the module that does the work.

PYTEST_DONT_REWRITE: a second run of pytest in this process would warn that it cannot rewrite this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.fixtures.agents import (
    gpu_buffer,
    nixl_agent,
    nixl_buffer,
    nixl_cluster,
    nixl_launches,
    nixl_link,
    nixl_settings,
    parametrize_links,
    require_image,
)
from pytest_nixl.fixtures.etcd import etcd3_client, nixl_etcd, nixl_etcd_proxy, nixl_etcd_server, nixl_private_etcd
from pytest_nixl.fixtures.s3 import nixl_s3
from pytest_nixl.session.options import add_options, join_flags, uses_options

if TYPE_CHECKING:
    from pytest_nixl.session.outcome import Reruns
    from pytest_nixl.session.run import Run

# Nothing else of ours is imported, and no setting is read, unless the project uses the plugin: see _begin.

#: The plugin's fixtures: pytest finds them here by name, and ruff compares this list with the imports.
__all__ = [
    "etcd3_client",
    "gpu_buffer",
    "nixl_agent",
    "nixl_buffer",
    "nixl_cluster",
    "nixl_etcd",
    "nixl_etcd_proxy",
    "nixl_etcd_server",
    "nixl_launches",
    "nixl_link",
    "nixl_private_etcd",
    "nixl_s3",
    "nixl_settings",
]

_log = logging.getLogger(__name__)

#: Whether the header was written, on the configuration.
_ANNOUNCED = pytest.StashKey[bool]()


#: The state of the run; missing: the project has not used the plugin yet.
_RUN: pytest.StashKey[Run] = pytest.StashKey()
#: The exit code with which a verdict failed the run; missing: it did not.
_FAILED_CODE = pytest.StashKey[int]()
_FIXTURES = frozenset(__all__)


def _begin(config: pytest.Config) -> Run:
    """Return the state of the run. The first call registers the parts of the plugin that observe the run.

    It is called when an option or ini value of ours is given, when a test with a fixture or the marker of ours is
    collected, and in a run of pytest-xdist, whose controller collects no tests.
    """
    if _RUN in config.stash:
        return config.stash[_RUN]
    from pytest_nixl.report.brief_output import BriefOutput
    from pytest_nixl.report.row_progress import RowProgress
    from pytest_nixl.session.completeness import completeness_of
    from pytest_nixl.session.levels import LevelSelection
    from pytest_nixl.session.preconditions import Preconditions
    from pytest_nixl.session.run import Run

    run = config.stash[_RUN] = Run.of(config)
    config.pluginmanager.register(_Results(run), "nixl-results")
    config.pluginmanager.register(LevelSelection(run), "nixl-levels")
    config.pluginmanager.register(Preconditions(run), "nixl-preconditions")
    config.pluginmanager.register(completeness_of(run), "nixl-completeness")
    config.pluginmanager.register(BriefOutput(run), BriefOutput.name)
    config.pluginmanager.register(RowProgress(run), RowProgress.name)
    return run


def _uses_plugin(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of the plugin or makes a check."""
    uses_fixture = not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
    return uses_fixture or item.get_closest_marker("nixl_check") is not None


def _is_distributed(config: pytest.Config) -> bool:
    """Whether this is the controller of pytest-xdist."""
    return config.getoption("dist", "no") != "no" or bool(config.getoption("tx", None))


class _Results:
    """A pytest plugin that collects the result of each check, from this process or from a worker of pytest-xdist."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reruns: Reruns | None = None

    @pytest.hookimpl(tryfirst=True)  # before pytest writes the report to its JUnit file
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "nixl_module"):
            from pytest_nixl.report.junit import name_by_module

            name_by_module(self._run.config, report)
        result = getattr(report, "nixl_result", None)
        if result is not None:
            from pytest_nixl.session.outcome import Reruns

            self._reruns = self._reruns or Reruns()
            self._run.found.add_result(self._reruns.judge(result, report))

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
            from pytest_nixl.model.results import Result

            vars(report)["nixl_result"] = Result.from_plain(plain)
        return report


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest's capture takes standard output
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, None, None]:
    join_flags(args)
    if any(".py" in argument for argument in args):
        from pytest_nixl.session.suites import find_pasted

        options = early_config.known_args_namespace
        if pasted := find_pasted(options.file_or_dir, early_config.invocation_params.dir):
            args[:] = [*(pasted.get(argument, argument) for argument in args), "--pyargs"]
            options.file_or_dir = [pasted.get(each, each) for each in options.file_or_dir]
            options.pyargs = True
    if sys.stdout is None and (
        any("nixl" in argument for argument in args) or "suites" in early_config.getini("testpaths")
    ):
        from pytest_nixl.core.terminal_output import TerminalOutput, reopen_closed_output

        reopen_closed_output()
        early_config.pluginmanager.register(TerminalOutput(closed=True), "nixl-output")
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Give the verdict the last word on the exit code, and hide the secrets of a refusal, which pytest prints as it is.

    Another plugin may set the exit code to 0 at the very end. A refusal may quote a setting of any length, with control
    characters: they are escaped and its length is limited.
    """
    try:
        code = yield
    except pytest.UsageError as error:
        if _RUN in config.stash or uses_options(config):
            from pytest_nixl.core.strict import error_text
            from pytest_nixl.session.given_options import hider_of

            hide = hider_of(config)
            error.args = tuple(error_text(hide(str(part))) for part in error.args)
        raise
    except KeyboardInterrupt:  # Ctrl-C again, while the run was ending
        if _RUN not in config.stash:
            raise
        code = pytest.ExitCode.INTERRUPTED
        pytest_unconfigure(config)
    return config.stash.get(_FAILED_CODE, code) if code == pytest.ExitCode.OK else code


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_NIXL_ENDING" in os.environ:
        from pytest_nixl.session.ending import take_path

        take_path(config)
    config.addinivalue_line(
        "markers",
        "nixl_check(id, level='standard', own=False): the id of the check that a test makes; level: quick, standard or "
        "extended (--nixl-level); own: it checks pytest-nixl itself",
    )
    config.addinivalue_line(
        "markers",
        "nixl_early(waits=seconds): a check of the suites that measures nothing, and may run beside others; waits: how "
        "long it waits, if that is seconds",
    )
    if "suites" in config.getini("testpaths") or any("nixl" in argument for argument in config.args):
        from pytest_nixl.report.brief_output import quiet_benchmarks

        quiet_benchmarks(config)
    if not uses_options(config):
        if _is_distributed(config):
            _begin(config)
        return
    from pytest_nixl.session.run import Run

    run = Run.of(config)
    if run.configured and not run.parallel:
        try:
            if run.placement.several:
                from pytest_nixl.cluster_hooks import refuse, write_plainly

                write_plainly(config, run)
                refuse(config, run)
            if run.settings.judged_by:
                from pytest_nixl.session.baseline import find
                from pytest_nixl.session.gate import refuse_accidents

                refuse_accidents(config, run.settings)
                find(run)
        except pytest.UsageError as error:
            from pytest_nixl.report.outputs import leave_refusal

            leave_refusal(config, run, str(error))
            raise
    _begin(config)
    if run.configured and not run.parallel and not config.pluginmanager.has_plugin("nixl-output"):
        from pytest_nixl.core.terminal_output import TerminalOutput

        config.pluginmanager.register(TerminalOutput(), "nixl-output")


@pytest.hookimpl(wrapper=True)
def pytest_report_header(config: pytest.Config) -> Generator[None, list[Any], list[Any]]:
    headers = yield
    run = config.stash.get(_RUN, None)
    if run is None or not run.configured:
        return headers
    from pytest_nixl.report.brief_output import without_benchmark_header

    config.stash[_ANNOUNCED] = True
    return [*without_benchmark_header(config, headers), _header(run)]


@pytest.hookimpl(tryfirst=True)  # links vary slowest, so that all block sizes of an operation run one after the other
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _RUN not in metafunc.config.stash and not _uses_plugin(metafunc.definition):
        return
    run = _begin(metafunc.config)
    if metafunc.definition.get_closest_marker("nixl_check") is not None:
        from pytest_nixl.session.suites import suite_of

        run.collected.checks = True
        if (suite := suite_of(metafunc.definition.path)) is not None:
            run.collected.suites.add(suite)
    if "nixl_link" in metafunc.fixturenames and run.usable:
        parametrize_links(metafunc, run)


def pytest_itemcollected(item: pytest.Item) -> None:
    if _RUN not in item.config.stash and _uses_plugin(item):
        _begin(item.config)
    if item.get_closest_marker("nixl_check") is not None:
        from pytest_nixl.session.check_result import watch_call

        watch_call(item)
        places = item.config.stash[_RUN].collected.places
        places[item.nodeid] = len(places)
    if "nixl_agent" in getattr(item, "fixturenames", ()) and not item.config.option.collectonly:
        _prepare_workers(item.config.stash[_RUN])


def _prepare_workers(run: Run) -> None:
    """Let the process from which workers are forked import its modules while pytest collects the rest of the tests."""
    if not run.usable or run.parallel or run.in_cluster:
        return
    from pytest_nixl.processes.supervisor import SupervisorError, supervisor
    from pytest_nixl.processes.worker_parent import parent_of_workers, prepare

    with contextlib.suppress(SupervisorError, OSError):  # the first worker will raise it
        if not parent_of_workers():
            prepare(supervisor(), os.environ)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = config.stash.get(_RUN, None)
    if run is None:
        return
    from pytest_nixl.session.benchmark import make_benchmark, records_figures
    from pytest_nixl.session.requested_links import NOT_IN_PARALLEL, row_of

    ours = [item for item in items if _uses_plugin(item)]
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


def pytest_collection_finish(session: pytest.Session) -> None:
    run = session.config.stash.get(_RUN, None)
    if run is None:
        return
    gates = run.collected.used and run.usable and run.settings.gate
    if gates and session.config.pluginmanager.has_plugin("rerunfailures"):
        from pytest_nixl.session.outcome import refuse_marked

        refuse_marked(session.items, "--nixl-gate")
    used = any("nixl_etcd" in getattr(item, "fixturenames", ()) for item in session.items)
    if used and not run.parallel and not session.config.option.collectonly:
        require_image(run.settings)
    if run.collected.used and run.usable and not run.parallel:
        _log_profile(run)
        if not session.config.option.collectonly:
            from pytest_nixl.session.agent_check import refuse_agent_options
            from pytest_nixl.session.benchmark import read_machine_early

            refuse_agent_options(run.settings)
            read_machine_early(session.config, stored=bool(run.settings.store))
    if gates and not run.parallel:
        from pytest_nixl.judge.profiles import load_profile
        from pytest_nixl.session.silent_profile import refuse_silence

        refuse_silence(load_profile(run.settings.profile), session.items)


def _log_profile(run: Run) -> None:
    """Say which profile judges; it was read before pytest could show what is logged."""
    from pytest_nixl.judge.profiles import load_profile

    profile = load_profile(run.settings.profile)
    counts = len(profile.required), len(profile.expectations)
    _log.info("profile %s: %d required checks, %d expectations", profile.path_or_origin, *counts)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    run = config.stash.get(_RUN, None)
    shown = config.stash.get(_ANNOUNCED, False)
    unwanted = config.option.no_header or config.get_verbosity() < 0
    late = run is not None and run.collected.used and not shown and not run.parallel
    return _header(run) if run is not None and late and not unwanted else []


def _header(run: Run) -> list[str]:
    from pytest_nixl.core.strict import printable
    from pytest_nixl.report.terminal import header

    lines = header(run.settings, run.placement, run.config.get_verbosity())
    return [printable(line) for line in lines]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    run = session.config.stash.get(_RUN, None)
    if run is None or run.parallel or session.config.option.collectonly or not run.in_cluster:
        return None
    from pytest_nixl.cluster_hooks import take_part

    return take_part(session, run)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _RUN not in item.config.stash:
        return
    from pytest_nixl.session.outcome import check_of

    if check_of(item) is not None:
        from pytest_nixl.session.check_result import watch_load

        watch_load(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    run = item.config.stash.get(_RUN, None)
    if run is None or not _uses_plugin(item):
        return report
    from pytest_nixl.session.check_result import add_result

    add_result(item, call, report)
    if report.failed and call.excinfo is not None and isinstance(item, pytest.Function):
        from pytest_nixl.fixtures.agent_lines import agents_section

        report.sections += agents_section(item.funcargs.values(), call.excinfo.value)
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if not hasattr(report, "nixl_result"):
        return None
    from pytest_nixl.report.brief_output import status_word

    return status_word(report)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    run = config.stash.get(_RUN, None)
    if run is not None and run.found.results:
        from pytest_nixl.session.record_writer import add_ours

        add_ours(output_json, run)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-benchmark writes its files
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    run = session.config.stash.get(_RUN, None)
    if run is None:
        return (yield)
    from pytest_nixl.session.completeness import completeness_of

    if run.rank_session is not None:
        from pytest_nixl.cluster_hooks import conclude

        conclude(session, run)
    if not run.parallel and not run.serves:
        if exitstatus == pytest.ExitCode.USAGE_ERROR:
            from pytest_nixl.report.outputs import leave_session_refusal

            leave_session_refusal(session.config, run)
        elif run.usable:  # else the refused settings end the run
            run.found.interrupt(completeness_of(run).interruption(session))
        if run.found.interrupted or ((run.found.results or run.configured) and exitstatus in (0, 1, 5)):
            _ = run.settings  # bad settings that only workers of pytest-xdist have read end the run here
            _conclude(session, run)
            if session.exitstatus:
                session.config.stash[_FAILED_CODE] = int(session.exitstatus)
    try:
        yield
    except BaseException as error:
        if (run.found.results or run.configured) and not run.parallel and not run.serves and run.usable:
            from pytest_nixl.report.outputs import leave_again
            from pytest_nixl.session.completeness import refuse_exit_code_0

            run.found.interrupt(completeness_of(run).crash(error))
            refuse_exit_code_0(session, error)
            leave_again(session.config, run)
            if not isinstance(error, KeyboardInterrupt):  # after Ctrl-C, what pytest left out is written below
                raise
        else:
            raise
    if run.rank_session is not None:
        from pytest_nixl.cluster_hooks import leave

        for text in leave(session, run):
            print(text, file=sys.stderr)
    if run.found.interrupted or run.serves:
        from pytest_nixl.report.terminal import report_if_left_out

        report_if_left_out(session.config, run)
    if session.exitstatus == pytest.ExitCode.OK:  # another plugin may have changed it
        session.exitstatus = session.config.stash.get(_FAILED_CODE, session.exitstatus)
    if not run.parallel:
        from pytest_nixl.session.ending import write_ending

        write_ending(session)


def _conclude(session: pytest.Session, run: Run) -> None:
    """Add the results that belong to no test, set the exit status by them, and write record and reports."""
    from pytest_nixl.judge.profiles import load_profile
    from pytest_nixl.report.junit import add_run_cases
    from pytest_nixl.report.outputs import leave
    from pytest_nixl.session.baseline import compare, tell_of_no_baseline
    from pytest_nixl.session.gate import failed, missed, unchecked

    settings = run.settings
    profile = load_profile(settings.profile)
    collected = run.found
    collected.order_rows(run.collected.places)
    if collected.interrupted and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
    if collected.ended or not collected.interrupted:
        missing = missed(profile, run) if settings.gate else unchecked(run)
        run.found.add_run_results(missing)
        if not collected.ended:
            compare(run)
        if failed(run.found.results, profile, gate=settings.gate):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if collected.interrupted:
        tell_of_no_baseline(run)
    add_run_cases(session.config, run)
    leave(session.config, run)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash.get(_RUN, None)
    if run is not None:
        from pytest_nixl.report.brief_output import finish

        finish(terminalreporter, run)


@pytest.hookimpl(trylast=True)  # the reason of an interruption is the very last line, after pytest's own
def pytest_unconfigure(config: pytest.Config) -> None:
    run = config.stash.get(_RUN, None)
    if run is not None and run.rank_session is not None:
        run.rank_session.close()
    if run is not None and run.found.interrupted:
        from pytest_nixl.report.terminal import last_word

        last_word(config, run)
    for name, close in (("worker_parent", "close_parent"), ("supervisor", "close_supervisor")):
        if (module := sys.modules.get(f"pytest_nixl.processes.{name}")) is not None:
            getattr(module, close)()
