# SPDX-License-Identifier: Apache-2.0
"""The pytest hooks of the plugin. Each only calls what does the work.

PYTEST_DONT_REWRITE: a second run of pytest in this process would warn that it cannot rewrite this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.fixtures.agents import (
    gpu_buffer,
    nixl_agent,
    nixl_buffer,
    nixl_cluster,
    nixl_launches,
    nixl_link,
    nixl_settings,
)
from pytest_nixl.fixtures.etcd import etcd3_client, nixl_etcd, nixl_etcd_proxy, nixl_etcd_server, nixl_private_etcd
from pytest_nixl.fixtures.s3 import nixl_s3
from pytest_nixl.session.options import add_options, join_flags, uses_options

if TYPE_CHECKING:
    from pytest_nixl import run_hooks
    from pytest_nixl.core import terminal_output
    from pytest_nixl.report import brief_output
    from pytest_nixl.session import ending, given_options, selection
else:  # a project that does not use the plugin loads none of them, and no setting is read: see _begin
    run_hooks = lazy_module("pytest_nixl.run_hooks")
    terminal_output = lazy_module("pytest_nixl.core.terminal_output")
    brief_output = lazy_module("pytest_nixl.report.brief_output")
    ending = lazy_module("pytest_nixl.session.ending")
    given_options = lazy_module("pytest_nixl.session.given_options")
    selection = lazy_module("pytest_nixl.session.selection")

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

#: The hooks of the run; missing: the project has not used the plugin yet.
_HOOKS: pytest.StashKey[run_hooks.RunHooks] = pytest.StashKey()
_FIXTURES = frozenset(__all__)


def _begin(config: pytest.Config, *, configured: bool = False) -> run_hooks.RunHooks:
    """Return the hooks of the run. The first call registers the parts of the plugin that observe the run.

    It is called when an option or ini value of ours is given (``configured``), when a test with a fixture or the marker
    of ours is collected, and in a run of pytest-xdist, whose controller collects no tests.
    """
    if _HOOKS in config.stash:
        return config.stash[_HOOKS]
    begin = run_hooks.RunHooks.configured if configured else run_hooks.RunHooks.of
    config.stash[_HOOKS] = begin(config)
    return config.stash[_HOOKS]


def _uses_plugin(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of the plugin or makes a check."""
    uses_fixture = not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
    return uses_fixture or item.get_closest_marker("nixl_check") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest's capture takes standard output
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, None, None]:
    join_flags(args)
    if any(".py" in argument for argument in args):
        options = early_config.known_args_namespace
        if pasted := selection.pyargs_of_pasted(options.file_or_dir, early_config.invocation_params.dir):
            args[:] = [*(pasted.get(argument, argument) for argument in args), "--pyargs"]
            options.file_or_dir = [pasted.get(each, each) for each in options.file_or_dir]
            options.pyargs = True
    if sys.stdout is None and (
        any("nixl" in argument for argument in args) or "suites" in early_config.getini("testpaths")
    ):
        terminal_output.reopen_closed_output()
        early_config.pluginmanager.register(terminal_output.TerminalOutput(closed=True), "nixl-output")
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
        if _HOOKS in config.stash or uses_options(config):
            error.args = given_options.printable_error(config, error)
        raise
    except KeyboardInterrupt:  # Ctrl-C again, while the run was ending
        if _HOOKS not in config.stash:
            raise
        code = pytest.ExitCode.INTERRUPTED
        pytest_unconfigure(config)
    hooks = config.stash.get(_HOOKS, None)
    return hooks.failed_code or code if hooks is not None and code == pytest.ExitCode.OK else code


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_NIXL_ENDING" in os.environ:
        ending.take_path(config)
    config.addinivalue_line(
        "markers",
        "nixl_check(id, level='standard', own=False): the id of the check that a test makes; level: quick, standard or "
        "extended (--nixl-level); own: it checks pytest-nixl itself",
    )
    config.addinivalue_line(
        "markers",
        "nixl_early(waits=seconds): a check of the suites that measures nothing, and may run while others do; waits: "
        "how long it waits, if that is seconds",
    )
    if "suites" in config.getini("testpaths") or any("nixl" in argument for argument in config.args):
        brief_output.quiet_benchmarks(config)
    controls_xdist = config.getoption("dist", "no") != "no" or bool(config.getoption("tx", None))
    if (configured := uses_options(config)) or controls_xdist:
        _begin(config, configured=configured)


@pytest.hookimpl(wrapper=True)
def pytest_report_header(config: pytest.Config) -> Generator[None, list[Any], list[Any]]:
    headers = yield
    hooks = config.stash.get(_HOOKS, None)
    return headers if hooks is None else hooks.report_header(headers)


@pytest.hookimpl(tryfirst=True)  # links vary slowest, so that all block sizes of an operation run one after the other
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _HOOKS in metafunc.config.stash or _uses_plugin(metafunc.definition):
        _begin(metafunc.config).generate_tests(metafunc)


def pytest_itemcollected(item: pytest.Item) -> None:
    if _HOOKS in item.config.stash or _uses_plugin(item):
        _begin(item.config).itemcollected(item)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    hooks = config.stash.get(_HOOKS, None)
    if hooks is not None:
        hooks.collection_modifyitems([item for item in items if _uses_plugin(item)])


def pytest_collection_finish(session: pytest.Session) -> None:
    hooks = session.config.stash.get(_HOOKS, None)
    if hooks is not None:
        hooks.collection_finish(session)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    hooks = config.stash.get(_HOOKS, None)
    return [] if hooks is None else hooks.report_collectionfinish()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    hooks = session.config.stash.get(_HOOKS, None)
    return None if hooks is None else hooks.runtestloop(session)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    hooks = item.config.stash.get(_HOOKS, None)
    if hooks is not None:
        hooks.runtest_setup(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    hooks = item.config.stash.get(_HOOKS, None)
    if hooks is not None and _uses_plugin(item):
        hooks.runtest_makereport(item, call, report)
    return report


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    hooks = config.stash.get(_HOOKS, None)
    return hooks.report_teststatus(report) if hooks is not None and hasattr(report, "nixl_result") else None


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    hooks = config.stash.get(_HOOKS, None)
    if hooks is not None:
        hooks.benchmark_update_json(output_json)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-benchmark writes its files
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    hooks = session.config.stash.get(_HOOKS, None)
    if hooks is None:
        return (yield)
    return (yield from hooks.sessionfinish(session, exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    hooks = config.stash.get(_HOOKS, None)
    if hooks is not None:
        hooks.terminal_summary(terminalreporter)


@pytest.hookimpl(trylast=True)  # the reason of an interruption is the very last line, after pytest's own
def pytest_unconfigure(config: pytest.Config) -> None:
    hooks = config.stash.get(_HOOKS, None)
    if hooks is not None:
        hooks.unconfigure()
    for name, close in (("worker_parent", "close_parent"), ("supervisor", "close_supervisor")):
        if (module := sys.modules.get(f"pytest_nixl.processes.{name}")) is not None:
            getattr(module, close)()
