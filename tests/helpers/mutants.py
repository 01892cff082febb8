# SPDX-License-Identifier: Apache-2.0
"""Change a seeded sample of the package and the suites, one place at a time, and count the changes that tests notice.

``python -m helpers.mutants [--sample=N] [--seed=N] [--least=PERCENT] [--operators] [--kind=NAME]… [PATH…]``
``python -m helpers.mutants --matrix=FILE [--sample=N] [--seed=N] [--operators] [--most=SECONDS] [PATH…]``
``python -m helpers.mutants --cover=FILE [--keep=EXPRESSION]``

``mutations`` makes the changes, as many of each kind: those of meaning, with ``--operators`` those of operators, or the
kinds that ``--kind`` names. One run of the unit tests tells which tests run which line: coverage.py sees their own
process, and ``child_lines`` those that they start. Tests that fail without any change are left out. Then the tests that
run the line of a change run with it in a copy of the clone. Most changes take a fraction of a second, because no Python
is started for them (``swapped``). One that lives so, or that only other processes reach, is written into the copy, and
its tests run there. It has died when a test fails, or takes far longer than it may.

``--matrix`` does not stop at the first test that fails, and appends who kills what to a file outside the clone, of
changes of both kinds; the same command goes on where it was ended. If the tests of a change take longer than ``--most``
seconds, the slowest of them run only until one fails. With ``--most=0``, one that fails is enough, which tells whether
a reduced set of tests still kills all. ``--cover`` reads such a file: it prints the changes that live, and by a greedy
weighted set cover the tests that kill nothing that the others do not kill. Which tests run which line is kept in
``FILE.lines``, for the next command on the same clone.

Exit code 0: enough of the sample died; 1: too few did; 2: the tests fail without any change, or nothing can be chosen.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from itertools import chain, islice, zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import pytest

from helpers import child_lines, matrix, near
from helpers.mutations import MEANING, OPERATORS, Mutant, Operator, mutants_of

#: What is sampled, without three modules that need nvcc, torch and an account of Azure.
WHERE = ("pytest_nixl", "suites")
LEFT_OUT = ("make_ptx", "by_torch", "azure_blob")
#: The most seconds that the tests of one change take without it. The quickest run first: most changes die at once.
MOST_SECONDS = 20.0
#: A test has noticed a change when it takes that many times as long as without it, and so many seconds. A busy machine
#: makes all tests slower: if one is late, the same tests run without the change, and the limit grows if they are slow.
TIMES, SECONDS = 10, 20
#: The most seconds that the tests of a module may take without a change.
UNCHANGED = 3600.0
ROOT = Path(__file__).resolve().parents[2]


def read(module: str) -> str:
    """Return the text of a module, which is a path in the clone without ``.py``."""
    return (ROOT / f"{module}.py").read_text(encoding="utf-8")


def choose(paths: Sequence[str], operators: Mapping[str, Operator], seed: int) -> Iterator[Mutant]:
    """Yield the changes below some paths in the order of a seed, in turn one of each kind.

    A smaller sample is the beginning of a larger one, and a change of the code changes little of it.
    """
    files = {file for path in map(Path, paths) for file in (path.rglob("*.py") if path.is_dir() else [path])}
    kinds: dict[str, list[Mutant]] = {name: [] for name in operators}
    for file in sorted(files):
        if file.stem not in LEFT_OUT:
            module = str(file.with_suffix(""))
            for mutant in mutants_of(module, read(module), operators):
                kinds[mutant.operator].append(mutant)
    for name, mutants in kinds.items():
        mutants.sort(key=lambda mutant: random.Random(f"{seed} {name} {mutant.module} {mutant.edit}").random())
    for mutant in filter(None, chain.from_iterable(zip_longest(*kinds.values()))):
        if mutant.is_python(read(mutant.module)):
            yield mutant


@cache  # a file that is written while this runs has not been run without a change
def tests_of(module: str) -> tuple[str, ...]:
    """Return the nearest test files of a module: that named like it first, then the others of its folder."""
    path = Path(f"{module}.py")
    files = near.of_module(path)

    def distance(file: Path) -> tuple[bool, bool, int]:
        return path.stem not in file.stem, file.parent.name not in path.parts, file.stat().st_size

    return tuple(map(str, sorted(files, key=distance)))


@dataclass(frozen=True)
class Covering:
    """Which tests run which line of which module, in their process or in another, and the seconds of each test.

    :ivar imported: the lines that run before or between tests.
    """

    lines: Mapping[str, Mapping[int, set[str]]]
    elsewhere: Mapping[str, Mapping[int, set[str]]]
    seconds: Mapping[str, float]
    imported: Mapping[str, set[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Path, children: Path, times: Path, clone: Path) -> Covering:
        """Read the data of coverage.py, with a context for each test, of ``child_lines``, and of a JUnit report.

        Tests that failed are left out.
        """
        from coverage import CoverageData

        coverage = CoverageData(str(data))
        coverage.read()
        seconds, failed = {}, set()
        for case in ElementTree.parse(times).iter("testcase"):
            folder, _, inside = f"{case.get('classname')}".rpartition(".test_")
            module, *classes = inside.split(".")
            name = "::".join([f"{folder.replace('.', '/')}/test_{module}.py", *classes, f"{case.get('name')}"])
            seconds[name] = float(case.get("time") or 0)
            if case.find("failure") is not None or case.find("error") is not None:
                failed.add(name)
                print(f"left out, because it fails without any change: {name}", flush=True)
        contexts = {
            file.removeprefix(f"{clone}/").removesuffix(".py"): coverage.contexts_by_lineno(file)
            for file in coverage.measured_files()
        }
        lines = {
            module: {
                line: {name.rpartition("|")[0] for name in names if name and "\n" not in name} - failed
                for line, names in tests.items()
            }
            for module, tests in contexts.items()
        }
        imported = {
            module: {line for line, names in tests.items() if "" in names} for module, tests in contexts.items()
        }
        elsewhere = {
            module: {line: names - failed for line, names in tests.items()}
            for module, tests in child_lines.read(children).items()
        }
        return cls(lines, elsewhere, {name: taken for name, taken in seconds.items() if name not in failed}, imported)

    def tests(self, mutant: Mutant) -> tuple[list[str], float]:
        """Return the tests that run first with a change, and the seconds that they take: the nearest first.

        A line that runs when its module is imported belongs to every test of the module. A process that several tests
        of a file use counts as the first one's: the file's others come last.
        """
        nearest = tests_of(mutant.module)
        near, far = (lines.get(mutant.module, {}) for lines in (self.lines, self.elsewhere))
        line = next((line for line in range(mutant.line, mutant.line - 6, -1) if near.get(line) or far.get(line)), 0)
        # A test that reads only a constant of the module runs no line of it.
        of_nearest = {name for name in self.seconds if name.partition("::")[0] in nearest}
        reaching = near.get(line, set()) | far.get(line, set())
        reaching = reaching or of_nearest.union(*near.values(), *far.values())
        files = {name.partition("::")[0] for name in far.get(line, ())}
        after = {name for name in self.seconds if name.partition("::")[0] in files} - reaching
        names = sorted(
            reaching | after,
            key=lambda name: (name in after, name.partition("::")[0] not in nearest, self.seconds.get(name, 1.0), name),
        )
        chosen: list[str] = []
        total = 0.0
        for name in names:
            seconds = self.seconds.get(name, 1.0)
            if not chosen or total + seconds <= MOST_SECONDS:
                chosen.append(name)
                total += seconds
        return chosen, total


class Tests:
    """Runs tests in copies of the clone, one for each job."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder = folder
        self._copies: SimpleQueue[Path] = SimpleQueue()
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        paths = [name for name in names if name and (ROOT / name).is_file()]
        self.digest = sha256(b"".join(sha256((ROOT / name).read_bytes()).digest() for name in paths)).hexdigest()
        for number in range(jobs):
            for name in paths:
                (folder / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / str(number) / name, follow_symlinks=False)
            self._copies.put(folder / str(number))

    def copies(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]"))

    def run(
        self,
        tests: Sequence[str],
        limit: float,
        mutant: Mutant | None = None,
        more: Sequence[str] = ("-x",),
    ) -> tuple[str, float]:
        """Return ``passed``, ``failed``, ``none`` or ``late``, and the seconds that the tests took.

        :param tests: files, or tests of files.
        :param more: further arguments of pytest.
        """
        copy = self._copies.get()
        changed = copy / f"{mutant.module}.py" if mutant is not None else None
        listed = copy / "tests.txt"
        listed.write_text("\n".join(tests))
        options = ["-W", "error", "-p", "no:cacheprovider", "-q", *more, "-m", near.MARKS]
        command = [sys.executable, "-m", "pytest", *options, f"@{listed}"]
        start = time.monotonic()
        try:
            if mutant is not None and changed is not None:
                changed.write_text(mutant.code(read(mutant.module)), encoding="utf-8")
            process = subprocess.Popen(
                command, cwd=copy, env={**os.environ, "PYTHONPATH": f"{copy}:{copy / 'tests'}"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return "late", time.monotonic() - start
        finally:
            if mutant is not None and changed is not None:
                changed.write_text(read(mutant.module), encoding="utf-8")
            self._copies.put(copy)
        seconds = time.monotonic() - start
        if process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "none" if process.returncode else "passed", seconds
        if mutant is None:
            print(output[-10000:])
        else:
            named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            killer = named[1] if named else output.strip().splitlines()[-1:]
            print(f"{mutant.module}.py:{mutant.line} {mutant.operator} by {killer}", flush=True)
        return "failed", seconds

    def kept_covering(self, file: Path, files: Sequence[str], jobs: int) -> Covering | None:
        """Return what a file has of the same clone and tests, or :meth:`covering`, which is written to the file."""
        key = f"{self.digest} {' '.join(files)}"
        if file.exists():
            kept, covering = pickle.loads(file.read_bytes())
            if kept == key:
                return cast("Covering", covering)
        covering = self.covering(files, jobs)
        if covering is not None:
            file.write_bytes(pickle.dumps((key, covering)))
        return covering

    def covering(self, files: Sequence[str], jobs: int) -> Covering | None:
        """Run the unit tests that are not long, and return which tests run which line; None: there is no test."""
        # Not named like the data: pytest-cov erases coverage.* first.
        names = ("coverage", "settings.ini", "times.xml", "children")
        data, settings, times, children = (self._folder / name for name in names)
        settings.write_text(f"[run]\nsource =\n  pytest_nixl\n  suites\ndata_file = {data}\ncore = ctrace\n")
        more = (f"-n{jobs}", "--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=",
                f"--junitxml={times}", "-p", "helpers.child_lines")  # fmt: skip
        with child_lines.installed(self._folder / "0", children), pytest.MonkeyPatch.context() as patch:
            patch.setenv(child_lines.FILE, str(children))
            result, seconds = self.run(files, UNCHANGED, more=more)
        if result not in ("passed", "failed"):
            print(f"without a change, the result of the unit tests after {seconds:.0f} s is: {result}")
            return None
        print(f"the unit tests took {seconds:.0f} s", flush=True)
        return Covering.read(data, children, times, self._folder / "0")

    def reaching(self, mutant: Mutant, covering: Covering) -> str:
        """Return what :meth:`run` returns first with a change, of the tests that run its line."""
        chosen, seconds = covering.tests(mutant)
        if not chosen:
            return "none"
        limit = SECONDS + TIMES * seconds
        result, _ = self.run(chosen, limit, mutant)
        if result == "late":  # because of the change, if they take less without it
            _, now = self.run(chosen, UNCHANGED)
            if SECONDS + TIMES * now > limit:
                result, _ = self.run(chosen, SECONDS + TIMES * now, mutant)
        return result


def describe(mutant: Mutant) -> str:
    """Return the place of a change, and the line before and after it."""
    before = read(mutant.module)
    pairs = zip_longest(before.splitlines(), mutant.code(before).splitlines(), fillvalue="")
    old, new = next((old, new) for old, new in pairs if old != new)
    return f"{mutant.module}.py:{mutant.line} {mutant.operator}\n    - {old.strip()}\n    + {new.strip()}"


def try_all(
    pool: ThreadPoolExecutor, judge: Callable[[Mutant], str], mutants: Sequence[Mutant]
) -> tuple[list[Mutant], int]:
    """Return those that live, and how many died by their time."""
    lives: list[Mutant] = []
    late = 0
    answers = {pool.submit(judge, mutant): mutant for mutant in mutants}
    for answer in as_completed(answers):
        mutant, result = answers[answer], answer.result()
        late += result == "late"
        lives += [mutant] if result in ("passed", "none") else []
        print(f"{mutant.module}.py:{mutant.line} {mutant.operator} {result}", flush=True)
    return sorted(lives), late


def fill_matrix(file: Path, chosen: Sequence[Mutant], options: argparse.Namespace, *, stop: bool) -> int:
    """Append the outcomes of changes to a matrix; leave out those that it has.

    With ``stop``, one test that fails is enough, and what lives is tried once more in a pytest of its own.
    """
    earlier = matrix.Matrix.read(file)
    remaining = [mutant for mutant in chosen if mutant not in earlier.killers and mutant not in earlier.untried]
    files = matrix.test_files(options.paths, options.tests.split())
    if not remaining or not files:
        return 0 if files else 2
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(options.jobs) as pool:
        tests = Tests(Path(folder), options.jobs)
        covering = tests.kept_covering(Path(f"{file}.lines"), files, options.jobs)
        if covering is None:
            return 2
        most = 0.0 if stop else options.most
        changes = [matrix.reaching(mutant, covering, tests_of(mutant.module), most) for mutant in remaining]
        matrix.fill(file, changes, covering, files, tests.copies(), near.MARKS)
        results = matrix.Matrix.read(file)
        lives = [mutant for mutant in remaining if not results.killers.get(mutant)]
        if stop:
            lives, late = try_all(pool, partial(tests.reaching, covering=covering), lives)
            print("\n".join(map(describe, lives)))
            print(f"{late} died by their time")
    tried, lived = (Counter(mutant.operator for mutant in mutants) for mutants in (remaining, lives))
    print("\n".join(f"{name}: {count - lived[name]} of {count} died" for name, count in sorted(tried.items())))
    died = len(remaining) - len(lives)
    share = 100 * died / len(remaining)
    untried = len(results.untried.intersection(lives))
    print(f"{died} of {len(remaining)} changes died ({share:.1f} %); {untried} were not tried", flush=True)
    return 0 if share >= options.least else 1


def print_cover(file: Path, keep: str) -> int:
    """Print the changes of a matrix that live, and the tests that are not needed."""
    results = matrix.Matrix.read(file)
    lives = results.survivors()
    print("\n".join(map(describe, lives)))
    functions, cases = matrix.not_needed(results, keep)
    print("\n".join(f"not needed: {name} ({matrix.lines_of(name)} lines)" for name in functions))
    print("\n".join(f"not needed: {name}" for name in cases))
    lines = sum(map(matrix.lines_of, functions))
    print(
        f"{len(results.killers) - len(lives)} of {len(results.killers)} changes died, {len(results.untried)} not tried"
    )
    print(f"{len(functions)} functions ({lines} lines) and {len(cases)} cases of others are not needed")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sample", type=int, default=400, help="the number of changes; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--least", type=float, default=85.0, help="the percentage that must die")
    parser.add_argument("--tests", default="tests/unit", help="the tests that are tried")
    parser.add_argument("--operators", action="store_true", help="change operators and values, not meaning")
    parser.add_argument(
        "--kind", action="append", choices=(*MEANING, *OPERATORS), help="make changes of this kind only"
    )
    parser.add_argument("--matrix", type=Path, help="append who kills what to this file")
    parser.add_argument(
        "--most",
        type=float,
        default=1.0,
        help="the seconds of the tests that all run for a change; 0: one that fails is enough",
    )
    parser.add_argument("--cover", type=Path, help="print what lives in a matrix, and the tests that are not needed")
    parser.add_argument("--keep", default="(?!)", help="an expression for tests that --cover does not name")
    parser.add_argument("paths", nargs="*", default=WHERE, help="files or folders, such as pytest_nixl/judge/row.py")
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.cover:
        return print_cover(options.cover, options.keep)
    every = {**MEANING, **OPERATORS}
    operators = OPERATORS if options.operators else every if options.matrix else MEANING
    if options.kind:
        operators = {name: every[name] for name in options.kind}
    chosen = list(islice(choose(options.paths, operators, options.seed), options.sample or None))
    if not chosen:
        print(f"no change can be made in {' '.join(options.paths)}: name files or folders of the clone")
        return 2
    print(f"{len(chosen)} changes, seed {options.seed}", flush=True)
    if options.matrix:
        return fill_matrix(options.matrix.resolve(), chosen, options, stop=False)
    with tempfile.TemporaryDirectory() as folder:
        return fill_matrix(Path(folder) / "outcomes.jsonl", chosen, options, stop=True)


if __name__ == "__main__":
    sys.exit(main())
