# SPDX-License-Identifier: Apache-2.0
"""The suites that come with the plugin: the checks of each suite, and the suites that a run selected."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

BANDWIDTH, INFRASTRUCTURE, ENDPOINTS = "bandwidth", "infrastructure", "uri_validation"
#: The suites that are selected only if an option is given, by the option.
ON_REQUEST = {"pattern": "--nixl-pattern"}


def suites_folder() -> Path:
    """Return the folder of the suites: the wheel has it inside the package, a clone beside the package.

    There is no such folder if somebody copied the package alone.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "suites"
    return inside if inside.is_dir() else package.parent / "suites"


def find_pasted(words: Iterable[str], folder: Path) -> dict[str, str]:
    """Return the name for ``--pyargs`` of each word that is a node id of the suites and no path.

    With ``--pyargs`` pytest prints ``metadata/test_exchange.py::test_it``, which is no path in the user's directory.

    :param words: the command line.
    :param folder: the directory in which pytest was started.
    """
    found = {}
    for word in words:
        name, colons, test = word.partition("::")
        if re.fullmatch(r"(\w+/)?test_\w+\.py", name) and not (folder / name).exists():
            files = [path for path in suites_folder().glob("*/test_*.py") if path.as_posix().endswith(f"/{name}")]
            if len(files) == 1:
                found[word] = f"pytest_nixl.suites.{files[0].parent.name}.{files[0].stem}{colons}{test}"
    return found


@cache
def suite_names() -> frozenset[str]:
    """Return the names of the suites."""
    return frozenset(folder.name for folder in suites_folder().glob("*") if (folder / "__init__.py").is_file())


@cache
def checks_of_suites() -> Mapping[str, frozenset[str]]:
    """Return the ids of the checks of each suite, read from the markers in its files without importing them."""
    return {
        name: frozenset(id for file in sorted((suites_folder() / name).glob("test_*.py")) for id in _marked(file))
        for name in sorted(suite_names())
    }


def _marked(file: Path) -> list[str]:
    """Return the ids in the ``nixl_check("id")`` calls of a file."""
    calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    marks = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "nixl_check"]
    return [str(mark.args[0].value) for mark in marks if mark.args and isinstance(mark.args[0], ast.Constant)]


def suite_of(path: Path) -> str | None:
    """Return the name of the suite that a test file belongs to; None: it belongs to none."""
    for folder in path.parents:
        if folder.parent.name == "suites" and folder.name in suite_names():
            return folder.name
    return None


def not_chosen(chosen: Collection[str]) -> list[str]:
    """Return the names of the suites that a run did not select, except those that need an option.

    :param chosen: the names of the suites that it selected.
    """
    return [suite for suite in sorted(suite_names()) if suite not in chosen and suite not in ON_REQUEST]


def answerable(check: str, chosen: Collection[str]) -> bool:
    """Whether a run that selected these suites should have made this check.

    A check that is in no suite belongs to a user's test. It always should have been made, because nothing shows which
    selection contains its test.

    :param check: the id of the check.
    :param chosen: the names of the selected suites.
    """
    suites = [suite for suite, checks in checks_of_suites().items() if check in checks]
    return not suites or any(suite in chosen for suite in suites)
