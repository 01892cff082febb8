# SPDX-License-Identifier: Apache-2.0
"""Run the chosen tests, those that run alone last.

``python parallel.py [--in=PATH…] [--workers=N] MARKS [ARGUMENT…]``

The others run four at a time, or N. Two such commands may run at the same time in one clone: a test that is marked
``alone`` waits until the tests of the other command have ended.

With further arguments, which name the tests that somebody wants, only those run, one at a time, whatever their marks.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

#: pytest leaves no folder in the clone.
PYTEST = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider"]
#: Name the tests in which the time goes.
SLOWEST = ["--durations=40", "--durations-min=5"]
#: Each of these folders has an environment of its own.
APART = ("libfabric", "cluster", "machines", "mixed", "plugins")
#: Twice the cores of a small machine: with three tests at a time, a core waited for a quarter of the time.
WORKERS = 4
#: The number of test files without bytecode from which on they are compiled before the workers start.
MANY = 20
#: The exit code of pytest if it finds no test.
NONE = 5
#: After this time a test has failed, in seconds: otherwise one that waits for ever would keep the others from being
#: reported.
LONGEST = 900


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
        collect = [*PYTEST, "--collect-only", "-q"]
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
    if mark := re.match(r"(\w+) and ", marks):
        tests = files_with(mark[1], where)
    parallel = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers > 1 else []
    yield fcntl.LOCK_SH, [*PYTEST, *parallel, *SLOWEST, "-m", f"({marks}) and not alone", *tests, *unwanted]
    if alone := files_with("alone", where):
        yield fcntl.LOCK_EX, [*PYTEST, *SLOWEST, "-m", f"({marks}) and alone", *alone]


def main(options: argparse.Namespace) -> int:
    """Run pytest for the tests beside each other, then for those alone; return the first exit code that is not good."""
    if options.wanted:
        return subprocess.run([*PYTEST, *options.wanted]).returncode
    if options.workers > 1:
        unwanted = files_without_any(options.marks, options.where)
        compile_first([file for file in test_files(options.where) if str(file) not in unwanted], options.workers)
    codes = []
    for kind, command in commands(options.marks, options.where, options.workers):
        with beside_others(kind):
            codes.append(subprocess.run([*command, f"--timeout={LONGEST}"]).returncode)
    return next((code for code in codes if code not in (0, NONE)), 0)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--in", dest="where", action="append", default=[], metavar="PATH", help="test files and folders"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help="tests at a time (default: 4)")
    parser.add_argument("marks", help="the expression of pytest -m that chooses tests")
    parser.add_argument("wanted", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="only what these name")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(parsed(sys.argv[1:])))
