# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that prints the suite, the check, its level and the node id of every collected test."""

from __future__ import annotations

import pytest

from pytest_nixl.session.outcome import check_of
from pytest_nixl.session.selection import level_of, suite_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if check_of(item) is not None:
            print(f"CHECK {suite_of(item.path)} {check_of(item)} {level_of(item)} {item.nodeid}")
