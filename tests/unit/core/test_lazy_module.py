# SPDX-License-Identifier: Apache-2.0
"""A lazy module is loaded when a name of it is read, and the type checker and import-linter see its import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cli_run import ROOT

from pytest_nixl.core.lazy_module import lazy_module, load

NAME = "lazy_example"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported and has not been."""
    (tmp_path / f"{NAME}.py").write_text("value = 3\n_pytestfixturefunction = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield NAME
    sys.modules.pop(NAME, None)


def test_reading_a_name_loads_the_module_unless_it_is_private(example: str) -> None:
    """Whatever a plugin has in its module, pytest asks for private names."""
    module = lazy_module(example)
    assert not hasattr(module, "_pytestfixturefunction")
    assert example not in sys.modules
    assert module.value == 3


def test_load_loads_the_module(example: str) -> None:
    load(lazy_module(example))
    assert example in sys.modules


def test_a_missing_module_is_named_at_its_first_use() -> None:
    module = lazy_module("no_such_package.part")
    with pytest.raises(ModuleNotFoundError) as caught:
        _ = module.value
    assert caught.value.name == "no_such_package"


def imports(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the name and the module of what a statement imports, if each is a whole module."""
    if isinstance(statement, ast.Import):
        yield from ((alias.asname or alias.name, alias.name) for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from ((alias.asname or alias.name, f"{statement.module}.{alias.name}") for alias in statement.names)


def lazy_modules(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the name and the module of an assignment such as ``np = lazy_module("numpy")``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(func=ast.Name(id="lazy_module"), args=[ast.Constant(value=str(module))]),
        ):
            yield name, module


@pytest.mark.parametrize("top", ["pytest_nixl", "suites"])
def test_every_lazy_module_is_imported_for_type_checkers(top: str) -> None:
    """Otherwise an import in a text would escape the contracts of import-linter."""
    for path in sorted((ROOT / top).rglob("*.py")):
        tree = ast.parse(path.read_text())
        blocks = [
            part
            for part in tree.body
            if isinstance(part, ast.If) and isinstance(part.test, ast.Name) and part.test.id == "TYPE_CHECKING"
        ]
        visible = {pair for block in blocks for part in block.body for pair in imports(part)}
        lazy = [pair for block in blocks for part in block.orelse for pair in lazy_modules(part)]
        calls = [
            part for part in ast.walk(tree) if isinstance(part, ast.Call) and ast.unparse(part.func) == "lazy_module"
        ]
        assert set(lazy) <= visible, path
        assert len(calls) == len(lazy), f"{path} calls lazy_module elsewhere"
