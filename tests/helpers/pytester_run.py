# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest on a directory of the test's own, with the plugin: in this process, or in one of their own."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from helpers.cli_run import ROOT, WITHOUT, environment, execute
from pytest_nixl.checks.doctor.catalogue import own_checks

# pytester removes what a test imports. A check that a second test imports again would be registered twice.
own_checks()

#: The plugin by the name of its module, which serves whether it is installed or not: its entry point is left out.
PLUGIN = ("-p", "no:nixl", "-p", "pytest_nixl.plugin", *WITHOUT)
#: The same for a run in this process, which does not read the metadata of all installed packages three times.
_LOADED = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_nixl.plugin"}


class _InProcess:
    """The modules that a run in this process imported, but those of its own directory; and pytest-benchmark's plugin.

    pytester removes all of them after the run, so that each run would import the plugin anew.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.modules: dict[str, ModuleType] = {}

    def pytest_addoption(self, pluginmanager: pytest.PytestPluginManager) -> None:
        pluginmanager.register(import_module("pytest_benchmark.plugin"), "benchmark")  # the name of its entry point

    def pytest_unconfigure(self) -> None:
        for name, module in sys.modules.items():
            file = getattr(module, "__file__", None)
            if file and not file.startswith(self._directory) and not name.endswith("conftest"):
                self.modules[name] = module


def run_pytest(
    pytester: pytest.Pytester,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    plugin: tuple[str, ...] | None = None,
    in_process: bool = False,
    fork: bool = True,
) -> pytest.RunResult:
    """Run pytest in ``pytester``'s directory, with none of the machine's variables that steer a run but ``env``.

    :param plugin: options that load the plugin; None for :data:`PLUGIN`.
    :param fork: False for a run that looks at what is imported: it is executed.
    :param in_process: ten times as fast, and the same for a run that starts no worker and whose output goes to pytest.
    """
    if plugin is None:
        plugin = WITHOUT if in_process else PLUGIN
    variables = environment(**(_LOADED if in_process else {}), **(env or {}))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ).difference(variables):
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        if in_process:
            imported = _InProcess(str(pytester.path))
            try:
                with warnings.catch_warnings():
                    warnings.resetwarnings()  # -W error is for this process, and not for the run
                    return pytester.runpytest_inprocess(*plugin, *arguments, plugins=[imported])
            finally:
                sys.modules.update(
                    {name: module for name, module in imported.modules.items() if name not in sys.modules}
                )
        return _subprocess(pytester, [*plugin, *arguments], dict(os.environ), fork)


def _subprocess(
    pytester: pytest.Pytester, arguments: Sequence[str], env: Mapping[str, str], fork: bool
) -> pytest.RunResult:
    """Do what ``pytester.runpytest_subprocess`` does, by a process that may be forked."""
    temporary = tempfile.mkdtemp(prefix="runpytest-", dir=pytester.path)
    started = time.monotonic()
    with (pytester.path / "stdout").open("w+") as output, (pytester.path / "stderr").open("w+") as errors:
        argv = [sys.executable, "-m", "pytest", f"--basetemp={temporary}", *arguments]
        code = execute(argv, cwd=Path.cwd(), env=env, output=output, errors=errors, timeout=600, fork=fork)
        print(*argv, f"in {Path.cwd()}")
        output.seek(0)
        errors.seek(0)
        printed, errors_printed = output.read(), errors.read()
        print(printed, errors_printed)
    return pytest.RunResult(code, printed.splitlines(), errors_printed.splitlines(), time.monotonic() - started)


def parse_config(pytester: pytest.Pytester, *options: str) -> pytest.Config:
    """Return the configuration of a run in ``pytester``'s directory, read in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _LOADED.items():
            patch.setenv(name, value)
        patch.setattr(pytester, "plugins", [_InProcess(str(pytester.path))])
        return pytester.parseconfig(*WITHOUT, *options)
