# SPDX-License-Identifier: Apache-2.0
"""Which test notices which change: the file of ``mutants --matrix``, and the tests that it shows to be needed.

A line of the file is the outcome of a change, ``{"mutant", "way", "killers", "ran", "reach"}``, or a test, ``{"test",
"seconds", "elsewhere"}``. The way is ``swapped`` (``swapped`` put the code into the functions), ``imported`` (the tests
imported the changed module) or ``none``: only processes that tests start reach the line, so nothing was tried. A test
whose lines run ``elsewhere``, in such a process, can notice what was not tried: it is always needed, and so is one
whose values hypothesis makes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from helpers import near
from helpers.mutations import Mutant
from helpers.swapped import WORK, Change, Work, append

if TYPE_CHECKING:
    from helpers.mutants import Covering

#: The most seconds of the tests that are tried for a change: of a table that reaches a line, one case may notice it.
MOST_SECONDS = 60.0
#: How often the progress is printed.
PROGRESS_SECONDS = 60.0


@dataclass
class Matrix:
    """What a file has.

    :ivar killers: of each change, the tests that fail with it.
    :ivar untried: the changes that no test in its own process reaches.
    """

    killers: dict[Mutant, set[str]] = field(default_factory=dict)
    untried: set[Mutant] = field(default_factory=set)
    tests: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Matrix:
        matrix = cls()
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            values = json.loads(line)
            if "test" in values:
                matrix.tests[values.pop("test")] = values
                continue
            start, end, text = values["mutant"].pop("edit")
            mutant = Mutant(edit=(start, end, text), **values["mutant"])
            if values["way"] == "none":
                matrix.untried.add(mutant)
            else:
                matrix.killers[mutant] = set(values["killers"])
        return matrix

    def survivors(self) -> list[Mutant]:
        return sorted(mutant for mutant, killers in self.killers.items() if not killers)


def test_files(paths: Iterable[str], folders: Sequence[str]) -> list[str]:
    """Return the test files near some paths of the package, of those below some folders."""
    return [file for file in near.near(paths) if any(map(Path(file).is_relative_to, folders))]


def reaching(mutant: Mutant, covering: Covering, nearest: Sequence[str], most: float) -> Change:
    """Return a change with the tests that reach it: the nearest first, then the quickest.

    A line that runs when its module is imported belongs to every test of the module; then only the nearest are tried.

    :param most: the seconds of the tests that all run.
    """
    lines = covering.lines.get(mutant.module, {})
    line = next((line for line in range(mutant.line, mutant.line - 6, -1) if lines.get(line)), 0)
    names = lines.get(line) or set().union(*lines.values())
    at_import = mutant.line in covering.imported.get(mutant.module, ())
    if not line and not at_import and covering.elsewhere.get(mutant.module, {}).get(mutant.line):
        return Change(mutant, [], 0)  # only a process that a test starts runs it
    if not line and nearest:
        # A test that reads only a constant of the module runs no line of it.
        names = {name for name in covering.seconds if name.partition("::")[0] in nearest} or names
    tests = sorted(
        (name for name in names if name in covering.seconds),
        key=lambda name: (name.partition("::")[0] not in nearest, covering.seconds[name], name),
    )
    ends = list(accumulate(covering.seconds[name] for name in tests))
    count = sum(end <= most for end in ends) or min(1, len(tests))
    tests = tests[: max(count, sum(end <= MOST_SECONDS for end in ends))]
    # One file after the other: a fixture of a module is made once.
    return Change(mutant, [*sorted(tests[:count]), *tests[count:]], count, at_import)


def fill(
    file: Path, changes: Sequence[Change], covering: Covering, files: Sequence[str], copies: Sequence[Path],
    marks: str,
) -> None:  # fmt: skip
    """Try changes in the copies of the clone, at the same time, and append the outcomes to a file."""
    elsewhere = set().union(*(names for lines in covering.elsewhere.values() for names in lines.values()))
    of_tests = [{"test": name, "seconds": seconds, "elsewhere": name in elsewhere}
                for name, seconds in covering.seconds.items()]  # fmt: skip
    append(str(file), of_tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "helpers.swapped", "-q", "-m", marks]
    start, before = time.monotonic(), len(Matrix.read(file).killers)

    def started(program: Sequence[str], copy: Path, work: Path) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'tests'}", WORK: str(work)}
        return subprocess.Popen(program, cwd=copy, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    for at_import in (False, True):
        processes = []
        for number, copy in enumerate(copies):
            works = [copy / f"work{step}.json" for step in (0, 1)]
            if at_import:
                if works[1].exists():
                    processes.append(started([sys.executable, "-m", "helpers.swapped", str(works[1])], copy, works[1]))
            else:
                work = Work(str(file), str(works[1]), list(changes[number :: len(copies)]), dict(covering.seconds))
                work.write(works[0])
                processes.append(started([*command, *files], copy, works[0]))
        last = time.monotonic()
        while any(process.poll() is None for process in processes):
            time.sleep(0.5)
            if time.monotonic() > last + PROGRESS_SECONDS:
                last = time.monotonic()
                done = len(Matrix.read(file).killers) - before
                print(f"{done} of {len(changes)} changes tried after {last - start:.0f} s", flush=True)


def function_of(test: str) -> str:
    """Return the name of a test without its parameters."""
    return test.partition("[")[0]


@cache
def _functions(file: str) -> Mapping[str, tuple[int, bool]]:
    """Return the lines of each test function of a file, and whether hypothesis makes its values."""
    results: dict[str, tuple[int, bool]] = {}

    def visit(nodes: Iterable[ast.AST], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                given = any(ast.unparse(part).startswith(("given(", "hypothesis.")) for part in node.decorator_list)
                results[f"{prefix}{node.name}"] = ((node.end_lineno or first) - first + 1, given)

    visit(ast.parse(Path(file).read_text(encoding="utf-8")).body, "")
    return results


def exists(function: str) -> bool:
    """Return whether a test function has not been left out since."""
    file, _, name = function.partition("::")
    return Path(file).exists() and name in _functions(file)


def lines_of(function: str) -> int:
    """Return the lines of a test function."""
    file, _, name = function.partition("::")
    return _functions(file).get(name, (1, False))[0]


def is_property(function: str) -> bool:
    """Return whether hypothesis makes the values of a test function."""
    file, _, name = function.partition("::")
    return _functions(file).get(name, (1, False))[1]


def cover(kills: Mapping[str, set[Mutant]], cost: Mapping[str, float], kept: Iterable[str]) -> list[str]:
    """Return the tests that are not needed so that each change that some test notices is noticed.

    :param kills: of each test, the changes that it notices.
    :param cost: of each test.
    :param kept: the tests that stay in any case.
    """
    needed = set(kept)
    open_changes = set().union(*kills.values()) - set().union(*(kills.get(name, set()) for name in needed))
    while open_changes:
        best = max(sorted(kills), key=lambda name: len(kills[name] & open_changes) / cost[name])
        needed.add(best)
        open_changes -= kills[best]
    count: dict[Mutant, int] = defaultdict(int)
    for name in needed & set(kills):
        for mutant in kills[name]:
            count[mutant] += 1
    for name in sorted(needed - set(kept), key=lambda name: -cost[name]):
        if all(count[mutant] > 1 for mutant in kills[name]):
            needed.discard(name)
            for mutant in kills[name]:
                count[mutant] -= 1
    return sorted(set(kills) - needed)


def not_needed(matrix: Matrix, keep: str = "(?!)") -> tuple[list[str], list[str]]:
    """Return the test functions that kill nothing that the others do not kill, and the cases of the others.

    :param keep: an expression for the names of tests that are kept.
    """
    tests: dict[str, set[Mutant]] = {name: set() for name in matrix.tests if exists(function_of(name))}
    for mutant, killers in matrix.killers.items():
        for name in killers & set(tests):
            tests[name].add(mutant)
    kept = {
        name
        for name in tests
        if matrix.tests[name]["elsewhere"] or is_property(function_of(name)) or re.search(keep, name)
    }
    functions: dict[str, set[Mutant]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    for name, mutants in tests.items():
        functions[function_of(name)] |= mutants
        seconds[function_of(name)] += matrix.tests[name]["seconds"]
    cost = {name: lines_of(name) + 10 * seconds[name] for name in functions}
    unneeded = cover(functions, cost, {function_of(name) for name in kept})
    cases = {name: mutants for name, mutants in tests.items() if function_of(name) not in unneeded}
    case_cost = {name: 1 + 10 * matrix.tests[name]["seconds"] for name in cases}
    alone = {name for name in cases if "[" not in name}
    return unneeded, cover(cases, case_cost, kept | alone)
