# SPDX-License-Identifier: Apache-2.0
"""A plugin that copies the logs of all workers to the folder in ``PYTEST_NIXL_TEST_LOGS`` when the run ends."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    if "pytest_nixl.processes.supervisor" not in sys.modules:
        return
    from pytest_nixl.processes.supervisor import supervisor

    for log in Path(supervisor().directory).glob("*.log"):
        shutil.copy(log, os.environ["PYTEST_NIXL_TEST_LOGS"])
