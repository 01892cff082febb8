# SPDX-License-Identifier: Apache-2.0
"""``-p helpers.interrupted``: the first runs of a job are interrupted, as many as ``INTERRUPTED_RUNS`` says. A double.

A real interruption needs a signal at the right moment. Each run is counted by a file beside its JUnit XML.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Interrupt the run before its first test, if it is one of the first runs."""
    folder = Path(item.config.option.xmlpath).parent
    if sum(1 for _ in folder.glob("interrupted-*")) < int(os.environ["INTERRUPTED_RUNS"]):
        (folder / f"interrupted-{os.getpid()}").touch()
        pytest.exit("a double of a node that was taken away", returncode=2)
