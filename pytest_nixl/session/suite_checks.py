# SPDX-License-Identifier: Apache-2.0
"""The checks of the suites as their tests declare them, read from the files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.settings import DEFAULT_LEVEL
from pytest_nixl.session.suites import suites_folder


@dataclass(frozen=True)
class SuiteCheck:
    """A check of a suite, as its test declares it.

    :param test: the test's file from the root of the clone, and its name.
    :param text: the test's docstring.
    :param findings: ids of the findings that the test looks for.
    :param level: the level from which on a run makes the check.
    """

    id: str
    suite: str
    test: str
    text: str
    findings: tuple[str, ...]
    level: str

    @property
    def proves(self) -> str:
        """The first sentence of the test's docstring, in one line."""
        return " ".join(self.text.partition("\n\n")[0].split())


def suite_checks(suites: Path | None = None) -> list[SuiteCheck]:
    """Return every check of every suite, from the ``nixl_check`` markers of its tests, which are not imported.

    :param suites: the folder of the suites; None for those of this installation.
    """
    found = []
    for file in sorted((suites or suites_folder()).glob("*/test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                place = f"suites/{file.parent.name}/{file.name}::{node.name}"
                text = ast.get_docstring(node) or ""
                for id, level, findings in _marked(node):
                    found.append(SuiteCheck(id, file.parent.name, place, text, findings, level))
    return found


def _marked(test: ast.FunctionDef) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each id with which a test is marked, its level, and the findings that the test looks for under that id."""
    for call in (node for mark in test.decorator_list for node in ast.walk(mark) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "param":
            named = tuple(value for each in call.args if (value := _text(each)) in FINDINGS)
            for word in call.keywords:
                yield from ((id, level, named) for id, level in _marks(word.value))
    for mark in test.decorator_list:
        if not ast.unparse(mark).startswith("pytest.mark.parametrize"):
            named = tuple(dict.fromkeys(value for node in ast.walk(ast.Module(test.body, []))
                                        if (value := _text(node)) in FINDINGS))  # fmt: skip
            yield from ((id, level, named) for id, level in _marks(mark))


def _marks(node: ast.expr) -> Iterator[tuple[str, str]]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "nixl_check":
            levels = [_text(word.value) for word in call.keywords if word.arg == "level"]
            if id := _text(call.args[0]):  # else a check of another package, whose id is known only at run time
                yield id, levels[0] if levels else DEFAULT_LEVEL


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
