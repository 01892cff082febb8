# SPDX-License-Identifier: Apache-2.0
"""Run the tests nearest to a change: ``python -m helpers.near [PATH…] [-- ARGUMENT OF PYTEST…]``

Without a path, the change is what git finds changed since the last commit. The tests of a module are the file named
like it, and the test files that import it; if there are none, those of the modules that import it. Those of a helper
are the test files that import it; those of a page are its commands, and those of
a suite the files that run it. Tests marked ``long``, ``whole``, ``soak`` or
``alone`` do not run: ``tox`` and ``tox -e runs`` have them.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from helpers.parallel import APART

TESTS, PACKAGE = Path("tests"), Path("pytest_nixl")
MARKS = "not long and not whole and not soak and not alone"
#: A module that so many test files import is covered by the file named like it, and by those of its own package.
MANY = 25
#: Exit codes: nothing is near, and pytest's of no test.
NOTHING, NONE = 2, 5


def changed() -> list[str]:
    """Return the files that differ from the last commit, and the new ones that git does not ignore."""
    output = subprocess.run(["git", "status", "--porcelain", "-uall", "--no-renames"], capture_output=True, text=True,
                          check=True).stdout  # fmt: skip
    return [line[3:] for line in output.splitlines() if Path(line[3:]).exists()]


@functools.cache
def imports(file: Path) -> frozenset[str]:
    """Return the dotted names that a Python file imports."""
    results: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            results.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            results.add(node.module)
            results.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(results)


@functools.cache
def test_files() -> list[Path]:
    """Return the test files that the environment ``test`` runs."""
    return [file for file in sorted(TESTS.rglob("test_*.py")) if file.parts[1] not in (*APART, "with_torch")]


@functools.cache
def package_files() -> list[Path]:
    """Return the modules of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def dotted_name(path: Path) -> str:
    """Return the name by which a module is imported."""
    inside = path.relative_to(TESTS) if path.parts[0] == TESTS.name else path
    module = inside.with_suffix("")
    return ".".join(module.parent.parts if module.name == "__init__" else module.parts)


def of_module(path: Path) -> set[Path]:
    """Return the test files of a module of the package, of the suites or of the helpers."""
    if path.parts[0] == "suites":
        return of_suite(path)
    visited, files = {path}, [path]
    while files:
        if values := set().union(*map(of_one, files)):
            return values
        names = set(map(dotted_name, files))
        files = [file for file in package_files() if file not in visited and names & imports(file)]
        visited.update(files)
    # Only pytest imports a plugin, and only another process a program.
    folder = TESTS / "unit" / path.parts[1]
    return set(folder.glob("test_*.py")) if folder.is_dir() else set((TESTS / "integration").glob("test_*.py"))


def of_suite(path: Path) -> set[Path]:
    """Return the test files that run a file of the suites; if none names it, those that run another of its folder."""
    named = [
        {file for file in test_files() if str(name) in file.read_text(encoding="utf-8")} for name in (path, path.parent)
    ]
    return of_one(path) | (named[0] or named[1])


def of_one(path: Path) -> set[Path]:
    """Return the test files that are named like a module, or import it."""
    dotted = dotted_name(path)
    module = Path(*dotted.split("."))
    named = {f"test_{part}.py" for part in module.parts}
    matching = {file for file in test_files() if file.name in named and set(file.parts[2:-1]) <= set(module.parts)}
    users = {file for file in test_files() if dotted in imports(file)}
    if len(users) > MANY:
        users = {file for file in users if file.parent.name in module.parts}
    return matching | users


def near(paths: Iterable[str]) -> list[str]:
    """Return pytest's arguments for the tests nearest to some paths of the clone."""
    chosen: set[str] = set()
    for path in map(Path, paths):
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            if file.name.startswith("test_") and file.parts[0] == TESTS.name:
                chosen.add(str(file))
            elif file.suffix == ".py":
                chosen.update(map(str, of_module(file)))
            elif file.suffix == ".md":
                chosen.add("tests/integration/test_docs.py")
    return sorted(chosen)


def main(arguments: Sequence[str]) -> int:
    """Run them; return pytest's exit code, or 2 if no test is near."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    paths, options = arguments[:at] or changed(), arguments[at + 1 :]
    if missing := [path for path in paths if not Path(path).exists()]:
        print(f"{missing[0]} does not exist; name files or folders of the clone", file=sys.stderr)
        return NOTHING
    if not (tests := near(paths)):
        print(f"no test is near {' '.join(paths) or 'a clone without changes'}; run tox", file=sys.stderr)
        return NOTHING
    print(f"{len(tests)} test files are near {len(paths)} changed ones", flush=True)
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-q", "-n", "3", "--dist",
               "loadfile", "-m", MARKS, *options, *tests]  # fmt: skip
    code = subprocess.run(command).returncode
    return 0 if code == NONE else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
