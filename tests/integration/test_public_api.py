# SPDX-License-Identifier: Apache-2.0
"""What ``pytest_nixl`` exports: all of it is there, a type checker sees the same, and importing it loads nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.cli_run import ROOT

import pytest_nixl

SOURCE = Path(pytest_nixl.__file__)


def test_exported_names_are_there() -> None:
    assert [name for name in pytest_nixl.__all__ if getattr(pytest_nixl, name) is None] == []
    assert set(pytest_nixl.__all__) <= set(dir(pytest_nixl))


def test_type_checkers_see_what_is_exported() -> None:
    """The imports under TYPE_CHECKING, each under its own name, and the table of modules name the same."""
    tree = ast.parse(SOURCE.read_text())
    visited = {
        (node.module, alias.asname)
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        if node.module and node.module.startswith("pytest_nixl.")
    }  # fmt: skip
    table = {(f"pytest_nixl.{module}", name) for module, names in pytest_nixl._MODULES.items() for name in names}
    assert visited == table
    assert {name for _, name in table} | {"__version__"} == set(pytest_nixl.__all__)
    assert len(pytest_nixl.__all__) == len(table) + 1


def test_importing_the_package_loads_no_other_module_of_it() -> None:
    code = (
        "import json, sys, pytest_nixl; print(json.dumps([n for n in sys.modules if n.split('.')[0] == 'pytest_nixl']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["pytest_nixl"]


def test_version_is_that_of_the_distribution() -> None:
    assert pytest_nixl.__version__ == version("pytest-nixl")


def test_version_of_a_clone_that_is_not_installed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package is installed: a double."""
    monkeypatch.setattr("importlib.metadata.Distribution.discover", lambda **_: iter(()))
    monkeypatch.delitem(vars(pytest_nixl), "__version__", raising=False)
    assert pytest_nixl.__version__ == "unknown"
    monkeypatch.delitem(vars(pytest_nixl), "__version__")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchThing'"):
        pytest_nixl.NoSuchThing  # type: ignore[attr-defined]  # noqa: B018
