# SPDX-License-Identifier: Apache-2.0
"""``-p helpers.short_launches``: a run that a shell starts, whose launches take little time. A double.

It is for tests that do not judge figures, as :mod:`helpers.forked_runs` says, which does the same for its runs.
"""

from __future__ import annotations

from helpers.forked_runs import save_time


def pytest_configure() -> None:
    """Let workers of rows be forked, and make few transfers before the first row."""
    save_time(setattr)
