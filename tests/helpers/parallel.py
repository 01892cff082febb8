# SPDX-License-Identifier: Apache-2.0
"""Run the chosen tests, those that run alone last.

``python parallel.py [--in=PATH…] [--workers=N] [--passed-alone=FILE] MARKS [ARGUMENT…]``

The others run three at a time, or N. Two such commands may run at the same time in one clone: a test that is marked
``alone`` waits until the tests of the other command have ended.

If a few tests fail, they run once more with nothing beside them. Those that pass then are named at the end and in
``passed-alone.txt`` of the environment, and do not fail the command: each has a deadline that a busy machine misses, or
shows a race, and is to be mended.

With further arguments, which name the tests that somebody wants, only those run, one at a time, whatever their marks.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

PYTEST = [sys.executable, "-m", "pytest", "-W", "error"]
#: pytest leaves no folder in the clone.
NO_CACHE = ["-p", "no:cacheprovider"]
#: Name the tests in which the time goes.
SLOWEST = ["--durations=40", "--durations-min=5"]
#: Each of these folders has an environment of its own.
APART = ("libfabric", "cluster", "machines", "mixed", "plugins")
#: One more than the cores of a small machine: a test waits a third of its time.
WORKERS = 3
#: The number of test files without bytecode from which on they are compiled before the workers start.
MANY = 20
#: Exit codes of pytest if tests failed, and if it finds no test.
FAILED, NONE = 1, 5
#: The most tests that run once more. If more fail, something is broken.
FEW = 3
#: After this time a test has failed, in seconds: otherwise one that waits for ever would keep the others from being
#: reported.
LONGEST = 900
#: Where the tests that passed only alone are written, a line each.
PASSED_ALONE = Path(sys.prefix) / "passed-alone.txt"


def test_files(where: Sequence[str]) -> list[Path]:
    """Return the test files below some paths; of no path: all but those of the folders in :data:`APART`."""
    if not where:
        return [file for file in sorted(Path("tests").rglob("test_*.py")) if file.parts[1] not in APART]
    paths = [Path(path) for path in where]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py")))


def files_with(mark: str, where: Sequence[str] = ()) -> list[str]:
    """Return the test files that name a marker: pytest takes seconds to collect all of them."""
    return [str(file) for file in test_files(where) if f"mark.{mark}" in file.read_text(encoding="utf-8")]


def files_without_any(marks: str, where: Sequence[str] = ()) -> list[str]:
    """Return the test files of which no test is chosen that may run beside others: no worker imports them.

    :param marks: the expression of ``pytest -m``; a file counts whose every test has one of the marks it excludes.
    """
    excluded = "|".join([*re.findall(r"not (\w+)", marks), "alone"])
    whole = re.compile(rf"^pytestmark = .*mark\.({excluded})\b", re.MULTILINE)
    return [str(file) for file in test_files(where) if whole.search(file.read_text(encoding="utf-8"))]


@contextmanager
def beside_others(kind: int) -> Iterator[None]:
    """Share the machine with the tests of another such command of this clone, or have it alone.

    :param kind: ``fcntl.LOCK_SH``, to run beside others, or ``fcntl.LOCK_EX``, to wait until the others have ended.
    """
    with open(__file__, encoding="utf-8") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting until the tests of another environment have ended", flush=True)
            fcntl.flock(file, kind)
        except OSError as error:  # this file system has no locks
            print(f"other environments' tests may run beside these: {error}", flush=True)
        yield


def compile_first(files: Sequence[Path], workers: int) -> None:
    """Let each of several processes compile a part of the test files, if many are not compiled.

    Otherwise each worker of pytest-xdist compiles all of them, and what they import: 20 s of processor time.
    """
    name = f"{sys.implementation.cache_tag}-pytest-{metadata.version('pytest')}.pyc"
    missing = [str(file) for file in files if not (file.parent / "__pycache__" / f"{file.stem}.{name}").exists()]
    if len(missing) >= MANY and not sys.dont_write_bytecode:
        # What is wrong with a file is told when its tests run.
        collect = [*PYTEST, *NO_CACHE, "--collect-only", "-q"]
        quiet = subprocess.DEVNULL
        parts = [missing[part::workers] for part in range(workers)]
        for started in [subprocess.Popen([*collect, *part], stdout=quiet, stderr=quiet) for part in parts]:
            started.wait()


def commands(marks: str, where: Sequence[str], workers: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the command of the tests that may run beside others, and that of those which run alone, if there are any.

    Each comes with its kind of lock (:func:`beside_others`).
    """
    unwanted = [f"--ignore={file}" for file in files_without_any(marks, where)]
    # Whole runs come first, as their folder does, so that no worker is left with them at the end.
    tests = where or ["tests", *(f"--ignore=tests/{name}" for name in APART)]
    parallel = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers > 1 else []
    yield fcntl.LOCK_SH, [*PYTEST, *parallel, *SLOWEST, "-m", f"({marks}) and not alone", *tests, *unwanted]
    if alone := files_with("alone", where):
        yield fcntl.LOCK_EX, [*PYTEST, *SLOWEST, "-m", f"({marks}) and alone", *alone]


def run(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command of pytest; return its exit code and the ids of the tests that failed."""
    with tempfile.TemporaryDirectory() as cache:
        code = subprocess.run([*command, f"--timeout={LONGEST}", "-o", f"cache_dir={cache}"]).returncode
        failed = Path(cache) / "v" / "cache" / "lastfailed"
        return code, sorted(json.loads(failed.read_text(encoding="utf-8"))) if failed.exists() else []


def run_again(failed: Sequence[str]) -> tuple[int, list[str]]:
    """Run tests that failed once more, with nothing beside them; return the exit code and those that pass."""
    print(f"{len(failed)} of the tests failed; they run once more, with nothing beside them", flush=True)
    with beside_others(fcntl.LOCK_EX):
        code, again = run([*PYTEST, *failed])
    return code, sorted(set(failed) - set(again)) if code in (0, FAILED) else []


def main(asked: argparse.Namespace) -> int:
    """Run pytest for the tests beside each other, for those alone, and for those that failed.

    :returns: the first exit code that is not good.
    """
    if asked.wanted:
        return subprocess.run([*PYTEST, *NO_CACHE, *asked.wanted]).returncode
    if asked.workers > 1:
        unwanted = files_without_any(asked.marks, asked.where)
        compile_first([file for file in test_files(asked.where) if str(file) not in unwanted], asked.workers)
    codes, failed, named = [], [], True
    for kind, command in commands(asked.marks, asked.where, asked.workers):
        with beside_others(kind):
            code, names = run(command)
        codes.append(code)
        failed += names
        named = named and (code != FAILED or bool(names))
    passed_alone: list[str] = []
    if named and 0 < len(failed) <= FEW and set(codes) <= {0, FAILED, NONE}:
        code, passed_alone = run_again(failed)
        codes = [FAILED if code == NONE else code]
    asked.passed_alone.write_text("".join(f"{name}\n" for name in passed_alone), encoding="utf-8")
    for name in passed_alone:
        print(f"failed at first and passed alone, to be mended: {name}", flush=True)
    return next((code for code in codes if code not in (0, NONE)), 0)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--in", dest="where", action="append", default=[], metavar="PATH", help="test files and folders"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help="tests at a time (default: 3)")
    parser.add_argument(
        "--passed-alone",
        type=Path,
        default=PASSED_ALONE,
        metavar="FILE",
        help="where tests that passed only alone are listed",
    )
    parser.add_argument("marks", help="the expression of pytest -m that chooses tests")
    parser.add_argument("wanted", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="only what these name")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(parsed(sys.argv[1:])))
