# SPDX-License-Identifier: Apache-2.0
"""The pytest hooks of the plugin. Each only calls the module that does the work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.fixtures.agents import (
    gpu_buffer,
    nixl_agent,
    nixl_buffer,
    nixl_cluster,
    nixl_link,
    nixl_pairs,
    nixl_settings,
    parametrize_links,
    require_image,
)
from pytest_nixl.fixtures.etcd import etcd3_client, nixl_etcd, nixl_etcd_proxy, nixl_etcd_server, nixl_private_etcd
from pytest_nixl.session.completeness import completeness_of
from pytest_nixl.session.options import add_options, join_flags
from pytest_nixl.session.outcome import check_of
from pytest_nixl.session.preconditions import Preconditions
from pytest_nixl.session.run import Run, result_of, row_of, shorten, uses_ours, watch_load

if TYPE_CHECKING:
    from pytest_nixl.session.reruns import Reruns

# Most modules are imported inside the hooks, so that an installed but unused plugin costs only a few milliseconds.

#: Fixtures, which pytest finds here by name.
__all__ = [
    "etcd3_client",
    "gpu_buffer",
    "nixl_agent",
    "nixl_buffer",
    "nixl_cluster",
    "nixl_etcd",
    "nixl_etcd_proxy",
    "nixl_etcd_server",
    "nixl_link",
    "nixl_pairs",
    "nixl_private_etcd",
    "nixl_settings",
]

_log = logging.getLogger(__name__)

NOT_IN_PARALLEL = "bandwidth is never measured in parallel: run it without pytest-xdist (-n)"


class _Results:
    """A pytest plugin that collects the result of each check, from this process or from a worker of pytest-xdist."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reruns: Reruns | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        plain = getattr(report, "nixl_result", None)
        if plain is not None:
            from pytest_nixl.model.results import Result
            from pytest_nixl.session.reruns import Reruns

            self._reruns = self._reruns or Reruns()
            self._run.add(self._reruns.judge(Result.from_plain(plain), report))


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest's capture takes standard output
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, None, None]:
    join_flags(args)
    if sys.stdout is None and (any("nixl" in each for each in args) or "suites" in early_config.getini("testpaths")):
        from pytest_nixl.core.terminal_output import CLOSED, TerminalOutput, reopen_closed_output

        reopen_closed_output()
        early_config.pluginmanager.register(TerminalOutput(CLOSED), "nixl-output")
    yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "nixl_check(id, own=False): the id of the check that a test makes; own: it checks pytest-nixl itself",
    )
    run = Run.of(config)
    if run.asked_for and run.asked.several and not run.parallel:
        from pytest_nixl.cluster_hooks import refuse

        refuse(config, run)
    if run.asked_for and run.settings.judges and not run.parallel:
        from pytest_nixl.session.gate import refuse_accidents

        refuse_accidents(config, run.settings)
    if run.asked_for and run.settings.baseline and not run.parallel:
        from pytest_nixl.session.baseline import find

        find(run)
    config.pluginmanager.register(_Results(run), "nixl-results")
    config.pluginmanager.register(Preconditions(run), "nixl-preconditions")
    if run.asked_for and not run.parallel and not config.pluginmanager.has_plugin("nixl-output"):
        from pytest_nixl.core.terminal_output import TerminalOutput

        config.pluginmanager.register(TerminalOutput(), "nixl-output")
    config.pluginmanager.register(completeness_of(run), "nixl-completeness")


def pytest_report_header(config: pytest.Config) -> list[str]:
    run = Run.of(config)
    if not run.asked_for:
        return []
    run.announced = True
    return _header(run)


@pytest.hookimpl(tryfirst=True)  # links vary slowest, so that all block sizes of an operation run one after the other
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = Run.of(metafunc.config)
    if metafunc.definition.get_closest_marker("nixl_check") is not None:
        from pytest_nixl.session.suites import suite_of

        run.checks = True
        run.suites |= {suite for suite in (suite_of(metafunc.definition.path),) if suite is not None}
    if "nixl_link" in metafunc.fixturenames and run.usable:
        parametrize_links(metafunc, run)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = Run.of(config)
    for item in filter(uses_ours, items):
        run.used = True
        if run.parallel and not run.usable:
            return  # an error here would be lost in the worker of pytest-xdist; the fixtures report it instead
        # A bad value in an environment variable ends the run here.
        _ = run.settings, run.asked
        if row_of(item) is not None:
            from pytest_nixl.session.benchmark import prepare_row

            prepare_row(item)
            if run.parallel:
                item.add_marker(pytest.mark.skip(reason=NOT_IN_PARALLEL))


