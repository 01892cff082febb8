# SPDX-License-Identifier: Apache-2.0
"""A plugin for runs between two network namespaces: ``PYTEST_NIXL_TEST_TARGET`` is the command that starts targets."""

from __future__ import annotations

import os
import shlex
from typing import Any

import pytest

from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.hosts import LocalHost


def pytest_configure(config: pytest.Config) -> None:
    prefix = shlex.split(os.environ["PYTEST_NIXL_TEST_TARGET"])
    make = Launches.__init__

    def between_hosts(self: Launches, places: tuple[LocalHost, LocalHost], settings: Settings) -> None:
        make(self, (places[0], LocalHost(places[1]._supervisor, 1, prefix)), settings)

    vars_of: Any = Launches
    vars_of.__init__ = between_hosts
