# SPDX-License-Identifier: Apache-2.0
"""The source tree itself: names that are used once, packages that say what they hold, tests found by their module."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from helpers.cli_run import ROOT

PACKAGE = ROOT / "pytest_nixl"
MODULES = sorted(PACKAGE.rglob("*.py"))


def _classes(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def test_no_class_name_is_defined_twice() -> None:
    found = defaultdict(list)
    for path in (*MODULES, *sorted((ROOT / "suites").rglob("*.py"))):
        for name in _classes(path):
            found[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_each_package_says_what_it_holds() -> None:
    silent = [
        path for path in MODULES if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_each_folder_of_unit_tests_is_a_package_of_ours() -> None:
    folders = {path.name for path in (ROOT / "tests" / "unit").iterdir() if any(path.glob("test_*.py"))}
    assert folders <= {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}


def test_no_two_test_files_have_one_name() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


#: The most lines of a module.
LONGEST = 420
#: Modules that are longer, and why. The list may only become shorter: a module that was split must leave it.
LONGER = {
    "processes/supervisor_main.py": "runs with -I -S as one file, and so finds no module beside it",
}


def test_no_module_is_too_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name for name, length in lengths.items() if length > LONGEST} == set(LONGER)
