# SPDX-License-Identifier: Apache-2.0
"""Select the checks of a run by its level, and say which checks were left out.

A check names its level in its marker: ``nixl_check("my-id", level="extended")``. A marker without a level
means ``standard``. A run makes the checks of its own level and of every lower one.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.model.settings import DEFAULT_LEVEL, LEVELS
from pytest_nixl.session.outcome import check_of

if TYPE_CHECKING:
    from pytest_nixl.session.run import Run

_LEFT_OUT = pytest.StashKey[dict[str, str]]()


class LevelSelection:
    """A pytest plugin that deselects the tests whose checks are above the level of the run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @pytest.hookimpl(trylast=True)  # after -k and -m, so that only what the level leaves out is counted
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        run = self._run
        if not run.collected.used or not run.usable:
            return
        chosen = LEVELS.index(run.settings.level)
        above = [item for item in items if check_of(item) is not None and LEVELS.index(level_of(item)) > chosen]
        if not above:
            return
        selected = [item for item in items if item not in set(above)]
        checks = {check_of(item) for item in selected}
        left_out = {str(check): level_of(item) for item in above if (check := check_of(item)) not in checks}
        config.stash[_LEFT_OUT] = left_out
        config.hook.pytest_deselected(items=above)
        items[:] = selected

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["nixl_left_out"] = left_out_of(session.config)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what was left out from a worker of pytest-xdist, because the controller collects no tests."""
        counts = getattr(node, "workeroutput", {}).get("nixl_left_out", {})
        self._run.config.stash[_LEFT_OUT] = {**left_out_of(self._run.config), **counts}


def level_of(item: pytest.Item) -> str:
    """Return the level of the check that a test makes; without one in its marker, ``standard``.

    :raises pytest.UsageError: the marker names a level that does not exist.
    """
    marker = item.get_closest_marker("nixl_check")
    level = marker.kwargs.get("level", DEFAULT_LEVEL) if marker is not None else DEFAULT_LEVEL
    if level not in LEVELS:
        raise pytest.UsageError(
            f"{item.nodeid}: {level!r} of the marker nixl_check is not a level: expected {', '.join(LEVELS)}"
        )
    return str(level)


def left_out_of(config: pytest.Config) -> dict[str, str]:
    """Return the level of each check that was collected and is above the level of the run."""
    return config.stash.get(_LEFT_OUT, {})


def left_out_line(config: pytest.Config) -> str:
    """Return a sentence that says how many checks the level of the run leaves out; empty: none."""
    counts = Counter(left_out_of(config).values())
    if not counts:
        return ""
    levels = [level for level in LEVELS if counts[level]]
    parts = [f"{counts[level]} check{'' if counts[level] == 1 else 's'} of level {level}" for level in levels]
    several = sum(counts.values()) > 1
    first = f"--nixl-level={levels[0]} runs the former, " if len(levels) > 1 else ""
    return (
        f"{' and '.join(parts)} {'were' if several else 'was'} left out; {first}--nixl-level={levels[-1]} runs "
        f"{'all' if first else 'them' if several else 'it'}"
    )
