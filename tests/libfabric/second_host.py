# SPDX-License-Identifier: Apache-2.0
"""A plugin for runs between two hosts of one machine: targets start by the command in ``PYTEST_NIXL_TEST_TARGET``."""

from __future__ import annotations

import os
import shlex
from typing import Any

import pytest

from pytest_nixl.measure.link import Pairs
from pytest_nixl.processes.hosts import Here
from pytest_nixl.session.settings import Settings


def pytest_configure(config: pytest.Config) -> None:
    prefix = shlex.split(os.environ["PYTEST_NIXL_TEST_TARGET"])
    make = Pairs.__init__

    def between_hosts(self: Pairs, places: tuple[Here, Here], settings: Settings) -> None:
        make(self, (places[0], Here(places[1]._keeper, 1, prefix)), settings)

    vars_of: Any = Pairs
    vars_of.__init__ = between_hosts