def pytest_collection_finish(session: pytest.Session) -> None:
    run = Run.of(session.config)
    if run.used and run.usable and run.settings.gate and session.config.pluginmanager.has_plugin("rerunfailures"):
        from pytest_nixl.session.reruns import refuse_marked

        refuse_marked(session.items, "--nixl-gate")
    used = any("nixl_etcd" in getattr(item, "fixturenames", ()) for item in session.items)
    if used and not run.parallel and not session.config.option.collectonly:
        require_image(run.settings)
    if run.used and run.usable and not run.parallel:
        _log_profile(run)
    if run.used and not run.parallel and run.settings.gate:
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
    run = Run.of(config)
    return _header(run) if run.used and not run.announced and not run.parallel else []


def _header(run: Run) -> list[str]:
    from pytest_nixl.report.terminal import header

    return list(header(run.settings, run.asked))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    run = Run.of(session.config)
    if run.parallel or session.config.option.collectonly or not run.in_cluster:
        return None
    from pytest_nixl.cluster_hooks import take_part

    return take_part(session, run)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if check_of(item) is not None:
        watch_load(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not uses_ours(item):
        return report
    from pytest_nixl.judge.profiles import load_profile

    run = Run.of(item.config)
    if call.excinfo is not None:
        gate = run.usable and run.settings.gate
        required = run.usable and check_of(item) in load_profile(run.settings.profile).required
        shorten(report, item, call.excinfo.value, gate=gate, required=required)
    result = result_of(item, call, report)
    if result is not None:
        if report.failed and isinstance(report.longrepr, str):
            report.longrepr += f"\nrepeat: {result.repeat}"
        vars(report)["nixl_result"] = result.plain()
        item.user_properties.extend(result.properties())
        if run.usable and run.settings.image:
            item.user_properties.append(("nixl_image", run.settings.image))
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if not hasattr(report, "nixl_result"):
        return None
    from pytest_nixl.report.terminal import status_word

    return status_word(report)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    run = Run.of(config)
    if run.results:
        from pytest_nixl.session.record_writer import add_ours

        add_ours(output_json, run)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-benchmark writes its files
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    run = Run.of(session.config)
    if run.party is not None:
        from pytest_nixl.cluster_hooks import conclude

        conclude(session, run)
    if not run.parallel and not run.serves and (run.results or run.asked_for or run.checks):
        run.interrupted = completeness_of(run).interruption(session)
        if run.interrupted and not run.usable:
            run.interrupted = ""  # the refused settings end the run
        if run.interrupted or ((run.results or run.asked_for) and exitstatus in (0, 1, 5)):
            _ = run.settings  # bad settings that only workers of pytest-xdist have read end the run here
            _conclude(session, run)
    try:
        yield
    except BaseException as error:
        if run.results and not run.serves and run.usable:
            from pytest_nixl.report.outputs import leave_again

            run.interrupted = run.interrupted or completeness_of(run).crash(error)
            leave_again(session.config, run)
        raise
    if run.party is not None:
        from pytest_nixl.cluster_hooks import leave

        for text in leave(session, run):
            print(text, file=sys.stderr)
    if run.interrupted or run.serves:
        from pytest_nixl.report.terminal import report_if_left_out

        report_if_left_out(session.config, run)


def _conclude(session: pytest.Session, run: Run) -> None:
    """Add the results that belong to no test, set the exit status by them, and write record and reports."""
    from pytest_nixl.judge.profiles import load_profile
    from pytest_nixl.report.junit import add_run_cases
    from pytest_nixl.report.outputs import leave
    from pytest_nixl.session.baseline import compare
    from pytest_nixl.session.gate import failed, missed

    settings = run.settings
    profile = load_profile(settings.profile)
    if run.interrupted and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.INTERRUPTED
    if run.ended or not run.interrupted:
        if settings.gate:
            run.results += missed(profile, run)
        if not run.ended:
            compare(run)
        if settings.judges and failed(run.results, profile, gate=settings.gate):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    add_run_cases(session.config, run)
    leave(session.config, run)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = Run.of(config)
    if not (run.results or run.asked_for or run.interrupted) or not run.usable:
        return
    from pytest_nixl.report.terminal import nothing_collected, write_report

    if run.results or run.serves or run.interrupted:
        write_report(terminalreporter, run)
    elif not run.used:
        nothing_collected(terminalreporter, config)


@pytest.hookimpl(trylast=True)  # the reason of an interruption is the very last line, after pytest's own
def pytest_unconfigure(config: pytest.Config) -> None:
    run = Run.of(config)
    if run.party is not None:
        run.party.close()
    if run.interrupted:
        from pytest_nixl.report.terminal import last_word

        last_word(config, run)
    module = sys.modules.get("pytest_nixl.processes.supervisor")
    if module is not None:
        module.close_supervisor()
