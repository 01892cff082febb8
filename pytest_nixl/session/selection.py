# SPDX-License-Identifier: Apache-2.0
"""The suites and their checks, and those that a run selects: by suites and by its level.

A check names its level in its marker: ``nixl_check("my-id", level="extended")``. A marker without a level
means ``standard``. A run makes the checks of its own level and of every lower one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.model.settings import DEFAULT_LEVEL, LEVELS
from pytest_nixl.session.outcome import check_of

if TYPE_CHECKING:
    from pytest_nixl.session.run import Run


BANDWIDTH, INFRASTRUCTURE, ENDPOINTS = "bandwidth", "infrastructure", "uri_validation"
#: The suites that are selected only if an option is given, by the option.
ON_REQUEST = {"pattern": "--nixl-pattern"}

#: Checks of former releases that tested pytest-nixl itself. They are tests of it now, and no run makes them.
FORMER_CHECKS = frozenset(
    {"ranks-in-every-order", "ranks-lost-answer", "ranks-etcd-restart", "ranks-leader-change", "ranks-late-claimant"}
)
_LEFT_OUT = pytest.StashKey[dict[str, str]]()


def suites_folder() -> Path:
    """Return the folder of the suites: the wheel has it inside the package, a clone beside the package.

    There is no such folder if somebody copied the package alone.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "suites"
    return inside if inside.is_dir() else package.parent / "suites"


def pyargs_of_pasted(arguments: Iterable[str], folder: Path) -> dict[str, str]:
    """Return the name for ``--pyargs`` of each word that is a node id of the suites and no path.

    With ``--pyargs`` pytest prints ``metadata/test_exchange.py::test_it``, which is no path in the user's directory.

    :param arguments: the command line.
    :param folder: the directory in which pytest was started.
    """
    pasted = {}
    for argument in arguments:
        name, colons, test = argument.partition("::")
        if re.fullmatch(r"(\w+/)?test_\w+\.py", name) and not (folder / name).exists():
            files = [path for path in suites_folder().glob("*/test_*.py") if path.as_posix().endswith(f"/{name}")]
            if len(files) == 1:
                pasted[argument] = f"pytest_nixl.suites.{files[0].parent.name}.{files[0].stem}{colons}{test}"
    return pasted


@cache
def suite_names() -> frozenset[str]:
    """Return the names of the suites."""
    return frozenset(folder.name for folder in suites_folder().glob("*") if (folder / "__init__.py").is_file())


@dataclass(frozen=True)
class SuiteCheck:
    """A check of a suite, as its test declares it.

    :param test: the test's file from the root of the clone, and its name.
    :param level: the level from which on a run makes the check.
    :param findings: ids of the findings that the test looks for.
    :param text: what the check proves; the first paragraph says it in one sentence.
    """

    id: str
    test: str
    level: str
    findings: tuple[str, ...]
    text: str

    @property
    def suite(self) -> str:
        """The suite of its test."""
        return self.test.split("/")[1]

    @property
    def proves(self) -> str:
        """The first paragraph of the text, in one line."""
        return " ".join(self.text.partition("\n\n")[0].split())


@cache
def suite_checks() -> tuple[SuiteCheck, ...]:
    """Return every check of every suite; none if somebody copied the package alone.

    ``docs/generate.py`` lists them in a file, because it takes most of a second to import all suites.
    """
    path = suites_folder() / "checks.json"
    listed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else ()
    return tuple(SuiteCheck(**entry | {"findings": tuple(entry["findings"])}) for entry in listed)


@cache
def check_ids_by_suite() -> Mapping[str, frozenset[str]]:
    """Return the ids of the checks of each suite."""
    ids: dict[str, set[str]] = {}
    for check in suite_checks():
        ids.setdefault(check.suite, set()).add(check.id)
    return {suite: frozenset(checks) for suite, checks in ids.items()}


def suite_of(path: Path) -> str | None:
    """Return the name of the suite that a test file belongs to; None: it belongs to none."""
    for folder in path.parents:
        if folder.parent.name == "suites" and folder.name in suite_names():
            return folder.name
    return None


def suites_not_chosen(chosen: Collection[str]) -> list[str]:
    """Return the names of the suites that a run did not select, except those that need an option.

    :param chosen: the names of the suites that it selected.
    """
    return [suite for suite in sorted(suite_names()) if suite not in chosen and suite not in ON_REQUEST]


def check_expected(check: str, chosen: Collection[str]) -> bool:
    """Whether a run that selected these suites should have made this check.

    A check that is in no suite belongs to a user's test. It always should have been made, because nothing shows which
    selection contains its test.

    :param check: the id of the check.
    :param chosen: the names of the selected suites.
    """
    suites = [suite for suite, checks in check_ids_by_suite().items() if check in checks]
    return not suites or any(suite in chosen for suite in suites)


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
        selected = [item for item in items if item not in above]
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
