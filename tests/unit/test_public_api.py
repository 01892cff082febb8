# SPDX-License-Identifier: Apache-2.0
"""What ``pytest_nixl`` exports: all of it is there, a type checker sees the same, and importing it loads nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.cli_run import ROOT

import pytest_nixl

SOURCE = Path(pytest_nixl.__file__)


def test_a_type_checker_sees_what_is_exported_and_each_name_is_that_of_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imports = [
        (node.module, alias.asname)
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{node.module}".startswith("pytest_nixl.")
    ]
    names = [f"{name}" for _, name in imports]
    for loaded in ("__all__", "Agents"):
        monkeypatch.delitem(vars(pytest_nixl), loaded, raising=False)
    assert sorted(["__version__", *names]) == pytest_nixl.__all__
    assert [name for name in pytest_nixl.__all__ if name not in dir(pytest_nixl)] == []
    assert [name for name in vars(pytest_nixl) if name not in dir(pytest_nixl)] == []
    for module, name in imports:
        monkeypatch.delitem(vars(pytest_nixl), f"{name}", raising=False)
        assert getattr(pytest_nixl, f"{name}") is getattr(import_module(f"{module}"), f"{name}")
        assert f"{name}" in vars(pytest_nixl), "it is loaded once"


def test_importing_the_package_loads_no_other_module_of_it() -> None:
    code = (
        "import json, sys, pytest_nixl; print(json.dumps([n for n in sys.modules if n.split('.')[0] == 'pytest_nixl']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["pytest_nixl"]


def test_version_is_that_of_the_distribution_and_unknown_if_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(pytest_nixl), "__version__", raising=False)
    assert pytest_nixl.__version__ == version("pytest-nixl")
    monkeypatch.delitem(vars(pytest_nixl), "__version__")
    monkeypatch.setattr("importlib.metadata.Distribution.discover", lambda **_: iter(()))
    assert pytest_nixl.__version__ == "unknown"
    monkeypatch.delitem(vars(pytest_nixl), "__version__")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchThing'"):
        pytest_nixl.NoSuchThing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("pytest_nixl.plugin", True),
        ("pytest_nixl.suites", False),
        ("pytest_nixl.suites.conftest", False),
        ("pytest_nixl", False),
        ("pytest_nixlbench.plugin", False),
    ],
)
def test_a_wheels_suites_and_other_packages_are_left_to_pytest(name: str, ours: bool) -> None:
    """The tests of the suites have assertions whose values pytest shows. In a clone they are not in the package."""
    [importer] = [importer for importer in sys.meta_path if f"{importer}" == "<class 'pytest_nixl._PlainImports'>"]
    spec = importer.find_spec(name, [str(SOURCE.parent), str(ROOT / "suites")])
    assert (spec is not None and spec.origin) == (str(SOURCE.parent / "plugin.py") if ours else False)
