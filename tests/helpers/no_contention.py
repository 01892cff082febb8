# SPDX-License-Identifier: Apache-2.0
"""``-p helpers.no_contention``: a run in which no other process uses a row's cores. A double.

A busy machine makes a row INCONCLUSIVE, which is right, and hides the fault that a test causes. Tests of contention do
without this plugin.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_configure() -> None:
    """Replace what measures the contention of a row and of a raw tool."""
    from pytest_nixl.checks.raw_tools import tools
    from pytest_nixl.measure import link
    from pytest_nixl.model.samples import Samples

    def undisturbed(**fields: Any) -> Samples:
        return Samples(**{**fields, "contention": ()})

    replaced = pytest.MonkeyPatch()
    replaced.setattr(link, "Samples", undisturbed)
    replaced.setattr(tools, "contention_of", lambda *_: 0.0)
