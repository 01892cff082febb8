# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest on a directory of the test's own, with the plugin: in this process, or in one of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from helpers.cli_run import ROOT, environment

#: The plugin by the name of its module, which serves whether it is installed or not: its entry point is left out.
PLUGIN = ("-p", "no:nixl", "-p", "pytest_nixl.plugin", "-p", "no:cacheprovider")


def run_pytest(
    pytester: pytest.Pytester,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    plugin: tuple[str, ...] = PLUGIN,
    in_process: bool = False,
) -> pytest.RunResult:
    """Run pytest in ``pytester``'s directory, with none of the machine's variables that steer a run but ``env``.

    :param in_process: faster, and the same for a run that ends before it collects.
    """
    wanted = environment(**(env or {}))
    wanted["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), wanted.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ).difference(wanted):
            patch.delenv(name)
        for name, value in wanted.items():
            patch.setenv(name, value)
        if in_process:
            return pytester.runpytest_inprocess(*plugin, *arguments)
        return pytester.runpytest_subprocess(*plugin, *arguments, timeout=600)
